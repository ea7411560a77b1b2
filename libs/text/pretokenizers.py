"""How byte-level tokenizers cut text into words before BPE, under the names that GGUF files use.

A GGUF file holds no pattern, only a name (`tokenizer.ggml.pre`). The patterns are those of the models'
published tokenizer.json files. Stages apply one after the other; what a pattern does not match stays a
piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from libs.text.errors import UnsupportedTokenizer


@dataclass(frozen=True, slots=True)
class WordRule:
    """`whole_words`: a word that is a token as it stands is taken without looking at merges."""

    stages: tuple[str, ...]
    whole_words: bool = False
    compose: bool = False  # Unicode NFC before anything else

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(stage), behavior="isolated") for stage in self.stages]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(num_digits: str) -> str:
    """The pattern that Llama 3 and Qwen 2 share but for how many digits make a word."""
    punctuation = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{num_digits}|{punctuation}|{_SPACES}"


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_CASED_LETTERS = (  # of Latin, Greek, Cyrillic and their like, as DeepSeek LLM lists them
    r"\x{41}-\x{5A}\x{61}-\x{7A}\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}"
    r"\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}"
    r"\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}"
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}"
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}"
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}"
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}"
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}"
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}"
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}"
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)
_CJK = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

_SINGLE_DIGITS = WordRule((r"\p{N}", _GPT2))
_PLAIN = WordRule((_GPT2,))
_LLAMA3 = WordRule((_words("{1,3}"),), whole_words=True)
_QWEN2 = WordRule((_words(""),), compose=True)

_RULES: dict[str, WordRule] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "trillion", "mellum", "a.x-4.0"), _PLAIN),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), WordRule((_words("{1,3}"),))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": WordRule((_TEKKEN,), whole_words=True),
    "deepseek-llm": WordRule(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": WordRule((r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", _DEEPSEEK_V3)),
    # Files from before the key existed. What wrote them cut text like this, whatever the model was.
    "default": WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def word_rule(name: str) -> WordRule:
    """The rule a GGUF file names. Raises UnsupportedTokenizer for an unknown name: a guess would be wrong in
    silence."""
    rule = _RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(_RULES))
        raise UnsupportedTokenizer(f"the pre-tokenizer {name!r} is unknown; known are {known}")
    return rule

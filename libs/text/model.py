"""The text side of a model: prompts to token ids, token ids to bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from libs.checkpoint.config import ModelConfig
from libs.checkpoint.tokenizer_data import GgufTokenizer, HfTokenizer
from libs.text.build import build_vocabulary
from libs.text.chat import ChatMessage, ChatTemplate
from libs.text.control import ControlTokenFinder, choose_guard
from libs.text.errors import TextError, UnsupportedTokenizer
from libs.text.vocabulary import ControlToken, Vocabulary


class CheckpointText(Protocol):
    """The part of a checkpoint that says how its model reads and writes."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> GgufTokenizer | HfTokenizer: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class TextModel:
    """Immutable and safe to use from several threads; encoding releases the GIL.

    Text never becomes a control token, whoever wrote it: only a chat template's own control tokens do, and
    those of `encode_completion(parse_control=True)`.
    """

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        *,
        chat_template: str | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Raises UnsupportedTokenizer where `chat_template` is not a template."""
        self.name = name
        self.eos_token_ids = eos_token_ids
        self._vocabulary = vocabulary
        self._finder = ControlTokenFinder(vocabulary.control_tokens)
        self._control_texts = {token.token_id: token.text for token in vocabulary.control_tokens}
        self._template = None
        if chat_template is not None:
            self._template = ChatTemplate(chat_template, vocabulary.template_names)

    @classmethod
    def from_checkpoint(cls, checkpoint: CheckpointText) -> TextModel:
        """Raises UnsupportedTokenizer, naming the model, for what Baton cannot tokenise as its authors do."""
        name = checkpoint.config.name
        try:
            return cls(
                name,
                build_vocabulary(checkpoint.tokenizer, checkpoint.eos_token_ids),
                chat_template=checkpoint.chat_template,
                eos_token_ids=checkpoint.eos_token_ids,
            )
        except UnsupportedTokenizer as error:
            raise UnsupportedTokenizer(f"model {name}: {error.message}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows; the model's logits may be padded beyond it."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def adds_leading_space(self) -> bool:
        """Encoding puts a space before the first word (SentencePiece)."""
        return self._vocabulary.adds_leading_space

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without BOS.

        Raises TextError for a lone surrogate, and for a character that the vocabulary has no tokens for
        (SmolLM2 lacks eight control characters): leaving it out, or giving the model the unknown token,
        which is `<|endoftext|>` there, would answer another prompt than the one that was sent.
        """
        return self._encode_piece(_well_formed(text), at_start=True)

    def encode_completion(self, text: str, *, parse_control: bool = False) -> list[int]:
        """Ids of a whole prompt: BOS if the model begins with it, then `text`.

        `parse_control` is for callers that apply a chat template themselves: the text of control tokens then
        becomes those tokens, and a BOS that the text brings is not doubled. Raises TextError like `encode`.
        """
        text = _well_formed(text)
        ids = self._encode_rendered(text, choose_guard([text])) if parse_control else self.encode(text)
        return self._with_bos(ids)

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, answer_begins: str = ""
    ) -> list[int]:
        """Ids of a conversation as the model's chat template lays it out, with one BOS if the model wants it.

        `answer_begins` follows the template's text: the model goes on from there.

        Raises TextError where the model has no template, the template refuses the messages, or a text cannot
        be encoded.
        """
        if self._template is None:
            raise TextError(f"the model {self.name} has no chat template; use completions")
        texts = [text for message in messages for text in (message.role, message.content)]
        guard = choose_guard([*texts, self._template.source])
        guarded = [
            ChatMessage(self._finder.guard(message.role, guard), self._finder.guard(message.content, guard))
            for message in messages
        ]
        rendered = self._template.render(guarded, add_generation_prompt=add_generation_prompt)
        ids = self._encode_rendered(_well_formed(rendered), guard)
        if answer_begins:
            ids += self._encode_piece(_well_formed(answer_begins), at_start=False)
        return self._with_bos(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to the text; b"" for control tokens and for ids beyond the vocabulary.

        The bytes of generated tokens, joined, are the UTF-8 of the generated text. Only where they are not
        UTF-8 does the text differ: it has U+FFFD there.
        """
        table = self._vocabulary.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_text(self, token_id: int) -> str:
        """A token for people to read: its text, or for a control token its name; "" for an unknown id."""
        name = self._control_texts.get(token_id)
        return name if name is not None else self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Iterable[int], *, at_start: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, control tokens nothing.

        `at_start`: the ids begin a text, so the space that encoding put before its first word is taken off.
        Generated ids continue the prompt's text, so theirs is kept.
        """
        text = b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        return text.removeprefix(" ") if at_start and self.adds_leading_space else text

    def _encode_rendered(self, text: str, guard: str) -> list[int]:
        ids: list[int] = []
        at_start = True
        for part in self._finder.split(text, guard):
            if isinstance(part, ControlToken):
                ids.append(part.token_id)
            else:
                ids += self._encode_piece(part.replace(guard, ""), at_start=at_start)
            at_start = False
        return ids

    def _encode_piece(self, text: str, *, at_start: bool) -> list[int]:
        vocabulary = self._vocabulary
        if vocabulary.missing_bytes:
            data = text.encode()
            if len(data.translate(None, vocabulary.missing_bytes)) < len(data):
                raise self._unencodable(text)
        encoder = vocabulary.encoder if at_start else vocabulary.continuation
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        if not vocabulary.unreachable_ids.isdisjoint(ids):
            raise self._unencodable(text)
        return ids

    def _unencodable(self, text: str) -> TextError:
        missing = set(self._vocabulary.missing_bytes)
        for character in dict.fromkeys(text):
            ids = self._vocabulary.encoder.encode(character, add_special_tokens=False).ids
            if not missing.isdisjoint(character.encode()) or not self._vocabulary.unreachable_ids.isdisjoint(
                ids
            ):
                return TextError(f"the model {self.name} has no token for the character {_name(character)}")
        return TextError(f"the model {self.name} cannot represent this text")

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos_id = self.bos_id
        if not self._vocabulary.add_bos or bos_id is None or ids[:1] == [bos_id]:
            return ids
        return [bos_id, *ids]


def _name(character: str) -> str:
    return f"{character!a} (U+{ord(character):04X})"


def _well_formed(text: str) -> str:
    """`text` with surrogate pairs as the characters they stand for. Raises TextError for half a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as error:
            raise TextError("the text holds half of a surrogate pair, which is no character") from error
    return text

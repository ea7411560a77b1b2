"""How far Baton and llama.cpp are from `transformers` in float32: mean KL divergence of what they predict.

    python -m bench.peers.quality --texts DIR [--build-dir DIR] [--count 50] [--tokens 256]

The same tokens, the same positions (the second half of each text) and the same file of reference
log-probabilities for all; see `kl_base`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.commands import output_of
from bench.peers.kl_base import Base, Floats
from bench.peers.llama_cpp import LlamaCpp, add_build_options, both, build_from
from bench.peers.options import add_common, model_of, quiet_logs, threads_of
from bench.peers.texts import choose
from libs.checkpoint.open import open_checkpoint
from libs.engine.build import build_runner
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Draw, Row, StepPlan
from libs.service.config import Settings
from libs.text.model import TextModel
from libs.wire.errors import BatonError
from libs.wire.messages import Sampling

_TIMEOUT_S = 3600.0
_TEXTS_TOGETHER = 16
_MEAN = re.compile(r"^Mean\s+KLD:\s+(\S+)\s+±\s+(\S+)", re.MULTILINE)
Logits = Callable[[StepPlan], Any]


@dataclass(frozen=True, slots=True)
class Options:
    """`count` texts of `num_tokens` tokens from files in `texts`."""

    texts: Path
    model: Path
    threads: int
    count: int = 50
    num_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Divergence:
    """Nats, over all positions; `error` is the standard error of the mean."""

    mean: float
    error: float


def measure(options: Options, llamas: Sequence[LlamaCpp]) -> dict[str, Any]:
    """Means by engine, and whether Baton is no worse than the first llama.cpp. Raises BatonError."""
    checkpoint = open_checkpoint(options.model)
    encode = TextModel.from_checkpoint(checkpoint).encode_completion
    texts = choose(options.texts, options.count, options.num_tokens, encode)
    with tempfile.TemporaryDirectory(prefix="baton-quality-") as folder:
        base_file = _reference(options, texts, Path(folder))
        found = {"Baton": baton_divergence(options, Base(base_file))}
        for llama in llamas:
            _say(llama.name)
            found[llama.name] = llama_divergence(llama, base_file, options.num_tokens)
    return {
        "num_texts": len(texts),
        "tokens_per_text": options.num_tokens,
        "engines": {name: {"mean": each.mean, "error": each.error} for name, each in found.items()},
        "met": all(found["Baton"].mean <= found[llama.name].mean for llama in llamas[:1]),
    }


def baton_divergence(options: Options, base: Base) -> Divergence:
    """By the engine that serves: prompts up to the first position, then token by token, many texts together."""
    checkpoint = open_checkpoint(options.model)
    config = checkpoint.config
    settings = Settings(model=str(options.model), threads=options.threads)
    layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim)
    pool = KvPool(layout, _TEXTS_TOGETHER * layout.blocks_for(base.num_tokens))
    try:
        runner: Any = build_runner(checkpoint, pool, settings)
        values = []
        for begin in range(0, base.num_texts, _TEXTS_TOGETHER):
            group = range(begin, min(begin + _TEXTS_TOGETHER, base.num_texts))
            _say(f"Baton, texts {group[0] + 1} to {group[-1] + 1} of {base.num_texts}")
            values += list(divergences(runner.logits, base, group, layout.blocks_for(base.num_tokens)))
        return _mean(values)
    finally:
        pool.close()


def divergences(logits: Logits, base: Base, group: Sequence[int], blocks_per_text: int) -> Iterator[float]:
    """Of each compared position of these texts. A text's blocks follow from its place in the group."""
    start = 0
    for position in range(base.first, base.num_tokens - 1):
        rows = []
        for place, text in enumerate(group):
            tokens = base.texts[text][: position + 1]
            table = tuple(range(place * blocks_per_text, (place + 1) * blocks_per_text))
            draw = Draw(Sampling(temperature=0.0), tokens, len(tokens))
            rows.append(Row(f"text-{text}", tuple(tokens[start:]), start, table, draw))
        drawn: Floats = np.asarray(logits(StepPlan(tuple(rows))), np.float32)
        for text, row in zip(group, drawn, strict=True):
            yield base.divergence(text, position, row)
        start = position + 1


def llama_divergence(llama: LlamaCpp, base_file: Path, num_tokens: int) -> Divergence:
    command = [
        llama.build.program("llama-perplexity"), "-m", llama.model, "-t", llama.threads, "-fa", "on",
        "-c", num_tokens, "--kl-divergence", "--kl-divergence-base", base_file,
    ]  # fmt: skip
    return parse_perplexity(output_of(command, timeout_s=_TIMEOUT_S, stderr_too=True))


def parse_perplexity(text: str) -> Divergence:
    """The mean in llama-perplexity's output. Raises BatonError where there is none: it needs 100 positions."""
    match = _MEAN.search(text)
    if match is None:
        raise BatonError("llama-perplexity printed no mean of the KL divergence")
    return Divergence(float(match[1]), float(match[2]))


def _reference(options: Options, texts: list[list[int]], folder: Path) -> Path:
    _say(f"transformers float32, {len(texts)} texts")
    tokens, base = folder / "tokens.json", folder / "base"
    tokens.write_text(json.dumps(texts), encoding="utf-8")
    command = [
        sys.executable, "-m", "bench.peers.reference_logits", options.model, options.threads, tokens, base,
    ]  # fmt: skip
    output_of(command, timeout_s=_TIMEOUT_S)
    return base


def _mean(values: Sequence[float]) -> Divergence:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Divergence(statistics.fmean(values), error)


def _say(text: str) -> None:
    print(f"bench: quality: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    add_build_options(parser)
    parser.add_argument("--texts", type=Path, required=True, metavar="DIR")
    parser.add_argument("--count", type=int, default=50, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=256, metavar="N", help="of each text; default: %(default)s"
    )
    arguments = parser.parse_args()
    quiet_logs()
    model, threads = model_of(arguments), threads_of(arguments)
    options = Options(arguments.texts, model, threads, arguments.count, arguments.tokens)
    llamas = both(build_from(arguments, model), model, threads, arguments.cache)
    print(json.dumps(measure(options, llamas), indent=2))


if __name__ == "__main__":
    try:
        main()
    except BatonError as error:
        sys.exit(f"bench: {error.message}")

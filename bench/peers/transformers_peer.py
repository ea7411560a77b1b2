"""`transformers` in float32: the reference for quality, and for speed at small shapes.

python -m bench.peers.transformers_peer [--quick] [--only prefill] [--only decode]     prints figures as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.commands import output_of
from bench.peers.options import add_common, model_of, threads_of
from bench.peers.peer import REPEATS, parse_figures
from libs.bench.figures import TOKENS_PER_S, Figure, merge
from libs.bench.shapes import FULL, GROUPS, QUICK, Decode, Group, Prefill, Shapes

_LONGEST = 1024  # tokens; longer ones would take most of the time of a comparison
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Transformers:
    """In a process of its own, because torch's threads would stay."""

    model: Path
    threads: int
    name: str = field(default="transformers float32", init=False)

    def visit(self, group: Group, quick: bool) -> list[Figure]:
        """Prompts and one stream, up to 1024 tokens."""
        if group not in ("prefill", "decode"):
            return []
        command = [
            sys.executable, "-m", "bench.peers.transformers_peer", "--only", group, "--model", self.model,
            "--threads", self.threads, "--rounds", REPEATS[group], *(["--quick"] if quick else []),
        ]  # fmt: skip
        return parse_figures(json.loads(output_of(command, timeout_s=_TIMEOUT_S)))


def load_reference(model: Path, threads: int) -> Any:
    """The model in float32, never from the network; weights are those of the file, dequantised."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    folder, options = (model, {}) if model.is_dir() else (model.parent, {"gguf_file": model.name})
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **options)
    return loaded.eval()


class Timer:
    """Times a loaded model. Seconds; tokens are random."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._random = random.Random(0)

    def prefill(self, num_tokens: int) -> float:
        """A prompt to its first token."""
        tokens = self._tokens(num_tokens)
        begin = time.perf_counter()
        self._forward(tokens, None)
        return time.perf_counter() - begin

    def decode(self, context: int, steps: int) -> float:
        """`steps` steps of one stream after a prompt of `context`."""
        cache = self._forward(self._tokens(context), None)
        begin = time.perf_counter()
        for _ in range(steps):
            cache = self._forward(self._tokens(1), cache)
        return time.perf_counter() - begin

    def _forward(self, tokens: list[int], cache: Any) -> Any:
        import torch

        with torch.inference_mode():
            out = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            out.logits.argmax()
        return out.past_key_values

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._model.config.vocab_size) for _ in range(count)]


def small(shapes: Shapes) -> tuple[tuple[Prefill, ...], tuple[Decode, ...]]:
    """What `transformers` is measured at."""
    return (
        tuple(shape for shape in shapes.prefills if shape.num_tokens <= _LONGEST),
        tuple(shape for shape in shapes.decodes if shape.context <= _LONGEST),
    )


def _measure(timer: Timer, shapes: Shapes, rounds: int) -> Iterator[Figure]:
    prefills, decodes = small(shapes)
    timer.prefill(32)  # warm-up
    for _ in range(rounds):
        for prefill in prefills:
            seconds = timer.prefill(prefill.num_tokens)
            yield Figure(prefill.key, TOKENS_PER_S, (prefill.num_tokens / seconds,))
        for decode in decodes:
            seconds = timer.decode(decode.context, shapes.decode_steps)
            yield Figure(decode.key, TOKENS_PER_S, (shapes.decode_steps / seconds,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--only", action="append", choices=GROUPS, help="may be given several times")
    arguments = parser.parse_args()
    shapes = (QUICK if arguments.quick else FULL).only(frozenset(arguments.only or GROUPS))
    timer = Timer(load_reference(model_of(arguments), threads_of(arguments)))
    print(
        json.dumps([figure.to_json() for figure in merge(_measure(timer, shapes, arguments.rounds)).values()])
    )


if __name__ == "__main__":
    main()

"""llama.cpp beside Baton: the same shapes, measured with llama.cpp's own programs.

    python -m bench.peers.llama_cpp [--quick] [--build-dir DIR]     builds it if need be, prints figures as JSON

llama-bench times prompts and one stream, llama-batched-bench many streams, llama-server the cached prompt. Many
streams get copies of one prompt's KV, each in its own buffer (`-pps -no-kvu`): the same reads as with different
prompts, without computing those first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.commands import output_of
from bench.peers.llama_build import LlamaBuild, build_llama, default_cache, existing_build, requantise
from bench.peers.llama_server import cached_first_token
from bench.peers.options import add_common, model_of, threads_of
from bench.peers.peer import REPEATS
from libs.bench.figures import MILLISECONDS, TOKENS_PER_S, Figure, merge
from libs.bench.shapes import FULL, QUICK, Cached, Decode, Group, Prefill, Shapes
from libs.wire.errors import BatonError

_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """One model file as llama.cpp runs it, with flash attention, which is its faster way on CPUs too."""

    name: str
    build: LlamaBuild
    model: Path
    threads: int

    def visit(self, group: Group, quick: bool) -> list[Figure]:
        """See Peer."""
        shapes = (QUICK if quick else FULL).only(frozenset({group}))
        return list(merge(self.measure(shapes, REPEATS[group])).values())

    def measure(self, shapes: Shapes, repeats: int) -> Iterator[Figure]:
        """Figures with `repeats` values in all each; llama-bench warms itself up. Raises BatonError where it fails."""
        if shapes.prefills:
            yield from self._prefill(shapes.prefills, repeats)
        if shapes.decodes:
            yield from self._decode(shapes.decodes, shapes.decode_steps, repeats)
        for context in dict.fromkeys(shape.context for shape in shapes.streams):
            counts = [shape.num_streams for shape in shapes.streams if shape.context == context]
            for _ in range(repeats):
                yield from self._streams(counts, context, shapes.decode_steps)
        for shape in shapes.cached:
            yield self._cached(shape, repeats)

    def _prefill(self, shapes: Iterable[Prefill], repeats: int) -> list[Figure]:
        prompts = ",".join(str(shape.num_tokens) for shape in shapes)
        return self._bench("-p", prompts, "-n", "0", "-r", str(repeats))

    def _decode(self, shapes: Iterable[Decode], steps: int, repeats: int) -> list[Figure]:
        depths = ",".join(str(shape.context) for shape in shapes)
        return self._bench("-p", "0", "-n", str(steps), "-d", depths, "-r", str(repeats))

    def _bench(self, *options: str) -> list[Figure]:
        program = self.build.program("llama-bench")
        command = [program, "-m", self.model, "-t", str(self.threads), "-fa", "on", "-o", "json", *options]
        return parse_bench(output_of(command, timeout_s=_TIMEOUT_S))

    def _streams(self, counts: list[int], context: int, steps: int) -> list[Figure]:
        size = max(counts) * stream_buffer(context + steps)
        shape = ("-npp", str(context), "-ntg", str(steps), "-npl", ",".join(map(str, counts)))
        command = [
            self.build.program("llama-batched-bench"), "-m", self.model, "-t", str(self.threads), "-fa", "on",
            "-c", str(size), "-b", "2048", "-ub", "512", "-pps", "-no-kvu", *shape, "--output-format", "jsonl",
        ]  # fmt: skip
        figures = parse_batched_bench(output_of(command, timeout_s=_TIMEOUT_S))
        if len(figures) != len(counts):  # it leaves out, without a word, what does not fit its context
            raise BatonError(f"llama-batched-bench measured {len(figures)} of {len(counts)} shapes")
        return figures

    def _cached(self, shape: Cached, repeats: int) -> Figure:
        server = self.build.program("llama-server")
        answers = cached_first_token(server, self.model, self.threads, shape, repeats)
        return Figure(shape.key, MILLISECONDS, tuple(answer.first_token_ms for answer in answers))


def stream_buffer(num_tokens: int) -> int:
    """Tokens of a stream's KV buffer: llama.cpp rounds up to 256 by itself."""
    return -(-num_tokens // 256) * 256


def parse_bench(text: str) -> list[Figure]:
    """llama-bench's JSON: one figure per test, with the tokens per second of each repetition.

    Raises BatonError for what is not that.
    """
    try:
        return [
            Figure(_shape_of(test).key, TOKENS_PER_S, tuple(map(float, test["samples_ts"])))
            for test in json.loads(text)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise BatonError(f"llama-bench printed something else than expected: {error!r}") from error


def parse_batched_bench(text: str) -> list[Figure]:
    """llama-batched-bench's JSON lines, among whatever else it prints: tokens per second of all streams.

    Raises BatonError for lines that are something else.
    """
    try:
        tests = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [
            Figure(Decode(test["pl"], test["pp"]).key, TOKENS_PER_S, (float(test["speed_tg"]),))
            for test in tests
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise BatonError(f"llama-batched-bench printed something else than expected: {error!r}") from error


def _shape_of(test: dict[str, Any]) -> Prefill | Decode:
    num_prompt, num_generated = test["n_prompt"], test["n_gen"]
    if bool(num_prompt) == bool(num_generated):
        raise ValueError(f"{num_prompt} prompt tokens and {num_generated} generated in one test")
    return Prefill(num_prompt) if num_prompt else Decode(1, test["n_depth"])


def both(build: LlamaBuild, model: Path, threads: int, cache: Path) -> tuple[LlamaCpp, LlamaCpp]:
    """The shipped file, and llama.cpp at its best: requantised to Q4_0."""
    best = requantise(build, model, cache)
    return LlamaCpp("llama.cpp Q4_1", build, model, threads), LlamaCpp("llama.cpp Q4_0", build, best, threads)


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Where llama.cpp comes from; `build_from` reads them."""
    parser.add_argument("--build-dir", type=Path, metavar="DIR", help="a build of llama.cpp that exists")
    parser.add_argument(
        "--sdist", type=Path, metavar="FILE", help="its source distribution (default: fetched)"
    )
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), metavar="DIR", help="default: %(default)s"
    )


def build_from(arguments: argparse.Namespace, model: Path) -> LlamaBuild:
    """Raises BatonError where llama.cpp cannot be had or does not run."""
    if arguments.build_dir is not None:
        return existing_build(arguments.build_dir, model)
    return build_llama(arguments.cache, model, arguments.sdist)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    add_build_options(parser)
    arguments = parser.parse_args()
    model, shapes = model_of(arguments), QUICK if arguments.quick else FULL
    build = build_from(arguments, model)
    document = {
        peer.name: [figure.to_json() for figure in merge(peer.measure(shapes, arguments.rounds)).values()]
        for peer in both(build, model, threads_of(arguments), arguments.cache)
    }
    print(json.dumps({"note": build.note, "figures": document}, indent=2))


if __name__ == "__main__":
    main()

"""Baton beside llama.cpp and `transformers`: one run in which they take turns, one table.

    python -m bench.peers.compare --out build/bench                        an hour or so, alone on the machine
    python -m bench.peers.compare --quick --rounds 2 --out build/bench     minutes: to see that all of it works

Writes OUT/compare.md and OUT/compare.json. Each round visits each group of shapes, and in it each engine: what
else the machine does in the meantime falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.peers import quality, serving_memory
from bench.peers.comparison import BATON, VLLM, Comparison
from bench.peers.llama_cpp import add_build_options, both, build_from
from bench.peers.options import add_common, model_of, quiet_logs, threads_of
from bench.peers.peer import Baton, Peer
from bench.peers.table import markdown
from bench.peers.transformers_peer import Transformers
from libs.bench.figures import Figure, merge
from libs.bench.limits import gemm_peak, read_bandwidth
from libs.bench.machine import describe
from libs.bench.shapes import GROUPS, Group
from libs.bench.work import shares_of_machine, weight_bytes
from libs.checkpoint.open import open_checkpoint
from libs.engine.kv.layout import KvLayout
from libs.wire.errors import BatonError

_LIMIT_REPEATS = 3
_BUSY = 0.5  # load average above which others use the machine too


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    quiet_logs()
    model, threads = model_of(arguments), threads_of(arguments)
    given = list(argv) if argv is not None else sys.argv[1:]
    comparison = Comparison(shlex.join(["python", "-m", "bench.peers.compare", *given]), describe())
    build = build_from(arguments, model)
    comparison.notes += [f"llama.cpp: {build.note}."] if build.note else []
    llama = both(build, model, threads, arguments.cache)
    baton = Baton(model, threads, tuple(shlex.split(arguments.baton_options)))
    comparison.notes.append(f"Baton: {baton.engine()}.")
    if arguments.quick:
        comparison.notes.append("Quick shapes: a look, nothing to quote.")
    peers: list[Peer] = [baton, *llama]
    if not arguments.no_transformers:
        peers.append(Transformers(model, threads))
    groups = tuple(arguments.only or GROUPS)
    for _ in take_turns(comparison, peers, groups, threads, arguments.rounds, arguments.quick):
        _write(comparison, arguments.out)  # an hour's figures survive whatever comes in the next round
    if arguments.figures is not None:
        bring_in(comparison, json.loads(arguments.figures.read_text(encoding="utf-8")))
    _judge(comparison, model, threads, arguments)
    if arguments.texts is not None:
        options = quality.Options(arguments.texts, model, threads)
        comparison.quality = quality.measure(options, llama)
    _write(comparison, arguments.out)
    print(markdown(comparison))
    return 0


def take_turns(
    comparison: Comparison,
    peers: Sequence[Peer],
    groups: Sequence[Group],
    threads: int,
    rounds: int,
    quick: bool,
) -> Iterator[None]:
    """Adds the figures of one round each time. An engine that fails in a group is left out of it from then on."""
    failed: set[tuple[str, Group]] = set()
    limits: list[Figure] = []
    for number in range(1, rounds + 1):
        comparison.loads.append(os.getloadavg()[0])
        if number == 1 and comparison.loads[0] > _BUSY:
            comparison.notes.append(
                f"The machine was not idle: load average {comparison.loads[0]:.1f} before."
            )
        limits += [gemm_peak(threads, _LIMIT_REPEATS), read_bandwidth(threads, _LIMIT_REPEATS)]
        for group in groups:
            for peer in peers:
                if (peer.name, group) in failed:
                    continue
                print(f"bench: round {number} of {rounds}: {group}, {peer.name}", file=sys.stderr, flush=True)
                try:
                    comparison.add(peer.name, peer.visit(group, quick))
                except BatonError as error:
                    failed.add((peer.name, group))
                    comparison.failures.append(f"{peer.name} failed in {group}: {error.message}")
        comparison.limits = merge(limits)
        yield


def bring_in(comparison: Comparison, document: dict[str, dict[str, list[float]]]) -> None:
    """Figures measured elsewhere: `{"vLLM-CPU": {"prefill-1024": [355.0]}}`, tokens per second.

    Raises BatonError for an engine that no target knows.
    """
    for engine, values in document.items():
        if engine != VLLM:
            raise BatonError(f"--figures: {engine!r} is not an engine that is compared; {VLLM!r} is")
        comparison.add(engine, [Figure(key, "tok/s", tuple(each)) for key, each in values.items()])
        comparison.notes.append(f"{engine}: figures brought in from another run.")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common(parser)
    add_build_options(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--only", action="append", choices=GROUPS, help="may be given several times")
    parser.add_argument(
        "--texts", type=Path, metavar="DIR", help="compare quality too, on texts from this folder"
    )
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="JSON with figures of vLLM from another run"
    )
    parser.add_argument("--no-transformers", action="store_true", help="leave it out of the turns")
    parser.add_argument("--no-memory", action="store_true", help="do not start `baton up` to see its memory")
    parser.add_argument(
        "--kv-cache-mib", type=int, default=512, metavar="N", help="of each worker, for its memory"
    )
    parser.add_argument(
        "--baton-options", default="", metavar="TEXT", help="more flags of `baton bench engine`"
    )
    return parser


def _judge(comparison: Comparison, model: Path, threads: int, arguments: argparse.Namespace) -> None:
    """Baton against the machine."""
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim)
    ours = comparison.figures.get(BATON, {})
    comparison.shares = shares_of_machine(checkpoint, layout, ours, comparison.limits)
    if arguments.no_memory:
        return
    try:
        memory = serving_memory.measure(model, threads, weight_bytes(checkpoint), arguments.kv_cache_mib)
    except BatonError as error:
        comparison.failures.append(f"The memory of serving was not measured: {error.message}")
        return
    comparison.memory = {
        "ratio": memory.ratio,
        "resident_bytes": memory.resident_bytes,
        "weight_bytes": memory.weight_bytes,
        "kv_pool_bytes": memory.kv_pool_bytes,
    }


def _write(comparison: Comparison, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(comparison.to_json(), indent=2), encoding="utf-8")
    (folder / "compare.md").write_text(markdown(comparison), encoding="utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        sys.exit(f"bench: {error.message}")

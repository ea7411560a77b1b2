"""`baton bench`: its flags. What measures lies in `libs.bench`; the engine's part of it may load torch."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libs.bench.cache.options import ReplayOptions
from libs.bench.options import BenchOptions
from libs.bench.shapes import GROUPS
from libs.service import logs
from services.cli.options import add_settings

if TYPE_CHECKING:
    from libs.service.config import Settings

_SETTINGS = ("model", "threads", "max_step_tokens", "kv_block_size", "kv_dtype", "weights", "engine")
_MOST_REPEATS = 1000
_POLICIES = ("lru", "s3fifo", "cost")
_UNITS = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_DEFAULT_CAPACITY = 16_000_000


def add_bench(commands: Any) -> None:
    """Adds `bench` and what it can measure to the subcommands of `baton`."""
    bench = commands.add_parser("bench", help="how fast this machine is with Baton, how well its cache does")
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="WHAT")
    _add_engine(subjects)
    _add_cache(subjects)


def run_bench(arguments: argparse.Namespace, settings: Settings) -> int:
    """Runs the engine's benchmark; see `libs.bench.engine`."""
    options = BenchOptions(
        quick=arguments.quick,
        repeats=arguments.repeats,
        groups=frozenset(arguments.only or GROUPS),
        limits=not arguments.no_limits,
        as_json=arguments.as_json,
    )
    logs.configure("bench", "bench", replace(settings, log_level="warning"))  # progress is told beside it
    # By name, as services are: the command line itself never loads torch.
    return int(importlib.import_module("libs.bench.engine").run(settings, options))


def run_cache(arguments: argparse.Namespace, settings: Settings) -> int:
    """Replays a trace; see `libs.bench.cache.replay`."""
    from libs.bench.cache import replay

    options = ReplayOptions(
        trace=arguments.trace,
        capacities=tuple(arguments.capacity or (_DEFAULT_CAPACITY,)),
        policies=_POLICIES if arguments.policy == "all" else (arguments.policy,),
        nodes=arguments.nodes,
        sessions=arguments.sessions,
        move=arguments.move,
        pool_tokens=arguments.pool,
        seed=arguments.seed,
        outputs=arguments.outputs,
        as_json=arguments.as_json,
    )
    return replay.run(options)


def _add_engine(subjects: Any) -> None:
    engine = subjects.add_parser(
        "engine",
        help="the engine by itself",
        description="Times prompts, decoding and cached prompts in this process, and the machine's own limits.",
    )
    engine.add_argument("--quick", action="store_true", help="small shapes: a look, not a figure to quote")
    engine.add_argument("--repeats", type=_repeats, default=5, metavar="N", help="of each shape (default: 5)")
    engine.add_argument(
        "--only",
        action="append",
        choices=GROUPS,
        metavar="GROUP",
        help=f"measure only this: {', '.join(GROUPS)}; may be given several times",
    )
    engine.add_argument("--no-limits", action="store_true", help="do not measure the machine's own limits")
    engine.add_argument("--json", action="store_true", dest="as_json", help="for programs")
    add_settings(engine, _SETTINGS)
    engine.set_defaults(run=run_bench)


def _add_cache(subjects: Any) -> None:
    cache = subjects.add_parser(
        "cache",
        help="hit rates on a trace, without a model",
        description="Replays a trace of requests through the coordinator's own index, eviction and placement.",
    )
    cache.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="kv-cache-tester sessions (.jsonl.gz) or a Mooncake trace (.jsonl)",
    )
    cache.add_argument(
        "--capacity",
        type=_tokens,
        action="append",
        metavar="TOKENS",
        help="of the store, e.g. 16M (the default); may be given several times",
    )
    cache.add_argument("--nodes", type=_positive, default=8, metavar="N", help="default: 8")
    cache.add_argument(
        "--pool", type=_tokens, default=1_000_000, metavar="TOKENS", help="each node's own (default: 1M)"
    )
    cache.add_argument("--sessions", type=_positive, default=64, metavar="N", help="at once (default: 64)")
    cache.add_argument(
        "--move",
        type=_probability,
        default=0.0,
        metavar="P",
        help="probability that a request may not go where its session was served last (default: 0)",
    )
    cache.add_argument(
        "--outputs",
        action="store_true",
        help="answers are published too, as far as the next prompt can hold them (default: inputs only)",
    )
    cache.add_argument(
        "--policy", choices=(*_POLICIES, "all"), default="lru", help="of eviction (default: lru)"
    )
    cache.add_argument("--seed", type=int, default=0, metavar="N", help="of what moves (default: 0)")
    cache.add_argument("--json", action="store_true", dest="as_json", help="for programs")
    cache.set_defaults(run=run_cache)


def _tokens(text: str) -> int:
    """A whole number, perhaps with K, M or G behind it."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not (digits.isascii() and digits.isdigit()) or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 16M, 250K or 4096")
    return int(digits) * unit


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _repeats(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MOST_REPEATS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_REPEATS}")
    return int(text)

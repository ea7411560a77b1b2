"""`baton bench`: its flags. What measures lies in `libs.bench`, which loads an engine and so perhaps torch."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from libs.bench.options import BenchOptions
from libs.bench.shapes import GROUPS
from libs.service import logs
from services.cli.options import add_settings

if TYPE_CHECKING:
    from libs.service.config import Settings

_SETTINGS = ("model", "threads", "max_step_tokens", "kv_block_size", "kv_dtype", "weights", "engine")
_MOST_REPEATS = 1000


def add_bench(commands: Any) -> None:
    """Adds `bench` and what it can measure to the subcommands of `baton`."""
    bench = commands.add_parser("bench", help="how fast this machine is with Baton")
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="WHAT")
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


def _repeats(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MOST_REPEATS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_REPEATS}")
    return int(text)

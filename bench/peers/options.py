"""Flags that the programs here share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from libs.checkpoint.open import resolve_model
from libs.service import logs
from libs.service.config import Settings


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", metavar="FILE", help="a GGUF file (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of each engine (default: all CPUs)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small shapes: a look, not a figure to quote")


def model_of(arguments: argparse.Namespace) -> Path:
    """Raises CheckpointError for a model that is not there."""
    return resolve_model(arguments.model)


def threads_of(arguments: argparse.Namespace) -> int:
    return int(arguments.threads or len(os.sched_getaffinity(0)))


def quiet_logs() -> None:
    """Standard output holds results; progress is told on standard error."""
    logs.configure("bench", "bench", Settings(log_level="warning"))

"""The tools under `baton cache`, which by itself runs a coordinator. Light: what they need is loaded when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from libs.service.config import Settings

_SETTINGS: Final = ("nats_url", "state_dir", "store", "model", "cache_dir")
Run = Callable[[argparse.Namespace, "Settings"], int]


def add_cache(service: argparse.ArgumentParser) -> None:
    """Adds `stats`, `verify`, `clear` and `explain` to the service's own command."""
    from services.cli.options import add_settings

    tools = service.add_subparsers(
        dest="action", metavar="ACTION", title="tools (without one: the coordinator)"
    )

    def tool(name: str, text: str, run: Run) -> argparse.ArgumentParser:
        # A setting that is not given here must not hide one that was given before the action.
        parser = tools.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
        parser.add_argument("--json", action="store_true", dest="as_json", default=False, help="for programs")
        add_settings(parser, _SETTINGS)
        parser.set_defaults(run=run)
        return parser

    tool("stats", "what the cluster's cache holds, and what came from it", _stats)
    verify = tool("verify", "read every object of the store and check every byte", _verify)
    verify.add_argument("--delete", action="store_true", default=False, help="delete damaged objects")
    clear = tool("clear", "delete everything in the store", _clear)
    clear.add_argument("--yes", action="store_true", default=False, help="do not ask")
    explain = tool("explain", "where a prompt's KV is, and why the rest is missing", _explain)
    explain.add_argument("text", nargs="?", default=None, metavar="TEXT", help="the prompt; none: from stdin")
    explain.add_argument("--chat", action="store_true", default=False, help="TEXT is one user message")
    explain.add_argument("--key", default="", metavar="KEY", help="the credential it is sent with")


def _stats(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.store_tools import run_stats

    return run_stats(arguments, settings)


def _verify(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.store_tools import run_verify

    return run_verify(arguments, settings)


def _clear(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.store_tools import run_clear

    return run_clear(arguments, settings)


def _explain(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.explain import run_explain

    return run_explain(arguments, settings)

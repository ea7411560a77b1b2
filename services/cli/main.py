"""`baton`: reads the command line, then loads only what the command needs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libs.service.config import Settings

SERVICES = ("gateway", "prefill", "decode", "cache")
EXIT_FAILED = 1
EXIT_UNUSABLE = 2  # the command line, a setting or a file: trying again changes nothing
EXIT_INTERRUPTED = 130
_MOST_WORKERS = 64  # of one role, on one machine

Command = Callable[[argparse.Namespace, "Settings"], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; errors become one line on stderr."""
    from libs.checkpoint.errors import CheckpointError
    from libs.service.config import ConfigError
    from libs.wire.errors import BatonError

    arguments = build_parser().parse_args(argv)
    try:
        return run(arguments)
    except (ConfigError, CheckpointError) as error:
        return _fail(error, EXIT_UNUSABLE)
    except BatonError as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # e.g. `baton status | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def run(arguments: argparse.Namespace) -> int:
    """Settings, then the command."""
    from services.cli import running
    from services.cli.options import settings_of

    settings = settings_of(arguments, os.environ)
    named = getattr(arguments, "nats_url", None)  # `bench` needs no NATS, so it has no such flag
    explicit = named is not None or "BATON_NATS_URL" in os.environ
    arguments.nats_is_external = explicit
    if arguments.command != "up" and not explicit:  # join the `baton up` of this state directory
        live = running.find(settings.state_dir)
        if live is not None:
            settings = replace(settings, nats_url=live.nats_url)
    command: Command = arguments.run
    return command(arguments, settings)


def build_parser() -> argparse.ArgumentParser:
    from libs.service.release import release
    from services.cli.bench import add_bench
    from services.cli.cache import add_cache
    from services.cli.options import ALL_FIELDS, add_settings

    parser = argparse.ArgumentParser(
        prog="baton", description="Serve a language model with prefill and decode on separate workers."
    )
    parser.add_argument("--version", action="version", version=f"baton {release()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start NATS, cache, prefill, decode and gateway on this machine")
    up.add_argument(
        "--prefill",
        type=_count_from(0),
        default=1,
        metavar="N",
        help="prefill workers (default: 1); 0: decode workers read prompts themselves",
    )
    up.add_argument(
        "--decode", type=_count_from(1), default=1, metavar="N", help="decode workers (default: 1)"
    )
    up.add_argument(
        "--gateways",
        type=_count_from(1),
        default=1,
        metavar="N",
        help="processes that answer HTTP, on one port (default: 1)",
    )
    up.add_argument(
        "--pin", action="store_true", help="each decode worker has CPU cores that nothing else runs on"
    )
    add_settings(up, (name for name in ALL_FIELDS if name not in ("instance_id", "listen_fd")))
    up.set_defaults(run=_up)

    for service in SERVICES:
        one = commands.add_parser(service, help=f"run one {service} process in the foreground")
        add_settings(one, ALL_FIELDS)
        one.set_defaults(run=_service)
        if service == "cache":
            add_cache(one)

    status = commands.add_parser("status", help="what runs, and how busy it is")
    trace = commands.add_parser("trace", help="where the time of one request went")
    trace.add_argument("id", nargs="?", metavar="ID", help="request or trace id; none: the last request")
    trace.add_argument("--last", action="store_true", help="the last request (the default)")
    doctor = commands.add_parser("doctor", help="what this machine can do, and what is missing")
    chat = commands.add_parser("chat", help="talk to the model")
    chat.add_argument("--url", help="the gateway (default: the one of `baton up`)")
    chat.add_argument("--key", default="", help="API key, where the gateway wants one (`baton keys`)")
    chat.add_argument("--once", metavar="TEXT", help="ask this, print the answer, and end")
    for command, function in ((status, _status), (trace, _trace), (doctor, _doctor), (chat, _chat)):
        if command is not chat:
            command.add_argument("--json", action="store_true", dest="as_json", help="for programs")
        engine = ("engine", "kernels", "cache_dir") if command is doctor else ()
        add_settings(command, ("nats_url", "state_dir", "host", "port", "model", *engine))
        command.set_defaults(run=function)
    add_bench(commands)
    _add_keys(commands)
    return parser


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from services.cli.options import add_settings

    keys = commands.add_parser("keys", help="who may use the gateway: add, list, revoke API keys")
    actions = keys.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key, and print it once")
    add.add_argument("name", metavar="NAME", help="whose key it is")
    add.add_argument(
        "--tenant",
        metavar="NAME",
        help="keys of one tenant share cached prompts (default: a tenant of its own)",
    )
    add.add_argument("--requests-per-minute", type=_positive(int), metavar="N")
    add.add_argument("--tokens-per-minute", type=_positive(int), metavar="N", help="of prompts and answers")
    add.add_argument("--at-once", type=_positive(int), metavar="N", help="requests that run at the same time")
    add.add_argument("--expires-days", type=_positive(float), metavar="N", help="(default: never)")
    listing = actions.add_parser("list", help="all keys, without their secrets")
    revoke = actions.add_parser("revoke", help="refuse a key from now on")
    revoke.add_argument("name", metavar="NAME_OR_ID")
    for action in (add, listing, revoke):
        if action is not revoke:
            action.add_argument("--json", action="store_true", dest="as_json", help="for programs")
        add_settings(action, ("state_dir",))
        action.set_defaults(run=_keys)


def _keys(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.keys import run_keys

    return run_keys(arguments, settings)


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e12:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return value

    return number


def _up(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.up import run_up

    return run_up(
        settings,
        prefill=arguments.prefill,
        decode=arguments.decode,
        gateways=arguments.gateways,
        external_nats=arguments.nats_is_external,
        pin=arguments.pin,
    )


def _service(arguments: argparse.Namespace, settings: Settings) -> int:
    # By name: services do not import each other, and this one loads torch for nobody else.
    status = importlib.import_module(f"services.{arguments.command}.__main__").main(settings)
    return int(status or 0)


def _status(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.status import run_status

    return run_status(settings, arguments.as_json)


def _trace(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.trace import run_trace

    return run_trace(settings, arguments.id, arguments.last or arguments.id is None, arguments.as_json)


def _doctor(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.doctor import run_doctor

    return run_doctor(settings, arguments.as_json)


def _chat(arguments: argparse.Namespace, settings: Settings) -> int:
    from services.cli.chat import run_chat

    return run_chat(settings, arguments.url, arguments.once, arguments.key)


def _count_from(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdigit() or not least <= int(text) <= _MOST_WORKERS:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {_MOST_WORKERS}")
        return int(text)

    return count


def _fail(error: Exception, status: int) -> int:
    print(f"baton: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

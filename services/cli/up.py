"""`baton up`: a whole Baton on this machine, each part its own process, started, watched and drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.service import logs
from libs.service.config import ConfigError, Settings
from libs.wire.messages import ServiceStatus
from services.cli import health, logfile, machine, nats_server
from services.cli.child import Child, ChildFailed, RestartPolicy
from services.cli.pinning import Pinning, share_cores
from services.cli.plan import Plan, make_plan
from services.cli.progress import Progress
from services.cli.running import Running, StateDirBusy, StateLock
from services.cli.supervisor import Supervisor

_START_TIMEOUT_S = 600.0  # a large model from a slow disk
_NATS_TIMEOUT_S = 15.0
_POLL_S = 0.2
_PATIENCE_S = 1.0  # before a person is told what takes so long
_IDLE_S = 2.0  # between looks at log sizes and at processes that work
_EXIT_FAILED = 1


class StartTimeout(Exception):
    """Not everything was ready in time."""


def run_up(
    settings: Settings,
    *,
    prefill: int,
    decode: int,
    external_nats: bool,
    gateways: int = 1,
    pin: bool = False,
) -> int:
    """Runs until Ctrl-C or SIGTERM; returns the exit status. `pin`: decode workers get cores of their own.

    The port is opened here, for all gateways, and stays open when one of them goes: connections wait for the next.

    Raises ConfigError or CheckpointError before anything starts.
    """
    pinning = None
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        pinning = share_cores(cores, prefill=prefill, decode=decode, threads=settings.threads)
    open_checkpoint(resolve_model(settings.model))  # better one clear error now than one from each worker
    lock = StateLock(settings.state_dir)
    try:
        lock.acquire()
    except StateDirBusy as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"state_dir {settings.state_dir} cannot be written: {error}") from None
    try:
        log = logfile.fresh_log(settings.log_dir / "up.log")
        logs.configure("up", "up", settings, stream=log)
        machine.remove_dead_sockets(settings.run_dir)
        if pinning is not None:
            os.sched_setaffinity(0, pinning.rest)  # children inherit it
        with machine.open_port(settings.host, settings.port) as listener:
            port = listener.getsockname()[1]
            settings = replace(settings, port=port, listen_fd=listener.fileno())
            counts = Counts(prefill, decode, gateways)
            return asyncio.run(_Up(settings, lock, counts, external_nats, pinning, listener).run())
    finally:
        machine.remove_dead_sockets(settings.run_dir)
        lock.release()


@dataclass(frozen=True, slots=True)
class Counts:
    """Processes of each role."""

    prefill: int
    decode: int
    gateways: int


class _Up:
    """One run of `baton up`."""

    def __init__(
        self,
        settings: Settings,
        lock: StateLock,
        counts: Counts,
        external_nats: bool,
        pinning: Pinning | None,
        listener: socket.socket,
    ) -> None:
        self._settings = settings
        self._lock = lock
        self._counts = counts
        self._external_nats = external_nats
        self._pinning = pinning
        self._listener = listener
        self._nats_password = nats_server.new_password()
        self._progress = Progress(sys.stderr)
        self._stop = asyncio.Event()
        self._plan: Plan | None = None
        self._watch: health.StatusWatch | None = None
        self._started = time.monotonic()

    async def run(self) -> int:
        self._supervisor = Supervisor(RestartPolicy(), self._progress.line)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            ends: set[asyncio.Future[Any]] = {serving, stopping, self._supervisor.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._supervisor.failure.done():
                return self._explain(self._supervisor.failure.result())
            if serving.done():
                return self._explain(serving.exception())
            return 0
        finally:
            serving.cancel()
            stopping.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            await self._drain()

    async def _serve(self) -> None:
        """Starts everything, says so, and looks after it. Ends only by an error or by being cancelled."""
        nats_url = await self._start_nats()
        self._settings = settings = replace(self._settings, nats_url=nats_url)
        self._lock.publish(Running(os.getpid(), nats_url, address=None))
        counts = self._counts
        self._plan = make_plan(
            settings, os.environ, prefill=counts.prefill, decode=counts.decode, gateways=counts.gateways,
            cores=machine.cores(), suffix=machine.id_suffix() if self._external_nats else "", pinning=self._pinning,
        )  # fmt: skip
        self._watch = health.StatusWatch(nats_url)
        for spec in self._plan.all:
            logfile.rotate(spec.log)
            self._supervisor.start(spec)
        names = ", ".join(spec.name for spec in self._plan.all)
        self._progress.line(f"starting {names}; logs in {settings.log_dir}")
        statuses = await self._until_ready()
        self._announce(statuses)
        await self._look_after()

    async def _start_nats(self) -> str:
        """The URL of a server that answers: an external one, or an own one started now."""
        if self._external_nats:
            external = self._settings.nats_url
            if not await machine.reachable(external, health.CONNECT_TIMEOUT_S):
                raise ConfigError(f"no NATS server answers at {external}")
            return external
        logfile.rotate(self._settings.log_dir / "nats-1.log")
        machine.remove_files(self._settings.run_dir, "*.ports")
        child = self._supervisor.start(nats_server.server_spec(self._settings, None, self._nats_password))
        deadline = time.monotonic() + _NATS_TIMEOUT_S
        while time.monotonic() < deadline:
            if child.pid is not None and (
                url := nats_server.read_url(self._settings, child.pid, self._nats_password)
            ):
                child.mark_ready()
                self._progress.line(f"{self._elapsed()} {child.name} is ready")
                # A restarted server must come back where its clients look for it.
                port = nats_server.port_of(url)
                child.spec = nats_server.server_spec(self._settings, port, self._nats_password)
                return url
            await asyncio.sleep(0.02)
        raise StartTimeout(f"nats-server was not ready within {_NATS_TIMEOUT_S:g} s; see {child.spec.log}")

    async def _until_ready(self) -> list[ServiceStatus]:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            statuses = await self._poll()
            missing = self._supervisor.not_ready
            if not missing:
                return statuses
            self._progress.wait(f"{self._elapsed()} waiting for {_doing(missing)}")
        names = ", ".join(child.name for child in self._supervisor.not_ready)
        raise StartTimeout(f"not ready within {_START_TIMEOUT_S:g} s: {names}; see {self._settings.log_dir}")

    async def _poll(self) -> list[ServiceStatus]:
        """Asks everybody once, and marks those that are ready."""
        assert self._watch is not None
        statuses = await self._watch.poll(_POLL_S)
        by_pid = {status.pid: status for status in statuses}
        for child in self._supervisor.not_ready:
            if child.pid is None:
                continue
            if child.name == "nats-1":
                is_ready = nats_server.read_url(self._settings, child.pid, self._nats_password) is not None
            else:
                status = by_pid.get(child.pid)
                is_ready = status is not None and await self._can_serve(status)
            if is_ready:
                child.mark_ready()
                self._progress.line(f"{self._elapsed()} {child.name} is ready")
        return statuses

    async def _can_serve(self, status: ServiceStatus) -> bool:
        if status.service != "gateway":
            return status.state not in ("starting", "draining", "stopped")
        if status.state != "ready" or status.address is None:
            return False
        host = health.probe_host(self._settings.host)
        tls = self._settings.tls_cert is not None
        return await health.http_status(host, self._settings.port, "/ready", tls=tls) == 200

    async def _look_after(self) -> None:
        """Until cancelled: says when a restarted process is ready again, and keeps logs short."""
        while True:
            await asyncio.sleep(_POLL_S if self._supervisor.not_ready else _IDLE_S)
            if self._supervisor.not_ready:
                await self._poll()
            for child in self._supervisor.children:
                logfile.shorten(child.spec.log)

    def _announce(self, statuses: list[ServiceStatus]) -> None:
        settings = self._settings
        address = health.http_url(settings.host, settings.port, tls=settings.tls_cert is not None)
        self._lock.publish(Running(os.getpid(), settings.nats_url, address))
        model = next((status.model for status in statuses if status.model), settings.model)
        body = json.dumps(
            {"model": model, "messages": [{"role": "user", "content": "What is a baton?"}], "max_tokens": 64}
        )
        say = self._progress.line
        say(f"{self._elapsed()} Baton is ready at {address} with {model}. Try:\n")
        say(f"  curl {address}/v1/chat/completions -H 'content-type: application/json' -d {_quoted(body)}\n")
        say(
            "`baton chat`, `baton status` and `baton trace` work in another terminal. Ctrl-C stops everything."
        )

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._progress.line("stopping at once")
            self._supervisor.kill()
        self._stop.set()

    async def _drain(self) -> None:
        """Gateway, workers, cache, NATS: each has those it still needs until it is gone itself."""
        self._stop.set()  # from now on a signal means: at once
        self._listener.close()  # what comes now is refused by the kernel, once the gateways have let go, too
        if self._watch is not None:
            await self._watch.close()
        stages = self._plan.stop_stages if self._plan is not None else ()
        names = [[spec.name for spec in stage] for stage in stages]
        stages_running: list[str] = []

        def on_stage(running: str) -> None:
            self._progress.line(f"stopping {running}")
            stages_running.append(running)

        started = time.monotonic()
        stopping = asyncio.create_task(self._supervisor.stop([*names, ["nats-1"]], on_stage))
        while not (await asyncio.wait({stopping}, timeout=_POLL_S))[0]:
            if stages_running and time.monotonic() - started > _PATIENCE_S:
                self._progress.wait(f"{stages_running[-1]} may finish; Ctrl-C again stops at once")
        await stopping
        machine.remove_files(self._settings.run_dir, "*.ports")
        self._progress.line("stopped")

    def _explain(self, error: BaseException | None) -> int:
        if isinstance(error, ChildFailed):
            self._progress.line(f"baton: {error}. The end of {error.log}:")
            for line in error.log_tail:
                self._progress.line(textwrap.indent(logfile.readable(line), "  "))
            return _EXIT_FAILED
        if isinstance(error, ConfigError | StartTimeout):
            self._progress.line(f"baton: {error}")
            return _EXIT_FAILED
        raise error if error is not None else AssertionError("serving never ends by itself")

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:5.1f} s"


def _doing(children: tuple[Child, ...]) -> str:
    """The children, each with the last thing that it logged."""
    return "; ".join(f"{child.name}{_last_event(child.spec.log)}" for child in children)


def _last_event(log: Path) -> str:
    for line in reversed(logfile.tail(log, max_lines=5)):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return f" ({json.loads(line)['event']})"
    return ""


def _quoted(text: str) -> str:
    """For a shell, inside single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"

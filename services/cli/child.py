"""One supervised process: started, watched, restarted with backoff, stopped within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.cli.logfile import open_log, tail

EXIT_UNUSABLE = 2  # of a service: its settings or files are wrong, so that a restart changes nothing
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. `env` is the whole environment of the process."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    grace_s: float  # from SIGTERM to SIGKILL
    cores: frozenset[int] | None = None  # that it may run on; None: those of the supervisor
    fds: tuple[int, ...] = ()  # open files that it inherits, under the same numbers


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A crash waits `first_delay_s`, doubling to `max_delay_s`; `stable_s` without a crash starts over.

    A process that was never ready and crashes `max_crashes` times within `window_s` has failed for good.
    """

    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    stable_s: float = 60.0
    max_crashes: int = 5
    window_s: float = 60.0


class ChildFailed(Exception):
    """A process that cannot be brought up; `log_tail` are its last words."""

    def __init__(self, name: str, reason: str, log: Path) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.log = log
        self.log_tail = tail(log, max_lines=15)


class Child:
    """Owns at most one process. `keep` runs it until `stop`; `on_change` is told what happened in words."""

    def __init__(self, spec: ProcessSpec, policy: RestartPolicy, on_change: Callable[[str], None]) -> None:
        self.spec = spec
        self._policy = policy
        self._on_change = on_change
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = asyncio.Event()
        self._gone = asyncio.Event()
        self._gone.set()
        self._crashes: deque[float] = deque(maxlen=policy.max_crashes)
        self._ready = False
        self._was_ready = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """None while nothing runs."""
        return self._process.pid if self._process is not None else None

    @property
    def ready(self) -> bool:
        """Whether the process that runs now has reported for work."""
        return self._ready

    def mark_ready(self) -> None:
        self._ready = self._was_ready = True

    async def keep(self) -> None:
        """Runs the process, again after every crash, until `stop`. Raises ChildFailed when it never comes up."""
        delay_s = self._policy.first_delay_s
        while not self._stop.is_set():
            started = time.monotonic()
            code = await self._run_once()
            if self._stop.is_set():
                return
            if time.monotonic() - started >= self._policy.stable_s:
                delay_s = self._policy.first_delay_s
            self._give_up_if_hopeless(code)
            self._on_change(
                f"{self.name} {describe(code)}; starting it again in {delay_s:g} s (log: {self.spec.log})"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stop.wait()
            delay_s = min(2 * delay_s, self._policy.max_delay_s)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after the grace time. Returns when the process is gone; idempotent."""
        self._stop.set()
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.grace_s):
                await self._gone.wait()
        except TimeoutError:
            self._on_change(f"{self.name} did not stop within {self.spec.grace_s:g} s: killed")
            self.kill()
            await self._gone.wait()  # no deadline: SIGKILL cannot be ignored

    def kill(self) -> None:
        """SIGKILL to the process and all it started. Idempotent; `stop` waits for the end."""
        self._stop.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)  # it leads a session of its own
            else:
                os.kill(self._process.pid, number)

    async def _run_once(self) -> int:
        """Starts the process and waits for its end. Returns its exit status, as subprocess gives it."""
        self._ready = False
        supervisor = os.getpid()
        try:
            with open_log(self.spec.log) as log:
                # Returns as soon as the program runs; asyncio's own way may start a thread, and a fork from a
                # process with threads must not run Python code.
                process = subprocess.Popen(  # noqa: ASYNC220
                    self.spec.argv, env=dict(self.spec.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=self.spec.fds,
                    start_new_session=True,  # Ctrl-C reaches the supervisor alone, which knows the order
                    preexec_fn=lambda: _prepare(supervisor, self.spec.cores),
                )  # fmt: skip
        except OSError as error:
            raise ChildFailed(self.name, f"cannot be started: {error}", self.spec.log) from None
        self._process = process
        self._gone.clear()
        try:
            await _ended(process.pid)
        finally:
            code = process.wait() if process.poll() is not None else _reap(process)
            self._process = None
            self._ready = False
            self._gone.set()
        return code

    def _give_up_if_hopeless(self, code: int) -> None:
        if self._was_ready:
            return
        if code == EXIT_UNUSABLE:
            raise ChildFailed(self.name, "cannot run with these settings", self.spec.log)
        policy = self._policy
        self._crashes.append(time.monotonic())
        if (
            len(self._crashes) == policy.max_crashes
            and self._crashes[-1] - self._crashes[0] <= policy.window_s
        ):
            reason = f"{describe(code)} {policy.max_crashes} times before it was ready"
            raise ChildFailed(self.name, reason, self.spec.log)


def describe(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with status {code}"


async def _ended(pid: int) -> None:
    """Waits, without a thread, until the child process `pid` has ended (it still has to be reaped)."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    try:
        loop.add_reader(pidfd, ended.set)
        await ended.wait()  # no deadline: a service runs as long as it is wanted
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _reap(process: subprocess.Popen[bytes]) -> int:
    """The task was cancelled: nobody else will end this process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _prepare(supervisor: int, cores: frozenset[int] | None) -> None:
    """Runs in the new process before its program: the kernel ends it when the supervisor is gone, however."""
    failed = _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0
    if failed or os.getppid() != supervisor:  # it went before prctl
        os._exit(127)
    if cores is not None:
        os.sched_setaffinity(0, cores)

"""Keeps a set of processes running, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from services.cli.child import Child, ChildFailed, ProcessSpec, RestartPolicy

_KILL_TIMEOUT_S = 10.0


class Supervisor:
    """Owns children: `start` them, `stop` them in stages. `failure` ends with the first that is hopeless."""

    def __init__(self, policy: RestartPolicy, on_change: Callable[[str], None]) -> None:
        self._policy = policy
        self._on_change = on_change
        self._children: dict[str, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[ChildFailed] = asyncio.get_running_loop().create_future()

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._children.values())

    @property
    def not_ready(self) -> tuple[Child, ...]:
        return tuple(child for child in self._children.values() if not child.ready)

    def start(self, spec: ProcessSpec) -> Child:
        """Starts a process and keeps it running from now on."""
        child = Child(spec, self._policy, self._on_change)
        self._children[spec.name] = child
        self._tasks.append(asyncio.create_task(self._keep(child), name=spec.name))
        return child

    async def stop(self, stages: Iterable[Sequence[str]], on_stage: Callable[[str], None]) -> None:
        """Ends the named children, stage after stage, those of one stage at once. Unknown names are skipped."""
        try:
            for stage in stages:
                children = [self._children[name] for name in stage if name in self._children]
                running = [child.name for child in children if child.pid is not None]
                if running:
                    on_stage(", ".join(running))
                await asyncio.gather(*(child.stop() for child in children))
        finally:
            await self._end()

    def kill(self) -> None:
        """Ends all children at once, without grace."""
        for child in self._children.values():
            child.kill()

    async def _end(self) -> None:
        """Nothing may be left: kills what a broken-off `stop` has not reached, and waits for the tasks."""
        self.kill()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_KILL_TIMEOUT_S)
            for task in pending:
                task.cancel()

    async def _keep(self, child: Child) -> None:
        try:
            await child.keep()
        except ChildFailed as failed:
            with contextlib.suppress(asyncio.InvalidStateError):  # an earlier one was set
                self.failure.set_result(failed)

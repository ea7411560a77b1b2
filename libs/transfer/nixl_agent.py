"""A NIXL agent for one pool: its memory registered with UCX, for peers to read and to read into.

NIXL (github.com/ai-dynamo/nixl, Apache-2.0) is optional: `pip install --no-deps nixl-cu12` (or `nixl-cu13`).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from libs.engine.kv.pool import KvPool
from libs.transfer.interface import TransferError

PACKAGES: Final = ("nixl_cu13", "nixl_cu12", "nixl")
_MEMORY: Final = "DRAM"


@cache
def missing() -> str:
    """Why there is no NIXL here; "" where there is."""
    if _package() is None:
        return "NIXL is not installed (pip install --no-deps nixl-cu12)"
    try:
        _api()
    except (ImportError, OSError) as error:
        return f"NIXL cannot be loaded: {error}"
    return ""


def _package() -> str | None:
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


@cache
def _api() -> Any:
    """The package has types, but under a name that depends on what is installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    return importlib.import_module(f"{_package()}._api")


class Agent:
    """All calls of one pool's agent, one at a time. Every error of NIXL or UCX becomes a TransferError.

    No progress thread: one costs half of the rate (docs/adr/0007-transfers.md). Whoever waits makes progress.
    """

    def __init__(self, pool: KvPool) -> None:
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(pool.view))
        self.num_users = 0
        self._lock = threading.Lock()
        with _errors("starting NIXL"):
            config = _api().nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = _api().nixl_agent(f"baton-{secrets.token_hex(8)}", config)
            self._memory = self._agent.register_memory([(self.address, pool.num_bytes, 0, "")], _MEMORY)
            self.metadata: bytes = self._agent.get_agent_metadata()

    def add(self, metadata: bytes) -> str:
        """Makes a peer's agent known; returns its name."""
        with self._lock, _errors("reading the peer's metadata"):
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        """Forgets the peer and closes the connection: nothing that it still sends has anywhere to go."""
        with self._lock, _errors("leaving the peer"):
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, theirs: list[tuple[int, int]], ours: list[tuple[int, int]]) -> Any:
        """Begins to copy (address, bytes) of the peer to as many here. Returns what `is_done` and `release` take."""
        with self._lock, _errors("reading"):
            local = self._agent.get_xfer_descs([(*each, 0) for each in ours], _MEMORY)
            remote = self._agent.get_xfer_descs([(*each, 0) for each in theirs], _MEMORY)
            handle = self._agent.initialize_xfer("READ", local, remote, peer)
            if self._agent.transfer(handle) == "ERR":
                raise TransferError("NIXL refuses the transfer")
            return handle

    def is_done(self, handle: Any) -> bool:
        """Makes progress, too."""
        with self._lock, _errors("reading"):
            state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise TransferError("the transfer failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        """Gives up a transfer that runs, if it does."""
        with self._lock, _errors("giving up a transfer"):
            self._agent.release_xfer_handle(handle)

    def progress(self) -> None:
        """Does what peers that read from here need done, where their network needs this side's help."""
        with self._lock, _errors("making progress"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        with self._lock, _errors("stopping NIXL"):
            self._agent.deregister_memory(self._memory)
            del self._agent, self._memory


class Agents:
    """One agent for each pool of this process, while anybody uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: dict[int, Agent] = {}

    def take(self, pool: KvPool) -> Agent:
        """Given back with `give_back`. Raises TransferError."""
        with self._lock:
            agent = self._agents.get(id(pool))
            if agent is None:
                agent = self._agents[id(pool)] = Agent(pool)
            agent.num_users += 1
            return agent

    def give_back(self, pool: KvPool) -> None:
        """The last one ends the agent: the pool's memory is nobody's any more."""
        with self._lock:
            agent = self._agents[id(pool)]
            agent.num_users -= 1
            if not agent.num_users:
                del self._agents[id(pool)]
                agent.close()


@contextmanager
def _errors(doing: str) -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except Exception as error:  # NIXL's own are plain exceptions of several kinds
        raise TransferError(f"{doing}: {type(error).__name__}: {error}") from error

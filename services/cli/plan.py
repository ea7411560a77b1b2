"""Which processes make a Baton on one machine, and with what environment. Pure: starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from libs.service.config import Settings
from services.cli.child import ProcessSpec
from services.cli.options import environment_of
from services.cli.pinning import Pinning

_ROOT = Path(__file__).parents[2]
_KILL_MARGIN_S = 5.0  # beyond the time that a service gives its own requests to end


@dataclass(frozen=True, slots=True)
class Plan:
    """Processes by role, in the order in which they start; they stop in the order of `stop_stages`."""

    cache: tuple[ProcessSpec, ...]
    prefill: tuple[ProcessSpec, ...]
    decode: tuple[ProcessSpec, ...]
    gateway: tuple[ProcessSpec, ...]

    @property
    def all(self) -> tuple[ProcessSpec, ...]:
        return self.cache + self.prefill + self.decode + self.gateway

    @property
    def stop_stages(self) -> tuple[tuple[ProcessSpec, ...], ...]:
        """The gateway first: it takes no new requests and waits for those it has, which need the others."""
        return self.gateway, self.prefill + self.decode, self.cache


def make_plan(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    prefill: int,
    decode: int,
    cores: int,
    gateways: int = 1,
    suffix: str = "",
    pinning: Pinning | None = None,
) -> Plan:
    """One cache, and the given numbers of workers and gateways, which share `settings.listen_fd` if there is one.

    `suffix` makes the ids unique where other machines share the NATS server. `cores` is what this machine
    grants; `settings.nats_url` must be final. With `pinning`, decode workers have cores of their own.
    """
    shared = pinning.threads if pinning is not None else worker_threads(cores, prefill + decode)
    threads = settings.threads or shared

    def specs(role: str, count: int) -> tuple[ProcessSpec, ...]:
        names = (f"{role}-{number}{suffix}" for number in range(1, count + 1))
        own = settings if role == "gateway" else replace(settings, listen_fd=None)
        return tuple(_spec(own, environ, role, name, threads) for name in names)

    decodes = specs("decode", decode)
    if pinning is not None:
        decodes = tuple(replace(spec, cores=own) for spec, own in zip(decodes, pinning.decode, strict=True))

    fds = () if settings.listen_fd is None else (settings.listen_fd,)
    return Plan(
        cache=specs("cache", 1),
        prefill=specs("prefill", prefill),
        decode=decodes,
        gateway=tuple(replace(spec, fds=fds) for spec in specs("gateway", gateways)),
    )


def worker_threads(cores: int, workers: int) -> int:
    """CPU threads of each worker.

    On one or two cores every worker may use both: prefill and decode are seldom busy at once there, and half
    the machine would idle. With more, workers get disjoint shares.
    """
    return cores if cores <= 2 else max(1, cores // workers)


def _spec(settings: Settings, environ: Mapping[str, str], role: str, name: str, threads: int) -> ProcessSpec:
    own = replace(settings, instance_id=name, threads=threads)
    env = {key: value for key, value in environ.items() if not key.startswith("BATON_")}
    env |= environment_of(own)
    env["PYTHONUNBUFFERED"] = "1"
    if (_ROOT / "pyproject.toml").exists():  # a source tree, perhaps not installed
        env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    if role in ("prefill", "decode"):
        env["OMP_NUM_THREADS"] = str(threads)
    if role == "cache":  # its index is looked up at random: small pages cost half of that time
        env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-P", "-m", "services.cli", role),  # -P: no imports from the current folder
        env=env,
        log=settings.log_dir / f"{name}.log",
        grace_s=settings.drain_timeout_s + _KILL_MARGIN_S,
    )

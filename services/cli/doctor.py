"""`baton doctor`: what this machine can do for Baton, what is missing, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from libs.service.config import Settings
from services.cli.checks import hardware, kernels, network, runtime
from services.cli.checks.finding import Finding

Check = Callable[[Settings], Finding]

CHECKS: tuple[Check, ...] = (
    runtime.python, hardware.cpu_cores, hardware.memory, hardware.cpu_features, runtime.torch, hardware.gpu,
    kernels.compiler, kernels.kernels, runtime.nats_server, runtime.model,
    hardware.shared_memory, hardware.passing_memory, runtime.state_dir,
    network.gateway_port, network.nats_port, network.otlp_endpoint,
)  # fmt: skip


def run_doctor(settings: Settings, as_json: bool) -> int:
    """Prints all findings. Exit status 1 when something that Baton needs is missing."""
    findings = examine(settings, CHECKS)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.level:<8} {finding.name:<16} {finding.fact}")
            if finding.advice:
                print(f"{'':<26}{finding.advice}")
    return 1 if any(finding.level == "missing" for finding in findings) else 0


def examine(settings: Settings, checks: Sequence[Check]) -> list[Finding]:
    """Runs all checks at once. One that breaks is a finding too: a doctor must not die of its patient."""

    def examine_one(check: Check) -> Finding:
        try:
            return check(settings)
        except Exception as error:
            return Finding(check.__name__, "warn", f"could not be checked: {error!r}")

    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(examine_one, checks))

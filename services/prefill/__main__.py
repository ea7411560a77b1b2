"""`baton prefill`: one prefill worker."""

from __future__ import annotations

import os

from libs.service.config import Settings, load
from libs.worker.process import run_worker
from services.prefill.worker import PrefillWorker


def main(settings: Settings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status."""
    return run_worker("prefill", settings, PrefillWorker)


if __name__ == "__main__":
    raise SystemExit(main(load(os.environ)))

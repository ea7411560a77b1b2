"""`baton decode`: one decode worker."""

from __future__ import annotations

import os

from libs.service.config import Settings, load
from libs.worker.process import run_worker
from services.decode.worker import DecodeWorker


def main(settings: Settings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status."""
    return run_worker("decode", settings, DecodeWorker)


if __name__ == "__main__":
    raise SystemExit(main(load(os.environ)))

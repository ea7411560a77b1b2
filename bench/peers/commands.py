"""Running other programs: bounded, with their output, and with an error that says what they said."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from libs.wire.errors import BatonError

_SHOWN_LINES = 5


def output_of(
    command: Sequence[object],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    stderr_too: bool = False,
) -> str:
    """Standard output (and error) of a program that ends well. Raises BatonError otherwise."""
    name = Path(str(command[0])).name
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if stderr_too else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, **(environ or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise BatonError(f"{name} did not end within {timeout_s:.0f} s") from error
    except OSError as error:
        raise BatonError(f"{name} cannot be run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout or "").strip().splitlines()[-_SHOWN_LINES:]
        raise BatonError(f"{name} ended with {done.returncode}: {' / '.join(said) or 'no output'}")
    return done.stdout

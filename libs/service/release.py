"""Which Baton this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The installed version; "(not installed)" in a source tree that is not."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return "(not installed)"

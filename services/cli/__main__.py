"""`python -m services.cli`: the same as `baton`."""

from __future__ import annotations

import sys

from services.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

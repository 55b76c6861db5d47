"""`python -m memfit` is `memfit`."""

from __future__ import annotations

import sys

from memfit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

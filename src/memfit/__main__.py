"""`python -m memfit` is `memfit`."""

from __future__ import annotations

from memfit.cli.main import run

if __name__ == "__main__":
    run()

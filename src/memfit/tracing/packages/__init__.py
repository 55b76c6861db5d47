"""Packages that bring CUDA kernels of their own: their real code runs in a trace, and only the kernels do nothing."""

from __future__ import annotations

DOOR = {
    "bitsandbytes": "bitsandbytes_traced",
}
"""What other rooms may use, by file."""

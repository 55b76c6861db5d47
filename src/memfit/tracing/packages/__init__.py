"""Packages whose code runs in a trace as it is, but for the pieces that need a GPU, or values that nobody knows."""

from __future__ import annotations

DOOR = {
    "bitsandbytes": "bitsandbytes_traced",
    "cuda_extensions": "kernels_not_compiled",
    "matching": "matching_of_unknown_costs",
    "torchscript": "torchscript_traced",
}
"""What other rooms may use, by file."""

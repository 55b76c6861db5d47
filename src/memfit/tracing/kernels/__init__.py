"""What single kernels of CUDA allocate beside their results, and which kernel torch takes. Rules with their sources."""

from __future__ import annotations

DOOR = {
    "": "composites indexing",
    "composites": "EngineSums composites_of_compiler run_frames_as_before",
    "cudnn": "identity",
    "products": "PRODUCTS SCALED Workspaces",
    "tables": "HIDDEN REPLACED",
}
"""What other rooms may use, by file."""

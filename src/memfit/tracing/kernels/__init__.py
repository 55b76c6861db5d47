"""What single kernels of CUDA allocate beside their results, and which kernel torch takes. Rules with their sources."""

from __future__ import annotations

DOOR = {
    "": "attention composites convolutions indexing losses normalisation products recurrent rules",
    "composites": "EngineSums composites_of_compiler",
    "products": "PRODUCTS Workspaces",
    "rules": "HIDDEN",
}
"""What other rooms may use, by file."""

"""What single kernels of CUDA allocate beside their results, and which kernel torch takes. Rules with their sources."""

from __future__ import annotations

DOOR = {
    "": "attention composites convolutions four_bit indexing losses normalisation products recurrent rules",
    "composites": "EngineSums composites_of_compiler run_frames_as_before",
    "cudnn": "identity",
    "products": "PRODUCTS Workspaces",
    "rules": "HIDDEN",
}
"""What other rooms may use, by file."""

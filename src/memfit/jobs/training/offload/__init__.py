"""What a training keeps in host memory or computes again: activations, frozen weights, the optimizer."""

from __future__ import annotations

DOOR = {"host": "host_memory_by", "optimizer": "AdamWOnHost", "switch": "use_block_levers"}
"""What other rooms may use, by file."""

"""`memfit prune`: one block on the GPU at a time, from files to files, resumed where it was interrupted."""

from __future__ import annotations

DOOR = {
    "decoder": "Call Decoder check_decoder",
    "engine": "Engine",
    "placement": "MicroBatch NoRoom",
    "result": "PruningOutcome Planned Prediction BlockProgress PruneResult",
    "run": "run",
    "settings": "PruneSettings RunOptions",
    "streaming": "Parts",
}
"""What other rooms may use, by file."""

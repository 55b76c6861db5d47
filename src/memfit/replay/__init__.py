"""The model of torch's allocator, in which events of memory are replayed. No torch here.

The modules named in COMPILED may be there twice: as Python, and in the folder `_compiled` as machine code that mypyc
has made of that same Python at installation (`hatch_build.py`). It replays some twelve times as fast. A digest beside
it says of which source it was made. Only where that is still the source here is it used, so that an edited file is
never shadowed by what it was before. `MEMFIT_PURE=1` does without it.
"""

from __future__ import annotations

import hashlib
import os
from importlib.machinery import EXTENSION_SUFFIXES

DOOR = {
    "alloc_config": "AllocatorConfig MIN_BLOCK_SIZE SMALL_SIZE",
    "driver": "COMES DRIVER_ACTIONS DriverCall Range Ranges",
    "replay": "DEFAULTS Replay Replays replay",
    "timeline": "BEFORE Ints Lifetimes Timeline allocated_changes check_total lifetimes rounded_sizes",
}
"""What other rooms may use, by file."""

COMPILED = ("allocator", "blocks", "expandable")
FOLDER = "_compiled"
DIGEST = f"source{EXTENSION_SUFFIXES[0]}.sha256"
"""One for each kind of Python, as there is machine code for each."""


def source_digest(folder: str) -> str:
    digest = hashlib.sha256()
    for name in COMPILED:
        with open(os.path.join(folder, f"{name}.py"), "rb") as source:
            digest.update(hashlib.sha256(source.read()).digest())
    return digest.hexdigest()


def _is_of_this_source(compiled: str) -> bool:
    try:
        with open(os.path.join(compiled, DIGEST), encoding="ascii") as kept:
            return kept.read() == source_digest(os.path.dirname(compiled))
    except OSError:
        return False


_folder = os.path.join(os.path.dirname(__file__), FOLDER)
if os.environ.get("MEMFIT_PURE", "") in ("", "0") and _is_of_this_source(_folder):
    __path__.insert(0, _folder)

"""NaN and infinite weights, found before any work: one look at the files.

A number is not finite exactly if all bits of its exponent are set, which needs no arithmetic. A model of more than a
few GiB is not looked through beforehand, for reading it twice would take as long as the work; there each block is
checked when its turn comes, and what was done before it is kept.
"""

from __future__ import annotations

import torch

from memfit.errors import InputError
from memfit.models.checkpoint import Stored, WeightStore
from memfit.units import GiB, MiB

LOOK_UP_TO = 8 * GiB
PIECE = 32 * MiB
EXPONENTS = {
    "F64": (torch.int64, 0x7FF << 52), "F32": (torch.int32, 0xFF << 23), "F16": (torch.int16, 0x1F << 10),
    "BF16": (torch.int16, 0xFF << 7),
}  # fmt: skip


def check_files(weights: WeightStore, *, up_to: int = LOOK_UP_TO) -> bool:
    """Raises for the first tensor with such a value. False if the files are too large to be read twice."""
    tensors = [tensor for tensor in weights.stored.values() if tensor.dtype in EXPONENTS]
    if sum(tensor.nbytes for tensor in tensors) > up_to:
        return False
    for tensor in tensors:
        bad = _not_finite(weights, tensor)
        if bad:
            path = weights.files[tensor.file].path
            raise InputError(
                f"weight '{tensor.name}' has {bad:,} values that are NaN or infinite ({path})",
                hint="the checkpoint is damaged, or its training had diverged; nothing was written",
            )
    return True


def _not_finite(weights: WeightStore, tensor: Stored) -> int:
    kind, exponent = EXPONENTS[tensor.dtype]
    room, bad = bytearray(min(PIECE, tensor.nbytes)), 0
    for start in range(0, tensor.nbytes, PIECE):
        part = memoryview(room)[: min(PIECE, tensor.nbytes - start)]
        weights.read_into(tensor.name, part, start)
        found = torch.frombuffer(part, dtype=kind) & exponent
        if int(found.max()) == exponent:
            bad += int(found.eq(exponent).sum())
    return bad

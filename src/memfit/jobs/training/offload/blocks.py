"""The blocks of a model, for levers that go block by block."""

from __future__ import annotations

from torch import nn

from memfit.errors import UsageError
from memfit.models.block_list import block_list


def blocks_of(model: nn.Module, *, lever: str) -> list[nn.Module]:
    found = block_list(model)
    if found is None:
        raise UsageError(f"{lever}: a {type(model).__name__} has no list of blocks")
    return list(found[1])

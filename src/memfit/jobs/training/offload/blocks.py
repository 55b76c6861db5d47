"""The blocks of a model: the longest list of modules that is in no other list."""

from __future__ import annotations

from torch import nn

from memfit.errors import UsageError


def blocks_of(model: nn.Module, *, lever: str) -> list[nn.Module]:
    lists = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    outer = [each for name, each in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    found = max(outer, key=len, default=None)
    if found is None or not len(found):
        raise UsageError(f"{lever}: a {type(model).__name__} has no list of blocks")
    return list(found)

"""Where a model keeps its blocks."""

from __future__ import annotations

from torch import nn


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The longest list of modules that is in no other list, with its path."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = [(n, m) for n, m in lists.items() if len(m) > 1 and not any(n.startswith(f"{o}.") for o in lists)]
    return max(outer, key=lambda found: len(found[1])) if outer else None

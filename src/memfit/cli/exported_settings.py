"""Settings of torch's allocator in the environment that torch does not survive: it reads them while it is imported, and
ends the process at `expandable_segments=True` (torch 2.11 for CUDA), without a word that a user could act on.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.core.alloc_config import exported
from memfit.errors import UsageError

COMMANDS = ("plan", "fit", "table", "prune", "train", "profile")
"""Those that import torch. `check` looks at the variables itself."""


def refuse_what_torch_dies_of(environment: Mapping[str, str]) -> None:
    for name, text in exported(environment).items():
        if any("=" in setting and ":" not in setting for setting in text.split(",")):
            raise UsageError(
                f"{name}={text}: a setting is written key:value", hint=f"export {name}={text.replace('=', ':')}"
            )

"""What torch's compiler is configured with in this process: whether it was changed, and how it is put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CONFIGURATIONS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
STANCE_IN = "torch._dynamo.eval_frame"
"""Where torch keeps, for the whole process, what `torch.compiler.set_stance` was last told."""


@contextmanager
def settings_put_back() -> Iterator[None]:
    """What the code sets in the compiler's own configuration, and its stance, would hold for every later trace."""
    before = {name: module.get_config_copy() for name, module in _configurations()}
    stance = _stance()
    try:
        yield
    finally:
        for name, module in _configurations():
            for each, was in _changed(module, before.get(name) or _at_import(module)):
                setattr(module, each, was)
        if (keeps_it := sys.modules.get(STANCE_IN)) is not None:
            keeps_it._stance = stance or keeps_it.DynamoStance()  # type: ignore[attr-defined]


def compiler_is_set_otherwise() -> bool:
    """Than by the variables that it read when it was imported."""
    if any(_changed(module, _at_import(module)) for _, module in _configurations()):
        return True
    stance = _stance()
    return stance is not None and stance != type(stance)()


def _stance() -> Any:
    """None where the compiler is not loaded: it is the usual one then."""
    return getattr(sys.modules.get(STANCE_IN), "_stance", None)


def _changed(module: Any, before: dict[str, Any]) -> list[tuple[str, Any]]:
    """With what they were; to ask for one that torch has given up warns."""
    now = module.get_config_copy()
    return [(name, was) for name, was in before.items() if name in now and now[name] != was]


def _configurations() -> list[tuple[str, Any]]:
    return [(name, sys.modules[name]) for name in CONFIGURATIONS if name in sys.modules]


def _at_import(module: Any) -> dict[str, Any]:
    unset = sys.modules["torch.utils._config_module"]._UNSET_SENTINEL
    given = {
        name: (entry.env_value_force, entry.env_value_default, entry.default) for name, entry in module._config.items()
    }
    return {name: next((value for value in values if value is not unset), None) for name, values in given.items()}

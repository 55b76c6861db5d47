"""torch's compiler in this process: what it is configured with, how that is put back, and which graph it is at."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from memfit.environment import COMPILER_FOLDER, COMPILER_READS

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


_before_import: dict[str, str] = {}
_seen_before_import = False


def variables_read() -> dict[str, str] | None:
    """Those of the environment that it has read, or will; None where one was changed after that."""
    global _before_import, _seen_before_import
    now = _variables(os.environ)
    if not _configurations():
        _before_import, _seen_before_import = now, True
        return now
    return now if now == (_before_import if _seen_before_import else _at_start()) else None


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    said = {name: value for name, value in environment.items() if name.startswith(COMPILER_READS)}
    said.pop(COMPILER_FOLDER, None)  # torch sets that itself
    return said


def _at_start() -> dict[str, str]:
    """Of this process, where the system tells."""
    try:
        with open("/proc/self/environ", "rb") as stream:
            pairs = [os.fsdecode(pair).partition("=") for pair in stream.read().split(b"\0")]
    except OSError:
        return _variables(os.environ)
    return _variables({name: value for name, _, value in pairs})


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


# -- which graph it is at, for who waits: the compiler takes seconds for each ------------------------------------------


_told: ContextVar[Callable[[int], None]] = ContextVar("told", default=lambda number: None)


@contextmanager
def graphs_told(tell: Callable[[int], None]) -> Iterator[None]:
    """`tell` is called with the number of each graph of a trace that is about to be compiled, from 1 on."""
    before = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(before)


def tell_graph(number: int) -> None:
    _told.get()(number)

"""memfit: GPU memory of transformer work, known before it runs.

>>> import memfit
>>> plan = memfit.predict(kind="train", model="gpt2", batch_size=8, seq_len=1024, gpu="24GB")    # doctest: +SKIP
>>> plan.verdict                                                                                 # doctest: +SKIP
'safe'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, MemfitError, TraceError, UnknownName, UsageError

if TYPE_CHECKING:
    from memfit.planning.own_code import trace_own_code as trace
    from memfit.planning.predict import Plan, predict

__version__ = "0.1.0"

__all__ = [
    "InputError",
    "MemfitError",
    "Plan",
    "TraceError",
    "UnknownName",
    "UsageError",
    "__version__",
    "predict",
    "trace",
]

_LATE = {
    "Plan": ("memfit.planning.predict", "Plan"),
    "predict": ("memfit.planning.predict", "predict"),
    "trace": ("memfit.planning.own_code", "trace_own_code"),
}


def __getattr__(name: str) -> Any:
    """`import memfit` costs nothing: torch is imported by the first prediction."""
    if name not in _LATE:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LATE[name]
    return getattr(import_module(module), attribute)

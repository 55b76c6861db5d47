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
    from memfit.advice.estimate_memory import estimate_memory
    from memfit.advice.explain import Explanation, explain
    from memfit.advice.fit import Fitted, fit
    from memfit.advice.ladder import Ladder, ladder
    from memfit.advice.preflight.checking import Checked, check
    from memfit.advice.table import make_table
    from memfit.planning.own_code import trace_own_code as trace
    from memfit.planning.predict import Plan, predict
    from memfit.recording.callbacks import lightning_memory, trainer_memory
    from memfit.recording.memory_log import MemoryLog, print_gpu_memory_summary
    from memfit.recording.recorder import record
    from memfit.recording.sampler import Sampler

__version__ = "0.1.0"

__all__ = [
    "Checked",
    "Explanation",
    "Fitted",
    "InputError",
    "Ladder",
    "MemfitError",
    "MemoryLog",
    "Plan",
    "Sampler",
    "TraceError",
    "UnknownName",
    "UsageError",
    "__version__",
    "check",
    "estimate_memory",
    "explain",
    "fit",
    "ladder",
    "lightning_memory",
    "make_table",
    "predict",
    "print_gpu_memory_summary",
    "record",
    "trace",
    "trainer_memory",
]

_LATE = {
    "Checked": ("memfit.advice.preflight.checking", "Checked"),
    "Explanation": ("memfit.advice.explain", "Explanation"),
    "Fitted": ("memfit.advice.fit", "Fitted"),
    "Ladder": ("memfit.advice.ladder", "Ladder"),
    "MemoryLog": ("memfit.recording.memory_log", "MemoryLog"),
    "Plan": ("memfit.planning.predict", "Plan"),
    "Sampler": ("memfit.recording.sampler", "Sampler"),
    "check": ("memfit.advice.preflight.checking", "check"),
    "estimate_memory": ("memfit.advice.estimate_memory", "estimate_memory"),
    "explain": ("memfit.advice.explain", "explain"),
    "fit": ("memfit.advice.fit", "fit"),
    "ladder": ("memfit.advice.ladder", "ladder"),
    "lightning_memory": ("memfit.recording.callbacks", "lightning_memory"),
    "make_table": ("memfit.advice.table", "make_table"),
    "predict": ("memfit.planning.predict", "predict"),
    "print_gpu_memory_summary": ("memfit.recording.memory_log", "print_gpu_memory_summary"),
    "record": ("memfit.recording.recorder", "record"),
    "trace": ("memfit.planning.own_code", "trace_own_code"),
    "trainer_memory": ("memfit.recording.callbacks", "trainer_memory"),
}


def __getattr__(name: str) -> Any:
    """`import memfit` costs nothing: torch is imported by the first prediction."""
    if name not in _LATE:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LATE[name]
    return getattr(import_module(module), attribute)

"""memfit: GPU memory of transformer work, known before it runs.

>>> import memfit
>>> plan = memfit.predict(kind="train", model="gpt2", batch_size=8, seq_len=1024, gpu="24GB")    # doctest: +SKIP
>>> plan.verdict                                                                                 # doctest: +SKIP
'safe'

    predict, predict_many, trace    what a job, many jobs, or code of your own will take
    fit, ladder, table              what makes it fit; settings for a card; models against cards
    explain, check                  an out-of-memory error; a machine and a job before it starts
    train, prune, profile           the jobs themselves, planned first
    report, diff, export            what a recorded file says; two of them; for another tool
    record, MemoryLog, Sampler      what a running program does take; trainer_memory, lightning_memory as callbacks
    estimate_memory                 what pruning a Llama of any size takes, predicted

Settings are the flags of the commands with underscores. `print` shows a result as the command does; `to_json()` is the
document of `--json`. What is wrong with a question is a `MemfitError` with a `hint`.
"""

from __future__ import annotations

from memfit.errors import InputError, MemfitError, RanOut, Stopped, TraceError, UnknownName, UsageError

TYPE_CHECKING = False  # typing itself would be most of what `import memfit` costs

if TYPE_CHECKING:
    from memfit.checking.check import Checked, check
    from memfit.checking.gate import GateResult, gate
    from memfit.explaining.explain import Explanation, explain
    from memfit.fitting.claims import estimate_memory
    from memfit.fitting.fit import Fitted, fit
    from memfit.fitting.ladder import Ladder, ladder
    from memfit.fitting.table import Table
    from memfit.fitting.table import make_table as table
    from memfit.jobfiles.file import JobFile, read_job
    from memfit.jobs.listener import Listener
    from memfit.jobs.pruning.result import PruneResult
    from memfit.jobs.workload import Workload
    from memfit.planning.many import Refusal, predict_many
    from memfit.planning.own_code import trace_own_code as trace
    from memfit.planning.predict import Plan, predict
    from memfit.recording.memory_log import MemoryLog, lightning_memory, print_gpu_memory_summary, trainer_memory
    from memfit.recording.recorder import record
    from memfit.recording.sampler import Sampler
    from memfit.render.shown import Difference, FileReport, diff, export, report
    from memfit.running.profile import Profile, profile
    from memfit.running.prune import prune
    from memfit.running.train import Trained, train
    from memfit.scripts.plan import trace_script
    from memfit.scripts.trials import Trials, try_script

__version__ = "0.2.0"

__all__ = [
    "Checked", "Difference", "Explanation", "FileReport", "Fitted", "GateResult", "InputError", "JobFile", "Ladder",
    "Listener", "MemfitError", "MemoryLog", "Plan", "Profile", "PruneResult", "RanOut", "Refusal", "Sampler", "Stopped",
    "Table", "TraceError", "Trained", "Trials", "UnknownName", "UsageError", "Workload", "__version__", "check", "diff",
    "estimate_memory", "explain", "export", "fit", "gate", "ladder", "lightning_memory", "predict", "predict_many",
    "print_gpu_memory_summary", "profile", "prune", "read_job", "record", "report", "table", "trace", "trace_script",
    "train", "trainer_memory", "try_script",
]  # fmt: skip

_LATE = {
    "checking.check": "Checked check",
    "checking.gate": "GateResult gate",
    "explaining.explain": "Explanation explain",
    "fitting.claims": "estimate_memory",
    "fitting.fit": "Fitted fit",
    "fitting.ladder": "Ladder ladder",
    "fitting.table": "Table table",
    "jobfiles.file": "JobFile read_job",
    "jobs.listener": "Listener",
    "jobs.pruning.result": "PruneResult",
    "jobs.workload": "Workload",
    "planning.many": "Refusal predict_many",
    "planning.own_code": "trace",
    "planning.predict": "Plan predict",
    "recording.memory_log": "MemoryLog lightning_memory print_gpu_memory_summary trainer_memory",
    "recording.recorder": "record",
    "recording.sampler": "Sampler",
    "render.shown": "Difference FileReport diff export report",
    "running.magic": "load_ipython_extension",
    "running.profile": "Profile profile",
    "running.prune": "prune",
    "running.train": "Trained train",
    "scripts.plan": "trace_script",
    "scripts.trials": "Trials try_script",
}
_OTHERWISE = {"table": "make_table", "trace": "trace_own_code"}
"""What is called by another name where it stands."""


if not TYPE_CHECKING:  # a type checker knows the names, and tells those that are not there

    def __getattr__(name: str) -> object:
        """`import memfit` costs nothing: torch is imported by the first prediction."""
        for module, names in _LATE.items():
            if name in names.split():
                from importlib import import_module

                return getattr(import_module(f"memfit.{module}"), _OTHERWISE.get(name, name))
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What Tab offers."""
    return __all__

"""`memfit explain`: an out-of-memory error, from whatever there is of it, as a document (memfit.explain/1).

    told = explain("CUDA out of memory. Tried to allocate 1.16 GiB. ...", model="qwen2.5-7b")
    told.cause.sentence, told.readings.likeliest, told.fixes, told.withheld
    explain("train.log", kind="lora", model="qwen2.5-7b", batch_size=1, seq_len=2048, rank=128)    # savings predicted

What happened, by how much, which tensor, in which phase, what to do about it and what will not help, and the command
with which to go on. Where the text does not tell, that is the answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from memfit.errors import MemfitError, UsageError
from memfit.explaining.cause import Account, Cause, Trap, account_of, cause_of, traps_of
from memfit.explaining.fixes import (
    Evidence,
    Fix,
    Withheld,
    capped,
    fixes_in_words,
    predicted_fixes,
    pruning_fixes,
    withheld,
)
from memfit.explaining.input import Case, Input, case_of, read_input
from memfit.explaining.job import Job, card_of, job_of, with_length_of
from memfit.explaining.message import LocatedOom, Oom, OomMessages, Size, exact_interval, request_intervals
from memfit.explaining.place import COLLECTING, FailurePlace, frame_text
from memfit.explaining.tensor import Readings, RunClues, readings
from memfit.fitting.forecast import few_micro_steps_note
from memfit.gpus import Gpu
from memfit.jobs.settings import as_json
from memfit.jobs.workload import Workload
from memfit.planning.card_here import fit_command
from memfit.render.shown import Shown
from memfit.units import in_mib

if TYPE_CHECKING:
    from memfit.planning.predict import Plan


WHOLE_MODEL_UNTOLD = "what the program itself takes is predicted for Wanda only, and this method is another one"
BESIDE = dict.fromkeys(("train", "lora", "prune"), ("evaluation", "generation", "saving"))
"""What runs beside a job's own steps, and settings of the job do not change."""
NOTHING = "There is no out-of-memory message here."
NOTHING_SO_FAR = "There is no out-of-memory message in what was read."
COPIES = "It was asked for by a product with packed weights, which makes a 16-bit copy of one of them."


@dataclass(frozen=True, kw_only=True)
class Explanation(Case, Shown):
    """What `memfit.explain` answers: what happened, what did not fit, what helps. `print` shows it."""

    source: Input
    cause: Cause
    account: Account
    readings: Readings
    job: Job
    gpu: Gpu | None
    plan: Plan | None
    fixes: tuple[Fix, ...]
    withheld: tuple[Withheld, ...]
    traps: tuple[Trap, ...]
    seconds: float

    @property
    def known(self) -> bool:
        """Whether there was an out-of-memory error to explain."""
        return self.cause.kind != "none"

    @property
    def answer(self) -> str:
        """What happened, in one sentence."""
        return self.cause.sentence

    def __repr__(self) -> str:
        return f"<Explanation: {self.answer}>"

    def to_json(self) -> dict[str, Any]:
        """The contract that other tools read (memfit.explain/1)."""
        return document_of(self)


def explain(
    text_or_path: str | bytes | BinaryIO | os.PathLike[str],
    *,
    gpu: str | None = None,
    config: str | None = None,
    predict: bool = True,
    **settings: Any,
) -> Explanation:
    """Explain a message, a log, a snapshot, a memory log or a run's folder.

    `settings` are those of `memfit plan`, as many as are known: the model names the tensor, a whole job lets savings be
    predicted (`predict=False` leaves that out). `config` is one of `memfit train`, or another tool's job file."""
    started = time.perf_counter()
    if not (isinstance(text_or_path, (str, bytes, os.PathLike)) or hasattr(text_or_path, "read")):
        raise UsageError(f"there is nothing to explain in {text_or_path!r}", hint="a message, a path or an open file")
    source = read_input(text_or_path)
    case = case_of(source)
    given = {name: value for name, value in settings.items() if value is not None}
    notes = [*source.notes, *case.notes]
    account = account_of(case.oom) if case.oom else Account()
    configured = _configured(source, config, given, notes)
    job = job_of(given, configured, case.clues, case.place, account.allocated_bytes)
    notes += [job.beyond] if job.beyond else []
    card = card_of(case.oom, account, gpu)
    cause = case.cause or (
        Cause("none", NOTHING if source.is_read_whole else NOTHING_SO_FAR)
        if case.oom is None
        else cause_of(case.oom, account, case.clues, case.recorded, card_bytes=card.capacity_bytes if card else None)
    )
    if "packed weights" in case.place.hints and cause.kind != "none":
        cause = replace(cause, sentence=f"{cause.sentence} {COPIES}")
    read = _readings(case, job)
    job = with_length_of(job, read, given)
    plan, fixes = _predicted(job, card, case.place, notes) if predict and cause.kind != "none" else (None, [])
    fixes, useless = _advice(case, account, cause, read, job, plan, fixes)
    return Explanation(
        **vars(case) | {"cause": cause, "notes": tuple(notes)},
        source=source,
        account=account,
        readings=read,
        job=job,
        gpu=card,
        plan=plan,
        fixes=tuple(fixes),
        withheld=tuple(useless),
        traps=tuple(traps_of(case.oom, account, case.clues)) if case.oom else (),
        seconds=time.perf_counter() - started,
    )


# -- putting it together ---------------------------------------------------------------------------------------------


def _advice(
    case: Case, account: Account, cause: Cause, read: Readings, job: Job, plan: Plan | None, predicted: list[Fix]
) -> tuple[list[Fix], list[Withheld]]:
    """What helps, the predicted after what is said in words, and what does not."""
    if case.oom is None:
        return predicted, []
    evidence = Evidence(
        **vars(case) | {"cause": cause},
        account=account,
        readings=read,
        job=job,
        at_peak=None if plan is None else max(plan.report.breakdown, key=plan.report.breakdown.__getitem__),
        predicted=tuple(fix.name for fix in predicted),
    )
    return [*fixes_in_words(evidence), *predicted], withheld(evidence)


def _configured(source: Input, config: str | None, given: Mapping[str, Any], notes: list[str]) -> Workload | None:
    """The job of a config, given or found in the run's folder."""
    if config is None and source.config is None:
        return None
    from memfit.explaining.job import workload_of_config
    from memfit.jobfiles.file import is_job_file, read_job

    said = given.get("world_size", source.result.get("world_size"))
    world_size = said if isinstance(said, int) and said > 0 else 1
    if config is not None and is_job_file(config):
        job = read_job(config, **given)
        notes += [f"{job.where} ({job.formats[0].title}): {line}" for line in job.in_lines()]
        return job.workload
    if config is not None:
        return workload_of_config(config, world_size=world_size)
    try:
        return workload_of_config(str(source.config), source.text, world_size=world_size)
    except MemfitError as error:
        notes.append(f"its config.yaml cannot be planned: {error.message}")
        return None


def _readings(case: Case, job: Job) -> Readings:
    if case.oom is None:
        return Readings((), (), "")
    hints = case.place.hints or (frozenset({"calibration"}) if job.kind == "prune" else frozenset())
    run = RunClues(
        batch_size=None if case.place.at(COLLECTING) else job.number("batch_size"),
        seq_len=job.number("seq_len"),
        rank=job.number("rank"),
        nsamples=job.number("nsamples"),
        precision=job.precision,
        phase=case.place.phase,
        hints=hints,
        written=case.place.written,
        card_bytes=case.oom.capacity.high if case.oom.capacity else None,
    )
    intervals = request_intervals(case.oom)
    if case.recorded is not None:
        intervals = exact_interval(case.recorded.requested_bytes)
    return readings(intervals, job.models, run)


def _predicted(job: Job, card: Gpu | None, place: FailurePlace, notes: list[str]) -> tuple[Plan | None, list[Fix]]:
    if job.workload is None:
        return None, []
    if place.phase in BESIDE.get(job.workload.kind, ()):
        own = "pruning" if job.workload.kind == "prune" else "training"
        notes.append(f"it failed in {place.phase}, not in {own}, which is what is predicted: so no saving is")
        return None, []
    if job.assumed is not None:
        notes.append(f"predicted with settings that the text does not tell at their defaults: {job.assumed}")
    few = few_micro_steps_note(job.workload)
    notes += [few] if few else []
    try:
        plan, fixes = (pruning_fixes if job.of_another_pruner else predicted_fixes)(job.workload, card)
    except MemfitError as error:
        notes.append(f"the job cannot be predicted: {error.message}")
        return None, []
    if job.of_another_pruner:
        untold = f"{WHOLE_MODEL_UNTOLD}: {job.workload.method}"
        notes.append(untold if plan is None else f"as it is: {plan.notes[0]}")
    if plan is not None and plan.verdict in ("safe", "tight"):
        notes.append(
            "as given, the job is predicted to fit: its settings are not those of the run that failed, or something "
            "else is on the card"
        )
    return plan, fixes


PLACEHOLDERS = {"kind": "lora|train|forward|generate|prune", "model": "NAME"}
WHOLE_TEXT = "give the whole text from `Traceback` to its end, the log file, a snapshot or the folder of the run"
IN_THE_LOG = "a checkpoint that failed is a line of memfit's memory log: `memfit report memory_log.csv` has it whole"
_CHECKPOINT_FAILED = re.compile(r"^\s*\d\d_\w+:\s+ERROR!", re.MULTILINE)
SNAPSHOT = (
    "a snapshot tells who holds the memory: torch.cuda.memory._record_memory_history() at the start, "
    "torch.cuda.memory._dump_snapshot('oom.pickle') in `except torch.OutOfMemoryError`, then memfit explain oom.pickle"
)


def next_steps(told: Explanation) -> list[str]:
    if told.cause.kind == "none":
        found = [IN_THE_LOG] if _CHECKPOINT_FAILED.search(told.source.text or "") else []
        return [*found, WHOLE_TEXT] if told.source.kind == "text" else []
    if told.cause.kind in ("host-memory", "library", "corrupt-size"):
        return []
    unsettled = told.cause.fragmentation is not None and told.cause.fragmentation.verdict == "cannot tell"
    return [*_of_the_job(told), *([SNAPSHOT] if unsettled and told.account.cached_bytes is not None else [])]


def _of_the_job(told: Explanation) -> Iterator[str]:
    job, plan = told.job, told.plan
    predicted = [fix for fix in told.fixes if fix.basis == "predicted"]
    if job.workload is None and job.missing:
        asked = " ".join(f"--{name.replace('_', '-')} {PLACEHOLDERS.get(name, 'N')}" for name in job.missing)
        yield f"savings are predicted once the job is known: add {asked}"
    elif told.gpu is None and predicted:
        yield "add --gpu NAME|SIZE to hear which of these is enough for the card"
    elif plan and plan.verdict == "fails" and not any(fix.verdict in ("safe", "tight") for fix in predicted):
        assert job.workload is not None and told.gpu is not None
        work = capped(job.workload) if job.of_another_pruner else job.workload
        command = fit_command(work, in_mib(told.gpu.capacity_bytes))
        yield f"no single change is enough: {command} finds the smallest set of them"


SCHEMA = "memfit.explain/1"


def document_of(told: Explanation) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "source": {"path": told.source.path, "kind": told.source.kind, "text_from": told.source.text_from},
        "answer": told.cause.sentence,
        "cause": {
            "kind": told.cause.kind, "certainty": told.cause.certainty, "short_bytes": told.cause.short_bytes,
            "fragmentation": None if told.cause.fragmentation is None else asdict(told.cause.fragmentation),
        },
        "message": None if told.oom is None else _message(told.oom),
        "found": _found(told.found),
        "account": _account(told.account),
        "traps": [asdict(trap) for trap in told.traps],
        "phase": _phase(told.place),
        "tensor": _tensor(told.readings),
        "holders": list(told.holders),
        "growth": told.growth,
        "job": _job(told.job, told.gpu, told.plan),
        "fixes": [{**asdict(fix), "changes": as_json(fix.changes), "how": dict(fix.how)} for fix in told.fixes],
        "withheld": [asdict(each) for each in told.withheld],
        "notes": list(told.notes),
        "next": next_steps(told),
        "seconds": round(told.seconds, 3),
    }  # fmt: skip


def _message(oom: Oom) -> dict[str, Any]:
    return {
        "form": oom.form, "text": oom.message, "device": oom.device,
        "sizes": {name: _size(size, oom.unknown.get(name)) for name, size in oom.sizes().items()},
        "processes": [{"pid": use.pid, "used": _size(use.used, "the driver did not know")} for use in oom.processes],
    }  # fmt: skip


def _size(size: Size | None, why: str | None) -> dict[str, Any]:
    if size is None:
        return {"text": None, "bytes": None, "tolerance_bytes": None, "unknown": why or "not in the message"}
    return {"text": size.text, "bytes": size.middle, "tolerance_bytes": size.tolerance, "unknown": None}


def _found(found: OomMessages | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"count": found.count, "first": _located(found.first), "last": _located(found.last)}


def _located(located: LocatedOom) -> dict[str, Any]:
    requested = located.oom.requested
    return {"line": located.line, "form": located.oom.form, "requested": requested.text if requested else None,
            "text": located.oom.message}  # fmt: skip


def _account(account: Account) -> dict[str, Any]:
    return {
        "rows": [{"name": row.name, "bytes": row.nbytes, "says": row.says} for row in account.rows()],
        "capacity_bytes": account.whole_bytes,
        "rest_bytes": account.rest_bytes,
        "tolerance_bytes": account.tolerance_bytes,
    }


def _phase(place: FailurePlace) -> dict[str, Any]:
    shown = place.shown
    return {
        "name": place.phase, "detail": place.detail, "code_line": frame_text(shown) if shown else None,
        "code": shown.code if shown else None, "because": frame_text(place.because) if place.because else None,
    }  # fmt: skip


def _tensor(read: Readings) -> dict[str, Any]:
    likeliest = read.likeliest
    return {
        "request_bytes": [{"low": low, "high": high} for low, high in read.intervals],
        "readings": [
            {
                "tensor": each.tensor, "product": each.product, "bytes": each.nbytes, "kind": each.kind,
                "models": list(each.models), "known": each.known, "likeliest": each is likeliest,
                "factors": [asdict(factor) for factor in each.factors], "itemsize": each.itemsize,
            }
            for each in read.candidates
        ],
        "why_none": read.why_none or None,
    }  # fmt: skip


def _job(job: Job, gpu: Gpu | None, plan: Plan | None) -> dict[str, Any]:
    return {
        "settings": as_json(job.settings),
        "read_from_text": dict(job.read), "missing": list(job.missing),
        "gpu": None if gpu is None else {"name": gpu.name, "capacity_bytes": gpu.capacity_bytes},
        "predicted": None if plan is None else {
            "peak": asdict(plan.peak), "breakdown": dict(plan.report.breakdown), "verdict": plan.verdict,
            "phase": plan.report.at_peak.phase, "failed_at": plan.fit.failed_at if plan.fit else None,
        },
    }  # fmt: skip

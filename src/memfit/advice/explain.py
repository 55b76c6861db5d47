"""`memfit explain`: an out-of-memory error, from whatever there is of it.

    told = explain("CUDA out of memory. Tried to allocate 1.16 GiB. ...", model="qwen2.5-7b")
    told.cause.sentence, told.readings.likeliest, told.fixes, told.withheld
    explain("train.log", kind="lora", model="qwen2.5-7b", batch_size=1, seq_len=2048, rank=128)    # savings predicted

What happened, by how much, which tensor, in which phase, what to do about it and what will not help. Where the text
does not tell, that is the answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from memfit.advice.explaining.accounting import Account, account_of
from memfit.advice.explaining.case import Case, case_of
from memfit.advice.explaining.cause import Cause, cause_of
from memfit.advice.explaining.clues import Clues
from memfit.advice.explaining.document import document_of
from memfit.advice.explaining.fix import Fix
from memfit.advice.explaining.fixes import fixes_in_words
from memfit.advice.explaining.inputs import Input, read_input
from memfit.advice.explaining.job import Job, card_of, job_of, with_length_of
from memfit.advice.explaining.place import Place, collects
from memfit.advice.explaining.predicted import predicted_fixes, pruning_fixes
from memfit.advice.explaining.traps import Trap, traps_of
from memfit.advice.explaining.withheld import Situation, Withheld, withheld
from memfit.advice.forecast import few_micro_steps_note
from memfit.advice.oom_message import Found, Oom
from memfit.advice.request_size import exact_interval, request_intervals
from memfit.advice.tensor_names import Readings, RunClues, readings
from memfit.errors import MemfitError, UsageError
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

WHOLE_MODEL_UNTOLD = "what the program itself takes is predicted for Wanda only, and this method is another one"
BESIDE = {
    "train": ("evaluation", "generation", "saving"), "lora": ("evaluation", "generation", "saving"),
    "prune": ("evaluation", "generation", "saving"),
}  # fmt: skip
"""What runs beside a job's own steps, and settings of the job do not change."""
NOTHING = "There is no out-of-memory message here."
NOTHING_SO_FAR = "There is no out-of-memory message in what was read."


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `memfit.explain` answers: what happened, what did not fit, what helps. `print` shows it."""

    source: Input
    cause: Cause
    oom: Oom | None = None
    found: Found | None = None
    account: Account
    place: Place
    readings: Readings
    clues: Clues
    job: Job
    gpu: Gpu | None = None
    plan: Plan | None = None
    fixes: tuple[Fix, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    holders: tuple[dict[str, Any], ...] = ()
    growth: dict[str, Any] | None = None
    traps: tuple[Trap, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

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

    def __str__(self) -> str:
        from memfit.render.explain_terminal import show_explanation
        from memfit.render.text import as_text

        return as_text(show_explanation, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The contract that other tools read (memfit.explain/1)."""
        return document_of(self)


def explain(
    text_or_path: str | bytes | BinaryIO | os.PathLike[str], *, gpu: str | None = None, config: str | None = None,
    predict: bool = True, **settings: Any,
) -> Explanation:  # fmt: skip
    """Explain a message, a log, a snapshot, a memory log or a run's folder.

    `settings` are those of `memfit plan`, as many as are known: the model names the tensor, a whole job lets savings be
    predicted (`predict=False` leaves that out). `config` is one of `memfit train`."""
    started = time.perf_counter()
    if not (isinstance(text_or_path, (str, bytes, os.PathLike)) or hasattr(text_or_path, "read")):
        raise UsageError(f"there is nothing to explain in {text_or_path!r}", hint="a message, a path or an open file")
    source = read_input(text_or_path)
    given = {name: value for name, value in settings.items() if value is not None}
    return _explained(source, case_of(source), given, gpu=gpu, config=config, predict=predict, started=started)


# -- putting it together ---------------------------------------------------------------------------------------------


def _explained(
    source: Input, case: Case, given: Mapping[str, Any], *, gpu: str | None, config: str | None, predict: bool,
    started: float,
) -> Explanation:  # fmt: skip
    notes = [*source.notes, *case.notes]
    account = account_of(case.oom) if case.oom else Account()
    configured = _configured(source, config, given, notes)
    job = job_of(given, configured, case.clues, case.place, account.allocated_bytes)
    notes += [job.beyond] if job.beyond else []
    card = card_of(case.oom, account, gpu)
    cause = case.cause or (
        Cause(kind="none", sentence=NOTHING if source.is_read_whole else NOTHING_SO_FAR) if case.oom is None
        else cause_of(case.oom, account, case.clues, case.recorded, card_bytes=card.capacity_bytes if card else None)
    )  # fmt: skip
    read = _readings(case, job)
    job = with_length_of(job, read, given)
    plan, fixes = _predicted(job, card, case.place, notes) if predict and cause.kind != "none" else (None, [])
    told: list[Withheld] = []
    if case.oom is not None:
        situation = Situation(
            oom=case.oom, account=account, cause=cause, clues=case.clues, place=case.place, readings=read,
            kind=job.kind, batch_size=job.number("batch_size"), precision=_text(job.settings.get("precision")),
            grad_checkpointing=bool(job.settings.get("grad_checkpointing")) or case.clues.grad_checkpointing,
            at_peak=_at_peak(plan), growth=None if case.growth is None else str(case.growth.get("kind")),
            predicted=tuple(fix.name for fix in fixes),
        )  # fmt: skip
        fixes = [*fixes_in_words(situation, predicted=bool(fixes)), *fixes]
        told = withheld(situation)
    return Explanation(
        source=source, cause=cause, oom=case.oom, found=case.found, account=account, place=case.place, readings=read,
        clues=case.clues, job=job, gpu=card, plan=plan, fixes=tuple(fixes), withheld=tuple(told), holders=case.holders,
        growth=case.growth, traps=tuple(traps_of(case.oom, account, case.clues)) if case.oom else (),
        notes=tuple(notes), seconds=time.perf_counter() - started,
    )  # fmt: skip


def _configured(source: Input, config: str | None, given: Mapping[str, Any], notes: list[str]) -> Workload | None:
    """The job of a config, given or found in the run's folder."""
    if config is None and source.config is None:
        return None
    from memfit.advice.explaining.configured import workload_of_config

    said = given.get("world_size", source.result.get("world_size"))
    world_size = said if isinstance(said, int) and said > 0 else 1
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
        batch_size=None if collects(case.place) else job.number("batch_size"), seq_len=job.number("seq_len"),
        rank=job.number("rank"), nsamples=job.number("nsamples"), precision=_text(job.settings.get("precision")),
        phase=case.place.phase, hints=hints, written=case.place.written,
        card_bytes=case.oom.capacity.high if case.oom.capacity else None,
    )  # fmt: skip
    intervals = request_intervals(case.oom)
    if case.recorded is not None:
        intervals = exact_interval(case.recorded.requested_bytes)
    return readings(intervals, job.models, run)


def _predicted(job: Job, card: Gpu | None, place: Place, notes: list[str]) -> tuple[Plan | None, list[Fix]]:
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
        notes.append(
            f"as it is: {plan.notes[0]}" if plan is not None else f"{WHOLE_MODEL_UNTOLD}: {job.workload.method}"
        )
    if plan is not None and plan.verdict in ("safe", "tight"):
        notes.append(
            "as given, the job is predicted to fit: its settings are not those of the run that failed, or something "
            "else is on the card"
        )
    return plan, fixes


def _at_peak(plan: Plan | None) -> str | None:
    if plan is None:
        return None
    return max(plan.report.breakdown.items(), key=lambda item: item[1])[0]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memfit.advice.explaining.accounting import Account, account_of
from memfit.advice.explaining.cause import Cause, cause_of
from memfit.advice.explaining.clues import Clues, clues_in
from memfit.advice.explaining.fix import Fix
from memfit.advice.explaining.fixes import fixes_in_words
from memfit.advice.explaining.fragmented import Recorded
from memfit.advice.explaining.inputs import Input, read_input
from memfit.advice.explaining.job import Job, card_of, job_of
from memfit.advice.explaining.next_steps import next_steps
from memfit.advice.explaining.place import Place, frame_text, frames_of_stack, place_from, place_of
from memfit.advice.explaining.predicted import predicted_fixes, streamed_pruning
from memfit.advice.explaining.recorded import cause_of_log, growth_of_log, holders_of, oom_of_record, record_of
from memfit.advice.explaining.traps import Trap, traps_of
from memfit.advice.explaining.withheld import Situation, Withheld, withheld
from memfit.advice.oom_message import Found, Located, Oom, Size, find_ooms
from memfit.advice.tensor_names import Readings, RunClues, exact_interval, readings, request_intervals
from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

SCHEMA = "memfit.explain/1"
NOTHING = "There is no out-of-memory message here."
MAX_MESSAGES = 20


@dataclass(frozen=True, kw_only=True)
class Explanation:
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

    def __str__(self) -> str:
        from memfit.render.explain_terminal import show_explanation
        from memfit.render.text import as_text

        return as_text(show_explanation, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The contract that other tools read (memfit.explain/1)."""
        return {
            "schema": SCHEMA,
            "source": {"path": self.source.path, "kind": self.source.kind, "text_from": self.source.text_from},
            "answer": self.cause.sentence,
            "cause": {
                "kind": self.cause.kind, "certainty": self.cause.certainty, "short_bytes": self.cause.short_bytes,
                "fragmentation": None if self.cause.fragmentation is None else asdict(self.cause.fragmentation),
            },
            "message": None if self.oom is None else _message(self.oom),
            "found": _found(self.found),
            "account": _account(self.account),
            "traps": [asdict(trap) for trap in self.traps],
            "phase": _phase(self.place),
            "tensor": _tensor(self.readings),
            "holders": list(self.holders),
            "growth": self.growth,
            "job": _job(self.job, self.gpu, self.plan),
            "fixes": [{**asdict(fix), "how": dict(fix.how)} for fix in self.fixes],
            "withheld": [asdict(each) for each in self.withheld],
            "notes": list(self.notes),
            "next": next_steps(self.cause, self.account, self.job, self.plan, self.fixes),
            "seconds": round(self.seconds, 3),
        }  # fmt: skip


def explain(
    text_or_path: str | bytes | os.PathLike[str], *, gpu: str | None = None, config: str | None = None,
    predict: bool = True, **settings: Any,
) -> Explanation:  # fmt: skip
    """Explain a message, a log, a snapshot, a memory log or a run's folder.

    `settings` are those of `memfit plan`, as many as are known: the model names the tensor, a whole job lets savings be
    predicted (`predict=False` leaves that out). `config` is one of `memfit train`."""
    started = time.perf_counter()
    source = read_input(text_or_path)
    given = {name: value for name, value in settings.items() if value is not None}
    case = _from_text(source, given) if source.kind == "text" else _from_recording(source, given)
    return _explained(source, case, given, gpu=gpu, config=config, predict=predict, started=started)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One error, as far as the input tells it."""

    oom: Oom | None
    place: Place
    clues: Clues
    found: Found | None = None
    recorded: Recorded | None = None
    cause: Cause | None = None
    holders: tuple[dict[str, Any], ...] = ()
    growth: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def _from_text(source: Input, given: Mapping[str, Any]) -> _Case:
    found = find_ooms(source.text)
    if not found:
        return _Case(oom=None, place=Place(), clues=clues_in(source.text, None, Place()))
    chosen = _chosen(source.text, found)
    place = place_of(chosen)
    return _Case(
        oom=chosen.oom, place=place, clues=clues_in(source.text, chosen, place), found=found, growth=source.growth
    )  # fmt: skip


def _chosen(text: str, found: Found) -> Located:
    """The last, for what came before was survived; unless it is a consequence: then the first."""
    last = found.last
    if last.oom.over_an_exabyte and len(found.ooms) > 1 and clues_in(text, last, Place()).after_nccl_timeout:
        return found.first
    return last


def _from_recording(source: Input, given: Mapping[str, Any]) -> _Case:
    """A snapshot has the moment to the byte, a folder has text too; a memory log has only heights."""
    report = source.report or {}
    log = report.get("log")
    text = _from_text(source, given) if source.text else None
    growth = source.growth or _growth(report) or (growth_of_log(log["checkpoints"]) if log else None)
    events = report.get("ooms") or []
    if events:
        event = events[-1]
        recorded = record_of(event, report.get("settings") or {})
        place = place_from(frames_of_stack(event["stack"]))
        oom = text.oom if text and text.oom and text.oom.requested else oom_of_record(event)
        notes = tuple(message["text"] for message in report.get("messages", ()))
        if len(events) > 1:
            notes = (f"{len(events)} requests failed in this recording; this is the last", *notes)
        return _Case(
            oom=oom, place=place if place.frames else text.place if text else place, recorded=recorded, growth=growth,
            clues=text.clues if text else clues_in(" ".join(event["stack"]), None, place),
            found=text.found if text else None, holders=tuple(holders_of(event)), notes=notes,
        )  # fmt: skip
    if text is not None and text.oom is not None:
        return _Case(oom=text.oom, place=text.place, clues=text.clues, found=text.found, growth=growth)
    cause = cause_of_log(log) if log else _nothing_in_recording(report)
    clues = text.clues if text else Clues()
    return _Case(oom=None, place=Place(), clues=clues, cause=cause, growth=growth)


def _growth(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a recording: whether steps leave more and more behind."""
    grown = report.get("growth")
    if not grown or grown.get("grows") is None:
        return None
    from memfit.units import format_bytes

    if not grown["grows"]:
        return {"kind": "none", "text": "memory does not grow from step to step in the recording"}
    each = format_bytes(grown["per_step_bytes"])
    return {"kind": "leak", "text": f"leak: every step of the recording leaves {each} more behind"}


def _nothing_in_recording(report: Mapping[str, Any]) -> Cause:
    from memfit.units import gib

    peak = (report.get("peak") or {}).get("allocated_bytes")
    return Cause(kind="none", sentence=f"No request failed in this recording; its peak was {gib(peak)}.")


# -- putting it together ---------------------------------------------------------------------------------------------


def _explained(
    source: Input, case: _Case, given: Mapping[str, Any], *, gpu: str | None, config: str | None, predict: bool,
    started: float,
) -> Explanation:  # fmt: skip
    notes = [*source.notes, *case.notes]
    job = job_of(given, _configured(source, config, notes), case.clues, case.place)
    account = account_of(case.oom) if case.oom else Account()
    card = card_of(case.oom, account, gpu)
    cause = case.cause or (
        Cause(kind="none", sentence=NOTHING) if case.oom is None
        else cause_of(case.oom, account, case.clues, case.recorded, card_bytes=card.capacity_bytes if card else None)
    )  # fmt: skip
    read = _readings(case, job)
    plan, fixes = _predicted(job, card, notes) if predict and cause.kind != "none" else (None, [])
    told: list[Withheld] = []
    if case.oom is not None:
        situation = Situation(
            oom=case.oom, account=account, cause=cause, clues=case.clues, place=case.place, readings=read,
            kind=job.kind, batch_size=job.number("batch_size"), precision=_text(job.settings.get("precision")),
            grad_checkpointing=bool(job.settings.get("grad_checkpointing")) or case.clues.grad_checkpointing,
            at_peak=_at_peak(plan), growth=None if case.growth is None else str(case.growth.get("kind")),
        )  # fmt: skip
        fixes = [*fixes_in_words(situation, predicted=bool(fixes)), *fixes]
        told = withheld(situation)
    return Explanation(
        source=source, cause=cause, oom=case.oom, found=case.found, account=account, place=case.place, readings=read,
        clues=case.clues, job=job, gpu=card, plan=plan, fixes=tuple(fixes), withheld=tuple(told), holders=case.holders,
        growth=case.growth, traps=tuple(traps_of(case.oom, account, case.clues)) if case.oom else (), notes=tuple(notes),
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def _configured(source: Input, config: str | None, notes: list[str]) -> Workload | None:
    """The job of a config, given or found in the run's folder."""
    if config is None and source.config is None:
        return None
    from memfit.advice.explaining.configured import workload_of_config

    if config is not None:
        return workload_of_config(config)
    try:
        return workload_of_config(str(source.config), source.text)
    except MemfitError as error:
        notes.append(f"its config.yaml cannot be planned: {error.message}")
        return None


def _readings(case: _Case, job: Job) -> Readings:
    if case.oom is None:
        return Readings((), (), "")
    hints = case.place.hints or (frozenset({"calibration"}) if job.kind == "prune" else frozenset())
    run = RunClues(
        batch_size=job.number("batch_size"), seq_len=job.number("seq_len"), rank=job.number("rank"),
        nsamples=job.number("nsamples"), phase=case.place.phase, hints=hints,
    )  # fmt: skip
    intervals = request_intervals(case.oom)
    if case.recorded is not None:
        intervals = exact_interval(case.recorded.requested_bytes)
    return readings(intervals, job.models, run)


def _predicted(job: Job, card: Gpu | None, notes: list[str]) -> tuple[Plan | None, list[Fix]]:
    if job.workload is None:
        return None, []
    try:
        plan, fixes = predicted_fixes(job.workload, card)
    except MemfitError as error:
        notes.append(f"the job cannot be predicted: {error.message}")
        return None, []
    if plan is not None and plan.verdict in ("safe", "tight"):
        if job.kind == "prune":
            return plan, [streamed_pruning(job.workload, plan)]
        notes.append(
            "as given, the job is predicted to fit: its settings are not those of the run that failed, or "
            "something else "
            "is on the card"
        )
    return plan, fixes


def _at_peak(plan: Plan | None) -> str | None:
    if plan is None:
        return None
    return max(plan.report.breakdown.items(), key=lambda item: item[1])[0]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# -- as a document -------------------------------------------------------------------------------------------------


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


def _found(found: Found | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"count": len(found.ooms), "first": _located(found.first), "last": _located(found.last)}


def _located(located: Located) -> dict[str, Any]:
    requested = located.oom.requested
    return {"line": located.line, "form": located.oom.form, "requested": requested.text if requested else None,
            "text": located.oom.message}  # fmt: skip


def _account(account: Account) -> dict[str, Any]:
    return {
        "rows": [{"name": row.name, "bytes": row.nbytes, "says": row.says} for row in account.rows()],
        "capacity_bytes": account.whole_bytes, "rest_bytes": account.rest_bytes,
        "tolerance_bytes": account.tolerance_bytes,
    }  # fmt: skip


def _phase(place: Place) -> dict[str, Any]:
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
        "settings": {name: list(value) if isinstance(value, tuple) else value for name, value in job.settings.items()},
        "read_from_text": dict(job.read), "missing": list(job.missing),
        "gpu": None if gpu is None else {"name": gpu.name, "capacity_bytes": gpu.capacity_bytes},
        "predicted": None if plan is None else {
            "peak": asdict(plan.peak), "breakdown": dict(plan.report.breakdown), "verdict": plan.verdict,
            "phase": plan.report.at_peak.phase, "failed_at": plan.fit.failed_at if plan.fit else None,
        },
    }  # fmt: skip

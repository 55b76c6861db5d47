"""An explanation as a document (memfit.explain/1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memfit.advice.explaining.accounting import Account
from memfit.advice.explaining.job import Job
from memfit.advice.explaining.next_steps import next_steps
from memfit.advice.explaining.place import Place, frame_text
from memfit.advice.oom_message import Found, Located, Oom, Size
from memfit.advice.tensor_names import Readings
from memfit.gpus import Gpu

if TYPE_CHECKING:
    from memfit.advice.explain import Explanation
    from memfit.planning.predict import Plan

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
        "fixes": [{**asdict(fix), "changes": _plain(fix.changes), "how": dict(fix.how)} for fix in told.fixes],
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


def _found(found: Found | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"count": found.count, "first": _located(found.first), "last": _located(found.last)}


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


def _plain(settings: Mapping[str, object]) -> dict[str, object]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _job(job: Job, gpu: Gpu | None, plan: Plan | None) -> dict[str, Any]:
    return {
        "settings": _plain(job.settings),
        "read_from_text": dict(job.read), "missing": list(job.missing),
        "gpu": None if gpu is None else {"name": gpu.name, "capacity_bytes": gpu.capacity_bytes},
        "predicted": None if plan is None else {
            "peak": asdict(plan.peak), "breakdown": dict(plan.report.breakdown), "verdict": plan.verdict,
            "phase": plan.report.at_peak.phase, "failed_at": plan.fit.failed_at if plan.fit else None,
        },
    }  # fmt: skip

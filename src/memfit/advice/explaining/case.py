"""The one error that is explained, of all that an input has: its numbers, its place, and what stands around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memfit.advice.explaining.cause import Cause
from memfit.advice.explaining.clues import Clues, clues_in
from memfit.advice.explaining.fragmented import Recorded
from memfit.advice.explaining.inputs import Input
from memfit.advice.explaining.place import Place, frames_of_stack, place_from, place_of
from memfit.advice.explaining.recorded import cause_of_log, growth_of_log, holders_of, oom_of_record, record_of
from memfit.advice.oom_message import Found, Located, Oom, find_ooms
from memfit.units import format_bytes, gib


@dataclass(frozen=True, kw_only=True)
class Case:
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


def case_of(source: Input) -> Case:
    return _from_text(source) if source.kind == "text" else _from_recording(source)


def _from_text(source: Input) -> Case:
    found = find_ooms(source.excerpt)
    if not found:
        return Case(oom=None, place=Place(), clues=clues_in(source.text, None, Place()))
    chosen = _chosen(source.text, found)
    place = place_of(chosen)
    return Case(
        oom=chosen.oom, place=place, clues=clues_in(source.text, chosen, place), found=found, growth=source.growth
    )  # fmt: skip


def _chosen(text: str, found: Found) -> Located:
    """The last, for what came before was survived; unless it is a consequence: then the first."""
    last = found.last
    if last.oom.over_an_exabyte and len(found.ooms) > 1 and clues_in(text, last, Place()).after_nccl_timeout:
        return found.first
    return last


def _from_recording(source: Input) -> Case:
    """A snapshot has the moment to the byte, a folder has text too; a memory log has only heights."""
    report = source.report or {}
    log = report.get("log")
    text = _from_text(source) if source.text else None
    growth = source.growth or _growth(report) or (growth_of_log(log["checkpoints"]) if log else None)
    if report.get("ooms"):
        return _from_event(report, text, growth)
    if text is not None and text.oom is not None:
        return replace(text, growth=growth)
    cause = cause_of_log(log) if log else _nothing_in_recording(report)
    return Case(oom=None, place=Place(), clues=text.clues if text else Clues(), cause=cause, growth=growth)


def _from_event(report: Mapping[str, Any], text: Case | None, growth: dict[str, Any] | None) -> Case:
    """The last request that failed; with the numbers of a message beside it if they are of the same request."""
    events = report["ooms"]
    event = events[-1]
    place = place_from(frames_of_stack(event["stack"]))
    notes = [message["text"] for message in report.get("messages", ())]
    if len(events) > 1:
        notes.insert(0, f"{len(events)} requests failed in this recording; this is the last")
    made = Case(
        oom=oom_of_record(event), place=place, clues=clues_in(" ".join(event["stack"]), None, place), growth=growth,
        recorded=record_of(event, report.get("settings") or {}), holders=tuple(holders_of(event)), notes=tuple(notes),
    )  # fmt: skip
    if text is None or text.oom is None:
        return made
    made = replace(made, clues=text.clues, found=text.found, place=place if place.frames else text.place)
    same = text.oom.requested is not None and text.oom.requested.may_be(event["segment_bytes"])
    return replace(made, oom=text.oom) if same else made


def _growth(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a recording: whether steps leave more and more behind."""
    grown = report.get("growth")
    if not grown or grown.get("grows") is None:
        return None
    if not grown["grows"]:
        return {"kind": "none", "text": "memory does not grow from step to step in the recording"}
    each = format_bytes(grown["per_step_bytes"])
    return {"kind": "leak", "text": f"leak: every step of the recording leaves {each} more behind"}


def _nothing_in_recording(report: Mapping[str, Any]) -> Cause:
    peak = (report.get("peak") or {}).get("allocated_bytes")
    return Cause(kind="none", sentence=f"No request failed in this recording; its peak was {gib(peak)}.")

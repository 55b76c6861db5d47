"""One row an allocation, for a spreadsheet or a data frame.

Names come from the file that is exported. One that begins as a formula does gets an apostrophe in front, for a
spreadsheet would run it.
"""

from __future__ import annotations

import csv
import io

from memfit.core.labels import ALL_CATEGORIES
from memfit.core.lifetimes import BEFORE
from memfit.core.run import Run

COLUMNS = (
    "block", "allocated_bytes", "requested_bytes", "category", "module", "op", "code_line", "stream", "born_event",
    "freed_event", "born_seconds", "freed_seconds", "phase", "step",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(run: Run) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    lives, labels, trace = run.course.lives, run.labels, run.trace
    for block in range(len(run.course.size)):
        birth, death = int(lives.birth[block]), int(lives.death[block])
        born, freed = birth if birth != BEFORE else None, death if 0 <= death < len(trace) else None
        phase = None if born is None else run.phase_at(born)
        writer.writerow(
            (
                block, int(run.course.size[block]), trace.requested[block], ALL_CATEGORIES[labels.category[block]],
                _text(trace.module(block)), _text(trace.op(block)), _text(labels.lines[labels.line[block]]),
                trace.streams[block], _known(born), _known(freed), _seconds(run, born), _seconds(run, freed),
                _text(phase.name) if phase else "", phase.step if phase else "",
            )
        )  # fmt: skip
    return out.getvalue()


def _text(name: str) -> str:
    return f"'{name}" if name.startswith(FORMULA) else name


def _known(event: int | None) -> int | str:
    return "" if event is None else event


def _seconds(run: Run, event: int | None) -> str:
    seconds = None if event is None else run.seconds(event)
    return "" if seconds is None else f"{seconds:.6f}"

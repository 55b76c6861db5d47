"""A run in the formats of other tools.

memory-viz   a snapshot as torch writes it (pickle, protocol 4): pytorch.org/memory_viz and every other reader
json         the same as JSON, which newer viewers read too
perfetto     counters, phases and the largest allocations for ui.perfetto.dev
speedscope   what is alive at the peak as a flame graph for speedscope.app
csv          one row an allocation
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memfit.core.export.perfetto import perfetto_trace
from memfit.core.export.rows import csv_text
from memfit.core.export.speedscope import speedscope_profile
from memfit.core.export.viewer import viewer_json, viewer_pickle
from memfit.core.run import Run
from memfit.core.whole_file import written_whole
from memfit.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Format:
    ending: str
    write: Callable[[Run], bytes]
    opens_in: str


def _perfetto(run: Run) -> bytes:
    return json.dumps(perfetto_trace(run), separators=(",", ":"), allow_nan=False).encode()


def _speedscope(run: Run) -> bytes:
    return json.dumps(speedscope_profile(run), separators=(",", ":"), allow_nan=False).encode()


def _csv(run: Run) -> bytes:
    return csv_text(run).encode("utf-8", "replace")


FORMATS = {
    "memory-viz": Format(".memory-viz.pickle", viewer_pickle, "pytorch.org/memory_viz"),
    "json": Format(".memory-viz.json", viewer_json, "pytorch.org/memory_viz"),
    "perfetto": Format(".perfetto.json", _perfetto, "ui.perfetto.dev"),
    "speedscope": Format(".speedscope.json", _speedscope, "speedscope.app"),
    "csv": Format(".csv", _csv, "any spreadsheet"),
}


def find_format(name: str) -> Format:
    found = FORMATS.get(name.replace("_", "-"))
    if found is None:
        raise UnknownName("export format", name, FORMATS, more=f"there are {', '.join(FORMATS)}")
    return found


def write_export(run: Run, format_: Format, path: str | Path) -> None:
    data = format_.write(run)
    with written_whole(path) as beside:
        beside.write_bytes(data)

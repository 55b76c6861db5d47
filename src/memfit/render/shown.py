"""What every answer of the library can do: be printed as its command shows it, be a document for programs.

Beside it the answers about recorded files: `memfit.report`, `memfit.diff`, `memfit.export`. What they say is found out
in `analysis`; here it is given to people, pages and other tools.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from memfit.files import check_free, writing
from memfit.units import gib

if TYPE_CHECKING:
    from rich.console import Console


Renderer: TypeAlias = "Callable[[Mapping[str, Any], Console], None]"
"""Writes a document for a person."""
RENDERERS = {
    "memfit.plan/1": "plan.show_plan", "memfit.fit/1": "fit.show_fit", "memfit.ladder/1": "fit.show_ladder",
    "memfit.table/1": "table.show_table", "memfit.explain/1": "explain.show_explanation",
    "memfit.report/1": "report.show_report", "memfit.diff/1": "report.show_diff", "memfit.check/1": "small.show_check",
    "memfit.gate/1": "small.show_gate", "memfit.profile/1": "small.show_profile",
    "memfit.trials/1": "small.show_trials", "memfit.gpus/1": "small.show_gpus", "memfit.models/1": "small.show_models",
}  # fmt: skip
"""Of each document the file of this room that renders it, and the function: imported only where somebody reads it."""
NOT_MODELLED, NO_BF16, STORED = "not modelled:", "no bf16 on", "the checkpoint is quantised"
UNUSED_ANSWER = "--answer "


def stands_in_front(note: str) -> bool:
    """What a reader must see beside the verdict."""
    return note.startswith((NOT_MODELLED, NO_BF16, STORED, UNUSED_ANSWER))


def renderer_of(document: Mapping[str, Any]) -> Renderer:
    file, name = RENDERERS[document["schema"]].split(".")
    render: Renderer = getattr(import_module(f"memfit.render.{file}"), name)
    return render


class Shown:
    """An answer. `print` shows it as its command does; `to_json()` is the document of `--json`."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def _repr_html_(self) -> str | None:
        """As a notebook shows it; None where there is only text."""
        from memfit.render.notebook import as_html

        return as_html(self.to_json())

    def __str__(self) -> str:
        from memfit.render.plan import as_text

        document = self.to_json()
        return as_text(renderer_of(document), document)


AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, repr=False)
class RecordedAnswer(Shown):
    document: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.document


class FileReport(RecordedAnswer):
    """What `memfit.report` says of a recording, a prediction or a memory log (memfit.report/1). `print` shows it."""

    __slots__ = ()

    def __repr__(self) -> str:
        source, peak = self.document["source"], self.document.get("peak")
        most = "" if peak is None else f", {gib(peak['allocated_bytes'])} at the peak"
        return f"<FileReport: {source['kind'].replace('_', ' ')} {source['path']}{most}>"


class Difference(RecordedAnswer):
    """What `memfit.diff` says of two runs, b less a (memfit.diff/1). `print` shows it."""

    __slots__ = ()

    def __repr__(self) -> str:
        a, b, more = (gib(self.document["peak"]["allocated_bytes"][key]) for key in ("a", "b", "difference"))
        return f"<Difference: {self.document['a']['path']} {a}, {self.document['b']['path']} {b}: {more}>"


def report(
    file: AnyPath,
    *,
    html: AnyPath | None = None,
    device: int | None = None,
    alloc_conf: str | None = None,
    force: bool = False,
) -> FileReport:
    """Report on a snapshot, a trace, a memory log or the folder of a run.

    `html` also writes it as one self-contained page, over what is there only with `force`. `device` is the GPU to
    report on, by default that which needed most; `alloc_conf` replays a trace with these settings of the allocator."""
    from memfit.analysis.report import files_read, report_file

    if html is not None:
        check_free(Path(html), "--html", force, inputs=files_read(Path(file)))
    reported = report_file(Path(file), device=device, alloc_conf=alloc_conf)
    if html is not None:
        from memfit.render.html import write_page

        with writing(Path(html), "--html"):
            write_page(reported, Path(html))
    return FileReport(reported.document)


def diff(
    a: AnyPath, b: AnyPath, *, step_a: int | None = None, step_b: int | None = None, device: int | None = None
) -> Difference:
    """Compare two runs, any mix of predicted and measured: snapshots or traces, whole or one step of each.

    What is alive at one peak and not at the other adds up to the difference of the peaks exactly."""
    from memfit.analysis.diff import diff_files

    return Difference(diff_files(Path(a), Path(b), step_a=step_a, step_b=step_b, device=device))


def export(
    file: AnyPath, *, to: str, output: AnyPath | None = None, device: int | None = None, force: bool = False
) -> Path:
    """Write a snapshot or a trace for another tool, and say where: memory-viz, json, perfetto, speedscope or csv.

    By default the output has the file's name and stands in this folder; what is there is replaced only with `force`."""
    from memfit.analysis.export import find_format, write_export
    from memfit.analysis.run import open_run

    source, format_ = Path(file), find_format(to)
    target = Path(source.name.removesuffix(source.suffix) + format_.ending) if output is None else Path(output)
    check_free(target, "--output", force, inputs=[source])
    run = open_run(source, device=device)
    with writing(target, "--output"):
        write_export(run, format_, target)
    return target

"""`memfit table` as Markdown, to be pasted, and as CSV, to be computed with."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from memfit.render.table_parts import Part, parts, settings_in_words

Document = Mapping[str, Any]
COLUMNS = (
    "workload", "way", "model", "parameters", "seq_len", "nsamples", "weights_bytes", "activations_bytes",
    "total_bytes", "smallest_bytes", "smallest_gpu", "recommended_gpu",
)  # fmt: skip
GUIDE_COLUMNS = (
    "guide_weights_bytes", "guide_activations_least_bytes", "guide_activations_most_bytes", "guide_total_least_bytes",
    "guide_total_most_bytes", "guide_smallest_gpu", "guide_recommended_gpu", "guide_difference_bytes",
)  # fmt: skip


def as_markdown(document: Document) -> str:
    return "\n".join(_markdown(document))


def _markdown(document: Document) -> Iterator[str]:
    yield "# What fits where"
    for part in parts(document):
        yield ""
        yield f"## {part.title}"
        yield ""
        yield from _table(part)
    yield ""
    yield from (f"- {_escaped(line)}" for line in (*settings_in_words(document), *document["notes"]))


def _table(part: Part) -> Iterator[str]:
    yield _line(part.headers)
    yield _line(["---" if at < part.words else "---:" for at in range(len(part.headers))])
    for row in part.rows:
        yield _line(row)


def _line(cells: Any) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    """A bar would begin a cell, and a tag would be one."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def as_csv(document: Document) -> str:
    """One line a row of the quick reference, sizes in bytes, then the verdict of each card; unknown is empty."""
    labels = [gpu["label"] for gpu in document["gpus"]]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*COLUMNS, *labels, *GUIDE_COLUMNS))
    for row in document["rows"]:
        values = {**row["settings"], **row}
        verdicts = (row["cells"][label]["verdict"] for label in labels)
        writer.writerow((*(values.get(name) for name in COLUMNS), *verdicts, *_of_guide(row["guide"])))
    return out.getvalue().rstrip("\n")


def _of_guide(guide: Document | None) -> tuple[Any, ...]:
    if guide is None:
        return (None,) * len(GUIDE_COLUMNS)
    return (
        guide["weights_bytes"], *guide["activations_bytes"], *guide["total_bytes"], guide["smallest_gpu"],
        guide["recommended_gpu"], guide["difference_bytes"],
    )  # fmt: skip

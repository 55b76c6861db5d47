"""`memfit table` from its document (memfit.table/1): in a terminal, as Markdown to be pasted, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.render.pieces import bullets, clean, section
from memfit.units import GiB

Document = Mapping[str, Any]
NOTHING = "n/a"
NONE_OF_THEM = "none"
SAME = "the same"


@dataclass(frozen=True)
class Part:
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int
    """So many columns at the left are words; the others are figures and verdicts."""
    grouped: bool = False
    """The first column names a group of rows."""
    sentences: bool = False
    """The first column is a sentence and the second an answer to it: in a narrow terminal they are lines."""


def parts(document: Document) -> Iterator[Part]:
    yield _quick_reference(document)
    yield _matrix(document)
    beside = [row for row in document["rows"] if row["guide"]]
    if beside:
        yield _guide_rows(beside)
    for name, title in (
        ("guide_matrix", "The guide's decision matrix, checked"),
        ("guide_examples", "The guides' examples and recommendations, checked"),
    ):
        if document[name]:
            yield _claims(title, document[name])
    if document["guide_savings"]:
        yield _savings(document["guide_savings"])


def _quick_reference(document: Document) -> Part:
    """On cards below the smallest the job fails, from the recommended one on it is safe, between them it is tight."""
    headers = ("workload", "model", "params", "weights", "activations", "total", "smallest", "recommended")
    rows = [
        (
            clean(", ".join(filter(None, (row["workload"], row["way"])))),
            clean(row["model"]) + (" *" if row["not_modelled"] else ""),  # a mark that a note explains
            f"{row['parameters'] / 1e9:.2f} B", _gib(row["weights_bytes"]),
            _gib(row["activations_bytes"]), _gib(row["total_bytes"]), clean(row["smallest_gpu"] or NONE_OF_THEM),
            clean(row["recommended_gpu"] or NONE_OF_THEM),
        )
        for row in document["rows"]
    ]  # fmt: skip
    return Part("Quick reference: what each job takes in GiB, and the cards it fits on", headers, rows, 2, grouped=True)


def _matrix(document: Document) -> Part:
    names = list(document["matrix"][0]["largest"]) if document["matrix"] else []
    rows = [
        (clean(line["gpu"]), *(clean(line["largest"][name] or NONE_OF_THEM) for name in names))
        for line in document["matrix"]
    ]
    return Part("Decision matrix: the largest of these models that is safe on a card", ("card", *names), rows, 99)


def _guide_rows(rows: Sequence[Document]) -> Part:
    headers = ("model", "weights", "activations", "total", "off by", "smallest", "recommended")
    made = [
        (
            clean(row["model"]), f"{_gb(guide['weights_bytes'])} / {_gb(row['weights_bytes'])}",
            f"{_range(guide['activations_bytes'])} / {_gb(row['activations_bytes'])}",
            f"{_range(guide['total_bytes'])} / {_gb(row['total_bytes'])}",
            _signed(guide["difference_bytes"], 10**9),
            f"{guide['smallest_gpu']} / {clean(row['smallest_gpu'] or NONE_OF_THEM)}",
            f"{guide['recommended_gpu']} / {clean(row['recommended_gpu'] or NONE_OF_THEM)}",
        )
        for row in rows
        for guide in (row["guide"],)
    ]  # fmt: skip
    title = "The guide's table in GB, and the whole model on a card as predicted: guide / predicted"
    return Part(title, headers, made, 1)


def _claims(title: str, claims: Sequence[Document]) -> Part:
    """Its own way with the defaults only where it asks for something else; how far it is off only where it has a
    figure."""
    figures = any(claim["difference_bytes"] is not None for claim in claims)
    reduced = any(claim["whole_bytes"] != claim["whole_by_default_bytes"] for claim in claims)
    headers = (
        "the guide says", "answer", "card", "its way", *(("with defaults",) if reduced else ()),
        *(("off by",) if figures else ()), f"memfit prune on {clean(claims[0]['streamed_gpu'])}",
    )  # fmt: skip
    rows = [
        (
            clean(claim["said"] + (f" ({claim['note']})" if claim["note"] else "")), clean(claim["answer"]),
            clean(claim["gpu"]), _with_verdict(claim, "whole"), *((_by_default(claim),) if reduced else ()),
            *((_signed(claim["difference_bytes"], GiB),) if figures else ()), _with_verdict(claim, "streamed"),
        )
        for claim in claims
    ]  # fmt: skip
    return Part(f"{title} (GiB on that card)", headers, rows, 3, sentences=True)


def _by_default(claim: Document) -> str:
    same = claim["whole_bytes"] == claim["whole_by_default_bytes"]
    return SAME if same else _with_verdict(claim, "whole_by_default")


def _savings(savings: Sequence[Document]) -> Part:
    headers = ("the guide says", "model", "activations", "guide", "predicted")
    rows = [
        (
            clean(saving["said"]), clean(saving["model"]),
            f"{_gib(saving['activations_before_bytes'])} to {_gib(saving['activations_after_bytes'])}",
            _less(saving["guide_share"]), _less(saving["share"]),
        )
        for saving in savings
    ]  # fmt: skip
    return Part("What the guide's flags save of its way's activations (GiB), checked", headers, rows, 2)


def settings_in_words(document: Document) -> Iterator[str]:
    """What each workload was planned with, once for all models."""
    told = set()
    for row in document["rows"]:
        kind = row["workload"]
        if kind not in told:
            told.add(kind)
            chosen = {name: row["settings"][name] for name in _SHOWN if name in row["settings"]}
            yield f"{kind}: " + ", ".join(
                _setting(name, value) for name, value in chosen.items() if value not in (False, "none")
            )


_SHOWN = (
    "method", "sparsity", "nsamples", "batch_size", "seq_len", "new_tokens", "precision", "rank", "optimizer",
    "grad_checkpointing", "quant", "double_quant", "quant_compute", "kbit_prepare",
)  # fmt: skip


def _setting(name: str, value: object) -> str:
    word = name.replace("_", "-")
    return word if value is True else f"{word} {value}"


def _with_verdict(claim: Document, way: str) -> str:
    return f"{_gib(claim[f'{way}_bytes'])} {claim[f'{way}_verdict']}"


def _gib(size: int | None) -> str:
    return NOTHING if size is None else f"{size / GiB:.2f}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g}"


def _range(ends: Sequence[int]) -> str:
    least, most = (f"{end / 1e9:g}" for end in ends)
    return least if least == most else f"{least}-{most}"


def _signed(size: int | None, unit: int) -> str:
    return NOTHING if size is None else "nothing" if size == 0 else f"{size / unit:+.1f}"


def _less(share: float | None) -> str:
    return NOTHING if share is None else f"{-share:+.0%}"


STYLES = {"safe": "green", "tight": "yellow", "fails": "red"}
"""Colour repeats what the word says."""
NAME = 32
"""What is longer in the first column is a sentence, and may be wrapped."""
WIDE = 120


def show_table(document: Mapping[str, Any], console: Console) -> None:
    for part in parts(document):
        narrow = part.sentences and console.width < WIDE
        console.print(section(part.title, _lines(part) if narrow else _table(part)))
    console.print(section("planned with", bullets(list(settings_in_words(document)))))
    console.print(section("how to read it", bullets(document["notes"])))


def _table(part: Part) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    first = 1 if part.grouped else 0
    sentences = any(len(row[first]) > NAME for row in part.rows)
    for at, header in enumerate(part.headers[first:], first):
        wraps = at > first or sentences  # where a terminal is too narrow nothing is cut off
        table.add_column(header, justify="left" if at < part.words else "right", overflow="fold", no_wrap=not wraps)
    group = None
    for row in part.rows:
        if part.grouped and row[0] != group:
            group = row[0]
            table.add_row(Text(group, "bold"))
        name = Text(f"  {row[first]}" if part.grouped else row[first])
        table.add_row(name, *(Text(cell, STYLES.get(cell.rpartition(" ")[2], "")) for cell in row[first + 1 :]))
    return table


def _lines(part: Part) -> RenderableType:
    """A sentence, and below it the answer with its figures."""
    made: list[RenderableType] = []
    for said, answer, *cells in part.rows:
        told = zip(part.headers[2:], cells, strict=True)
        figures = ", ".join(f"{header} {cell}" for header, cell in told if cell not in (NOTHING, SAME))
        made += [Text(said), Padding(Text(f"{answer} ({figures})", "dim"), (0, 0, 0, 2))]
    return Group(*made)


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
        yield from _markdown_table(part)
    yield ""
    yield from (f"- {_escaped(line)}" for line in (*settings_in_words(document), *document["notes"]))


def _markdown_table(part: Part) -> Iterator[str]:
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

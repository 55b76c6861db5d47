"""A report as one self-contained page: it opens from disk, loads nothing, and works in dark and in light.

    write_page(report_file("snapshot.pickle"), "report.html")

Texts of the file that is reported on reach the page as JSON in a block that no browser runs, with `<`, `>` and `&`
escaped, and are put into it by `textContent` alone. A content security policy names the page's own script and style by
their hashes; nothing else can run or be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from memfit.analysis.page import page_data
from memfit.analysis.report import Report
from memfit.files import written_whole

MODULES = (
    "dom.js", "data.js", "chart.js", "timeline_drawing.js", "timeline.js", "flame.js", "table.js", "report_view.js",
)  # fmt: skip
"""What this page and the served one are made of, each after those that it imports."""


def page(reported: Report) -> str:
    script, style = _script(), asset("style.css")
    title = Path(str(reported.document["source"]["path"])).name or "report"
    data = page_data(reported)
    data["title"] = title
    parts = {
        "POLICY": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
        "STYLE": style,
        "DATA": _as_json(data),
        "SCRIPT": script,
    }
    pieces = re.split(r"\{\{([A-Z]+)\}\}", asset("page.html"))  # once: no text of the data is taken for a place
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def write_page(reported: Report, path: str | Path) -> None:
    text = page(reported).encode("utf-8", "backslashreplace")
    with written_whole(path) as beside:
        beside.write_bytes(text)


@cache
def asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """All modules as one function: a page opened from disk may not import any. Nothing of them is global."""
    text = "\n".join(asset(name) for name in MODULES) + "\nopenReport();"
    return '(() => {\n"use strict";\n' + re.sub(r"^(?:import .*\n|export )", "", text, flags=re.MULTILINE) + "\n})();"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _as_json(data: object) -> str:
    """Inside a page: no character that could end the block, and none that an old script parser takes for a line."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

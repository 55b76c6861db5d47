"""The page as a file: self-contained, small, and strict about what may run in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import DATA, random_trace, save, training

from memfit.analysis.page import MAX_BLOCKS, page_data
from memfit.analysis.report import Report, report_file, report_run
from memfit.analysis.run import run_of_trace
from memfit.render.html import MODULES, page

ASSETS = Path(__file__).parents[2] / "src" / "memfit" / "render" / "html"


@cache
def html() -> str:
    return page(report_file(DATA / "snap-train.pickle"))


def data() -> Any:
    return json.loads(html().partition('id="data">')[2].partition("</script>")[0])


def column(text: str, kind: Any) -> list[int]:
    return np.frombuffer(base64.b64decode(text), dtype=kind).tolist()


def test_the_page_names_nothing_outside_itself() -> None:
    without_data = html().partition('id="data">')[0] + html().partition('id="data">')[2].partition("</script>")[2]

    addresses = set(re.findall(r"https?://[^\s\"'`)]+", without_data))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a namespace: nothing is loaded from it
    assert not re.findall(r"<(?:img|iframe|object|embed)\b|@import|url\(", without_data)


def test_only_the_pages_own_script_and_style_may_run() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html())
    assert policy is not None
    script = html().rpartition("<script>")[2].partition("</script>")[0]
    style = html().partition("<style>")[2].partition("</style>")[0]

    for text, rule in ((script, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none';")
    assert "unsafe" not in policy[1]


def test_no_script_writes_markup_or_runs_text() -> None:
    for name in MODULES:
        text = (ASSETS / name).read_text(encoding="utf-8")
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc", text
        )
        assert found == [], name


def test_every_file_of_the_page_is_used_and_ships_with_the_package() -> None:
    there = {path.name for path in ASSETS.iterdir() if path.suffix in (".js", ".css", ".html")}

    assert there == {*MODULES, "style.css", "page.html"}


def test_the_same_file_gives_the_same_page() -> None:
    assert page(report_file(DATA / "snap-train.pickle")) == html()


def test_the_samples_on_the_page_are_those_of_the_run() -> None:
    timeline = data()["timeline"]
    allocated = column(timeline["samples"]["allocated"], "<u4")

    assert max(allocated) * timeline["unit"] == 2_569_738_240
    for grouping in timeline["groupings"]:
        sums = [column(text, "<u4") for text in grouping["sums"]]
        assert [sum(parts) for parts in zip(*sums, strict=True)] == allocated, grouping["id"]


def test_blocks_on_the_page_are_sorted_by_size_so_that_the_largest_share_comes_first() -> None:
    blocks = data()["timeline"]["blocks"]
    sizes = column(blocks["size"], "<u4")

    assert sizes == sorted(sizes, reverse=True)
    assert (len(sizes), blocks["left_out"]) == (blocks["count"], 0)


def test_the_flame_graph_on_the_page_adds_up() -> None:
    flame = data()["timeline"]["flame"]

    assert flame["bytes"][0] == 2_569_738_240
    inside = [0] * len(flame["bytes"])
    for node, parent in enumerate(flame["parent"]):
        if parent >= 0:
            inside[parent] += flame["bytes"][node]
    assert all(inside[i] in (0, size) or inside[i] < size for i, size in enumerate(flame["bytes"]))


def test_what_is_too_much_for_a_page_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.analysis.page.MAX_BLOCKS", 10)
    run = run_of_trace(random_trace(3))
    made = page_data(Report({**report_run(run), "source": {"path": "x"}}, run))

    assert made["timeline"]["blocks"]["count"] == 10
    assert made["timeline"]["blocks"]["left_out"] == int((run.timeline.size > 0).sum()) - 10
    assert MAX_BLOCKS == 120_000


def test_a_hundred_thousand_events_make_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    path = save(training(100_000).snapshot(), tmp_path / "large.pickle")

    size = len(page(report_file(path)))

    assert size < 9_000_000  # a million events: 9.8 MB, since columns are sampled from there on

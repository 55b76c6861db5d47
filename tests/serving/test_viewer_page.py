"""The viewer in a real browser: dropped files, zooming by asking, ranges summed, filters, names that are only text."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="memfit[web] is not installed")
pytest.importorskip("playwright", reason="playwright is not installed: no browser to open pages with")
from playwright.sync_api import Browser, sync_playwright
from recorded_page import CHROMIUM, DATA, Looked, look, served
from support.quick import quick

from memfit.analysis.report import report_file
from memfit.events import Trace
from memfit.units import format_bytes

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
MiB = 1 << 20
HOSTILE = "<img src=x onerror=document.title='ran'>.pickle"
STEPS, LAYERS = 40, 150


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


def many_blocks() -> Trace:
    """More blocks than one document has room for."""
    trace = Trace()
    for step in range(1, STEPS + 1):
        trace.mark("forward", step)
        kept = [
            trace.alloc(MiB + 512 * layer, category="activations", module=f"h.{layer}.mlp", op="aten.mm.default")
            for layer in range(LAYERS)
        ]
        trace.mark("backward", step)
        for block in reversed(kept):
            trace.free(block)
    return trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    for name in ("snap-train.pickle", HOSTILE):
        (folder / name).write_bytes((DATA / "snap-train.pickle").read_bytes())
    many_blocks().save(folder / "many.npz")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


@pytest.fixture
def looked(browser: Browser, address: str) -> Iterator[Looked]:
    made = look(browser, address)
    yield made
    made.page.close()


def open_file(looked: Looked, name: str) -> None:
    looked.view("viewer")
    looked.page.get_by_role("link", name=name, exact=True).click()
    looked.page.wait_for_selector("canvas.main")


def test_the_label_says_how_many_are_in_view_though_not_all_were_sent(looked: Looked) -> None:
    open_file(looked, "many.npz")
    looked.until("document.querySelector('.tools output').textContent.endsWith('in view')")

    drawn, there = looked.page.inner_text(".tools output").split(" of up to ")
    assert int(drawn.replace(",", "")) <= 4000
    assert there == f"{STEPS * LAYERS:,} in view"


def test_a_file_of_the_folder_is_shown_as_a_report_shows_it(looked: Looked) -> None:
    open_file(looked, "snap-train.pickle")

    text = looked.page.inner_text("main")
    assert text.index("recording began after memory was in use") < text.index("2.39")
    assert "Flame graph of the peak" in text and "Allocations" in text and "By line of code" in text
    assert looked.complaints == []


def test_a_dropped_snapshot_is_read_and_drawn(looked: Looked) -> None:
    looked.view("viewer")
    looked.page.evaluate(
        """(text) => {
          const dataTransfer = new DataTransfer(), bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
          dataTransfer.items.add(new File([bytes], "dropped <b>here</b>.pickle"));
          const drop = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
          document.querySelector(".drop").dispatchEvent(drop);
        }""",
        base64.b64encode((DATA / "snap-oom.pickle").read_bytes()).decode(),
    )
    looked.page.wait_for_selector("canvas.main")

    assert looked.page.inner_text(".opened h1") == "dropped <b>here</b>.pickle"
    assert "Out of memory: a request of 48.00 MiB failed" in looked.page.inner_text("main")
    assert looked.complaints == []


def test_junk_that_is_dropped_is_refused_in_words_and_the_list_comes_back(looked: Looked, tmp_path: Path) -> None:
    (tmp_path / "junk.pickle").write_bytes(b"junk")
    looked.view("viewer")
    looked.page.set_input_files("#file", tmp_path / "junk.pickle")
    looked.page.wait_for_selector(".message.bad")

    assert "'junk.pickle': it is neither a pickle" in looked.page.inner_text(".message.bad")
    assert looked.page.locator(".drop").count() == 1


def test_a_hostile_name_is_text(looked: Looked) -> None:
    open_file(looked, HOSTILE)

    assert looked.page.inner_text(".opened h1") == HOSTILE
    assert looked.page.locator("main img").count() == 0
    assert looked.page.title() == "Viewer · memfit"


def test_zooming_asks_the_server_for_what_is_in_view(looked: Looked) -> None:
    open_file(looked, "many.npz")
    whole = looked.drawing()
    assert (whole["first"], whole["last"]) == (0, len(many_blocks()))
    assert "others are not listed one by one" in looked.page.inner_text("#allocations")

    looked.page.focus("canvas.main")
    for _ in range(12):
        looked.page.keyboard.press("+")
    shown = "(({ first, last }) => last - first)(document.querySelector('canvas.main').dataset)"
    looked.until(f"{shown} < {0.1 * whole['last']}")
    near = looked.drawing()

    assert near["first"] <= near["from"] and near["to"] <= near["last"] + 1
    looked.page.keyboard.press("0")
    looked.until("Number(document.querySelector('canvas.main').dataset.first) === 0")


def test_a_range_that_is_selected_is_summed_as_python_sums_it(looked: Looked) -> None:
    open_file(looked, "snap-train.pickle")
    looked.drawing()
    left, y = looked.place(0.25, 0.5)
    right, _ = looked.place(0.75, 0.5)
    looked.page.keyboard.down("Shift")
    looked.page.mouse.move(left, y)
    looked.page.mouse.down()
    looked.page.mouse.move(right, y, steps=3)
    with looked.page.expect_response(lambda response: response.url.endswith("/sums")) as answered:
        looked.page.mouse.up()
    looked.page.keyboard.up("Shift")
    looked.page.wait_for_selector(".summed")

    asked = answered.value.request.post_data_json
    run = report_file(DATA / "snap-train.pickle").run
    assert run is not None and run.times is not None
    inside = np.flatnonzero((run.times >= asked["from"]) & (run.times <= asked["to"]))
    lives, size = run.timeline.lives, run.timeline.size
    made = sum(int(s) for s, birth in zip(size, lives.birth, strict=True) if inside[0] <= birth <= inside[-1])
    after = sum(
        int(s) for s, birth, death in zip(size, lives.birth, lives.death, strict=True) if birth <= inside[-1] < death
    )
    total = looked.page.locator(".summed table").first.locator("tbody tr").last.inner_text().split("\t")
    assert (total[0], total[3], total[7]) == ("all", format_bytes(made), format_bytes(after))


def test_filters_change_what_is_drawn_and_stay_in_the_address(looked: Looked) -> None:
    open_file(looked, "snap-train.pickle")
    before = looked.drawing()["high"]
    looked.page.fill("#filter-text", "adam")
    looked.until("document.querySelector('.filter > .sub').textContent.includes('148 of 1,730')")
    assert looked.drawing()["high"] < before
    looked.page.fill("#filter-least", "100 MiB")
    looked.until("document.querySelector('.filter > .sub').textContent.startsWith('1 of')")
    assert "text=adam" in looked.page.url and "least=100" in looked.page.url

    looked.page.reload()
    looked.until("document.querySelector('.filter > .sub')?.textContent.startsWith('1 of')")
    looked.page.click("#filter-none")
    looked.until("document.querySelector('.filter > .sub').textContent === ''")
    looked.page.get_by_role("button", name="gradients").click()
    looked.until("document.querySelector('.filter > .sub').textContent.includes(' of 1,730')")
    assert set(looked.page.locator("#allocations td .cat").all_inner_texts()) == {"gradients"}


@pytest.mark.parametrize("theme", quick(["dark"], ["light", "dark"]))
def test_it_is_readable_on_a_phone(browser: Browser, address: str, theme: str) -> None:
    looked = look(browser, address, theme=theme, width=390)
    open_file(looked, "snap-train.pickle")
    looked.drawing()

    assert looked.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert looked.complaints == []
    looked.page.close()

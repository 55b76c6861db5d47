"""Runs in a real browser: one that was trained here, two side by side, one that goes on, names that are only text."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("fastapi", reason="memfit[web] is not installed")
pytest.importorskip("playwright", reason="playwright is not installed: no browser to open pages with")
from playwright.sync_api import Browser, sync_playwright
from recorded_page import CHROMIUM, DATA, Looked, look, served

from memfit.jobs.training.config_file import config_from
from memfit.jobs.training.job import prepare_job
from memfit.jobs.training.result import RunLog
from memfit.jobs.training.run import train

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
HOSTILE = "<img src=x onerror=document.title='ran'>"
HEAD = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent\n"
TINY_GSA = {
    "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ffn": 32, "vocab_size": 300,
    "max_position_embeddings": 512, "k_base": 8, "k_min": 2, "k_max": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


class Said:
    """A plan's figures."""

    peak_bytes, reserved_bytes = 5 << 20, 6 << 20
    phases: ClassVar = {"forward": (4 << 20, 6 << 20), "backward": (5 << 20, 6 << 20)}


def row(step: int) -> str:
    return f"2026-11-16T12:00:{step:02d},step_{step},{step}.000,{step}.500,{step}.250,2.000,6.10\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was really trained and planned, a copy of it, one with a snapshot and a name, and one that goes on."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "play.txt").write_text("to be or not to be. " * 100)
    job = prepare_job(config_from({
        "model": {"name": "gsa", "tokenizer": "bytes", "settings": TINY_GSA}, "data.source": str(folder / "play.txt"),
        "max_seq_len": 32, "output_dir": str(folder / "first"), "max_steps": 3, "precision": "fp32", "device": "cpu",
        "global_batch_size": 2, "micro_batch_size": 2, "logging_steps": 1, "logging.memory_log": True,
        "logging.tensorboard": False, "memory.probe": False,
    }, name="tiny"))  # fmt: skip
    log = RunLog(folder / "first")
    train(job, on_event=log, plan=Said())
    log.close()
    shutil.copytree(folder / "first", folder / "second", ignore=shutil.ignore_patterns("step_*"))
    for name in (HOSTILE, "live"):
        (folder / name).mkdir()
        (folder / name / "memory_log.csv").write_text(HEAD + row(1) + row(2))
    (folder / HOSTILE / "snap.pickle").write_bytes((DATA / "snap-oom.pickle").read_bytes())
    outside = tmp_path_factory.mktemp("outside")
    (outside / "memory_log.csv").write_text(HEAD + row(9))
    (folder / "way out").symlink_to(outside)
    (folder / "half").mkdir()
    (folder / "half" / "memory_log.csv").symlink_to(outside / "memory_log.csv")
    return folder


@pytest.fixture(scope="module")
def looked(browser: Browser, folder: Path) -> Iterator[Looked]:
    with served(folder) as address:
        made = look(browser, address)
        yield made
        assert made.complaints == []


def test_runs_are_listed_and_links_out_of_the_folder_are_not(looked: Looked) -> None:
    looked.view("runs")
    looked.page.wait_for_selector("#runs tbody tr")

    names = [text.split("\t")[1] for text in looked.page.locator("#runs tbody tr").all_inner_texts()]
    assert sorted(names) == sorted(["first", "second", HOSTILE, "live"])
    assert looked.page.locator("main img").count() == 0
    for name in ("way out", "half", "../outside"):
        answer = looked.page.request.get(f"{looked.address}api/runs/run", params={"name": name})
        assert answer.status == 403, name


def test_a_run_is_told_with_its_plan_its_loss_and_its_growth(looked: Looked) -> None:
    looked.view("runs")
    looked.page.get_by_role("link", name="first", exact=True).click()
    looked.page.wait_for_selector("#run-loss svg path")

    text = looked.page.inner_text("#details")
    assert "step 3 of 3" in text and "Growth: 3 steps are too few" in text
    for words in ("GPU allocated", "forward", "backward", "02_model_built", "Its log, at the end", "end: step 3/3"):
        assert words in text, words


def test_two_runs_stand_side_by_side(looked: Looked) -> None:
    looked.view("runs")
    for name in ("first", "second"):
        looked.page.get_by_label(f"Show {name}", exact=True).check()
        looked.page.wait_for_function(f"document.activeElement.getAttribute('aria-label') === 'Show {name}'")
        looked.page.get_by_role("heading", name=name).wait_for()

    assert looked.page.locator("#run-loss svg path").count() == 2
    assert looked.page.locator(".heads .head").count() == 2
    rows = looked.page.locator("#run-peaks tbody tr").all_inner_texts()
    assert [row.split("\t")[1].strip() for row in rows[:2]] == ["first", "second"]
    looked.page.reload()
    looked.page.wait_for_selector("#run-loss svg path")
    assert looked.page.locator(".heads .head").count() == 2


def test_a_run_that_goes_on_grows_on_the_page(looked: Looked, folder: Path) -> None:
    looked.view('runs?runs=["live"]')
    looked.page.wait_for_selector("#log svg circle")
    assert looked.page.locator("#log svg circle").count() == 2
    assert "running" in looked.page.inner_text(".heads")

    with (folder / "live" / "memory_log.csv").open("a") as log:
        log.write(row(3) + row(4)[:-9])
    looked.until("document.querySelectorAll('#log svg circle').length === 3")
    assert "step_3" in looked.page.inner_text(".heads")


def test_a_hostile_name_is_text_and_its_recording_opens(looked: Looked) -> None:
    looked.view("runs")
    looked.page.get_by_role("link", name=HOSTILE, exact=True).click()
    looked.page.get_by_role("link", name="snap.pickle", exact=True).click()
    looked.page.wait_for_selector("canvas.main")

    assert looked.page.inner_text(".opened h1") == f"{HOSTILE}/snap.pickle"
    assert looked.page.locator("main img").count() == 0
    assert looked.page.title() == "Viewer · memfit"


def test_it_fits_a_phone(looked: Looked) -> None:
    looked.page.set_viewport_size({"width": 390, "height": 800})
    looked.view('runs?runs=["first","second"]')
    looked.page.wait_for_selector("#run-loss")

    assert looked.page.evaluate("document.documentElement.scrollWidth") <= 400

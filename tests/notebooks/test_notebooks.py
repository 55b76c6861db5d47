"""In a notebook: answers draw themselves, escaped and self-contained; the magic predicts a cell and leaves nothing."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from typing import Any

import pytest

import memfit
from memfit.render.notebook import as_html
from memfit.running.magic import load_ipython_extension, look_at

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def plan() -> Any:
    return memfit.predict(kind="forward", model="gpt2", batch_size=1, seq_len=16, gpu="24GB")


class Tags(HTMLParser):
    """Every tag is closed, in order; attributes are collected."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_plan_draws_its_bar_and_its_table(plan: Any) -> None:
    html = plan._repr_html_()
    tags = Tags(html)
    assert not tags.open and {"div", "table", "i", "style"} <= tags.seen
    assert "weights" in html and "safe" in html and "24 GB card" in html
    assert not {"script", "link", "img", "iframe"} & tags.seen
    assert not any(name.startswith("on") or name in ("src", "href") for name in tags.attributes)
    assert "prefers-color-scheme:dark" in html and "http" not in html


def test_what_comes_from_elsewhere_is_escaped(plan: Any) -> None:
    evil = '<img src=x onerror="alert(1)">'
    html = dataclasses.replace(plan, model=evil, notes=(f"not modelled: {evil}",))._repr_html_()
    assert evil not in html and html.count("&lt;img") == 2
    assert "img" not in Tags(html).seen


def test_shares_of_the_bar_are_of_the_card(plan: Any) -> None:
    document = plan.to_json()
    share = 100 * document["breakdown"]["weights"] / document["gpu"]["capacity_bytes"]
    assert f"width:{share:.3f}%" in plan._repr_html_()


def test_an_answer_without_a_picture_is_shown_as_text() -> None:
    assert as_html({"schema": "memfit.check/1"}) is None


REPORT: dict[str, Any] = {
    "schema": "memfit.report/1", "source": {"path": "<b>.pickle"}, "messages": [{"text": "cut"}], "origin": "recorded",
    "peak": {"allocated_bytes": 3 << 30, "reserved_bytes": 4 << 30}, "breakdown": {"weights": 3 << 30, "loss": 0},
    "phases": [{"name": "forward", "step": 1, "allocated_bytes": 3 << 30, "reserved_bytes": 4 << 30}],
}  # fmt: skip


def test_a_report_draws_itself_and_so_does_one_without_figures() -> None:
    html = memfit.FileReport(REPORT)._repr_html_()
    assert html is not None and "&lt;b&gt;.pickle" in html and "3.00 GiB" in html and "forward 1" in html
    empty = {**REPORT, "peak": {"allocated_bytes": None, "reserved_bytes": None}}
    assert "no figures of a GPU" in str(as_html(empty))


def test_a_fit_draws_before_and_after() -> None:
    forecast = {"device_bytes": 5 << 30, "use_bytes": 5 << 30, "verdict": "safe"}
    html = as_html({
        "schema": "memfit.fit/1", "answer": "fits", "workload": {"kind": "lora"}, "model": {"name": "gpt2"},
        "gpu": {"name": "24 GB card", "capacity_bytes": 24 << 30}, "margin": 0.1, "before": forecast,
        "after": {**forecast, "device_bytes": 3 << 30, "use_bytes": 3 << 30},
        "changes": [{"name": "micro-batch 1", "cost": "time", "before_bytes": 5 << 30, "after_bytes": 3 << 30}],
    })  # fmt: skip
    assert html is not None and "before: 5.00 GiB" in html and "after: 3.00 GiB" in html and "micro-batch 1" in html


CELL = """
import torch
made_here = torch.nn.Linear(1024, 1024).cuda()
made_here(torch.ones(8, 1024, device="cuda")).sum().backward()
"""


class Shell:
    """As much of IPython as the magic asks for."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.magics: dict[str, Any] = {}

    def transform_cell(self, code: str) -> str:
        return code

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        self.magics[magic_name] = function


def test_a_cell_is_predicted_without_a_gpu_and_leaves_no_names() -> None:
    shell = Shell()
    made = look_at(shell, "--gpu 24GB", CELL)
    assert isinstance(made, memfit.Plan) and made.verdict == "safe"
    assert made.report.breakdown["weights"] >= 4 << 20
    assert "made_here" not in shell.user_ns


def test_two_dashes_part_flags_from_code_and_may_stand_first() -> None:
    for line in ("-- x = 'a -- b'; torch.ones(1, device='cuda')", "--predict -- torch.ones(1, device='cuda')"):
        shell = Shell()
        shell.user_ns["torch"] = __import__("torch")
        assert look_at(shell, line, None).to_json()["peak"]["allocated_bytes"] == 512


def test_wrong_flags_are_told_and_no_traceback_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell()
    load_ipython_extension(shell)
    for line, words in (
        ("--gpus 24GB", "--gpus: no such flag"),
        ("--gpu nothing", "nothing"),
        ("--gpu '8GB", "No closing quotation"),
        ("--predict", "no code"),
    ):
        assert shell.magics["memfit"](line, "" if words == "no code" else "1") is None
        assert words in capsys.readouterr().err
    assert shell.magics["memfit"]("--predict", "x = (") is None
    assert "the cell is not Python that can be read" in capsys.readouterr().err


def test_ipython_loads_it_and_runs_a_line_and_a_cell() -> None:
    testing = pytest.importorskip("IPython.testing.globalipapp")
    shell = testing.start_ipython() or testing.get_ipython()
    shell.run_line_magic("load_ext", "memfit")
    shell.user_ns["side"] = 256
    line = shell.run_line_magic("memfit", "--gpu 24GB -- x = __import__('torch').ones(side, side, device='cuda')")
    plain = shell.run_line_magic("memfit", "-- y = __import__('torch').ones(side, side, device='cuda')")
    assert plain.peak.allocated_bytes == 4 * 256 * 256
    cell = shell.run_cell_magic("memfit", "--predict", CELL)
    assert line.verdict == "safe" and cell.gpu is None and "x" not in shell.user_ns

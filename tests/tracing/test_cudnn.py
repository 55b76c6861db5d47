"""Convolutions whose plans cuDNN itself tells: as on the H200, with nothing left behind where it cannot be asked.

`h200-convolutions.jsonl` has the workspaces of result, input's gradient and weight's gradient as torch 2.11 with cuDNN
9.19 took them there. The tests that need the library look for it among the installed packages, or where MEMFIT_CUDNN
said before the tests began.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.events import Action
from memfit.gpus import find_gpu
from memfit.planning import cache
from memfit.platform import H200, platform_of
from memfit.tracing.kernels import cudnn
from memfit.tracing.kernels.convolutions import Convolution, Kind

RECORDED = Path(__file__).parents[1] / "data" / "h200-convolutions.jsonl"
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MiB = 1 << 20


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cudnn.VARIABLE, os.environ["MEMFIT_CUDNN_OF_TESTS"])
    if cudnn.folder() is None:
        pytest.skip("no cuDNN here: pip install nvidia-cudnn-cu13==9.19.0.56, or MEMFIT_CUDNN=folder")
    if "9.19.0" not in cudnn.said(H200):
        pytest.skip("another cuDNN than on the H200")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A cuDNN with two plans: what it was asked."""
    asked: list[dict[str, Any]] = []

    def plans(question: dict[str, Any], platform: object) -> tuple[cudnn.PlanBytes, ...]:
        asked.append(question)
        return cudnn.PlanBytes.of(2 * MiB), cudnn.PlanBytes.of(64 * MiB)

    monkeypatch.setattr(cudnn, "plans", plans)
    yield asked


def convolve(times: int = 2) -> memfit.Plan:
    def step() -> None:
        layer, x = nn.Conv2d(8, 8, 3, padding=1).cuda(), torch.ones(2, 8, 16, 16, device="cuda")
        for _ in range(times):
            layer(x).sum().backward()

    return memfit.trace(step)


def recorded() -> Iterator[tuple[dict[str, Any], Convolution, Kind, int]]:
    for q in map(json.loads, RECORDED.read_text().splitlines()):
        sides, kind = q["dims"], torch.contiguous_format
        if q["lay"]:
            kind = torch.channels_last if sides == 2 else torch.channels_last_3d
        places = (q["c"], q["k"] // q["g"]) if q["t"] else (q["k"], q["c"] // q["g"])
        x, weight = (
            torch.empty(*shape, *[side] * sides, dtype=TYPES[q["dt"]], device="meta").contiguous(memory_format=kind)
            for shape, side in (((q["n"], q["c"]), q["hw"]), (places, q["ks"]))
        )
        numbers = [[q[name]] * sides for name in ("s", "p", "d")]
        y = torch.convolution(x, weight, None, *numbers, bool(q["t"]), [q["op"]] * sides, q["g"])
        wide, narrow = (y, x) if q["t"] else (x, y)
        of = Convolution(wide, weight, narrow, q["g"], bool(q["lay"]), *numbers)
        kinds: tuple[Kind, ...] = ("input", "forward", "weight") if q["t"] else ("forward", "input", "weight")
        for name, taken in zip(kinds, q["workspaces"], strict=True):
            yield q, of, name, taken


@pytest.mark.usefixtures("library")
def test_every_recorded_workspace_is_the_one_of_the_first_plan_that_cudnn_names() -> None:
    all_of_them, of_cublas, not_so = 0, 0, 0
    for q, of, kind, taken in recorded():
        plan = cudnn.plans(of.question(kind), H200)[0]
        all_of_them, of_cublas = all_of_them + 1, of_cublas + plan.multiplies
        if kind == "weight" and of.compiles_gradient:
            assert of.compiled_gradient_bytes() == taken, (q, kind)
        elif not plan.multiplies:
            not_so += plan != taken
    assert all_of_them > 600 and of_cublas < all_of_them / 3
    assert not_so < all_of_them / 50  # kernels that it compiles on the spot: it names them only where there is a driver


@pytest.mark.usefixtures("library")
def test_products_of_cublas_take_little_beside_but_for_weights_channels_last() -> None:
    off = {}
    for q, of, kind, taken in recorded():
        plan = cudnn.plans(of.question(kind), H200)[0]
        if plan.multiplies:
            off[str(q), kind] = taken - of.bytes_of(plan, kind, H200)
    assert sum(abs(bytes_) <= 1024 for bytes_ in off.values()) > 0.8 * len(off)


@pytest.mark.usefixtures("library")
def test_a_plan_says_that_cudnn_was_asked_and_for_which_card() -> None:
    here, other = (str(memfit.trace(convolution, gpu=card).notes) for card in ("H200", "RTX 4090"))
    assert "cuDNN 9.19.0 was asked" in here and "measured on an H200" not in here
    assert "cuDNN 9.19.0 was asked for its plans for 8.9; its answers were measured on an H200" in other


def convolution() -> None:
    nn.Conv2d(8, 8, 3).cuda()(torch.ones(2, 8, 16, 16, device="cuda"))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("card", ["T4", "A100 80GB", "RTX 3090", "RTX 4090", "H100", "B200", "RTX 5090"])
def test_cards_of_every_architecture_are_answered(card: str) -> None:
    assert cudnn.plans(question(), platform_of(find_gpu(card)))


def question() -> dict[str, Any]:
    x, weight = torch.empty(8, 64, 28, 28, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    return Convolution(x, weight, x, 1, False, [1, 1], [1, 1], [1, 1]).question("weight")


def test_without_cudnn_rules_tell_and_the_plan_says_how_to_get_it() -> None:
    notes = convolve().notes
    assert any(note.startswith("not modelled:") and "convolution_backward" in note for note in notes)
    assert any("pip install nvidia-cudnn-cu13" in note for note in notes)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_workspace_by_rule_is_told_without_a_backward_pass_and_beside_the_verdict_where_it_is_the_peak(
    kind: type[nn.Module], dtype: torch.dtype
) -> None:
    def forward() -> None:
        with torch.no_grad():
            layer = kind(64, 64, 3, padding=1).to("cuda", dtype)
            layer(torch.ones(4, 64, 256, 256, device="cuda", dtype=dtype))

    notes = memfit.trace(forward).notes
    copies = "64.07 MiB" if dtype == torch.float16 else "128.14 MiB"  # of image, result and weight, channels last
    assert any(note.startswith("not modelled: the kernel that cuDNN takes") and copies in note for note in notes)
    assert any("told by rule: after `pip install nvidia-cudnn-cu13`" in note for note in notes)


def test_a_workspace_by_rule_that_is_not_at_the_peak_is_assumed_only() -> None:
    def step() -> None:
        layer, x = nn.Conv2d(64, 64, 3).cuda().half(), torch.ones(4, 64, 16, 16, device="cuda", dtype=torch.half)
        with torch.no_grad():
            layer(x)
        torch.ones(1 << 24, device="cuda")

    notes = memfit.trace(step).notes
    assert not any(note.startswith("not modelled:") for note in notes)
    assert any("told by rule" in note for note in notes)


def test_what_cudnn_says_is_taken_and_nothing_is_unmodelled(told: list[dict[str, Any]]) -> None:
    made = convolve()
    assert made.trace.requested.tolist().count(2 * MiB) == 4  # forward and the weight's gradient, twice
    assert not any(note.startswith("not modelled:") for note in made.notes)
    assert [each["kind"] for each in told] == ["forward", "weight"] * 2
    assert told[0]["image"] == [2, 8, 16, 16] and told[0]["alignments"] == [32, 32, 32]


def test_with_benchmark_the_largest_workspace_comes_once_and_the_cache_is_emptied(told: list[dict[str, Any]]) -> None:
    torch.backends.cudnn.benchmark = True
    try:
        made = convolve(times=3)
    finally:
        torch.backends.cudnn.benchmark = False
    assert made.trace.requested.tolist().count(64 * MiB) == 2
    assert made.trace.requested.tolist().count(2 * MiB) == 6
    assert made.trace.actions.tolist().count(Action.EMPTY_CACHE) == 2
    assert any("fastest plan is only known on the card" in note for note in made.notes)
    assert all(each["every"] for each in told)


def test_a_convolution_with_one_side_is_asked_for_with_two(told: list[dict[str, Any]]) -> None:
    memfit.trace(lambda: nn.Conv1d(4, 8, 5, 2, padding=2).cuda()(torch.ones(2, 4, 64, device="cuda")))
    assert (told[0]["image"], told[0]["weight"], told[0]["result"]) == ([2, 4, 1, 64], [8, 4, 1, 5], [2, 8, 1, 32])
    assert (told[0]["stride"], told[0]["padding"], told[0]["dilation"]) == ([1, 2], [0, 2], [1, 1])


def test_a_view_is_told_with_its_alignment(told: list[dict[str, Any]]) -> None:
    memfit.trace(lambda: nn.Conv2d(2, 8, 3).cuda()(torch.ones(3, 2, 9, 9, device="cuda")[1:]))
    assert told[0]["alignments"] == [8, 32, 32]


def test_a_library_that_is_none_is_as_if_there_were_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / cudnn.LIBRARY).write_text("not a library")
    monkeypatch.setenv(cudnn.VARIABLE, str(tmp_path))
    assert cudnn.plans(question(), H200) == ()
    assert any("told by rule" in note and "gives no answer" in note for note in convolve().notes)


def test_a_folder_without_the_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cudnn.VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match="where there is no libcudnn_graph"):
        convolve()


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "print('[1, 2')", "raise SystemExit(3)"])
def test_a_library_that_hangs_or_crashes_is_asked_no_more(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "SECONDS", 0.5)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, bufsize=0)
    library = cudnn.AskedLibrary(process)
    assert library.ask("{}") == [] and library.ask("{}") == []
    assert process.wait(60) is not None


def test_another_cudnn_is_another_entry_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    work = memfit.Workload.from_mapping({"kind": "lora", "model": "gpt2"})
    before = cache.key_of(work, H200)
    (tmp_path / cudnn.LIBRARY).write_text("another one")
    monkeypatch.setenv(cudnn.VARIABLE, str(tmp_path))
    assert cache.key_of(work, H200) != before


def test_the_card_that_was_read_off_is_the_h200() -> None:
    assert cudnn.facts_of(H200) == cudnn.FACTS
    assert len(cudnn.CLUSTERS) == 40


@pytest.mark.usefixtures("library")
def test_a_script_that_has_cudnn_asked_is_not_said_to_leave_anything_for_its_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import torch\ntorch.nn.Conv2d(8, 8, 3).cuda()(torch.ones(2, 8, 16, 16, device='cuda'))\n")
    cudnn._library.cache_clear()
    cudnn._asked.cache_clear()
    notes = str(memfit.trace_script([str(program)]).notes)
    assert "was asked for its plans" in notes and "atexit" not in notes

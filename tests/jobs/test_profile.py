"""`memfit profile`: the guide's flags, file names and tables, from predictions."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memfit.cli.main import main
from memfit.jobs.profile import ProfileSettings, course_size
from memfit.models import basics
from memfit.models.presets import SIZES
from memfit.planning.predict import predict

SMALL = ["--model-size", "small", "--context-length", "64", "--batch-size", "1", "--device", "predict"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["profile", *argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def of_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size called small: every block of it is traced, for each file."""
    size = replace(SIZES["small"], num_layers=2)
    monkeypatch.setitem(SIZES, "small", size)
    monkeypatch.setattr(basics, "small", partial(basics.BasicsTransformer, size))


def test_a_predicted_training_step_is_a_snapshot_of_plain_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pickle"
    code, out, _ = run(capsys, *SMALL, "--profile-type", "training", "--measure-steps", "2", "-o", str(path), "--json")
    document = json.loads(out)
    assert code == 0 and document["origin"] == "predicted"
    assert [phase["name"] for phase in document["phases"]] == ["forward", "backward", "step"]
    events = pickle.loads(path.read_bytes())["device_traces"][0]
    assert {"alloc", "free_completed"} <= {event["action"] for event in events}
    weights = 4 * SIZES["small"].parameters
    assert 4 * weights < document["peak"]["allocated_bytes"] < 8 * weights


@pytest.mark.usefixtures("of_two_blocks")
def test_the_guides_three_commands_run_in_order_and_each_leaves_its_own_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    guide = ("--model-size", "small", "--context-length", "512", "--device", "predict")
    for extra in (
        ("--profile-type", "forward"), ("--profile-type", "training"),
        ("--profile-type", "training", "--use-mixed-precision"),
    ):  # fmt: skip
        code, _, err = run(capsys, *guide, *extra)
        assert (code, err) == (0, "")
    folder = tmp_path / "results" / "memory_profiling"
    names = ["forward_snapshot", "training_bf16_snapshot", "training_snapshot"]
    assert sorted(path.name for path in folder.iterdir()) == [f"small_ctx512_{name}.pickle" for name in names]


def test_every_setting_that_differs_stands_in_the_default_name() -> None:
    plain = ProfileSettings.asked("2.7B", profile_type="training")
    assert plain.file_name == "2.7B_ctx512_training_snapshot.pickle"
    changes: list[dict[str, Any]] = [
        {}, {"dtype": "bf16"}, {"dtype": "fp16"}, {"batch_size": 8}, {"warmup_steps": 1}, {"measure_steps": 1},
    ]  # fmt: skip
    names = {ProfileSettings.asked("2.7B", profile_type="training", **change).file_name for change in changes}
    assert len(names) == len(changes)
    assert plain.file_name_on("RTX 4090") == "2.7B_ctx512_training_RTX-4090_snapshot.pickle"


def test_a_default_name_that_is_taken_is_given_a_number_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "results" / "memory_profiling" / "small_ctx64_forward_batch1_snapshot.pickle"
    first.parent.mkdir(parents=True)
    first.write_bytes(b"mine")
    code, out, _ = run(capsys, *SMALL, "--json")
    assert (code, first.read_bytes()) == (0, b"mine")
    assert json.loads(out)["snapshot"].endswith("small_ctx64_forward_batch1_snapshot-2.pickle")


def test_the_verdict_on_the_card_comes_first_and_is_that_of_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = ("--model-size", "small", "--profile-type", "training", "--device", "predict", "--measure-steps", "1")
    code, out, _ = run(capsys, *guide, "--gpu", "4GB", "-o", str(tmp_path / "x.pickle"))
    assert code == 1
    assert out.startswith("fails: needs ")
    code, out, _ = run(capsys, *guide, "--gpu", "4GB", "-o", str(tmp_path / "y.pickle"), "--json")
    told = json.loads(out)
    plan = predict(
        kind="train", model="memfit.models.basics:small", batch_size=4, seq_len=512, precision="fp32",
        outputs="dropped", gpu="4GB",
    )  # fmt: skip
    assert (code, told["verdict"], told["headroom_bytes"]) == (1, "fails", plan.to_json()["headroom_bytes"])
    assert told["smallest_gpu_bytes"] == plan.smallest_gpu_bytes > told["capacity_bytes"]
    code, out, _ = run(capsys, *guide, "--gpu", "H200", "-o", str(tmp_path / "z.pickle"))
    assert code == 0
    assert out.startswith("safe: ")


def test_a_dtype_without_mixed_precision_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *SMALL, "--dtype", "fp16")
    assert code == 2
    assert "add --use-mixed-precision" in err


def test_mixed_precision_raises_the_peak_of_a_forward_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for extra in ([], ["--use-mixed-precision"]):
        _, out, _ = run(capsys, *SMALL, *extra, "-o", str(tmp_path / f"{len(extra)}.pickle"), "--json")
        peaks.append(json.loads(out)["peak"]["allocated_bytes"])
    assert peaks[1] > 1.3 * peaks[0]


def test_steps_that_are_not_alike_are_profiled_as_far_as_they_were_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", "growing_model:Growing", "--device", "predict", "-o", str(tmp_path / "x.pickle"))
    code, _, err = run(capsys, *asked)
    assert code == 2 and "3 steps do not tell the next ones of this job: tensors of the last two steps differ" in err
    assert run(capsys, *asked, "--warmup-steps", "1", "--measure-steps", "2")[0] == 0


def test_an_existing_snapshot_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(b"mine")
    code, _, err = run(capsys, *SMALL, "-o", str(path))
    assert code == 2 and "already exists" in err and path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give --model-size or --model"),
        (["--model-size", "3B", "--device", "predict"], "no model size called '3B'"),
        ([*SMALL, "--profile-type", "backward"], "--profile-type 'backward'"),
        ([*SMALL, "--dtype", "fp8"], "--dtype 'fp8'"),
        ([*SMALL, "--measure-steps", "0"], "--measure-steps 0"),
        ([*SMALL, "-o", "x.txt"], "has no known ending"),
        (["--model-size", "small", "--device", "tpu"], "--device tpu"),
    ],
)
def test_wrong_input_is_said_in_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and said in err


def test_sizes_are_known_by_any_spelling_and_named_as_in_the_guide() -> None:
    assert course_size("2.7b") == "2.7B"
    assert ProfileSettings.asked("2.7B").file_name == "2.7B_ctx512_forward_snapshot.pickle"


def test_the_courses_parameter_counts() -> None:
    assert {name: size.parameters for name, size in SIZES.items()} == {
        "small": 128_625_408, "medium": 423_183_360, "large": 969_411_840, "xl": 1_998_235_200, "2.7B": 3_406_809_600,
    }  # fmt: skip


@pytest.mark.usefixtures("of_two_blocks")
def test_the_suite_makes_every_file_of_the_guide_and_answers_each_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    code, out, _ = run(
        capsys, "suite", "--device", "predict", "--model-size", "small", "--batch-size", "1", "--output-dir",
        str(folder), "--warmup-steps", "1",
    )  # fmt: skip
    names = {path.name for path in folder.iterdir()}
    wanted = {f"small_ctx{c}_{k}_snapshot.pickle" for c in (128, 256, 512) for k in ("forward", "training")}
    wanted |= {f"small_ctx512_{k}_{d}_snapshot.pickle" for d in ("fp32", "bf16") for k in ("forward", "training")}
    wanted |= {"peak_memory_summary.txt", "mixed_precision_memory_summary.txt", "activation_size_analysis.txt"}
    assert code == 0 and names == wanted | {"answers.md"}
    for part in "abcde":
        assert f"## ({part})" in out
    assert "predicted (H200)" in (folder / "peak_memory_summary.txt").read_text()
    summary = (folder / "mixed_precision_memory_summary.txt").read_text()
    assert "Configuration | Peak Memory (MB) | Memory Savings vs FP32" in summary and "baseline" in summary
    assert re.search(r"attention scores .*: made by .*memfit/models/basics.py:\d+ softmax \d+ times", out)


@pytest.mark.usefixtures("of_two_blocks")
def test_parts_may_be_run_one_by_one_into_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--model-size", "small", "--batch-size", "1", "--warmup-steps", "1")
    asked = ("suite", *small, "--output-dir", str(tmp_path))
    assert run(capsys, *asked, "--device", "predict", "--part", "e")[0] == 0
    for part in ("a", "d"):
        code, out, err = run(capsys, *asked, "--device", "predict", "--part", part)
        assert (code, err) == (0, "")
        assert [line[4] for line in out.splitlines() if line.startswith("## (")] == [part]
    answers = (tmp_path / "answers.md").read_text()
    assert [line[4] for line in answers.splitlines() if line.startswith("## (")] == ["a", "d", "e"]
    again = (
        ("--device", "predict", "--part", "a"),
        ("--part", "d"),
    )  # what is told from the shape goes with any device
    assert [run(capsys, *asked, *each)[0] for each in again] == [0, 0]
    assert (tmp_path / "answers.md").read_text() == answers
    code, _, err = run(capsys, *asked, "--device", "predict", "--part", "a", "--measure-steps", "2")
    assert code == 2
    assert "has small_ctx512_forward_snapshot.pickle already, of a single profile or of other settings" in err


def test_the_size_of_an_activation_needs_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "suite", "--part", "d", "--output-dir", str(tmp_path))
    assert code == 0
    assert "4 x 512 x 2560 x 4 B = 20,971,520 B = 20.00 MB" in out
    assert "measured on" not in (tmp_path / "answers.md").read_text()


def test_a_suite_that_does_not_fit_the_card_says_so_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("suite", "--part", "a", "--model-size", "small", "--batch-size", "1", "--warmup-steps", "1")
    code, out, _ = run(capsys, *asked, "--device", "predict", "--gpu", "2GiB", "--output-dir", str(tmp_path))
    assert code == 1
    assert out.count("It does not fit") == 1  # forward does


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    code, _, err = run(capsys, "suite", "--device", "predict", "--output-dir", str(tmp_path))
    assert code == 2 and "not empty" in err

"""`memfit profile`: the guide's flags, file names and tables, from predictions."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from memfit.cli.main import main
from memfit.jobs.profile import ProfileSettings, course_size
from memfit.models.basics_sizes import SIZES

SMALL = ["--model-size", "small", "--context-length", "64", "--batch-size", "1", "--device", "predict"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["profile", *argv])
    out, err = capsys.readouterr()
    return code, out, err


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
    assert ProfileSettings(model="2.7B").file_name == "2.7B_ctx512_forward_snapshot.pickle"


def test_the_courses_parameter_counts() -> None:
    assert {name: size.parameters for name, size in SIZES.items()} == {
        "small": 128_625_408, "medium": 423_183_360, "large": 969_411_840, "xl": 1_998_235_200, "2.7B": 3_406_809_600,
    }  # fmt: skip


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
    assert "attention scores" in out


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    code, _, err = run(capsys, "suite", "--device", "predict", "--output-dir", str(tmp_path))
    assert code == 2 and "not empty" in err

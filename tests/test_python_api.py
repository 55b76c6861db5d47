"""memfit from a notebook: names that Tab finds, results that are short as expressions, errors with their hint."""

from __future__ import annotations

import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.cli.main import main

pytestmark = pytest.mark.usefixtures("shared_traces")

JOB: dict[str, Any] = {"kind": "forward", "model": "smollm2-135m", "seq_len": 256}
BLOCKS = str(Path(__file__).parent / "fitting" / "gpt2_of_two_blocks")
LORA: dict[str, Any] = {"kind": "lora", "model": BLOCKS, "rank": 8, "seq_len": 256}
OOM = Path(__file__).parents[1] / "examples" / "oom.txt"
DATA = Path(__file__).parent / "data"
SNAPSHOTS = str(DATA / "snap-train.pickle"), str(DATA / "snap-oom.pickle")
Command = Callable[..., str]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """What a command writes to stdout."""

    def run(*words: object) -> str:
        capfd.readouterr()
        assert main([str(word) for word in words]) != 70
        return capfd.readouterr().out

    return run


def is_what_the_command_says(answer: Any, command: Command, *words: object) -> bool:
    """The document of `--json`, but for how long it took, and in `print` what it shows."""
    document = json.loads(command(*words, "--json"))
    assert json.loads(json.dumps(answer.to_json())) | {"seconds": 0} == document | {"seconds": 0}
    assert str(answer) + "\n" == command(*words)
    return True


def test_tab_offers_every_public_name_and_nothing_else() -> None:
    assert dir(memfit) == sorted(memfit.__all__)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: memfit.predict(**JOB, gpu="RTX 4090"), r"Plan: forward of smollm2-135m, .* GiB on RTX 4090: safe"),
        (lambda: memfit.predict(**JOB), r"Plan: forward of smollm2-135m, \d\.\d\d GiB"),
        (lambda: memfit.fit(**LORA, gpu="24GB"), "Fitted: lora of .*: fits already: no changes; .* of .* GiB"),
        (lambda: memfit.ladder(**LORA, gpu="24GB", global_batch=2), "Ladder: .* on 24 GB card: micro-batch .*2"),
        (lambda: memfit.explain(OOM), "Explanation: The GPU was full.*"),
        (memfit.check, "Checked: (ok|warning|failed): .*skipped"),
    ],
)  # fmt: skip
def test_a_result_is_one_line_as_an_expression_and_a_report_in_print(made: Callable[[], object], said: str) -> None:
    result = made()

    shown = repr(result)
    assert "\n" not in shown and len(shown) < 250
    assert re.fullmatch(f"<{said}>", shown)
    assert len(str(result).splitlines()) > 5


def test_a_report_on_a_file_is_the_commands(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "report.html"

    report = memfit.report(SNAPSHOTS[1], html=page)

    assert repr(report) == f"<FileReport: snapshot {SNAPSHOTS[1]}, 5.76 GiB at the peak>"
    assert is_what_the_command_says(report, command, "report", SNAPSHOTS[1])
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(memfit.InputError, match="already exists"):
        memfit.report(SNAPSHOTS[1], html=page)
    memfit.report(SNAPSHOTS[0], html=page, force=True)


def test_a_difference_of_two_files_is_the_commands(command: Command) -> None:
    difference = memfit.diff(*SNAPSHOTS, device=0)

    assert re.fullmatch(r"<Difference: .* 2\.39 GiB, .* 5\.76 GiB: 3\.37 GiB>", repr(difference))
    assert is_what_the_command_says(difference, command, "diff", *SNAPSHOTS)


def test_a_file_for_another_tool_is_the_commands(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    written = memfit.export(SNAPSHOTS[1], to="csv")

    assert written == Path("snap-oom.csv")
    assert command("export", SNAPSHOTS[1], "--to", "csv", "--output", "other.csv") == "other.csv\n"
    assert written.read_bytes() == Path("other.csv").read_bytes()
    with pytest.raises(memfit.MemfitError, match="already exists"):
        memfit.export(SNAPSHOTS[1], to="csv")


def test_a_profile_is_the_commands(command: Command, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"

    asked: dict[str, Any] = {"context_length": 64, "device": "predict", "gpu": "RTX 4090", "measure_steps": 1}
    profile = memfit.profile(JOB["model"], **asked, output=one)

    words = ["--model", JOB["model"], "-f"]
    words += [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert profile.found.fits and re.fullmatch(
        "<Profile: forward of smollm2-135m, .* GiB predicted, .*>", repr(profile)
    )
    assert is_what_the_command_says(profile, command, "profile", *words, "--output", one)
    command("profile", *words, "--output", two)
    assert one.read_bytes() == two.read_bytes()
    with pytest.raises(memfit.UsageError, match="--gpu is for --device predict"):
        memfit.profile(JOB["model"], gpu="RTX 4090", output=tmp_path / "three.json")


def test_many_jobs_are_answered_as_lines_of_a_batch_are(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", "off")  # a plan says whether it was found there
    good, wrong = {**JOB, "id": "a", "gpu": "8GB"}, {**JOB, "model": "smolm2-135m", "id": 7}
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (good, wrong, JOB)))

    plan, refusal, alone = memfit.predict_many([good, wrong, memfit.Workload(**JOB)], gpu="24GB")

    assert isinstance(plan, memfit.Plan) and isinstance(alone, memfit.Plan) and isinstance(refusal, memfit.Refusal)
    assert (plan.id, plan.gpu and plan.gpu.name, alone.gpu and alone.gpu.name) == ("a", "8 GB card", "24 GB card")
    assert repr(refusal) == "<Refusal: job 2: no model called 'smolm2-135m'>" and not refusal.is_bug
    assert isinstance(refusal.error, memfit.MemfitError)
    printed = [json.loads(line) for line in command("plan", "batch", file, "--gpu", "24GB").splitlines()]
    for answers in ((plan, refusal, alone), memfit.predict_many(file, gpu="24GB")):
        assert [each.to_json() | {"seconds": 0} for each in answers] == [each | {"seconds": 0} for each in printed]


def test_many_jobs_come_one_by_one_and_a_wrong_card_is_told_at_once() -> None:
    def jobs() -> Iterator[dict[str, Any]]:
        yield JOB
        raise AssertionError("asked for too early")

    first = next(memfit.predict_many(jobs()))
    assert isinstance(first, memfit.Plan) and first.verdict is None
    with pytest.raises(memfit.MemfitError, match="RTX 4091"):
        memfit.predict_many([JOB], gpu="RTX 4091")


def test_settings_beside_a_workload_replace_its_own() -> None:
    work = memfit.Workload(kind="forward", model="smollm2-135m", seq_len=256)

    plan = memfit.predict(work, seq_len=512)

    assert plan.workload["seq_len"] == 512
    assert plan.peak == memfit.predict(**{**JOB, "seq_len": 512}).peak


def test_the_workload_of_a_plan_can_be_planned_again() -> None:
    plan = memfit.predict(**JOB, gpu="8GB")

    assert memfit.predict(**plan.workload).to_json()["peak"] == plan.to_json()["peak"]


def test_a_traceback_shows_what_to_do() -> None:
    with pytest.raises(memfit.MemfitError) as caught:
        memfit.predict(kind="forward", model="smolm2-135m")

    assert str(caught.value) == "no model called 'smolm2-135m'"
    assert "did you mean 'smollm2-135m'" in (caught.value.hint or "")
    if hasattr(BaseException, "add_note"):  # Python 3.11
        assert "did you mean 'smollm2-135m'" in "".join(traceback.format_exception(caught.value))


def test_a_card_that_is_no_text_is_told_and_a_card_itself_is_taken() -> None:
    number: Any = 24
    with pytest.raises(memfit.UsageError, match="24 is neither a card nor a size"):
        memfit.predict(**JOB, gpu=number)

    card = memfit.predict(**JOB, gpu="8GB").gpu
    assert memfit.predict(**JOB, gpu=card).gpu == card


@pytest.mark.parametrize("name", [name for name in memfit.__all__ if name != "__version__"])
def test_every_name_says_what_it_is(name: str) -> None:
    said = inspect.getdoc(getattr(memfit, name))

    assert said and not said.startswith(f"{name}("), "a dataclass without words of its own shows its fields"

"""How long a training takes: estimated as a range that measured steps lie in, and never for what is not known."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from memfit.cli.main import main
from memfit.errors import UsageError
from memfit.fitting.durations import AS_MEASURED, ELSEWHERE, Duration, Range, estimate, estimate_training
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload

BLOCKS = str(Path(__file__).with_name("gpt2_of_two_blocks"))
LEVERS = Path(__file__).parents[2] / "docs" / "levers.md"
TIMED = re.compile(r"\| (?:train|lora) .* \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \| \d+ \| [\d.]+ \| [\d.]+ \|")


def tiny(**changes: object) -> Workload:
    return Workload.from_mapping({"kind": "train", "model": BLOCKS, "batch_size": 2, "seq_len": 64, **changes})


def measured() -> list[tuple[float, float, int]]:
    """(seconds, roofline, kernels) of real steps on the H200, as docs/levers.md lists them."""
    found = TIMED.findall(LEVERS.read_text(encoding="utf-8"))
    return [(float(took), float(bound), int(kernels.replace(",", ""))) for took, bound, kernels in found]


def test_every_step_that_was_measured_lies_in_its_range() -> None:
    rows = measured()
    assert len(rows) == 27
    for took, bound, kernels in rows:
        for pace in (AS_MEASURED, ELSEWHERE):
            found = pace.estimate(bound, kernels)
            assert found.least <= took <= found.most
        assert 0.6 < AS_MEASURED.estimate(bound, kernels).likely / took < 1.4


def test_a_card_that_was_not_measured_has_a_wider_range() -> None:
    here, there = AS_MEASURED.estimate(1.0, 100), ELSEWHERE.estimate(1.0, 100)
    assert there.least < here.least < here.most < there.most


def test_small_kernels_take_as_long_as_the_host_needs_to_launch_them() -> None:
    found = AS_MEASURED.estimate(0.001, 10_000)
    assert (found.least, found.likely, found.most) == pytest.approx((0.24, 0.3, 0.45))


def test_the_whole_follows_from_steps_or_from_tokens() -> None:
    work, card = tiny(grad_accum=4, world_size=2), find_gpu("H200")
    by_steps, by_tokens = estimate(work, card, steps=10), estimate(work, card, tokens=10 * 2 * 64 * 4 * 2 - 5)
    assert by_steps is not None and by_tokens is not None
    assert by_steps.tokens_per_step == 1024
    assert by_steps == by_tokens
    assert by_steps.total == by_steps.step.times(10)
    assert "traffic between GPUs" in by_steps.basis
    with pytest.raises(UsageError, match="both say how long it trains"):
        estimate(work, card, steps=1, tokens=1)


def test_what_is_not_known_has_no_time() -> None:
    assert estimate(tiny(), find_gpu("24GB"), steps=10) is None
    assert estimate(tiny(), find_gpu("RTX 4080 Laptop"), steps=10) is None
    assert estimate(Workload(kind="forward", model="gpt2"), find_gpu("H200")) is None


def test_the_driver_s_name_of_a_card_is_the_card() -> None:
    here = dataclasses.replace(find_gpu("H200"), name="NVIDIA H200")
    assert estimate(tiny(), here) == estimate(tiny(), find_gpu("H200"))


def test_the_document_says_that_it_is_an_estimate_and_by_what() -> None:
    time = Duration(
        gpu="RTX 4090", step=Range(1.0, 1.5, 3.0), roofline_seconds=0.9, kernels=1000, tokens_per_step=6000, steps=2400,
        basis="counting",
    )  # fmt: skip
    document = time.to_json()
    assert (document["origin"], document["basis"]) == ("estimated", "counting")
    assert document["tokens_per_second"] == {"least": 2000, "likely": 4000, "most": 6000}
    assert document["total_seconds"] == {"least": 2400, "likely": 3600, "most": 7200}
    assert time.in_words() == (
        "about 1 h (40 min to 2 h) for 2,400 steps; about 1.5 s (1 s to 3 s) a step, 4,000 tokens a second"
    )


def test_an_operation_that_was_counted_before_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.fitting import durations

    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    durations._step_cost.cache_clear()
    first = durations.step_cost(tiny())
    durations._step_cost.cache_clear()
    monkeypatch.setattr(durations, "_counted_cost", lambda work: pytest.fail("counted again"))
    assert durations.step_cost(tiny()) == first


# -- in the commands ---------------------------------------------------------------------------------------------------

PLAN = ["plan", "train", "--model", BLOCKS, "--seq-len", "64", "--json"]


def test_a_plan_on_a_named_card_tells_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--gpu", "RTX 4090", "--steps", "5,000"]) == 0
    time = json.loads(capsys.readouterr().out)["duration"]
    assert (time["steps"], time["tokens_per_step"]) == (5000, 64)
    assert time["total_seconds"]["likely"] == pytest.approx(5000 * time["step_seconds"]["likely"], rel=1e-3)
    assert "on the RTX 4090 nothing was measured" in time["basis"]
    assert main([*PLAN[:-1], "--gpu", "RTX 4090"]) == 0
    assert re.search(r"time: about .* a step, [\d,]+\s+tokens a second \(estimated\)", capsys.readouterr().out)


def test_a_size_has_no_speed_and_nothing_is_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--gpu", "24GB", "--steps", "10"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["duration"] is None
    assert "no time: a size has no speed, and 24 GB card is no card" in captured.err


@pytest.mark.parametrize(("words", "said"), [
    (["--steps", "10"], "--steps: no card is named"), (["--steps", "0", "--gpu", "H200"], "--steps '0' is not a whole"),
    (["--steps", "1", "--tokens", "1", "--gpu", "H200"], "--steps and --tokens both say how long it trains"),
])  # fmt: skip
def test_how_much_is_trained_must_mean_something(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_fitted_job_tells_the_time_with_its_changes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "train", "--model", BLOCKS, "--seq-len", "64", "--gpu", "RTX 4090", "--tokens", "640"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["duration"]["steps"] == 10
    assert main([*words, "--ladder"]) == 2
    assert "--tokens has no effect with --ladder" in capsys.readouterr().err


def test_a_training_is_timed_by_the_rows_and_steps_that_it_has(tmp_path: Path) -> None:
    from memfit.jobs.training.config_file import config_from
    from memfit.jobs.training.job import prepare_job

    rows = [{"text": "x" * length} for length in (9, 29, 9, 29)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = config_from({
        "model": {"name": BLOCKS, "from_scratch": True, "tokenizer": "bytes"}, "precision": "bf16",
        "data": {"source": str(tmp_path / "rows.jsonl"), "packing": False, "shuffle": False}, "max_seq_len": 64,
        "micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 7, "output_dir": str(tmp_path / "out"),
    })  # fmt: skip
    time = estimate_training(prepare_job(config), find_gpu("H200"))
    assert time is not None
    assert (time.steps, time.tokens_per_step) == (7, 2 * 20)

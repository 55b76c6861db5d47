"""A training job is predicted before it starts: the guide's budget, the verdict, and `memory: auto`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import small_llama
from support.quick import quick

from memfit.cli.main import main
from memfit.errors import TraceError
from memfit.jobs.build import build_for_training
from memfit.jobs.training.config_file import config_from, load_config
from memfit.jobs.training.job import TrainJob, prepare_job
from memfit.models.presets import find_preset
from memfit.planning.predict import predict
from memfit.planning.training import TrainPlan, budget_of, decides, plan_training, workload_of
from memfit.units import GiB, gib

pytestmark = pytest.mark.usefixtures("shared_traces")

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
WITHOUT_FILES = ("model.from_scratch=true", "model.tokenizer=bytes")
SHIPPED: dict[str, tuple[str, ...]] = {
    "qwen2.5-7b-lora-24gb": WITHOUT_FILES,
    "gsa-512m": ("model.tokenizer=bytes", "memory.gpu=44GB"),
    "smollm2-lora-demo": ("model.name=smollm2-135m", *WITHOUT_FILES, "memory.gpu=8GB"),
}


def shipped(name: str, folder: Path) -> TrainJob:
    return prepare_job(load_config(name, sets=[*SHIPPED[name], f"saving.output_dir={folder}"]))


@pytest.fixture(scope="module")
def shipped_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TrainPlan]:
    """Made once for each."""
    return cache(lambda name: plan_training(shipped(name, tmp_path_factory.mktemp(name) / "out")))


def small_job(folder: Path, **changes: Any) -> TrainJob:
    (folder / "play.txt").write_text("to be or not to be. " * 400)
    document = {
        "model": {"name": small_llama(), "tokenizer": "bytes", "from_scratch": True}, "max_seq_len": 128,
        "data.source": str(folder / "play.txt"), "output_dir": str(folder / "out"), "max_steps": 4, "device": "cpu",
        "precision": "fp32", "global_batch_size": 16, "micro_batch_size": 2,
    }  # fmt: skip
    return prepare_job(config_from(document, name="small", over=changes))


@pytest.mark.parametrize("name", quick(["qwen2.5-7b-lora-24gb", "gsa-512m"], SHIPPED))
def test_each_shipped_config_fits_the_card_that_it_is_for(name: str, shipped_plan: Callable[[str], TrainPlan]) -> None:
    plan = shipped_plan(name)
    assert plan.verdict in ("safe", "tight")
    assert plan.plan is not None and plan.before is not None
    assert plan.before.peak.device_bytes > plan.plan.peak.device_bytes
    assert list(plan.phases) == ["load", "forward", "backward", "step"]
    assert max(allocated for allocated, _ in plan.phases.values()) <= (plan.peak_bytes or 0)
    json.dumps(plan.to_json())


def test_preparation_takes_what_the_shipped_config_says() -> None:
    """2 bytes more for each entry of embedding and head, which qwen2.5-7b does not tie."""
    preset = find_preset("qwen2.5-7b")
    assert preset is not None and not preset.config["tie_word_embeddings"]
    more = 2 * 2 * preset.config["vocab_size"] * preset.config["hidden_size"]
    said = (resources.files("memfit") / "configs" / "qwen2.5-7b-qlora-8gb.yaml").read_text()
    assert f"takes {more / GiB:.0f} GiB more" in said


@pytest.mark.slow
def test_the_shipped_config_in_4_bits_fits_a_card_of_8_gb_and_not_without_them(tmp_path: Path) -> None:
    sets = ["model.tokenizer=bytes", f"saving.output_dir={tmp_path}"]
    plan = plan_training(prepare_job(load_config("qwen2.5-7b-qlora-8gb", sets=sets), to_run=False))
    assert plan.verdict in ("safe", "tight") and list(plan.phases)[:2] == ["load", "adapt"]
    wide = load_config("qwen2.5-7b-qlora-8gb", sets=[*sets, "load_in_4bit=false"])
    assert plan_training(prepare_job(wide, to_run=False)).verdict == "fails"


def test_the_guide_s_lora_job_keeps_sequence_and_rank_and_leaves_room(shipped_plan: Callable[[str], TrainPlan]) -> None:
    plan = shipped_plan("qwen2.5-7b-lora-24gb")
    assert (plan.reserved_bytes or 0) < 22 * GiB
    lines = [line for line in plan.in_lines() if not line.startswith("note: ")]
    assert lines[1] == "before: the same job without gradient checkpointing and chunked loss"
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8"), "the plan on the page is another one"


def test_the_guide_s_pre_training_stays_below_6_gib(shipped_plan: Callable[[str], TrainPlan]) -> None:
    plan = shipped_plan("gsa-512m")
    assert (plan.reserved_bytes or 0) < 6 * GiB


def test_the_budget_adds_up_to_what_the_card_must_have(tmp_path: Path) -> None:
    made = plan_training(small_job(tmp_path, **{"method": "lora", "memory.gpu": "24GB"})).plan
    assert made is not None
    budget = budget_of(made)
    assert budget["total_bytes"] == made.peak.device_bytes
    rank, hidden, wide, layers = 16, 128, 256, 3
    adapted = layers * rank * (4 * 2 * hidden + 3 * (hidden + wide))
    assert 4 * adapted <= budget["adapter_bytes"] <= 4 * adapted + 512 * 2 * 7 * layers
    assert min(budget.values()) >= 0 and sum(budget.values()) == 2 * budget["total_bytes"]


def test_the_budget_and_the_verdict_are_one_number_where_torch_must_give_back_what_is_idle(tmp_path: Path) -> None:
    settings = {"memory.alloc_conf": "max_split_size_mb:20,expandable_segments:True", "max_seq_len": 512}
    ample = plan_training(small_job(tmp_path, **settings, **{"memory.gpu": "H200"})).plan
    assert ample is not None and ample.smallest_gpu_bytes < ample.peak.device_bytes
    card = (ample.smallest_gpu_bytes + ample.peak.device_bytes) // 2
    made = plan_training(small_job(tmp_path, **settings, **{"memory.gpu": f"{card}B"}))
    assert made.plan is not None and made.plan.fit is not None and made.plan.fit.retries
    total = budget_of(made.plan)["total_bytes"]
    assert total == made.plan.needed_bytes == min(made.plan.smallest_gpu_bytes, made.plan.fit.device_bytes) < card
    assert made.verdict == "tight"
    *_, last = made.in_lines()
    assert f"{gib(total)} of {gib(card)}, {gib(card - total)}" in last
    assert f"with room torch would hold {gib(made.plan.peak.device_bytes)}" in last


def test_the_budget_of_what_does_not_fit_is_the_smallest_card_that_takes_it(tmp_path: Path) -> None:
    made = plan_training(small_job(tmp_path, **{"memory.gpu": "600MiB"}))
    assert made.plan is not None and made.verdict == "fails"
    assert budget_of(made.plan)["total_bytes"] == made.plan.smallest_gpu_bytes
    assert f"the smallest card that takes it has {gib(made.plan.smallest_gpu_bytes)}" in made.in_lines()[-1]


def test_auto_takes_the_largest_micro_batch_that_leaves_the_margin(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    devices = {rows: predict(workload_of(job.with_micro_batch(rows))).peak.device_bytes for rows in job.batch.rungs}
    card = int(devices[4] / 0.9) + (1 << 20)
    plan = plan_training(small_job(tmp_path, **{"memory.auto": True, "memory.gpu": f"{card}B"}))
    assert plan.job.batch.micro_batch_size == 4
    assert plan.job.batch.global_batch_size == job.batch.global_batch_size == 16
    assert plan.verdict == "safe"
    assert [rows for rows, _ in plan.rungs] == [1, 2, 4, 8]
    why = next(line for line in plan.in_lines() if line.startswith("memory: auto"))
    assert "4 rows x 4 accumulation x 1 process = 16" in why
    assert f"the next rung, 8 rows, takes {devices[8] / GiB:.2f} GiB" in why


def test_auto_on_a_large_card_takes_all_rows_at_once(tmp_path: Path) -> None:
    plan = plan_training(small_job(tmp_path, **{"memory.auto": True, "memory.gpu": "H200"}))
    assert (plan.job.batch.micro_batch_size, plan.job.batch.gradient_accumulation_steps) == (16, 1)


def test_where_not_even_a_row_fits_the_plan_says_what_to_try(tmp_path: Path) -> None:
    plan = plan_training(small_job(tmp_path, **{"memory.auto": True, "memory.gpu": "700MiB"}))
    assert plan.verdict == "fails"
    assert plan.job.batch.micro_batch_size == 1
    said = plan.in_lines()
    assert any("not even a single row fits" in line for line in said)
    command = shlex.split(next(line for line in said if line.startswith("to try: ")).removeprefix("to try: "))
    assert command[:3] == ["memfit", "fit", "train"] and command[-4:] == ["--global-batch", "16", "--gpu", "700MiB"]
    assert main(["plan", *command[2:-4], "--gpu", "700MiB"]) == 1
    assert "--grad-accum" not in command  # it follows from the global batch


def test_without_a_gpu_there_is_a_prediction_and_no_verdict(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    job = small_job(tmp_path, **{"memory.auto": True})
    plan = plan_training(job)
    assert plan.verdict is None
    assert plan.peak_bytes
    assert not decides(job)
    assert "no verdict" in plan.in_lines()[0]
    assert plan.job.batch == job.batch


def test_a_job_that_cannot_be_predicted_can_still_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meets_an_unknown_op(*_: object, **__: object) -> None:
        raise TraceError("cannot trace somebody.kernel")

    job = small_job(tmp_path)
    monkeypatch.setattr("memfit.planning.training.predict", meets_an_unknown_op)
    plan = plan_training(job)
    assert (plan.verdict, plan.peak_bytes, plan.job) == (None, None, job)
    assert "this job cannot be predicted: cannot trace somebody.kernel" in plan.in_lines()[0]


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model.num_hidden_layers": 2, "model.vocab_size": 300},
    "gsa": {"model": {"name": "gsa-512m", "tokenizer": "bytes", "n_layers": 2, "d_model": 64}},
    "basics": {"model": {"name": "basics-small", "tokenizer": "bytes", "num_layers": 2, "d_model": 96}},
}


@pytest.mark.parametrize("name", quick(["gsa"], MODELS))
def test_a_changed_shape_is_planned_as_it_is_trained(name: str, tmp_path: Path) -> None:
    job = small_job(tmp_path, **MODELS[name])
    with torch.device("meta"):
        wanted = sum(each.numel() for each in build_for_training(job).parameters())
    plan = plan_training(job)
    assert plan.plan is not None, plan.said
    assert plan.plan.parameters == wanted


def test_rows_of_different_lengths_are_planned_with_padding(tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "output": "3" * length} for length in (5, 50, 90)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    of_rows = {"data.source": str(tmp_path / "rows.json"), "global_batch_size": 2, "max_seq_len": 512}
    padded = workload_of(small_job(tmp_path, **of_rows))
    alone = workload_of(small_job(tmp_path, **of_rows, micro_batch_size=1))
    assert (padded.padding, alone.padding) == (True, False)
    assert padded.seq_len == alone.seq_len < 512

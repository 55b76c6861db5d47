"""The engine learns, counts every token once, and leaves whole checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import close, document, run, same, tiny_job, weights
from training_folder import TINY_GSA, alpaca_file

from memfit.errors import UsageError
from memfit.jobs.training.checkpoints import find_checkpoints
from memfit.jobs.training.config_file import config_from
from memfit.jobs.training.engine import MemfitTrainer
from memfit.jobs.training.job import prepare_job


def test_a_small_model_learns_real_text(tmp_path: Path) -> None:
    result, events = run(
        tmp_path, **{"data.source": "builtin", "max_steps": 40, "global_batch_size": 8, "micro_batch_size": 8,
                     "save_steps": None, "logging_steps": 10},
    )  # fmt: skip
    assert result.losses[1] == pytest.approx(5.7, abs=0.3)  # the logarithm of 300 tokens
    assert result.losses[40] < 3.6
    assert [event.step for event in events if event.kind == "step"] == [10, 20, 30, 40]
    assert json.loads((tmp_path / "out" / "result.json").read_text())["steps"] == 40


def test_the_micro_batch_changes_neither_loss_nor_weights_though_answers_differ_in_length(tmp_path: Path) -> None:
    """Each token counts the same, whatever shares a micro-batch with it."""
    rows = [{"instruction": "Say it.", "input": "", "output": "word " * count} for count in (1, 9, 2, 14)]
    changes: dict[str, Any] = {"data.source": alpaca_file(tmp_path, rows), "max_seq_len": 256, "max_steps": 2}
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"), **(changes | {"micro_batch_size": 4}))
    split, _ = run(tmp_path, output_dir=str(tmp_path / "split"), **(changes | {"micro_batch_size": 1}))
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)
    assert close(tmp_path / "whole" / "step_2", tmp_path / "split" / "step_2")


def test_the_probe_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = {"method": {"kind": "lora", "rank": 2, "dropout": 0.5}, "optimizer.weight_decay": 0.1}
    plain, _ = run(tmp_path, output_dir=str(tmp_path / "plain"), **lora)
    steps: list[int] = []
    monkeypatch.setattr(MemfitTrainer, "reached", lambda self, phase, step, micro: steps.append(step))
    probed, events = run(tmp_path, output_dir=str(tmp_path / "probed"), **lora, **{"memory.probe": True})
    assert steps.count(0) == 2 * 2 * 3  # two steps of two micro-batches, each with three phases
    assert probed.losses == plain.losses
    assert same(tmp_path / "plain" / "step_4", tmp_path / "probed" / "step_4")
    assert events[0].kind == "probe"
    again, _ = run(
        tmp_path, output_dir=str(tmp_path / "again"), resume_from=str(tmp_path / "probed" / "step_2"), **lora,
        **{"memory.probe": True},
    )  # fmt: skip
    assert again.losses == plain.losses
    assert same(tmp_path / "plain" / "step_4", tmp_path / "again" / "step_4")


def test_memory_that_runs_out_in_the_probe_makes_the_run_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(self: MemfitTrainer, phase: str, step: int, micro_step: int) -> None:
        if self.recovery.batch.micro_batch_size == 2:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(MemfitTrainer, "reached", reached)
    result, events = run(tmp_path, **{"memory.probe": True, "max_steps": 1})
    assert result.micro_batch_size == 1
    assert [event.kind for event in events][:2] == ["out-of-memory", "probe"]


def test_only_the_last_checkpoints_are_kept_and_they_load_without_memfit(tmp_path: Path) -> None:
    result, _ = run(tmp_path, save_steps=1, save_total_limit=2)
    out = tmp_path / "out"
    assert [each.name for each in find_checkpoints(out)] == ["step_3", "step_4"]
    assert sorted(each.name for each in out.iterdir()) == ["result.json", "step_3", "step_4"]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out / "step_4")
    assert torch.equal(model.lm_head.weight, weights(result.checkpoint)["lm_head.weight"])


def test_what_a_killed_run_left_half_written_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    (tmp_path / "out" / "step_9.writing").mkdir(parents=True)
    (tmp_path / "out" / "step_9.writing" / "trainer_state.json").write_text("{}")
    run(tmp_path, max_steps=1)
    assert [each.name for each in (tmp_path / "out").glob("step_*")] == ["step_1"]


def test_a_checkpoint_that_the_trainer_named_resumes_too(tmp_path: Path) -> None:
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole" / "step_2", tmp_path / "checkpoint-2")
    for name in ("memfit_checkpoint.json", "memfit_progress.json"):
        (tmp_path / "checkpoint-2" / name).unlink()
    again, _ = run(tmp_path, output_dir=str(tmp_path / "again"), resume_from=str(tmp_path / "checkpoint-2"))
    assert again.losses == {step: whole.losses[step] for step in (3, 4)}
    assert same(tmp_path / "whole" / "step_4", tmp_path / "again" / "step_4")


def test_a_run_that_is_done_has_nothing_to_resume(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    with pytest.raises(UsageError, match="has 2 steps, and this config ends at step 2"):
        run(tmp_path, max_steps=2, resume_from="latest")


@pytest.mark.parametrize("changes", [
    {"method": {"kind": "lora", "rank": 2, "adapter_dtype": "same"}, "precision": "bf16"},
    {"precision": "amp-bf16", "optimizer": "adafactor"},
    {"model": {"name": "gsa", "tokenizer": "bytes", "settings": TINY_GSA}, "optimizer": "adamw-single"},
    {"model": {"name": "basics", "tokenizer": "bytes", "settings": {
        "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32, "vocab_size": 300, "context_length": 64}},
     "optimizer": "sgd"},
], ids=["lora-bf16", "amp", "gsa", "basics"])  # fmt: skip
def test_every_kind_of_model_trains_and_resumes_exactly(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole, _ = run(tmp_path, output_dir=str(tmp_path / "whole"), **changes)
    again, _ = run(
        tmp_path, output_dir=str(tmp_path / "again"), resume_from=str(tmp_path / "whole" / "step_2"), **changes
    )
    assert again.losses == whole.losses
    assert same(tmp_path / "whole" / "step_4", tmp_path / "again" / "step_4")


def test_checkpointing_and_the_chunked_loss_change_nothing_but_memory(tmp_path: Path) -> None:
    lora = {"method": {"kind": "lora", "rank": 2}}
    plain, _ = run(tmp_path, output_dir=str(tmp_path / "plain"), **lora)
    levers = {"memory.gradient_checkpointing": "full", "loss": {"kind": "chunked", "chunk": 16}}
    saved, _ = run(tmp_path, output_dir=str(tmp_path / "saved"), **lora, **levers)
    assert saved.losses == pytest.approx(plain.losses, rel=1e-5)
    assert close(tmp_path / "plain" / "step_4", tmp_path / "saved" / "step_4")
    assert plain.trained_parameters < plain.parameters / 4


def test_workers_read_the_same_rows(tmp_path: Path) -> None:
    alone, _ = run(tmp_path, output_dir=str(tmp_path / "alone"), max_steps=2)
    helped, _ = run(tmp_path, output_dir=str(tmp_path / "helped"), max_steps=2, num_workers=1)
    assert helped.losses == alone.losses


def test_predicted_stands_beside_measured() -> None:
    from memfit.jobs.training.result import TrainResult

    result = TrainResult(
        steps=1, first_step=0, losses={1: 2.0}, seconds=1.0, tokens=8, data_wait_share=0.4, micro_batch_size=1,
        gradient_accumulation_steps=1, world_size=1, trained_parameters=1, parameters=2, gpu_peak_bytes=2 << 30,
        gpu_reserved_bytes=4 << 30, host_peak_bytes=1 << 30, checkpoint=Path("out/step_1"),
        predicted={"peak_bytes": 3 << 30},
    )  # fmt: skip
    lines = result.in_lines()
    assert "GPU peak: measured 2.00 GiB, predicted 3.00 GiB (+50.0%)" in lines
    assert "40% of the time went by waiting for data: a larger num_workers helps" in lines


@pytest.mark.parametrize(("changes", "said"), [
    ({"optimizer": "adamw-8bit"}, "adamw-8bit needs"),
    ({"model.attention": "flash_attention_2"}, "flash_attention_2 needs flash-attn"),
    ({"precision": "amp-fp16"}, "amp-fp16 needs a GPU"),
    ({"method": {"kind": "lora", "target_modules": ["nothing"]}}, "nothing"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(tmp_path, **changes)


def test_of_the_refusals_all_but_the_model_s_own_come_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="wandb needs"):
        tiny_job(tmp_path, **{"logging.wandb": True})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="fsdp2 needs GPUs"):
        prepare_job(config_from(document(tmp_path, parallel="fsdp2"), name="tiny"))

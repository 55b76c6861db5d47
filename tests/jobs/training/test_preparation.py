"""What is wrong with a training job is found before it starts, in one sentence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from training_folder import TINY_GSA, alpaca_file, tiny_config

from memfit.errors import InputError, MemfitError, UsageError
from memfit.jobs.training.checkpoints import (
    STATE,
    check_checkpoint,
    find_checkpoints,
    identity_of,
    step_of,
    write_identity,
)
from memfit.jobs.training.config import ModelConfig, TrainConfig
from memfit.jobs.training.job import TrainJob, prepare_job


def checkpoint(folder: Path, name: str = "step_5", job: TrainJob | None = None) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    (made / STATE).write_text("{}")
    if job is not None:
        write_identity(made, job)
    return made


def test_a_job_knows_its_steps_and_says_what_it_is(tmp_path: Path) -> None:
    job = prepare_job(tiny_config(tmp_path, micro_batch_size=2, global_batch_size=8))
    assert (job.total_steps, job.batch.gradient_accumulation_steps, job.source) == (3, 4, None)
    assert "batch: 2 rows x 4 accumulation x 1 process = 8" in job.in_lines()
    assert json.loads(json.dumps(job.to_json()))["batch"]["global_batch_size"] == 8


def test_nothing_is_written(tmp_path: Path) -> None:
    prepare_job(tiny_config(tmp_path))
    assert not (tmp_path / "out").exists()


def test_the_number_of_processes_is_torchrun_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert prepare_job(tiny_config(tmp_path, global_batch_size=8)).batch.rows_per_process == 2
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="8 cannot be shared equally by 3 processes"):
        prepare_job(tiny_config(tmp_path, global_batch_size=8))


@pytest.mark.parametrize(("changes", "said"), [
    ({"data.source": "nowhere.jsonl"}, "no file 'nowhere.jsonl'"),
    ({"max_seq_len": 1024}, "max_seq_len 1,024: gsa has 512 positions"),
    ({"model.vocab_size": 100}, "is in the data, and gsa knows 100 tokens"),
    ({"model.n_heads": 3}, "heads do not divide"),
    ({"model.n_heads": 0}, "model.n_heads 0 is not above 0"),
    ({"model.n_layers": "many"}, "model.n_layers 'many' is not of the kind of 32"),
    ({"model.adaptive_k": 1}, "is not of the kind of True"),
    ({"model.tokenizer": None}, "gsa has none of its own"),
    ({"model.tokenizer": "./nowhere"}, "is no folder and not on the Hub"),
    ({"model.name": "gsa-7b"}, "no GSA model called 'gsa-7b'"),
    ({"output_dir": "/proc/nothing/here"}, "cannot be written"),
    ({"resume_from": "nowhere/step_3"}, "no folder 'nowhere/step_3'"),
    ({"resume_from": "latest"}, "there is no checkpoint"),
])  # fmt: skip
def test_what_cannot_be_is_one_error(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MemfitError, match=said):
        prepare_job(tiny_config(tmp_path, **changes))


def test_a_file_in_the_place_of_the_output_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="is a file"):
        prepare_job(tiny_config(tmp_path))


def test_a_gpu_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="finds no GPU"):
        prepare_job(tiny_config(tmp_path, device="cuda"))


def test_fewer_samples_than_a_global_batch_is_said(tmp_path: Path) -> None:
    job = prepare_job(tiny_config(tmp_path, **{"data.source": alpaca_file(tmp_path), "max_seq_len": 400,
                                               "global_batch_size": 8}))  # fmt: skip
    assert "3 samples are fewer than one global batch of 8" in job.notes[0]


def test_a_smaller_micro_batch_leaves_the_global_batch(tmp_path: Path) -> None:
    job = prepare_job(tiny_config(tmp_path, micro_batch_size=4, global_batch_size=8))
    assert job.with_micro_batch(1).batch.global_batch_size == 8


def test_basics_is_a_model_too(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model="basics-small")
    with pytest.raises(UsageError, match="no setting of the model called"):
        prepare_job(config)


# -- planned only ------------------------------------------------------------------------------------------------------


def planned(config: TrainConfig) -> TrainJob:
    return prepare_job(config, to_run=False)


def test_a_plan_does_not_need_what_a_run_needs_and_says_what_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    checkpoint(tmp_path / "out")
    config = tiny_config(tmp_path, device="cuda", fp16=True, precision=None, optimizer="paged-adamw")
    told = " ".join(planned(config).notes)
    for need in ("checkpoints of an earlier run", "finds no GPU here", "amp-fp16 needs a GPU", "paged-adamw needs"):
        assert need in told
        with pytest.raises(MemfitError):
            prepare_job(config)


def test_the_weights_of_a_known_model_need_not_be_here_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = tiny_config(tmp_path, max_steps=None)
    config = dataclasses.replace(config, model=ModelConfig(name="Qwen/Qwen2.5-0.5B", cache_dir=str(tmp_path)))
    job = planned(config)
    assert (job.source, job.data_read, int(job.data.lengths.max())) == (None, False, 64)
    assert any("the weights of Qwen/Qwen2.5-0.5B are not on this machine" in note for note in job.notes)
    assert "steps: not known until the data are read" in job.in_lines()
    document = json.loads(json.dumps(job.to_json()))
    assert (document["data"], document["data_sha256"], document["steps"]) == (None, None, None)


def test_a_data_set_on_the_hub_is_planned_with_full_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    job = planned(tiny_config(tmp_path, **{"data.source": "cerebras/SlimPajama-627B"}))
    assert not job.data_read
    assert "data: cerebras/SlimPajama-627B, not read" in job.in_lines()[1]
    assert "steps: 3" in job.in_lines()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.name": "gsa-7b"}, "no GSA model called"),
        ({"model.tokenizer": None}, "has none of its own"),
        ({"model.tokenizer": "./nowhere"}, "is no folder"),
        ({"data.source": "nowhere.jsonl"}, "no file"),
        ({"device": "cpu", "precision": "amp-fp16"}, "needs a GPU"),
    ],
)
def test_what_is_wrong_on_any_machine_is_wrong_in_a_plan_too(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(MemfitError, match=said):
        planned(tiny_config(tmp_path, **changes))


def test_a_config_for_four_processes_is_planned_as_one_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = tiny_config(tmp_path, micro_batch_size=2, gradient_accumulation_steps=32, global_batch_size=256)
    assert planned(config).batch.world_size == 4
    assert "planned as one of 4 processes" in planned(config).notes[-1]
    with pytest.raises(UsageError, match="is 64, not global_batch_size 256") as found:
        prepare_job(config)
    assert "torchrun --nproc_per_node=4" in str(found.value.hint)


def test_sizes_that_no_number_of_processes_makes_up_are_refused_in_a_plan_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is 63, not global_batch_size 256"):
        planned(tiny_config(tmp_path, micro_batch_size=3, gradient_accumulation_steps=21, global_batch_size=256))


def test_a_setting_that_these_data_do_not_use_is_named(tmp_path: Path) -> None:
    text = {"too_long": "drop", "template": "chat", "data.split": "test"}
    told = " ".join(prepare_job(tiny_config(tmp_path, **text)).notes)
    for key in ("data.too_long is of no effect", "data.template is of no effect", "data.split is of no effect"):
        assert key in told
    pairs = {"data.source": alpaca_file(tmp_path), "max_seq_len": 400, "text_column": "words"}
    assert "data.text_column is of no effect" in " ".join(prepare_job(tiny_config(tmp_path, **pairs)).notes)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoints_are_found_by_step_and_half_written_ones_are_not(tmp_path: Path) -> None:
    for name in ("step_10", "step_9", "checkpoint-11"):
        checkpoint(tmp_path, name)
    (tmp_path / "step_12").mkdir()
    (tmp_path / "step_13.writing").mkdir()
    assert [each.name for each in find_checkpoints(tmp_path)] == ["step_9", "step_10", "checkpoint-11"]
    assert [step_of(Path(name)) for name in ("step_7", "checkpoint-8", "steps_9")] == [7, 8, None]


def test_the_folder_of_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "out")
    with pytest.raises(InputError, match="holds checkpoints of an earlier run, up to step_5") as found:
        prepare_job(tiny_config(tmp_path))
    assert str(made) in str(found.value.hint)


def test_a_checkpoint_of_the_same_job_continues(tmp_path: Path) -> None:
    first = prepare_job(tiny_config(tmp_path))
    made = checkpoint(tmp_path / "out", job=first)
    job = prepare_job(tiny_config(tmp_path, resume_from="latest"))
    assert (job.resume_from, job.notes) == (made, ())


def test_the_path_through_attention_does_not_change_the_model(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "out", job=prepare_job(tiny_config(tmp_path)))
    assert prepare_job(tiny_config(tmp_path, **{"model.path": "gather", "resume_from": str(made)})).notes == ()


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "out", job=prepare_job(tiny_config(tmp_path)))
    with pytest.raises(InputError, match=r"another model \(gsa\), not of gsa: n_layers 2 there and 3 here"):
        prepare_job(tiny_config(tmp_path, **{"resume_from": str(made), "model.n_layers": 3}))


def test_a_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "out", job=prepare_job(tiny_config(tmp_path)))
    with pytest.raises(InputError, match="was trained with method kind full, and this config says kind lora rank 16"):
        prepare_job(tiny_config(tmp_path, resume_from=str(made), method="lora"))


def test_another_seed_or_batch_goes_on_and_is_said(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "out", job=prepare_job(tiny_config(tmp_path)))
    job = prepare_job(tiny_config(tmp_path, resume_from=str(made), seed=7, global_batch_size=2))
    assert job.notes == ("resumed with another global_batch_size, seed: the run will not be the one that was begun",)


def test_the_trainer_s_own_checkpoint_is_compared_by_its_config(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, "checkpoint-3")
    (made / "config.json").write_text(json.dumps({**TINY_GSA, "model_type": "gsa"}))
    job = prepare_job(tiny_config(tmp_path, resume_from=str(made)))
    assert "was not written by memfit" in job.notes[0]
    (made / "config.json").write_text(json.dumps({**TINY_GSA, "model_type": "gsa", "d_ffn": 64}))
    with pytest.raises(InputError, match="d_ffn 64 there and 32 here"):
        check_checkpoint(made, job)
    (made / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(InputError, match="holds LoRA adapters"):
        check_checkpoint(made, job)


def test_a_folder_of_checkpoints_is_not_one(tmp_path: Path) -> None:
    checkpoint(tmp_path / "out")
    with pytest.raises(InputError, match="is no checkpoint") as found:
        prepare_job(tiny_config(tmp_path, resume_from=str(tmp_path / "out")))
    assert found.value.hint == "it holds step_5: name one of them"


def test_a_damaged_identity_is_one_error(tmp_path: Path) -> None:
    job = prepare_job(tiny_config(tmp_path))
    made = checkpoint(tmp_path / "out", job=job)
    assert identity_of(job)["seed"] == 0
    (made / "memfit_checkpoint.json").write_text("{")
    with pytest.raises(InputError, match="cannot read"):
        check_checkpoint(made, job)


@pytest.mark.parametrize(("source", "said"), [
    ("nowhere.jsonl", r"data\.source: no file 'nowhere\.jsonl'"), ("/nowhere/at/all", "no file '/nowhere/at/all'"),
    ("what is this?", "is no file and no name of a data set"), ("x" * 5000 + ".jsonl", "no file"),
])  # fmt: skip
def test_a_file_that_is_not_there_is_missed_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = ModelConfig(name="Qwen/Qwen2.5-0.5B", cache_dir=str(tmp_path))
    config = dataclasses.replace(tiny_config(tmp_path, **{"data.source": source}), model=model)
    with pytest.raises(InputError, match=said):
        prepare_job(config, to_run=False)

"""Each failure that people really ran into is found before the run, one test each, by what really happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from check_jobs import document, factory_situation, only, rows_file, situation, words_tokenizer

from memfit.checking import config as config_checks
from memfit.checking import data, machine
from memfit.checking import model as model_checks
from memfit.checking import plan as plan_checks
from memfit.checking.check import check
from memfit.checking.machine import look
from memfit.checking.model import Flow
from memfit.checking.situation import CheckRequest, Finding, Situation, guarded
from memfit.jobs.workload import Workload
from memfit.recording.machine import GpuProcess, GpuState
from memfit.units import GiB

pytestmark = pytest.mark.usefixtures("shared_traces")


def flow_of(where: Situation) -> tuple[Finding, list[Flow]]:
    """The line on gradients; the one on the loss is of another subject."""
    followed: list[Flow] = []
    found = list(model_checks.check_gradients(where, followed))
    return next(each for each in found if each.name == "gradient flow"), followed


def checked_config(folder: Path, text: str, **rest: Any) -> list[Finding]:
    path = folder / "c.yaml"
    path.write_text(text)
    return [each for each in check(config=str(path), **rest).findings if each.subject == "config"]


# -- the longest batch, and steps enough -------------------------------------------------------------------------------


def test_the_plan_is_of_the_longest_row_and_not_of_a_usual_one(tmp_path: Path) -> None:
    rows = [{"text": "short"}] * 30 + [{"text": "long " * 60}]
    where = situation(tmp_path, gpu="24GB", **{"data.source": rows_file(tmp_path, rows), "packing": False,
                                               "max_seq_len": 400})  # fmt: skip
    finding = only(plan_checks.check_fit, where)
    assert finding.details["workload"]["seq_len"] == 301  # 300 bytes and the end of the text
    assert finding.status == "ok"


def test_the_plan_runs_several_optimizer_steps_with_accumulated_gradients(tmp_path: Path) -> None:
    (once,) = (each.plan for each in situation(tmp_path, micro_batch_size=4).plans.get())
    (many,) = (each.plan for each in situation(tmp_path, micro_batch_size=1).plans.get())
    assert {phase.step for phase in many.report.phases} >= {1, 2}
    assert once.workload["grad_accum"] == 1 < many.workload["grad_accum"]
    assert many.report.breakdown["optimizer"] > 0


# -- gradients and trained weights -------------------------------------------------------------------------------------


def test_checkpointing_with_adapters_but_without_input_grads_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding, _ = flow_of(factory_situation(tmp_path, "checkpointed_without_input_grads", monkeypatch))
    assert finding.status == "failed"
    assert "no gradient reaches" in finding.found
    assert "enable_input_require_grads" in str(finding.next)


def test_memfit_s_own_checkpointing_with_adapters_is_fine(tmp_path: Path) -> None:
    finding, _ = flow_of(situation(tmp_path, method="lora", gradient_checkpointing=True, loss="chunked"))
    assert finding.status == "ok"
    assert "all 28 trained tensors" in finding.found


def test_a_block_that_no_gradient_reaches_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding, (flow,) = flow_of(factory_situation(tmp_path, "one_block_detached", monkeypatch))
    assert finding.status == "warning"
    assert flow.without
    assert all("layers.0." in name for name in flow.without)


def test_a_base_model_that_was_not_frozen_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(model_checks.check_trained_weights, factory_situation(tmp_path, "base_not_frozen", monkeypatch))
    assert finding.status == "failed"
    assert "trained beside the adapters" in finding.found


def test_a_model_without_a_trained_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(model_checks.check_trained_weights, factory_situation(tmp_path, "all_frozen", monkeypatch))
    assert finding.status == "failed"
    assert "no weight is trained" in finding.found


@pytest.mark.parametrize(("targets", "said"), [
    (["q_proj", "c_attn"], "c_attn"), (["c_attn"], "c_attn"),
])  # fmt: skip
def test_targets_that_match_nothing_are_found_though_others_match(
    tmp_path: Path, targets: list[str], said: str
) -> None:
    where = situation(tmp_path, method="lora", target_modules=targets)
    (finding,) = guarded(model_checks.TRAINED, lambda: model_checks.check_trained_weights(where))
    assert finding.status == "failed"
    assert said in finding.found


def test_rank_128_on_all_linears_of_qwen_trains_323_million_weights_and_not_239() -> None:
    work = Workload(kind="lora", model="qwen2.5-7b", rank=128, seq_len=2048)
    from memfit.jobs.training.loops import training_config

    where = Situation(CheckRequest(config=training_config(work, steps=1), workload=work))
    finding = only(model_checks.check_trained_weights, where)
    assert finding.details["trained"] == 322_961_408 == 90_112 * 128 * 28
    assert (finding.status, finding.details["parameters"]) == ("ok", 7_615_616_512 + 322_961_408)


# -- the allocator -----------------------------------------------------------------------------------------------------


def test_expandable_segments_on_torch_2_0_1_are_found() -> None:
    (finding,) = look({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "2.0.1+cu118")
    assert finding.status == "failed"
    assert "Unrecognized CachingAllocator option: expandable_segments" in finding.found
    assert "2.1 or newer" in str(finding.next)


def test_settings_that_cancel_are_found() -> None:
    (finding,) = look({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"}, "2.11.0")
    assert (finding.status, finding.next) == (
        "warning", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )  # fmt: skip
    assert "of 128 MiB and more are never given to smaller requests" in finding.found


# -- the config --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "said"), [
    ("device_map: auto", "device_map can only be empty"), ("max_memory: {0: 20GB}", "unknown key 'max_memory'"),
])  # fmt: skip
def test_a_device_map_is_refused_with_what_to_do_instead(tmp_path: Path, line: str, said: str) -> None:
    (finding,) = checked_config(tmp_path, f"model: gpt2\n{line.replace('{0:', '{a:')}\n")
    assert finding.status == "failed"
    assert said in finding.found
    assert "memory.offload" in str(finding.next)


def test_weights_in_fp16_without_a_scaler_are_found(tmp_path: Path) -> None:
    finding = only(config_checks.check_precision, situation(tmp_path, method="lora", precision="fp16", gpu="RTX 4090"))
    assert (finding.status, "65,504" in finding.found) == ("warning", True)


@pytest.mark.parametrize(("said", "status"), [("fp16", "failed"), ("bf16", "ok")])
def test_a_loss_that_is_not_finite_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: str
) -> None:
    changes: dict[str, Any] = {"method": "lora", "target_modules": ["q_proj"], "precision": said}
    where = factory_situation(tmp_path, "too_large_for_fp16", monkeypatch, **changes)
    found = {each.name: each for each in model_checks.check_gradients(where, [])}
    assert (found["loss"].status, found["gradient flow"].status) == (status, status)
    assert json.dumps(found["loss"].to_json(), allow_nan=False)


@pytest.mark.parametrize(("changes", "line", "status"), [
    ({"precision": "bf16"}, config_checks.check_precision, "warning"),
    ({"precision": "amp-fp16"}, config_checks.check_precision, "ok"),
    ({"model.attention": "flash_attention_2"}, config_checks.check_attention, "failed"),
    ({}, config_checks.check_attention, "ok"),
])  # fmt: skip
def test_what_a_turing_card_lacks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], line: Any, status: str
) -> None:
    monkeypatch.setattr(config_checks, "find_spec", lambda name: object())  # as if flash-attn were installed
    finding = only(line, situation(tmp_path, gpu="T4", **changes))
    assert finding.status == status
    assert "7.5" in finding.found or status == "ok"


def sdpa_of(model: str, gpu: str, **settings: Any) -> Finding:
    work = Workload(kind="train", model=model, **settings)
    return only(config_checks.check_attention, Situation(CheckRequest(workload=work, gpu=gpu)))


@pytest.mark.parametrize(("model", "gpu", "precision", "status"), [
    ("smollm2-135m", "RTX 4090", "fp32", "warning"), ("smollm2-135m", "RTX 4090", "amp-bf16", "ok"),
    ("gpt2", "RTX 4090", "fp32", "ok"), ("gpt2", "T4", "bf16", "warning"), ("gpt2", "T4", "amp-fp16", "ok"),
])  # fmt: skip
def test_scores_that_are_whole_though_sdpa_is_asked_for_are_found(
    model: str, gpu: str, precision: Any, status: str
) -> None:
    """Grouped heads in fp32, and bf16 before Ampere: no fused kernel takes them."""
    finding = sdpa_of(model, gpu, precision=precision, seq_len=1024)
    assert finding.status == status
    heads = {"smollm2-135m": 9, "gpt2": 12}[model]
    in_fp32 = 4 * heads * 1024 * 1024
    assert finding.details["scores_bytes"] == (in_fp32 if status == "warning" else 0)


def test_the_precision_that_is_advised_really_frees_the_scores() -> None:
    finding = sdpa_of("smollm2-135m", "RTX 4090", precision="fp32", seq_len=1024)
    assert "precision bf16 or amp-bf16" in str(finding.next)
    for said in ("bf16", "amp-bf16"):
        again = sdpa_of("smollm2-135m", "RTX 4090", precision=said, seq_len=1024)
        assert again.details["scores_bytes"] == 0


def test_small_scores_are_said_and_not_warned_of() -> None:
    finding = sdpa_of("smollm2-135m", "RTX 4090", precision="fp32", seq_len=64)
    assert (finding.status, "by its plain kernel" in finding.found) == ("ok", True)


def test_padding_that_is_learned_is_found(tmp_path: Path) -> None:
    rows = [{"text": "yes " + "<pad> " * 40}, {"text": "yes yes no"}]
    model = {**document(tmp_path)["model"], "tokenizer": words_tokenizer(tmp_path)}
    where = situation(
        tmp_path, model=model, packing=False, **{"data.source": rows_file(tmp_path, rows)}, max_seq_len=64
    )
    finding = only(data.check_labels, where)
    assert (finding.status, finding.details["padding_in_the_data"]) == ("failed", 39)
    assert "token 0 ('<pad>')" in finding.found
    assert "take the padding out of the file" in str(finding.next)


def test_masked_padding_and_prompts_are_fine(tmp_path: Path) -> None:
    rows = [{"prompt": "What is it?", "completion": "it"}, {"prompt": "?", "completion": "a longer answer"}]
    finding = only(
        data.check_labels, situation(tmp_path, **{"data.source": rows_file(tmp_path, rows), "max_seq_len": 64})
    )
    assert (finding.status, finding.details["learned_tokens"]) == ("ok", 3 + 16)
    assert "prompts and padding are masked" in finding.found


def test_padding_to_max_length_is_shown_beside_what_memfit_pads(tmp_path: Path) -> None:
    rows = [{"text": "x" * 9}, {"text": "x" * 29}]
    where = situation(tmp_path, **{"data.source": rows_file(tmp_path, rows), "packing": False, "max_seq_len": 400})
    finding = only(data.check_padding, where)
    assert finding.details["padding_share"] == pytest.approx(1 - 40 / 60)
    assert finding.details["padding_share_at_max_length"] == pytest.approx(1 - 20 / 400)
    one_row = situation(tmp_path, **{"data.source": rows_file(tmp_path, rows), "packing": False, "micro_batch_size": 1})
    assert only(data.check_padding, one_row).details["padding_share"] == 0


def test_a_batch_that_is_mostly_padding_is_found(tmp_path: Path) -> None:
    rows = [{"text": "x"}, {"text": "x" * 299}]
    where = situation(tmp_path, **{"data.source": rows_file(tmp_path, rows), "packing": False, "max_seq_len": 400,
                                   "micro_batch_size": 4, "data.shuffle": False})  # fmt: skip
    assert only(data.check_padding, where).status == "ok"
    rows_file(tmp_path, [*[{"text": "x"}] * 3, {"text": "x" * 299}])
    again = situation(tmp_path, **{"data.source": str(tmp_path / "rows.jsonl"), "packing": False, "max_seq_len": 400,
                                   "micro_batch_size": 4})  # fmt: skip
    assert (only(data.check_padding, again).status, only(data.check_padding, again).next) == (
        "warning", "packing: true, or a smaller micro_batch_size",
    )  # fmt: skip


def test_a_global_batch_of_252_instead_of_256_is_found(tmp_path: Path) -> None:
    where = situation(tmp_path, world_size=4, micro_batch_size=3, gradient_accumulation_steps=21, global_batch_size=256)
    (finding,) = guarded(config_checks.BATCH, lambda: config_checks.check_global_batch(where))
    assert finding.status == "failed"
    assert "is 252, not global_batch_size 256" in finding.found
    assert "1 x 64, 2 x 32, 4 x 16, 8 x 8" in str(finding.next)


def test_an_interval_in_another_section_is_read_and_said(tmp_path: Path) -> None:
    text = "model: gpt2\nlogging:\n  save_interval: 77\ntraining:\n  log_interval: 5\n"
    path = tmp_path / "c.yaml"
    path.write_text(text)
    config, keys = config_checks.load(str(path), ())
    assert (config.saving.save_steps, config.logging.logging_steps) == (77, 5)
    finding = only(config_checks.check_keys, Situation(CheckRequest(config=config, keys=keys)))
    assert finding.details["elsewhere"] == {"logging.save_interval": "saving.save_steps"}
    assert "logging.save_interval is read as saving.save_steps" in finding.found


def test_a_key_that_nobody_reads_is_found_with_what_was_meant(tmp_path: Path) -> None:
    (finding,) = checked_config(tmp_path, "model: gpt2\nlogging:\n  log_intervall: 5\n")
    assert (finding.status, finding.name) == ("failed", "keys")
    assert "log_interval" in str(finding.next)


@pytest.mark.parametrize("key", ["load_best_model_at_end", "evaluation_strategy", "eval_strategy"])
def test_options_of_evaluation_that_do_nothing_here_are_said(tmp_path: Path, key: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: gpt2\n{key}: true\n")
    config, keys = config_checks.load(str(path), ())
    first, _ = config_checks.check_keys(Situation(CheckRequest(config=config, keys=keys)))
    assert (first.status, f"{key} is of no effect" in first.found) == ("warning", True)


# -- packages ----------------------------------------------------------------------------------------------------------


def in_a_process(code: str, *, first_on_path: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(first_on_path)},
                          capture_output=True, text=True, check=True, timeout=300)  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


SHOW = """
import json
from memfit.checking.machine import {look}
from memfit.checking.situation import CheckRequest, Line, Situation, guarded
(found, *_) = guarded(Line("settings", ""), lambda: {look}(Situation(CheckRequest())))
print(json.dumps(found.to_json()))
"""


def test_a_bitsandbytes_that_takes_the_process_down_is_found(tmp_path: Path) -> None:
    (tmp_path / "bitsandbytes.py").write_text("import os\nos.abort()\n")
    finding = in_a_process(SHOW.format(look="check_bitsandbytes"), first_on_path=tmp_path)
    assert finding["status"] == "failed"
    assert "ends the process with signal 6" in finding["found"]


def test_a_bitsandbytes_of_another_cuda_is_found(tmp_path: Path) -> None:
    (tmp_path / "bitsandbytes.py").write_text("raise RuntimeError('CUDA Setup failed: libbitsandbytes_cuda126.so')\n")
    finding = in_a_process(SHOW.format(look="check_bitsandbytes"), first_on_path=tmp_path)
    assert (finding["status"], "libbitsandbytes_cuda126.so" in finding["found"]) == ("failed", True)


def test_a_peft_that_was_downgraded_to_0_4_0_is_found(tmp_path: Path) -> None:
    info = tmp_path / "peft-0.4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.4.0\n")
    finding = in_a_process(SHOW.format(look="check_packages"), first_on_path=tmp_path)
    assert finding["status"] == "failed"
    assert "peft 0.4.0 is not what memfit needs (peft >=" in finding["found"]


def test_the_packages_of_this_environment_fit_one_another() -> None:
    assert only(machine.check_packages, Situation(CheckRequest())).status == "ok"


# -- several processes -------------------------------------------------------------------------------------------------


def test_parameters_that_ddp_would_wait_for_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"find_unused_parameters": False, "oom_recovery": False}
    where = factory_situation(tmp_path, "with_an_unused_head", monkeypatch, world_size=2, **changes)
    _, followed = flow_of(where)
    finding = config_checks.check_unused_parameters(where, followed)
    assert (finding.status, finding.details["tensors"]) == ("failed", ["never_called.weight"])
    assert "Expected to have finished reduction" in finding.found


def test_gsa_s_indexer_gets_no_gradient_and_is_passed_over(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ffn": 32, "k_base": 8, "k_min": 2, "k_max": 16}
    model = {"name": "gsa", "tokenizer": "bytes", "settings": sizes}
    where = situation(tmp_path, world_size=2, model=model)
    flow, followed = flow_of(where)
    assert (flow.status, "a choice of keys has no gradient" in flow.found) == ("ok", True)
    finding = config_checks.check_unused_parameters(where, followed)
    assert finding.status == "ok"
    assert all("indexer" in name for name in finding.details["tensors"])


@pytest.mark.parametrize(("loop", "status"), [("plain", "warning"), ("trainer", "ok"), ("memfit", "ok")])
def test_an_all_reduce_in_every_micro_step_is_found(loop: Any, status: str) -> None:
    from memfit.jobs.training.loops import training_config

    work = Workload(kind="train", model="gpt2", loop=loop, grad_accum=32, world_size=4)
    where = Situation(CheckRequest(config=training_config(work, steps=1), workload=work, world_size=4))
    finding = only(config_checks.check_reductions, where)
    assert finding.status == status
    assert ("32 all-reduces" in finding.found) == (loop == "plain")


# -- peaks beside the step ---------------------------------------------------------------------------------------------


def test_logits_that_an_evaluation_would_gather_are_counted() -> None:
    from memfit.jobs.training.loops import training_config

    work = Workload(kind="train", model="gpt2", seq_len=1024, loop="trainer")
    where = Situation(CheckRequest(config=training_config(work, steps=1), workload=work))
    finding = only(plan_checks.check_evaluation, where)
    assert (finding.status, finding.details["logits_bytes"]) == ("ok", 100 * 1024 * 50257 * 4)
    assert "only for compute_metrics" in finding.found and "eval_accumulation_steps" in finding.found


def test_what_a_checkpoint_takes_is_what_a_run_writes(tmp_path: Path) -> None:
    from memfit.checking.model import checkpoint_bytes
    from memfit.jobs.training.run import train

    wide = {"name": document(tmp_path)["model"]["name"], "tokenizer": "bytes", "from_scratch": True,
            "settings": {"hidden_size": 256, "intermediate_size": 512}}  # fmt: skip
    where = situation(tmp_path, model=wide, max_steps=1, save_steps=1, optimizer="adamw", **{"memory.probe": False})
    result = train(where.job.get(), on_event=lambda event: None)
    written = sum(each.stat().st_size for each in result.checkpoint.iterdir())
    predicted = checkpoint_bytes(where.shapes.get(), where.config)
    assert predicted == pytest.approx(written, rel=0.01)


# -- the machine -------------------------------------------------------------------------------------------------------


def test_another_job_on_the_card_is_found_with_its_name_and_size() -> None:
    holders = (
        GpuProcess(pid=4711, used_bytes=20 * GiB, name="/opt/venv/bin/python train.py"),
        GpuProcess(pid=12, used_bytes=None, name=None),
    )
    state = GpuState(index=0, uuid="GPU-x", name="NVIDIA H200", total_bytes=140 * GiB, used_bytes=21 * GiB,
                     busy_percent=None, processes=holders)  # fmt: skip
    finding = machine.of_gpu(state)
    assert finding.status == "warning"
    assert "process 4711 (python train.py): 20.00 GiB" in finding.found
    assert "process 12 (of another container, or ended): an unknown size" in finding.found
    assert finding.next == "if they are yours and not needed: kill 4711; another GPU: CUDA_VISIBLE_DEVICES=N"
    assert "another GPU" not in str(machine.of_gpu(state, alone=True).next)


@pytest.mark.parametrize(("used", "held", "status"), [(0.6, 0.0, "ok"), (1.9, 1.3, "warning"), (0.9, 0.1, "ok")])
def test_a_small_process_on_a_large_card_is_found_and_the_driver_s_own_share_is_not(
    used: float, held: float, status: str
) -> None:
    holder = GpuProcess(pid=7, used_bytes=int(held * GiB), name="python") if held else None
    state = GpuState(index=0, uuid="GPU-x", name="NVIDIA H200", total_bytes=140 * GiB, used_bytes=int(used * GiB),
                     busy_percent=None, processes=(holder,) if holder else ())  # fmt: skip
    assert machine.of_gpu(state).status == status


def test_a_card_that_is_held_by_nobody_that_can_be_seen_is_said() -> None:
    state = GpuState(index=0, uuid="GPU-x", name="NVIDIA H200", total_bytes=140 * GiB, used_bytes=21 * GiB,
                     busy_percent=None, processes=())  # fmt: skip
    assert "does not say who holds the rest" in machine.of_gpu(state).found


def test_a_disk_that_is_too_small_for_the_checkpoints_is_found(tmp_path: Path) -> None:
    where = situation(tmp_path, save_total_limit=(1 << 31) - 1)
    finding = only(machine.check_room_for_checkpoints, where)
    assert finding.status == "failed"
    assert finding.details["free_bytes"] < finding.details["checkpoint_bytes"] * (1 << 31)
    assert "save_total_limit:" in str(finding.next)


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_data_that_are_all_longer_than_the_config_says_are_found(tmp_path: Path) -> None:
    rows = [{"text": "word " * 820}] * 3
    where = situation(tmp_path, **{"data.source": rows_file(tmp_path, rows), "packing": False, "max_seq_len": 100})
    (finding,) = guarded(data.LENGTHS, lambda: data.check_lengths(where))
    assert finding.status == "failed"
    assert "all 3 samples are longer than max_seq_len 100 (4,101 to 4,101 tokens)" in finding.found


def test_a_factory_that_makes_no_model_is_found(tmp_path: Path) -> None:
    where = situation(tmp_path, model={"name": "os:getcwd", "tokenizer": "bytes"})
    (finding,) = guarded(model_checks.TRAINED, partial(model_checks.check_trained_weights, where))
    assert (finding.status, "returned a str" in finding.found) == ("failed", True)


def test_a_data_set_on_the_hub_is_not_fetched_and_a_missing_file_is_a_failure(tmp_path: Path) -> None:
    where = situation(tmp_path, **{"data.source": "tatsu-lab/alpaca"})
    for line, check_it in (
        (data.READABLE, data.check_readable),
        (data.LENGTHS, data.check_lengths),
        (data.LABELS, data.check_labels),
    ):
        (finding,) = guarded(line, partial(check_it, where))
        assert (finding.status, "which a look does not fetch" in finding.found) == ("skipped", True)
    (missing,) = guarded(
        data.READABLE, partial(data.check_readable, situation(tmp_path, **{"data.source": "nowhere.jsonl"}))
    )
    assert (missing.status, "no file 'nowhere.jsonl'" in missing.found) == ("failed", True)


def test_data_that_are_mostly_cut_are_found_with_their_distribution(tmp_path: Path) -> None:
    rows = [{"text": "x" * 9}, *[{"text": "x" * 200}] * 3]
    where = situation(tmp_path, **{"data.source": rows_file(tmp_path, rows), "packing": False, "max_seq_len": 100})
    finding = only(data.check_lengths, where)
    assert (finding.status, finding.details["truncated_share"]) == ("warning", 0.75)
    assert finding.found == "rows of 10 to 201 tokens, median 201, 95 % up to 201; max_seq_len 100 cuts 3 of 4 rows"
    assert str(finding.next).startswith("max_seq_len: 201 keeps 95 % of them whole")


def test_a_tokenizer_of_another_model_is_found(tmp_path: Path) -> None:
    model = {**document(tmp_path)["model"], "settings": {"vocab_size": 100}}
    finding = only(data.check_vocabulary, situation(tmp_path, model=model))
    assert (finding.status, finding.details["highest"]) == ("failed", ord("t"))
    assert only(data.check_vocabulary, situation(tmp_path)).status == "ok"


def test_a_setting_that_the_engine_refuses_is_found(tmp_path: Path) -> None:
    if find_spec("wandb") is not None:
        pytest.skip("W&B is installed here")
    where = situation(tmp_path, wandb=True)
    (finding,) = guarded(config_checks.SERVED, lambda: config_checks.check_served(where))
    assert finding.status == "failed"


def test_a_gpu_that_is_asked_for_and_not_here_is_found(tmp_path: Path) -> None:
    if Situation(CheckRequest()).here is not None:
        pytest.skip("a GPU is here")
    where = situation(tmp_path, device="cuda")
    (finding,) = guarded(config_checks.SERVED, lambda: config_checks.check_served(where))
    assert (finding.status, finding.next) == ("warning", "device: cpu trains without one")
    elsewhere = situation(tmp_path, device="cuda", gpu="24GB")
    assert [each.status for each in config_checks.check_served(elsewhere)] == ["ok"]


def test_what_only_a_gpu_can_do_is_no_failure_on_a_laptop_that_checks_for_a_card(tmp_path: Path) -> None:
    laptop = situation(tmp_path, precision="amp-fp16", device="auto", gpu="T4")
    laptop.__dict__["here"] = None
    assert [each.status for each in config_checks.check_served(laptop)] == ["ok"]


def test_what_only_a_gpu_can_do_is_a_warning_on_a_laptop_that_checks_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    finding = only(config_checks.check_served, situation(tmp_path, precision="amp-fp16", device="auto"))
    assert (finding.status, finding.found) == ("warning", "to run it here: precision amp-fp16 needs a GPU")


def test_the_checkpoints_of_an_earlier_run_are_a_warning_with_the_way_on(tmp_path: Path) -> None:
    (tmp_path / "out" / "step_5").mkdir(parents=True)
    (tmp_path / "out" / "step_5" / "trainer_state.json").write_text("{}")
    first, room = machine.check_room_for_checkpoints(situation(tmp_path))
    assert (first.status, room.status) == ("warning", "ok")
    assert f"--resume_from {tmp_path / 'out' / 'step_5'}" in str(first.next)


def test_a_config_for_four_processes_is_checked_as_one_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sizes = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "global_batch_size": 16}
    (tmp_path / "job.yaml").write_text(json.dumps(document(tmp_path, **sizes)))
    found = check(config=str(tmp_path / "job.yaml"), gpu="24GB")
    (line,) = (each for each in found.findings if each.name == "global batch")
    assert (line.status, line.next) == ("ok", "start it under torchrun --nproc_per_node=4")
    assert found.asked["world_size"] == 4


def test_weights_in_bf16_that_are_all_trained_are_said(tmp_path: Path) -> None:
    finding = only(config_checks.check_served, situation(tmp_path, precision="bf16"))
    assert (finding.status, "small updates round away" in finding.found) == ("warning", True)


@pytest.mark.parametrize(("settings", "status", "said"), [
    ({"kind": "forward", "model": "gpt2", "seq_len": 2048}, "failed", "--seq-len 1024"),
    ({"kind": "generate", "model": "gpt2", "seq_len": 1000, "new_tokens": 100}, "failed", "of 1024 together"),
    ({"kind": "generate", "model": "gpt2", "seq_len": 1000, "new_tokens": 24}, "ok", "None"),
    ({"kind": "forward", "model": "llama-7b", "seq_len": 4096}, "warning", "--seq-len 2048"),
])  # fmt: skip
def test_positions_count_where_nothing_is_trained_too(settings: dict[str, Any], status: str, said: str) -> None:
    """A table of positions ends; rotations go on, past what the model was taught."""
    finding = only(data.check_positions, Situation(CheckRequest(workload=Workload(**settings))))
    assert (finding.status, said in str(finding.next)) == (status, True)


def calibrated_on(dataset: str, **asked: Any) -> Finding:
    where = Situation(CheckRequest(workload=Workload(kind="prune", model="gpt2", dataset=dataset), **asked))
    (finding,) = guarded(data.CALIBRATION, lambda: data.check_calibration(where))
    return finding


def test_text_to_calibrate_on_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    assert calibrated_on("builtin").status == "ok"
    assert (calibrated_on("c4").status, "on the Hub" in calibrated_on("c4").found) == ("skipped", True)
    (tmp_path / "c4").mkdir()
    rows_file(tmp_path / "c4", [{"text": "one"}, {"text": "two"}])
    monkeypatch.setenv("MEMFIT_DATA", str(tmp_path))
    assert calibrated_on("c4").found.startswith("2 documents of c4")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    bare = calibrated_on("wikitext2")
    assert (bare.status, "pip install 'memfit[data]'" in str(bare.next)) == ("failed", True)
    wrong = calibrated_on(str(tmp_path / "nowhere"))
    assert (wrong.status, "--dataset takes wikitext2" in str(wrong.next)) == ("failed", True)


def test_fewer_samples_than_a_global_batch_are_said(tmp_path: Path) -> None:
    rows = rows_file(tmp_path, [{"text": "x" * 9}] * 3)
    finding = only(config_checks.check_served, situation(tmp_path, **{"data.source": rows, "packing": False}))
    assert (finding.status, "3 samples are fewer than one global batch of 4" in finding.found) == ("warning", True)


@pytest.mark.parametrize(("name", "content"), [
    ("cut.jsonl", b'{"text": "a"}\n{"text": "b'), ("empty.txt", b""), ("latin.txt", "caf\xe9".encode("latin-1")),
    ("cut.parquet", b"PAR1"),
])  # fmt: skip
def test_data_that_cannot_be_read_come_with_a_next_step(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    finding = only(data.check_readable, situation(tmp_path, **{"data.source": str(tmp_path / name)}))
    assert (finding.status, finding.next is not None) == ("failed", True)


def test_data_that_nobody_named_are_not_called_fine(tmp_path: Path) -> None:
    finding = only(data.check_readable, situation(tmp_path, **{"data.source": None}))
    assert (finding.status, finding.found) == ("failed", "data.source is empty: nothing says what to train on")


def test_an_output_folder_that_is_a_file_comes_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    finding = only(machine.check_room_for_checkpoints, situation(tmp_path))
    assert (finding.status, "--output_dir" in str(finding.next)) == ("failed", True)


def test_weights_that_fsdp2_gathers_are_no_alarm_where_the_host_has_room(tmp_path: Path) -> None:
    finding = only(plan_checks.check_saving, situation(tmp_path, parallel="fsdp2", world_size=2))
    assert (finding.status, "gathers the weights" in finding.found) == ("ok", True)


def test_a_sequence_longer_than_the_model_s_positions_is_found(tmp_path: Path) -> None:
    finding = only(data.check_positions, situation(tmp_path, max_seq_len=1024))
    assert (finding.status, finding.next) == ("failed", "max_seq_len: 512")

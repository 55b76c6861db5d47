"""`memfit train` on weights of 4 and 8 bits: its keys, what is refused before anything is loaded, runs on the CPU."""

from __future__ import annotations

import dataclasses
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quick import quick
from tiny_run import LLAMA, llama_folder, same
from training_folder import text_file

from memfit.errors import InputError, UsageError
from memfit.jobs.training import refusals
from memfit.jobs.training.checkpoints import check_checkpoint, write_identity
from memfit.jobs.training.config import TrainConfig, keys_of
from memfit.jobs.training.config_file import config_from, dump, parse_yaml
from memfit.jobs.training.job import prepare_job
from memfit.jobs.training.run import train
from memfit.jobs.workload import Workload
from memfit.planning.training import plan_training, workload_of

QLORA: dict[str, Any] = {
    "model": "gpt2", "lora_r": 8, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", "bf16": True,
    "optim": "paged_adamw_32bit",
}  # fmt: skip
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def read(**changes: Any) -> TrainConfig:
    return config_from({key: value for key, value in (QLORA | changes).items() if value is not None})


# -- keys --------------------------------------------------------------------------------------------------------------


def test_the_keys_of_hugging_face_are_the_settings_of_a_quantised_workload() -> None:
    work = read().workload
    assert (work.kind, work.quant, work.double_quant, work.quant_compute) == ("lora", "nf4", True, "bf16")
    assert (work.precision, work.autocast_type, work.optimizer) == ("bf16", "bf16", "paged-adamw")
    assert work.is_kbit_prepared and work.loop == "memfit"


def test_they_may_stand_in_a_section_of_their_own() -> None:
    inside = {key: QLORA[key] for key in QLORA if key.startswith(("load_in", "bnb_"))}
    others = {key: value for key, value in QLORA.items() if key not in inside}
    assert config_from({**others, "quantization_config": inside}) == read()
    own = {"kind": "nf4", "double": True, "compute": "bf16"}
    assert config_from({**others, "quant": own}).workload == read().workload


def test_8_bits_have_no_settings_of_4_bits() -> None:
    made = config_from(
        {"model": "gpt2", "lora_r": 8, "load_in_8bit": True, "kbit_prepare": False, "double_quant": True}
    )
    assert made.workload.quant == "int8" and not made.workload.is_kbit_prepared
    assert "quant.double is of no effect with int8: they are of 4-bit weights" in made.notes()


def test_4_bits_without_a_type_are_nf4_and_that_is_said() -> None:
    made = read(bnb_4bit_quant_type=None)
    assert made.workload.quant == "nf4"
    assert any("BitsAndBytesConfig alone takes fp4" in note for note in made.notes())
    assert not any("fp4" in note for note in read().notes())


def test_a_set_replaces_what_the_file_says_of_4_bits() -> None:
    for over, kind in (
        ({"bnb_4bit_quant_type": "fp4"}, "fp4"), ({"load_in_4bit": False}, "none"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "int8"),
    ):  # fmt: skip
        assert config_from(QLORA, over=over).workload.quant == kind


def test_without_quantised_weights_bf16_stays_autocast_over_fp32() -> None:
    made = read(load_in_4bit=False)
    assert (made.workload.precision, made.workload.autocast) == ("amp-bf16", None)
    assert any("quant.double, quant.compute are of no effect" in note for note in made.notes())


def test_autocast_is_a_key_of_its_own_whatever_the_weights_are() -> None:
    work = config_from({"model": "gpt2", "lora_r": 8, "precision": "bf16", "autocast": "bf16"}).workload
    assert (work.weight_precision, work.autocast_type) == ("bf16", "bf16")


@pytest.mark.parametrize(("changes", "said"), [
    ({"load_in_8bit": True}, "load_in_4bit and load_in_8bit are both yes"),
    ({"quant": "int8"}, "quant int8 and load_in_4bit do not agree"),
    ({"bnb_4bit_quant_type": "nf5"}, "bnb_4bit_quant_type 'nf5' is not one of nf4, fp4"),
    ({"load_in_4bit": "yes please"}, "load_in_4bit is true or false"),
    ({"bnb_4bit_compute_dtype": "int8"}, "quant.compute 'int8' is not one of bf16, fp16, fp32"),
    ({"method": "full"}, "quant nf4: weights of few bits cannot be trained themselves"),
    ({"precision": "amp-bf16", "autocast": "fp16", "bf16": None}, "contradict each other"),
    ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage can only be uint8"),
])  # fmt: skip
def test_what_contradicts_itself_is_one_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(**changes)


def test_every_setting_of_memory_comes_back_from_the_config_that_it_is_written_as() -> None:
    work = Workload(
        kind="lora", model="gpt2", loop="memfit", quant="fp4", double_quant=True, quant_compute="fp16", autocast="fp16",
        kbit_prepare=False, precision="fp16", optimizer="lion-8bit", rank=4, lora_dropout=0.1, loss="chunked",
        loss_chunk=64, grad_checkpointing=True, offload=("activations",), alloc_conf="expandable_segments:True",
        target_modules=("c_attn",), clip_grad=False,
    )  # fmt: skip
    again = config_from(keys_of(work)).workload
    assert again == work
    resolved = parse_yaml(dump(config_from(keys_of(work))), "dumped")
    assert config_from(resolved).workload == work


# -- what is refused before anything is loaded -------------------------------------------------------------------------


def tiny(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"name": llama_folder(folder), "tokenizer": "bytes"}, "method": {"kind": "lora", "rank": 16},
        "data.source": text_file(folder), "max_seq_len": 32, "output_dir": str(folder / "out"), "max_steps": 6,
        "quant": {"kind": "nf4", "double": True}, "global_batch_size": 4, "micro_batch_size": 2,
        "learning_rate": 1e-2, "save_steps": 3, "logging_steps": 1, "logging.tensorboard": False,
    } | changes  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), [
    ({"device": "cpu"}, "quant nf4 needs a GPU"),
    ({"model.from_scratch": True}, "quant nf4 does not go with model.from_scratch"),
    ({"offload": ["weights"]}, "quant nf4 does not go with memory.offload weights"),
    ({"gradient_checkpointing": "selective"}, "does not go with memory.gradient_checkpointing selective"),
])  # fmt: skip
def test_what_no_machine_could_run_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prepare_job(config_from(tiny(tmp_path, **changes)), to_run=False)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="quant nf4 does not go with several processes"):
        prepare_job(config_from(tiny(tmp_path)), to_run=False)


def found_package(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(refusals, "find_spec", lambda name: None if version is None else object())
    monkeypatch.setattr(refusals, "versions", lambda: {"bitsandbytes": version})


@pytest.mark.parametrize(("version", "said"), [
    (None, "quant nf4 needs bitsandbytes"), ("0.45.5", "quant nf4 needs bitsandbytes 0.46, and 0.45.5 is here"),
])  # fmt: skip
def test_a_package_that_is_missing_or_too_old_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    found_package(monkeypatch, version)
    with pytest.raises(UsageError, match=said):
        prepare_job(config_from(tiny(tmp_path)))


def test_a_machine_without_a_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_package(monkeypatch, "0.50.2")
    monkeypatch.setattr(refusals, "_has_gpu", lambda: False)
    with pytest.raises(UsageError, match="quant nf4 needs a GPU"):
        prepare_job(config_from(tiny(tmp_path)))


def test_a_card_without_bf16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    (error,) = refusals.missing_gpu(read(), world_size=1)
    assert error.message == "quant nf4 in bf16: Tesla T4 has no bf16"
    half = read(bf16=None, fp16=True, bnb_4bit_compute_dtype="float16")
    assert half.workload.weight_precision == "fp16" and list(refusals.missing_gpu(half, world_size=1)) == []


def test_a_plan_for_a_card_without_bf16_is_the_same_refusal(tmp_path: Path) -> None:
    job = prepare_job(config_from(tiny(tmp_path, memory={"gpu": "T4"})), to_run=False)
    with pytest.raises(UsageError, match="quant nf4 in bf16: T4 has no bf16"):
        plan_training(job)


def test_16_bit_weights_on_a_card_without_bf16_are_told_in_the_first_lines(tmp_path: Path) -> None:
    job = prepare_job(config_from(tiny(tmp_path, quant="none", memory={"gpu": "T4"})), to_run=False)
    assert plan_training(job).in_lines()[0].startswith("note: no bf16 on T4: torch emulates it")


def test_bf16_over_a_checkpoint_that_is_quantised_is_autocast_over_16_bits(tmp_path: Path) -> None:
    work = config_from({"model": "unsloth/Llama-3.2-1B-bnb-4bit", "lora_r": 8, "bf16": True}).workload
    assert work.stored is not None and (work.weight_precision, work.autocast_type) == ("bf16", "bf16")


def test_the_lines_of_a_plan_tell_where_paged_states_lie(tmp_path: Path) -> None:
    job = prepare_job(config_from(tiny(tmp_path, optim="paged_adamw_8bit", memory={"gpu": "24GB"})), to_run=False)
    assert any("managed memory" in line for line in plan_training(job).in_lines())


def test_a_dry_run_plans_the_quantised_job_without_the_package(tmp_path: Path) -> None:
    job = prepare_job(config_from(tiny(tmp_path)), to_run=False)
    assert any("needs a GPU" in note for note in job.notes)
    assert "LoRA of rank 16 on nf4 weights" in job.in_lines()[0]
    work = workload_of(job)
    assert (work.quant, work.double_quant, work.loop, work.is_kbit_prepared) == ("nf4", True, "memfit", True)


def test_a_checkpoint_of_other_bits_is_not_continued(tmp_path: Path) -> None:
    job = prepare_job(config_from(tiny(tmp_path)), to_run=False)
    write_identity(tmp_path, job)
    assert check_checkpoint(tmp_path, job) == ()
    for quant in ({"kind": "fp4", "double": True}, {"kind": "nf4"}, "none", "int8"):
        other = dataclasses.replace(job, config=config_from(tiny(tmp_path, quant=quant)))
        with pytest.raises(InputError, match="was trained with method"):
            check_checkpoint(tmp_path, other)


# -- runs, on the CPU, by bitsandbytes' own kernels for it -------------------------------------------------------------


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import transformers

    monkeypatch.setattr(refusals, "_only_on_gpus", lambda *_: iter(()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    shape = {**LLAMA, "hidden_size": 64, "intermediate_size": 128}
    del shape["model_type"], shape["architectures"]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(tmp_path / "w")
    return tmp_path


def trained(folder: Path, out: str, **changes: Any) -> dict[int, float]:
    said = tiny(folder, **{"device": "cpu", "output_dir": str(folder / out), **changes})
    said["model"] = {"name": str(folder / "w"), "tokenizer": "bytes"}
    return train(prepare_job(config_from(said, name="tiny")), on_event=lambda event: None).losses


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported")
@pytest.mark.parametrize(("quant", "optimizer"), quick([("nf4", "paged-adamw"), ("int8", "lion-8bit")], [
    ("nf4", "adamw-fused"), ("nf4", "paged-adamw"), ("fp4", "adamw-8bit"), ("int8", "paged-adamw-8bit"),
    ("int8", "lion-8bit"),
]))  # fmt: skip
def test_a_resumed_run_is_the_one_that_was_not_stopped(on_cpu: Path, quant: str, optimizer: str) -> None:
    settings: dict[str, Any] = {"quant": quant, "optimizer": optimizer}
    whole = trained(on_cpu, "whole", **settings)
    shutil.copytree(on_cpu / "whole" / "step_3", on_cpu / "stopped" / "step_3")
    resumed = trained(on_cpu, "stopped", resume_from="latest", **settings)
    assert resumed == whole and whole[6] < whole[1]
    assert same(on_cpu / "whole" / "step_6", on_cpu / "stopped" / "step_6")
    saved = json.loads((on_cpu / "whole" / "step_6" / "adapter_config.json").read_text())
    assert saved["r"] == 16 and not (on_cpu / "whole" / "step_6" / "model.safetensors").exists()


@needs_bitsandbytes
def test_the_probe_leaves_nothing_of_small_states(on_cpu: Path) -> None:
    losses = [
        trained(on_cpu, f"probe{probe}", optimizer="adamw-8bit", **{"memory.probe": probe}) for probe in (False, True)
    ]
    assert losses[0] == losses[1]


@needs_bitsandbytes
def test_memory_that_runs_out_halves_the_rows_of_a_quantised_run_too(
    on_cpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.jobs.training.engine import MemfitTrainer

    whole, compute = trained(on_cpu, "whole"), MemfitTrainer.compute_loss

    def scarce(self: Any, model: Any, inputs: Any, **kwargs: Any) -> Any:
        if len(inputs["input_ids"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return compute(self, model, inputs, **kwargs)

    monkeypatch.setattr(MemfitTrainer, "compute_loss", scarce)
    halved = trained(on_cpu, "halved", **{"memory.probe": False})
    assert halved == pytest.approx(whole, rel=2e-2)


# -- a checkpoint that is quantised already ----------------------------------------------------------------------------


def stored_folder(folder: Path, said: dict[str, Any]) -> str:
    place = folder / "stored"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": said}))
    return str(place)


@pytest.mark.parametrize(("stored", "changes", "said"), [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, {"quant": "none"}, "does not take it"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {}, "is stored as int8"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quant": "none", "method": "full"}, "cannot be trained"),
])  # fmt: skip
def test_what_is_quantised_already_is_trained_by_lora_and_bitsandbytes_alone(
    tmp_path: Path, stored: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    model = {"name": stored_folder(tmp_path, stored), "tokenizer": "bytes"}
    with pytest.raises(UsageError, match=said):
        prepare_job(config_from(tiny(tmp_path, **{"model": model, **changes})), to_run=False)


PACKED = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("said", [
    {}, {"load_in_4bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"quant": {"kind": "nf4"}},
    {key: value for key, value in PACKED.items() if key != "quant_method"},
])  # fmt: skip
def test_a_config_may_say_what_is_stored_and_the_same_is_planned(tmp_path: Path, said: dict[str, Any]) -> None:
    model = {"name": stored_folder(tmp_path, PACKED), "tokenizer": "bytes"}
    job = prepare_job(config_from(tiny(tmp_path, **{"model": model, "quant": None, **said})), to_run=False)
    assert "weights stored as bitsandbytes nf4, double quantisation" in job.in_lines()[0]
    told = [note for note in job.notes if "stored as nf4, double quantisation, compute bf16, and loaded so" in note]
    assert len(told) == (1 if said else 0)
    assert config_from(job.config.to_json()).workload == job.config.workload  # as a run writes it


@pytest.mark.parametrize("said", [
    {"bnb_4bit_compute_dtype": "float32"}, {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"},
    {"load_in_4bit": True, "bnb_4bit_use_double_quant": False}, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    {"load_in_8bit": True},
])  # fmt: skip
def test_a_config_that_says_other_than_is_stored_is_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    model = {"name": stored_folder(tmp_path, PACKED), "tokenizer": "bytes"}
    with pytest.raises(UsageError, match="the checkpoint is stored as nf4, double quantisation, compute bf16"):
        config_from(tiny(tmp_path, **{"model": model, "quant": None, **said}))


def test_no_double_quantisation_beside_a_checkpoint_that_has_it_is_told(tmp_path: Path) -> None:
    model = {"name": stored_folder(tmp_path, PACKED), "tokenizer": "bytes"}
    (note,) = config_from(tiny(tmp_path, model=model, quant={"double": False})).remarks
    assert note.startswith("quant.double False has no effect: the checkpoint is stored as nf4, double quantisation")


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_checkpoint_that_bitsandbytes_has_quantised_is_trained_as_it_is(on_cpu: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how: dict[str, Any] = (
        {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        on_cpu / "w", quantization_config=BitsAndBytesConfig(**how), device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    loaded.save_pretrained(on_cpu / "packed")
    shutil.move(on_cpu / "w", on_cpu / "plain")
    shutil.move(on_cpu / "packed", on_cpu / "w")
    losses = trained(on_cpu, "out", quant="none")
    shutil.move(on_cpu / "w", on_cpu / "packed")
    shutil.move(on_cpu / "plain", on_cpu / "w")
    again = trained(on_cpu, "again", quant={"kind": kind, "compute": "fp32"} if kind == "nf4" else kind)
    assert losses == pytest.approx(again, rel=1e-3) and losses[6] < losses[1]

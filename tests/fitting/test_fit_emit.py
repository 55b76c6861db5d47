"""`--emit`: what is written can be run, and holds every change."""

from __future__ import annotations

import ast
import inspect
import json
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

import memfit
from memfit.errors import UsageError
from memfit.fitting.emit import emit
from memfit.fitting.fit import Fitted
from memfit.gpus import find_gpu
from memfit.jobs.training.batch import resolve_batch
from memfit.jobs.training.config_file import config_from, load_config, parse_yaml

pytestmark = pytest.mark.usefixtures("shared_traces")

BLOCKS = str(Path(__file__).with_name("gpt2_of_two_blocks"))
JOB: dict[str, Any] = {
    "kind": "lora", "model": BLOCKS, "batch_size": 8, "seq_len": 512, "global_batch": 16, "rank": 8, "gpu": "1300MiB",
    "keep": (
        "selective_checkpointing", "offload", "seq_len", "rank", "adapter_dtype", "attention", "precision", "quant",
    ),
}  # fmt: skip


@cache
def fitted() -> Fitted:
    answer = memfit.fit(**JOB)
    assert answer.answer == "fits"
    assert answer.changes
    return answer


def test_the_yaml_is_a_config_that_memfit_train_reads(tmp_path: Path) -> None:
    path = tmp_path / "fitted.yaml"
    path.write_text(emit(fitted(), "yaml"), encoding="utf-8")

    config, work = load_config(str(path)), fitted().fitted

    sizes = resolve_batch(config.batch)
    assert (sizes.micro_batch_size, sizes.gradient_accumulation_steps) == (work.batch_size, work.grad_accum)
    assert sizes.global_batch_size == 16
    assert (config.workload.kind, config.workload.rank, config.data.max_seq_len) == ("lora", 8, 512)
    assert (config.workload.loss, config.workload.optimizer) == (work.loss, work.optimizer)
    assert config.workload.checkpointing == ("full" if work.grad_checkpointing else "none")
    assert config.workload.alloc_conf == work.alloc_conf
    assert config.remarks == ()


def test_the_config_plans_for_the_same_card(tmp_path: Path) -> None:
    path = tmp_path / "fitted.yaml"
    path.write_text(emit(fitted(), "yaml"), encoding="utf-8")

    said = load_config(str(path)).memory.gpu

    assert said is not None
    assert memfit.predict(kind="forward", model="gpt2", seq_len=8, gpu=said).gpu == fitted().gpu


def keywords(source: str, function: str) -> dict[str, Any]:
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
    ]
    (call,) = calls
    return {word.arg: word.value for word in call.keywords if word.arg}


def test_the_python_file_compiles_and_its_training_arguments_are_real() -> None:
    from transformers import TrainingArguments

    source = emit(fitted(), "python")

    compile(source, "fitted.py", "exec")
    given = {name: value for name, value in keywords(source, "TrainingArguments").items() if name != "output_dir"}
    settings = {name: ast.literal_eval(value) for name, value in given.items()}
    made = TrainingArguments(output_dir="unused", report_to=[], use_cpu=True, **settings)
    work = fitted().fitted
    assert made.per_device_train_batch_size * made.gradient_accumulation_steps == 16
    assert made.gradient_checkpointing == work.grad_checkpointing


def test_the_python_file_calls_peft_with_settings_that_it_has() -> None:
    from peft import LoraConfig

    source = emit(fitted(), "python")

    assert set(keywords(source, "LoraConfig")) <= set(inspect.signature(LoraConfig).parameters)
    assert ("use_chunked_loss(model" in source) == (fitted().fitted.loss == "chunked")


def test_the_flags_are_fields_of_training_arguments() -> None:
    from transformers import TrainingArguments

    text = emit(fitted(), "args")

    fields = inspect.signature(TrainingArguments).parameters
    flags = [line.split()[0].removeprefix("--") for line in text.splitlines() if line.strip().startswith("--")]
    assert flags
    assert set(flags) <= set(fields)


def test_what_the_trainer_has_no_switch_for_is_refused_with_the_form_that_has() -> None:
    answer = memfit.fit(kind="lora", model="gpt2", batch_size=1, seq_len=512, offload=("weights",), gpu="8GiB")

    with pytest.raises(UsageError, match="no switch for weights on the host") as told:
        emit(answer, "python")
    assert "--emit yaml" in str(told.value.hint)
    assert "weights" in emit(answer, "yaml")


@pytest.mark.parametrize("form", ["args", "python"])
def test_pruning_is_written_as_a_command_of_memfit(form: str) -> None:
    answer = memfit.fit(kind="prune", model="gpt2", nsamples=8, seq_len=128, gpu="8GiB")

    text = emit(answer, form)

    assert "prune" in text
    assert "--nsamples" in text
    with pytest.raises(UsageError, match="--emit yaml"):
        emit(answer, "yaml")


MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_experts": 4,
    "moe_intermediate_size": 64, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # peft's own, of experts
@pytest.mark.parametrize("asked", [None, ("all-linear",)])
def test_adapters_are_written_on_the_layers_that_were_planned(asked: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from torch import device
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    job = {"kind": "lora", "model": str(tmp_path), "seq_len": 64, "rank": 4, "target_modules": asked, "gpu": "24GB"}
    answer = memfit.fit(**job)
    (call,) = (line for line in emit(answer, "python").splitlines() if "config = LoraConfig(" in line)
    config = eval(call.partition("= ")[2], {"LoraConfig": LoraConfig})
    with device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        adapted = get_peft_model(model, config)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained == answer.before.trainable_parameters
    told = any("the experts have no adapters" in note for note in memfit.predict(**job).notes)
    assert told == (asked is None)


@pytest.mark.parametrize("kind", ["forward", "generate"])
def test_running_a_model_is_written_as_python_that_compiles(kind: str) -> None:
    tokens = {"new_tokens": 4} if kind == "generate" else {}
    answer = memfit.fit(kind=kind, model="gpt2", batch_size=2, seq_len=64, gpu="8GiB", **tokens)

    compile(emit(answer, "python"), "run.py", "exec")


def test_nothing_is_written_where_nothing_fits() -> None:
    answer = memfit.fit(kind="forward", model="gpt2-xl", seq_len=8, gpu="1GiB", keep=("precision", "alloc_conf"))

    with pytest.raises(UsageError, match="nothing fits"):
        emit(answer, "args")


def test_flags_of_a_sharded_job_are_read_by_the_trainers_own_parser(tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    answer = memfit.fit(kind="lora", model="pythia-14m", seq_len=128, world_size=2, parallel="fsdp2", gpu="8GiB")

    command = "".join(line for line in emit(answer, "args").splitlines(keepends=True) if not line.startswith("#"))
    words = shlex.split(command.replace("\\\n", " "))
    flags = [*words[words.index("train.py") + 1 :], "--output_dir", str(tmp_path), "--use_cpu", "True"]
    (read,) = HfArgumentParser(cast("Any", TrainingArguments)).parse_args_into_dataclasses(flags)
    assert read.fsdp is True
    assert read.fsdp_config["version"] == 2


@cache
def pruned() -> Fitted:
    return memfit.fit(
        kind="prune", model="gpt2", nsamples=8, seq_len=128, sparsity=0.6, precision="fp32",
        alloc_conf="expandable_segments:True", gpu="8GiB",
    )  # fmt: skip


@pytest.mark.parametrize("form", ["args", "python"])
def test_nothing_of_a_pruning_job_is_lost(form: str) -> None:
    text = emit(pruned(), form)

    words = text.split() if form == "args" else constants(text)
    for said in ("0.6", "fp32", "8", "128", str(pruned().fitted.max_gpu_memory), "--save"):
        assert said in words
    assert "expandable_segments:True" in text


def constants(source: str) -> list[object]:
    return [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]


def test_the_flags_of_a_pruning_job_are_those_of_memfit_prune() -> None:
    from memfit.fitting.emit import pruning_flags

    told = subprocess.run(
        [sys.executable, "-m", "memfit", "prune", "--help"], capture_output=True, text=True, check=True, timeout=300
    ).stdout

    assert all(flag in told for flag in pruning_flags(pruned().fitted))


def test_a_card_known_by_its_label_is_the_same_card_in_the_config(tmp_path: Path) -> None:
    answer = memfit.fit(kind="lora", model="pythia-14m", seq_len=128, gpu="16GB")
    path = tmp_path / "fitted.yaml"
    path.write_text(emit(answer, "yaml"), encoding="utf-8")

    said = load_config(str(path)).memory.gpu

    assert said is not None
    assert find_gpu(said) == answer.gpu


def test_a_config_of_a_model_without_a_tokenizer_passes_a_dry_run(tmp_path: Path) -> None:
    from memfit.cli.main import main

    answer = memfit.fit(kind="train", model="gsa-512m", seq_len=128, gpu="16GB")
    path = tmp_path / "fitted.yaml"
    path.write_text(emit(answer, "yaml"), encoding="utf-8")

    assert main(["train", "--config", str(path), "--dry-run"]) == 0


def test_a_config_file_of_a_model_becomes_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    shape = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    answer = memfit.fit(kind="forward", model=str(tmp_path / "config.json"), seq_len=64, gpu="8GiB")

    assert f"from_pretrained(\n        {str(tmp_path)!r}," in emit(answer, "python")


def test_a_switch_without_a_value_stands_alone() -> None:
    answer = memfit.fit(kind="forward", model="pythia-14m", batch_size=2, seq_len=64, padding=True, gpu="8GiB")

    lines = [line.strip(" \\") for line in emit(answer, "args").splitlines()]
    assert "--padding" in lines


def test_quantised_weights_are_written_in_every_form() -> None:
    answer = memfit.fit(kind="qlora", model=BLOCKS, batch_size=1, seq_len=256, gpu="24GB", margin=0.0)
    source = emit(answer, "python")
    compile(source, "run.py", "exec")

    loaded = "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True"
    assert loaded in source
    assert "prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)" in source
    assert "optim='paged_adamw_32bit'" in source
    flags = emit(answer, "args")
    assert f"# train.py itself loads with quantization_config=BitsAndBytesConfig({loaded}" in flags
    assert "then prepare_model_for_kbit_training" in flags and "--optim paged_adamw_32bit" in flags
    config = config_from(parse_yaml(emit(answer, "yaml"), "emitted"))
    assert config.workload.is_kbit_prepared and config.workload.double_quant and config.workload.quant_compute == "bf16"
    assert config.workload.optimizer == "paged-adamw" and config.workload.checkpointing == "full"

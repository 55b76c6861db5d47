"""What a lever says is how it is switched on: the Trainer, peft, generate, memfit and its configs take every word."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from memfit.fitting.levers import Lever, apply, levers_for
from memfit.jobs.settings import flag
from memfit.jobs.training.config_file import config_from
from memfit.jobs.workload import Workload

TRAIN = Workload(kind="train", model="gpt2", batch_size=4, precision="fp32", world_size=2, attention="eager")
LORA = Workload(kind="lora", model="gpt2", batch_size=4, grad_accum=2, rank=32, precision="bf16")
ALONE = Workload(kind="train", model="gpt2", batch_size=4, precision="fp32")
GENERATE = Workload(kind="generate", model="gpt2", batch_size=4, decoding="beam", num_beams=4, new_tokens=128)
JOBS = [TRAIN, LORA, ALONE, Workload(kind="forward", model="gpt2", batch_size=4, precision="fp32"), GENERATE]
PRUNE = Workload(kind="prune", model="gpt2", precision="fp32", seq_len=2048)


def levers() -> list[tuple[Workload, Lever]]:
    return [(work, lever) for work in (*JOBS, PRUNE) for lever in levers_for(work)]


def arguments_in(said: str) -> dict[str, Any]:
    """`name=value, name=value`, up to a semicolon; nothing where the words are of another kind."""
    said = said.partition(";")[0].rpartition(", or ")[2]
    if not re.match(r"[a-z_0-9]+=", said):
        return {}
    (call,) = ast.parse(f"f({said})").body
    assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
    return {str(word.arg): ast.literal_eval(word.value) for word in call.value.keywords}


TOLD = [(work, lever) for work, lever in levers() if work.trains and arguments_in(lever.how["trainer"])]


def test_these_levers_are_arguments_of_the_trainer() -> None:
    assert {re.sub(r" \d+$", " N", lever.name) for _, lever in TOLD} == {
        "fused optimizer", "8-bit AdamW", "chunked loss", "micro-batch N", "checkpointing", "FSDP2", "bf16 autocast",
    }  # fmt: skip


@pytest.mark.parametrize(("work", "lever"), TOLD, ids=[f"{work.kind}, {lever.name}" for work, lever in TOLD])
def test_training_arguments_take_them(work: Workload, lever: Lever, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    said = arguments_in(lever.how["trainer"])
    taken = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **said)
    assert all(name in {field.name for field in dataclasses.fields(taken)} for name in said)
    after = apply(work, [lever])
    if "batch_size" in lever.settings:
        assert taken.per_device_train_batch_size == after.batch_size
        assert taken.gradient_accumulation_steps == after.grad_accum
    if "grad_checkpointing" in lever.settings:
        assert (taken.gradient_checkpointing, taken.gradient_checkpointing_kwargs) == (True, {"use_reentrant": False})


def test_peft_and_generate_take_theirs() -> None:
    from peft import LoraConfig
    from transformers import GenerationConfig

    ranks = [lever for lever in levers_for(LORA) if lever.group == "rank"]
    assert [lever.how["trainer"] for lever in ranks] == ["LoraConfig(r=16)", "LoraConfig(r=8)"]
    for lever in ranks:
        assert eval(lever.how["trainer"], {"LoraConfig": LoraConfig}).r == lever.settings["rank"]
    of_generate = [each for each in levers_for(GENERATE) if "model.generate(..., " in each.how["trainer"]]
    assert {each.group for each in of_generate} == {"beams", "new tokens", "cache"}
    for lever in of_generate:
        said = arguments_in(lever.how["trainer"].removeprefix("model.generate(..., ").removesuffix(")"))
        taken = GenerationConfig(**said)
        assert all(getattr(taken, name) == value for name, value in said.items())


@pytest.mark.parametrize("kind", ["train", "lora", "forward", "generate", "prune"])
def test_memfit_has_every_flag_that_a_lever_names(kind: str) -> None:
    known = {flag(field.name) for field in dataclasses.fields(Workload)} | {"--dtype"}
    of_kind = [lever for work, lever in levers() if work.kind == kind]
    named = {lever.name: re.findall(r"--[a-z-]+", lever.how["memfit"]) for lever in of_kind}
    assert sum(map(len, named.values())) >= 3
    assert {name: words for name, words in named.items() if not set(words) <= known} == {}
    for work in (TRAIN, LORA):
        for lever in levers_for(work):
            (first, *_) = re.findall(r"--[a-z-]+", lever.how["memfit"])
            assert first in {flag(name) for name in lever.settings}, lever.name


def test_a_config_has_every_key_that_a_lever_names() -> None:
    keys = {
        key.strip(): (value or "").strip()
        for work, lever in levers()
        if work.trains
        for said in re.findall(r"\(([a-z_.]+(?:: [^()]+)?(?:, [a-z_]+)*)\)$", lever.how["memfit"])
        for key, _, value in (each.partition(":") for each in re.split(r", (?![^\[]*\])", said))
    }
    assert {"method.rank", "data.max_seq_len", "memory.alloc_conf", "micro_batch_size", "parallel"} <= set(keys)
    values = {"method.rank": 8, "data.max_seq_len": 128, "memory.alloc_conf": "expandable_segments:True"}
    counts = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    for key, said in keys.items():
        value: Any = values.get(key, counts.get(key, said))
        if isinstance(value, str) and value.startswith("["):
            value = value.strip("[]").split(", ")
        document = {"model.name": "gpt2", "data.source": "play.txt", key: value == "true" or value}
        config_from(document, name="lever")


def test_what_a_lever_takes_is_not_halved_below_the_least() -> None:
    assert [lever.settings["rank"] for lever in levers_for(LORA) if lever.group == "rank"] == [16, 8]
    short = Workload(kind="train", model="gpt2", seq_len=256)
    assert [lever.settings["seq_len"] for lever in levers_for(short) if lever.group == "sequence"] == [192, 128]

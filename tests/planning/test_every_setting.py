"""For every kind of job and every setting: another value changes the plan, is refused, or is noted in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from memfit.errors import MemfitError
from memfit.jobs.settings import KINDS, kinds_that_read, setting_types
from memfit.jobs.workload import Workload
from memfit.planning.predict import Plan, predict

MODEL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    **{kind: {"batch_size": 2, "seq_len": 64} for kind in ("forward", "train", "lora")},
    "generate": {"batch_size": 2, "seq_len": 64, "new_tokens": 4},
    "prune": {"seq_len": 64, "nsamples": 8},
}
TEXTS = {
    "sparsity_type": ["2:4"], "dataset": ["c4"], "max_gpu_memory": ["64MiB", "3MiB"],
    "alloc_conf": ["expandable_segments:True"], "adapter_config": ["bias=all"], "image_size": ["64x64"],
}  # fmt: skip
LISTS = {"target_modules": [("q_proj",)]}
SHARES = [0.25]
NUMBERS = [3]
BESIDE: dict[str, dict[str, Any]] = {
    "num_beams": {"decoding": "beam"}, "loss_chunk": {"loss": "chunked"}, "parallel": {"world_size": 2},
    "gradient_as_bucket_view": {"world_size": 2}, "adapter_dtype": {"precision": "fp32"},
    "nsamples": {"method": "magnitude"}, "dataset": {"method": "magnitude"}, "seq_len": {"method": "magnitude"},
    "sparsity": {"sparsity_type": "2:4"}, "double_quant": {"quant": "nf4"}, "quant_compute": {"quant": "fp4"},
    "kbit_prepare": {"quant": "torchao-int8"},
}  # fmt: skip
"""What makes a setting count, or not count any more: it is asked with this too."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """By the number of their blocks."""
    folders: dict[int, Path] = {blocks: tmp_path_factory.mktemp("tiny") for blocks in (1, 2)}
    for blocks, folder in folders.items():
        (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": blocks}))
    return {blocks: str(folder) for blocks, folder in folders.items()}


def values_of(name: str) -> list[Any]:
    """Made from its type, so that a new setting is asked about too."""
    kind = setting_types()[name]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is tuple:
        (inner, *_) = get_args(kind)
        return LISTS.get(name) or [(each,) for each in get_args(inner)]
    if kind is str:
        return TEXTS[name]
    return {bool: [True, False], int: NUMBERS, float: SHARES}[kind]


def cases() -> Iterator[Any]:
    for kind in KINDS:
        for field in dataclasses.fields(Workload):
            if field.name not in ("kind", "model"):
                like = {"lora": "train", "generate": "forward"}.get(kind)
                alike = like in kinds_that_read([field.name])
                alike |= field.name == "adapter"  # of which there are many: test_loops_as_written.py has some
                yield pytest.param(
                    kind, field.name, id=f"{kind}-{field.name}", marks=[pytest.mark.slow] if alike else []
                )


@cache
def planned(asked: str) -> Plan | MemfitError:
    try:
        return predict(trace_cache=False, **json.loads(asked))
    except MemfitError as refusal:
        return refusal


def told(plan: Plan) -> dict[str, Any]:
    """All of a plan but the settings it shows back."""
    document = plan.to_json()
    said = {key: document[key] for key in ("peak", "breakdown", "phases", "largest", "notes", "smallest_gpu_bytes")}
    return {
        **said,
        "host": document.get("host"),
        "events": len(plan.trace),
        "requested": int(sum(plan.trace.requested)),
    }


@pytest.mark.parametrize(("kind", "name"), list(cases()))
def test_a_setting_changes_the_plan_or_is_refused_or_noted(kind: str, name: str, models: dict[int, str]) -> None:
    model = models[2 if name == "compile_blocks" else 1]  # a list of one module is not taken for blocks
    for beside in ({}, *([BESIDE[name]] if name in BESIDE else [])):
        base = {"kind": kind, "model": model, **SIZES[kind], **beside}
        before = planned(json.dumps(base))
        if isinstance(before, MemfitError):
            continue  # what stands beside it is already refused
        applied = Workload.from_mapping(base)
        usual = applied.document().get(name, getattr(applied, name))
        for value in values_of(name):
            after = planned(json.dumps({**base, name: value}))
            if value == usual or isinstance(after, MemfitError):
                continue
            silent = told(after) == told(before) and not any(f"--{name.replace('_', '-')}" in n for n in after.notes)
            assert not silent, f"{name} {value} is dropped in silence: {beside}"

"""Models of every family of presets in miniature, and what it takes for a few of their blocks to tell all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.comparison import format_comparison

from memfit.analysis.compare import compare
from memfit.events import Action, Trace
from memfit.jobs.build import Prepared, prepare_without_memory
from memfit.jobs.workload import Workload
from memfit.models.presets import presets
from memfit.planning.few import blocks_of
from memfit.planning.on_trace import trace_job
from memfit.planning.traced import Traced, label, loss_modules_of, trace_workload
from memfit.platform import H200

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "n_embd": 64, "word_embed_proj_dim": 64, "intermediate_size": 96,
    "ffn_dim": 96, "moe_intermediate_size": 48, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
    "head_dim": 16, "query_pre_attn_scalar": 16, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "sliding_window": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "num_heads": 4, "d_ffn": 96, "d_ff": 96, "k_base": 8, "k_min": 2,
    "k_max": 16,
}  # fmt: skip
ALL_HEADS = ("phi", "phi3", "deepseek_v2")  # keys and values for every head
PERIODS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
FAMILIES = sorted({preset.model_type for preset in presets()})


def shrunk(family: str, layers: int) -> dict[str, Any]:
    """The first preset of the family, each size that it states made small."""
    config = dict(next(preset.config for preset in presets() if preset.model_type == family))
    config |= {name: size for name, size in SMALL.items() if config.get(name) is not None}
    names = ("n_layer", "n_layers", "num_layers", "num_hidden_layers")
    config[next(name for name in names if name in config)] = layers
    if "max_window_layers" in config:
        config["max_window_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][i % PERIODS[family]] for i in range(layers)]
    if family in ALL_HEADS:
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def layers_of(family: str) -> int:
    """One unit more than can be told from; the last of a pattern may be cut short."""
    return {"gemma2": 9, "gpt_oss": 10, "gemma3_text": 26}.get(family, 5)


@dataclass(frozen=True)
class Miniatures:
    parent: Path

    def folder(self, family: str, layers: int | None = None, **changes: Any) -> str:
        config = shrunk(family, layers or layers_of(family)) | changes
        folder = self.parent / f"{family}-{layers or layers_of(family)}-{len(changes)}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    def work(self, family: str, layers: int | None = None, **settings: Any) -> Workload:
        eager = {"attention": "eager"} if family == "gpt_oss" else {}
        usual = {"kind": "train", "batch_size": 2, "seq_len": 24, **eager}
        return Workload(model=self.folder(family, layers), **{**usual, **settings})


def all_blocks(work: Workload) -> tuple[Trace, Prepared]:
    job = prepare_without_memory(work)
    trace = trace_job(job, H200)
    label(trace, loss_modules_of(job.model))
    return trace, job


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    """Every event with all that is known of it; a block is known by how many were born before it."""
    births: dict[int, int] = {}
    made: list[tuple[Any, ...]] = []
    for action, subject in trace.events():
        if action == Action.MARK:
            made.append(("mark", trace.marks[subject].phase, trace.marks[subject].step))
        elif action == Action.ALLOC:
            births[subject] = len(births)
            labels = trace.op(subject), trace.module(subject), trace.category(subject)
            made.append(("alloc", births[subject], trace.requested[subject], trace.streams[subject], *labels))
        else:
            made.append((Action(action).name, births.get(subject)))
    return made


def first_difference(made: Trace, full: Trace) -> str:
    if not compare(made, full).same:
        return format_comparison(made, full, limit=4)
    return str(next((a, b) for a, b in zip(rows(made), rows(full), strict=True) if a != b))


def check(work: Workload) -> tuple[Traced, Trace]:
    made = trace_workload(work, H200)
    full, job = all_blocks(work)
    if rows(made.trace) != rows(full):
        pytest.fail(f"not as a full trace: {first_difference(made.trace, full)}")
    assert made.parameters == job.parameters
    assert made.trainable_parameters == (sum(p.numel() for p in job.trainable) if work.trains else 0)
    return made, full


def check_extended(work: Workload) -> None:
    """And it was extended, not traced in full."""
    blocks, _ = blocks_of(work.source, work.attention)
    assert blocks is not None and blocks.worthwhile
    made, _ = check(work)
    assert not any("one by one" in note for note in made.notes)

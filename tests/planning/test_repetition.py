"""A few traced blocks tell all of them: the extended stream is the full stream, event by event.

Every family of presets is planned in miniature, its preset's settings with small sizes, twice: as memfit plans it, from
four units of blocks, and from a trace of every block.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from miniatures import (
    FAMILIES,
    Miniatures,
    check,
    check_extended,
)
from plans import document
from support.quick import quick

from memfit.jobs import run as plain
from memfit.jobs.build import prepare_without_memory
from memfit.jobs.workload import Workload
from memfit.planning import on_trace as tracing_jobs
from memfit.planning.few import blocks_of
from memfit.planning.predict import predict
from memfit.planning.traced import trace_workload
from memfit.platform import H200


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Miniatures:
    return Miniatures(tmp_path_factory.mktemp("families"))


# -- families and kinds of jobs ----------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward"},
    "train": {"kind": "train"},
    "checkpointed": {"kind": "train", "grad_checkpointing": True, "clip_grad": True, "grad_accum": 2},
    "amp": {"kind": "train", "precision": "amp-bf16"},
    "lora": {"kind": "lora", "lora_dropout": 0.1, "grad_checkpointing": True, "rank": 4},
    "trainer": {"kind": "train", "loop": "trainer", "precision": "amp-bf16"},
    "generate": {"kind": "generate", "new_tokens": 3},
    "amp checkpointed": {"kind": "train", "precision": "amp-bf16", "grad_checkpointing": True},
    "amp fp16": {"kind": "train", "precision": "amp-fp16", "clip_grad": True},
    "amp forward": {"kind": "forward", "precision": "amp-bf16"},
    "lora amp trainer": {"kind": "lora", "loop": "trainer", "precision": "amp-bf16", "grad_checkpointing": True},
    "padded": {"kind": "train", "padding": True, "batch_size": 3},
    "batch of 1": {"kind": "train", "batch_size": 1, "optimizer": "sgd"},
    "single": {"kind": "train", "optimizer": "adamw-single", "precision": "fp32"},
    "fused": {"kind": "train", "optimizer": "adamw-fused", "clip_grad": True},
    "beam": {"kind": "generate", "new_tokens": 3, "decoding": "beam", "num_beams": 2},
    "static cache": {"kind": "generate", "new_tokens": 3, "cache": "static"},
    "static cache of beams": {"kind": "generate", "new_tokens": 3, "cache": "static", "decoding": "beam"},
    "odd beams": {"kind": "generate", "new_tokens": 3, "decoding": "beam", "num_beams": 5, "batch_size": 3},
    "eager": {"kind": "train", "attention": "eager"},
    "adafactor": {"kind": "lora", "optimizer": "adafactor", "rank": 4},
}
EVERY_KIND = ("checkpointed", "amp", "lora", "trainer", "generate")
SAMPLES = [
    ("llama", "padded"), ("llama", "adafactor"), ("llama", "static cache of beams"), ("gpt2", "single"),
    ("mistral", "amp forward"), ("gpt_neox", "eager"),
]  # fmt: skip
MORE_SAMPLES = [
    ("llama", "lora amp trainer"), ("llama", "static cache"), ("llama", "odd beams"), ("gpt2", "beam"),
    ("qwen2", "batch of 1"), ("qwen3", "fused"), ("gemma2", "generate"), ("phi", "amp fp16"),
    ("qwen3_moe", "generate"), ("mistral", "generate"), ("mixtral", "fused"), ("gemma2", "amp"), ("phi3", "trainer"),
    ("opt", "amp checkpointed"), ("deepseek_v2", "generate"),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_of_every_family_repeats(small: Miniatures, family: str) -> None:
    check_extended(small.work(family, kind="forward"))


@pytest.mark.parametrize("family", quick(("basics", "gpt2", "qwen3_moe"), FAMILIES))
def test_training_of_every_family_repeats(small: Miniatures, family: str) -> None:
    check_extended(small.work(family, kind="train"))


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("family", quick(["llama"], ["llama", "gpt2"]))
def test_every_kind_of_job_repeats(small: Miniatures, family: str, kind: str) -> None:
    check_extended(small.work(family, **KINDS[kind]))


@pytest.mark.parametrize(("family", "kind"), quick(SAMPLES, SAMPLES + MORE_SAMPLES))
def test_kinds_of_jobs_of_other_families_repeat(small: Miniatures, family: str, kind: str) -> None:
    check_extended(small.work(family, **KINDS[kind]))


# -- numbers of blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [5, 12])
def test_any_number_of_blocks_from_five_on_is_made_from_four(small: Miniatures, layers: int) -> None:
    check_extended(small.work("llama", layers, kind="forward"))


@pytest.mark.parametrize("layers", [10, 13])
def test_blocks_left_over_by_the_pattern_come_last(small: Miniatures, layers: int) -> None:
    work = small.work("gemma2", layers, kind="forward", batch_size=1)
    blocks, _ = blocks_of(work.source, work.attention)
    assert blocks is not None
    assert (blocks.period, blocks.units, blocks.traced) == (2, -(-layers // 2), 8 - layers % 2)
    check_extended(work)


@pytest.mark.parametrize(("family", "layers"), [("llama", 4), ("llama", 1), ("gemma2", 7), ("gpt2", 2)])
def test_fewer_than_five_units_are_all_traced(small: Miniatures, family: str, layers: int) -> None:
    work = small.work(family, layers, kind="forward")
    blocks, _ = blocks_of(work.source, work.attention)
    assert blocks is None or not blocks.worthwhile
    made, _ = check(work)
    assert not [note for note in made.notes if "traced" in note]


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["plain", "trainer"])
def test_the_last_step_of_a_training_is_not_traced(
    small: Miniatures, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    asked: list[int] = []
    usual = tracing_jobs.run_job

    def run_job(*args: Any, steps: int) -> None:
        asked.append(steps)
        usual(*args, steps=steps)

    monkeypatch.setattr(tracing_jobs, "run_job", run_job)
    trace = trace_workload(small.work("llama", loop=loop), H200).trace
    assert asked == [2]
    assert {mark.step for mark in trace.marks if mark.phase == "step"} == {1, 2, 3}


class Hoarder(torch.optim.SGD):
    """Keeps something of every step."""

    def step(self, closure: Any = None) -> None:
        self.kept = [*getattr(self, "kept", ()), torch.zeros_like(self.param_groups[0]["params"][0])]
        super().step(closure)


def test_steps_that_do_not_repeat_are_all_traced(small: Miniatures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "optimizer_of", lambda _: Hoarder)
    _, full = check(small.work("gpt2"))
    kept = [b for b in range(len(full.requested)) if "zeros_like" in full.op(b) and full.category(b) == "optimizer"]
    assert len(kept) == 3


# -- blocks that are not alike -----------------------------------------------------------------------------------------

NOT_ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "a dense block among experts": ("qwen3_moe", {"mlp_only_layers": [2]}),
    "three dense blocks first": ("deepseek_v2", {"first_k_dense_replace": 3}),
    "a pattern that breaks": (
        "gemma2",
        {"layer_types": [*2 * ["sliding_attention"], "full_attention", *9 * ["sliding_attention"]]},
    ),
}


def not_alike(small: Miniatures, which: str) -> Workload:
    family, changes = NOT_ALIKE[which]
    layers = len(changes.get("layer_types", range(12)))
    return Workload(kind="forward", model=small.folder(family, layers, **changes), batch_size=2, seq_len=24)


@pytest.mark.parametrize("which", NOT_ALIKE)
def test_blocks_that_are_not_alike_are_all_traced_and_the_plan_says_so(small: Miniatures, which: str) -> None:
    work = not_alike(small, which)
    assert blocks_of(work.source, work.attention)[0] is None
    made, _ = check(work)
    assert any("one by one" in note for note in made.notes)


STABLELM: dict[str, Any] = {
    "model_type": "stablelm", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64, "qk_layernorm": True,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


TWO_LISTS: dict[str, Any] = {
    "model_type": "hrm_text", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [STABLELM, TWO_LISTS],
    ids=["more norms for heads than blocks", "two lists of blocks"],
)
def test_lists_that_are_not_the_only_blocks_do_no_harm(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip(f"transformers.models.{config['model_type']}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(Workload(kind="forward", model=str(tmp_path), batch_size=2, seq_len=24))


RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"intermediate_size": 128, "state_size": 8},
    "bamba": {
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_d_state": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", quick(["train"], ["forward", "train"]))
@pytest.mark.parametrize("family", RECURRENT)
def test_a_config_that_derives_the_kinds_of_its_blocks_is_shortened(tmp_path: Path, family: str, kind: Any) -> None:
    pytest.importorskip(f"transformers.models.{family}")
    shared = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 5, "bos_token_id": 0, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **shared, **RECURRENT[family]}))
    check_extended(Workload(kind=kind, model=str(tmp_path), batch_size=2, seq_len=24, attention="eager"))


@pytest.fixture
def an_odd_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block that is built like the others and does something else."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    usual = LlamaAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 2:
            hidden_states = hidden_states * 2
        return usual(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", forward)


@pytest.mark.usefixtures("an_odd_block")
def test_blocks_that_only_look_alike_are_all_traced_and_the_plan_says_so(small: Miniatures) -> None:
    made, _ = check(small.work("llama", kind="train"))
    assert any(note.startswith("all 5 blocks were traced one by one: inner units") for note in made.notes)


@pytest.mark.usefixtures("an_odd_block")
def test_the_note_reaches_the_plan(small: Miniatures) -> None:
    plan = predict(small.work("llama", kind="forward"))
    assert any("one by one" in note for note in plan.to_json()["notes"])


# -- what an extended trace holds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "layers"), [("llama", 12), ("gpt2", 12), ("gemma2", 13)])
def test_every_weight_of_every_block_is_there_once_under_its_name(small: Miniatures, family: str, layers: int) -> None:
    work = small.work(family, layers, kind="forward")
    trace = trace_workload(work, H200).trace
    job = prepare_without_memory(work)
    named = [name for name, _ in (*job.model.named_parameters(), *job.model.named_buffers())]
    loaded = Counter(trace.module(b) for b in range(len(trace.requested)) if trace.category(b) == "weights")
    assert sum(".7." in name for name in loaded) == sum(".7." in name for name in named) > 0
    assert loaded == Counter(named)


def test_what_each_block_keeps_for_backward_is_under_its_own_name(small: Miniatures) -> None:
    trace = trace_workload(small.work("llama", 12), H200).trace
    kept = Counter(
        tuple(trace.module(b).split(".")[2:3]) for b in range(len(trace.requested))
        if trace.category(b) == "activations" and trace.module(b).startswith("model.layers.")
    )  # fmt: skip
    assert len(kept) == 12
    assert len({count for layer, count in kept.items() if layer not in (("0",), ("11",))}) == 1


@pytest.mark.parametrize("layers", [5, 12])
def test_buffers_with_an_entry_for_each_gradient_grow_with_the_blocks(small: Miniatures, layers: int) -> None:
    """Clipping makes partial sums of all gradients in one buffer (one each: all are small), and stacks their norms."""
    work = small.work("gpt2", layers, clip_grad=True, precision="fp32")
    trace = trace_workload(work, H200).trace
    weights = len(list(prepare_without_memory(work).model.parameters()))
    large = Counter(trace.op(b) for b in range(len(trace.requested)) if trace.requested[b] == 4 * weights)
    stacked = {trace.requested[b] for b in range(len(trace.requested)) if "stack" in trace.op(b)}
    assert stacked == {4 * weights}
    assert [count for op, count in large.items() if "norm" in op] == [3]  # once a step


def test_a_plan_from_a_few_blocks_is_the_plan_from_all_of_them(
    small: Miniatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = small.work("llama", 12, clip_grad=True)
    short = predict(work, gpu="24GiB")
    monkeypatch.setattr("memfit.planning.few.Blocks.worthwhile", property(lambda _: False))
    full = predict(work, gpu="24GiB")
    assert (short.how.to_json()["blocks"], full.how.to_json()["blocks"]) == ({"traced": 4, "all": 12}, None)
    assert document(short) == document(full)

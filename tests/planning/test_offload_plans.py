"""Plans with levers on: what lies on the host is not on the GPU, and a few blocks still tell all of them."""

from __future__ import annotations

from typing import Any

import pytest
from miniatures import Miniatures, check_extended
from support.quick import quick

from memfit.events import Action, Trace
from memfit.jobs.build import prepare_without_memory
from memfit.jobs.training import offload
from memfit.jobs.workload import Workload
from memfit.planning.on_trace import trace_job
from memfit.planning.predict import Plan, predict

ALL = ("optimizer", "activations", "weights")
BLOCKS, HIDDEN, TOKENS = 8, 256, 2 * 512
LLAMA: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 768, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip
SAVED = TOKENS * HIDDEN * 2
"""What a block is given, in 16 bit."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Miniatures:
    return Miniatures(tmp_path_factory.mktemp("offload"))


@pytest.fixture(autouse=True)
def _nothing_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 1)


def plan(small: Miniatures, kind: str = "lora", **settings: Any) -> Plan:
    folder = small.folder("llama", BLOCKS, **LLAMA)
    return predict(kind=kind, model=folder, batch_size=2, seq_len=TOKENS // 2, loss="chunked", **settings)


# -- a few blocks tell all ---------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "lora, all on the host": {"kind": "lora", "offload": ALL, "grad_checkpointing": True, "grad_accum": 2, "rank": 4},
    "lora, without checkpointing": {"kind": "lora", "offload": ALL, "lora_dropout": 0.1, "rank": 4},
    "lora, selective": {"kind": "lora", "selective_checkpointing": True, "offload": ("weights",), "rank": 4},
    "train, activations": {"kind": "train", "offload": ("activations",), "clip_grad": True},
    "train, optimizer": {"kind": "train", "offload": ("optimizer",), "optimizer": "adamw-fused"},
    "train, selective": {"kind": "train", "selective_checkpointing": True, "precision": "amp-bf16"},
    "trainer": {"kind": "lora", "offload": ALL, "grad_checkpointing": True, "loop": "trainer", "rank": 4},
    "trainer, selective": {"kind": "train", "selective_checkpointing": True, "loop": "trainer"},
    "memfit": {"kind": "lora", "offload": ALL, "grad_checkpointing": True, "loop": "memfit", "rank": 4},
}


ALSO = ("lora, selective", "train, optimizer", "memfit")


@pytest.mark.parametrize("kind", quick(ALSO, KINDS))
def test_blocks_whose_memory_lies_on_the_host_repeat(small: Miniatures, kind: str) -> None:
    check_extended(small.work("llama", **KINDS[kind]))


@pytest.mark.parametrize("family", quick(["gpt2"], ["gpt2", "gemma2", "qwen3_moe"]))
def test_so_do_those_of_other_families(small: Miniatures, family: str) -> None:
    check_extended(small.work(family, **KINDS["lora, all on the host"]))


# -- what is on the GPU at the peak ------------------------------------------------------------------------------------


def at_end_of_forward(work: Workload) -> int:
    """Bytes alive when the second step's forward pass has just ended."""
    trace = trace_job(prepare_without_memory(work))
    return _alive_before(trace, "backward", 2)


def _alive_before(trace: Trace, phase: str, step: int) -> int:
    alive = 0
    for action, subject in trace.events():
        if action == Action.ALLOC:
            alive += trace.requested[subject]
        elif action == Action.FREE:
            alive -= trace.requested[subject]
        elif action == Action.MARK and (trace.marks[subject].phase, trace.marks[subject].step) == (phase, step):
            return alive
    raise AssertionError(f"no {phase} in step {step}")


def test_of_the_blocks_inputs_one_is_left_on_the_gpu(small: Miniatures) -> None:
    work: dict[str, Any] = {"kind": "train", "model": small.folder("llama", BLOCKS, **LLAMA), "batch_size": 2,
                            "seq_len": TOKENS // 2, "grad_checkpointing": True, "loss": "chunked"}  # fmt: skip
    plain, on_host = at_end_of_forward(Workload(**work)), at_end_of_forward(Workload(**work, offload=("activations",)))
    assert plain - on_host == (BLOCKS - 1) * SAVED


def test_frozen_weights_on_the_gpu_are_those_of_two_blocks_and_the_ends(small: Miniatures) -> None:
    whole = plan(small, grad_checkpointing=True)
    streamed = plan(small, grad_checkpointing=True, offload=("weights",))
    block = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 768 + 2 * HIDDEN
    assert whole.report.breakdown["weights"] - streamed.report.breakdown["weights"] == (BLOCKS - 2) * block * 2
    assert any(note.startswith("host memory: ") and "frozen weights" in note for note in streamed.notes)


def test_the_optimizer_s_state_is_not_on_the_gpu(small: Miniatures) -> None:
    on_gpu, on_host = plan(small, "train"), plan(small, "train", offload=("optimizer",))
    assert on_gpu.report.breakdown["optimizer"] > 2 * 2 * on_gpu.parameters * 0.99
    assert on_host.report.breakdown["optimizer"] == 0
    assert "host memory for AdamW's moments" in " ".join(on_host.notes)


def test_selective_checkpointing_is_between_all_and_nothing(small: Miniatures) -> None:
    none, selective, full = (
        plan(small, "train", optimizer="sgd", **settings).peak.allocated_bytes
        for settings in ({}, {"selective_checkpointing": True}, {"grad_checkpointing": True})
    )
    assert full < selective < none


# -- how much of the host ----------------------------------------------------------------------------------------------


def test_host_memory_is_that_of_all_blocks_though_few_were_traced(small: Miniatures) -> None:
    told = plan(small, grad_checkpointing=True, offload=ALL)
    block = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 768 + 2 * HIDDEN
    assert told.trace.facts["host"] == {
        "weights": BLOCKS * block * 2, "activations": BLOCKS * SAVED, "optimizer": 2 * told.trainable_parameters * 4,
    }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
def test_host_memory_grows_with_the_batch(small: Miniatures, rows: int) -> None:
    folder = small.folder("llama", BLOCKS, **LLAMA)
    told = predict(
        kind="train", model=folder, batch_size=rows, seq_len=64, grad_checkpointing=True, offload=("activations",)
    )
    assert told.trace.facts["host"] == {"activations": BLOCKS * rows * 64 * HIDDEN * 2}

"""What the two documents on training say of memory: totals, advice with its savings, a budget.

They compare their GB with what `nvidia-smi` shows: 2^30.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.guides.claims import GSA_512M, LORA_7B, Document

BOTH_ALLOCATOR_SETTINGS = "max_split_size_mb:128,expandable_segments:True"


@dataclass(frozen=True)
class Tip:
    """A change of settings, and the saving that is claimed for it, in words."""

    said: str
    saves: str
    changes: Mapping[str, Any]
    on: Mapping[str, Any] = field(default_factory=dict)
    """What is changed before it."""


@dataclass(frozen=True)
class ClaimedTotal:
    """A job of a document, and what that says that it takes."""

    said: str
    takes: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class TrainingClaims:
    document: Document
    gpu: str
    settings: Mapping[str, Any]
    totals: tuple[ClaimedTotal, ...]
    advice: tuple[Tip, ...]
    no_prediction: tuple[str, ...]
    """Advice that touches nothing on the GPU."""


_AFTER = {"batch_size": 1, "grad_accum": 16, "seq_len": 1536}

LORA_CLAIMS = TrainingClaims(
    LORA_7B,
    "RTX 4090",
    {
        "kind": "lora",
        "model": "qwen2.5-7b",
        "loop": "trainer",
        "precision": "fp16",
        "rank": 128,
        "seq_len": 2048,
        "batch_size": 2,
        "grad_accum": 8,
        "grad_checkpointing": True,
    },
    (
        ClaimedTotal("before: 2 x 2048", "25.0", {}),
        ClaimedTotal("after: 1 x 1536", "20.0", {**_AFTER, "alloc_conf": BOTH_ALLOCATOR_SETTINGS}),
    ),
    (
        Tip("sequence 2048 to 1536", "1.5-2", {"seq_len": 1536}),
        Tip("batch 2 x 8 to 1 x 16", "2-3", {"batch_size": 1, "grad_accum": 16}),
        Tip(f"`{BOTH_ALLOCATOR_SETTINGS}`", "0.5-1", {"alloc_conf": BOTH_ALLOCATOR_SETTINGS}),
        Tip("gradient checkpointing", "1-2", {"grad_checkpointing": True}, on={"grad_checkpointing": False}),
        Tip("sequence 1536 to 1024", "1-2", {"seq_len": 1024}, on=_AFTER),
        Tip("rank 128 to 64", "no figure", {"rank": 64}, on=_AFTER),
    ),
    (
        "`TOKENIZERS_PARALLELISM=false` and `OMP_NUM_THREADS=4` (0.2-0.5 GB): threads of the host, nothing on the GPU",
        "`empty_cache()` in a process of its own before the run: it empties that process's cache, not the run's",
    ),
)
GSA_CLAIMS = TrainingClaims(
    GSA_512M,
    "44GB",
    {
        "kind": "train",
        "model": "gsa-512m-gather",
        "precision": "amp-bf16",
        "seq_len": 1024,
        "batch_size": 2,
        "grad_accum": 32,
        "grad_checkpointing": True,
        "world_size": 4,
    },
    (
        ClaimedTotal("old: 1 x 1024", "~35", {"batch_size": 1, "grad_accum": 64}),
        ClaimedTotal("current: 2 x 1024", "38-40", {}),
        ClaimedTotal("too aggressive: 8 x 2048", "51+", {"batch_size": 8, "grad_accum": 8, "seq_len": 2048}),
    ),
    (
        Tip("micro-batch 2 to 1", "no figure", {"batch_size": 1, "grad_accum": 64}),
        Tip("fp16 instead of bf16", "slightly", {"precision": "amp-fp16"}),
        Tip("expandable segments", "no figure", {"alloc_conf": "expandable_segments:True"}),
        Tip("gradient checkpointing", "no figure", {"grad_checkpointing": True}, on={"grad_checkpointing": False}),
    ),
    ("weights 7-8 GB and AdamW 14-16 GB for 512M parameters: the model has 184 million, 0.68 and 1.37 GiB in fp32",),
)

LORA_BUDGET = {
    "base": ("Base model (FP16)", (14.0, 14.0)), "adapter": ("LoRA adapters", (0.5, 0.5)),
    "activation": ("Activations", (5.0, 2.0)), "loss": ("(logits and loss: no row)", None),
    "gradient": ("Gradients", (2.5, 2.0)), "optimizer": ("Optimizer states", (1.5, 1.0)),
    "overhead": ("Buffer/overhead", (1.5, 0.5)), "total": ("Total", (25.0, 20.0)),
}  # fmt: skip
"""The budget of the 7B guide in GB, before its changes and after them, by the rows of memfit's."""

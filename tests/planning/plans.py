"""Small jobs to be planned, and modules of one's own that are easy or impossible to trace."""

from __future__ import annotations

import atexit
import json
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from bigram import Bigram

from memfit.planning.predict import Plan, predict

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


@cache
def small_llama() -> str:
    parent = mkdtemp(prefix="memfit-test-")
    atexit.register(rmtree, parent)
    folder = Path(parent) / "small-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def plan(kind: str = "train", **settings: Any) -> Plan:
    return predict(**{"kind": kind, "model": small_llama(), "batch_size": 4, "seq_len": 128, **settings})


@cache
def usual_plan(kind: str) -> Plan:
    """One of each kind, on a large card, made once."""
    return plan(kind, gpu="H200", **({"new_tokens": 4} if kind == "generate" else {}))


def document(plan: Plan) -> dict[str, Any]:
    """What is predicted: not how, nor how long that took."""
    made = plan.to_json()
    made["notes"].remove(plan.how.in_words())
    return {name: value for name, value in made.items() if name not in ("how", "seconds")}


class AsksForData(Bigram):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * float(ids.max())


class PicksByData(Bigram):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids[:, ids[0].nonzero()[:, 0]])

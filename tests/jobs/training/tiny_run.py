"""A small Llama with random weights and tokens of bytes, trained for real on the CPU in a second or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from training_folder import text_file

from memfit.jobs.training.config_file import config_from
from memfit.jobs.training.job import TrainJob, prepare_job
from memfit.jobs.training.result import TrainEvent, TrainResult
from memfit.jobs.training.run import train

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def llama_folder(folder: Path) -> str:
    place = folder / "llama"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(LLAMA))
    return str(place)


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"name": llama_folder(folder), "tokenizer": "bytes", "from_scratch": True},
        "data.source": text_file(folder), "max_seq_len": 32, "output_dir": str(folder / "out"), "max_steps": 4,
        "precision": "fp32", "global_batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-2, "save_steps": 2,
        "logging_steps": 1, "logging.tensorboard": False, "device": "cpu", "memory.probe": False,
    } | changes  # fmt: skip


def tiny_job(folder: Path, **changes: Any) -> TrainJob:
    return prepare_job(config_from(document(folder, **changes), name="tiny"))


def run(folder: Path, **changes: Any) -> tuple[TrainResult, list[TrainEvent]]:
    torch.set_num_threads(1)
    events: list[TrainEvent] = []
    return train(tiny_job(folder, **changes), on_event=events.append), events


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = next(checkpoint / name for name in ("model.safetensors", "adapter_model.safetensors")
                 if (checkpoint / name).is_file())  # fmt: skip
    return load_file(found)


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def close(one: Path, other: Path, tolerance: float = 2e-5) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.allclose(first[name], second[name], atol=tolerance, rtol=1e-4) for name in first)

"""A small model's folder, and files of data, for jobs that are prepared but cost nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.config_file import config_from

ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Say hello.", "input": "", "output": "Hello!"},
    {"instruction": "Count to five.", "input": "", "output": "1 2 3 4 5"},
]
TINY_GSA = {
    "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ffn": 32, "vocab_size": 300,
    "max_position_embeddings": 512, "k_base": 8, "k_min": 2, "k_max": 16,
}  # fmt: skip


def alpaca_file(folder: Path, rows: list[dict[str, Any]] | None = None) -> str:
    path = folder / "alpaca.json"
    path.write_text(json.dumps(ALPACA if rows is None else rows))
    return str(path)


def text_file(folder: Path, text: str = "to be or not to be. " * 100) -> str:
    path = folder / "play.txt"
    path.write_text(text)
    return str(path)


def tiny_config(folder: Path, **changes: Any) -> TrainConfig:
    """GSA with tokens of bytes: no file of a model is needed."""
    document: dict[str, Any] = {
        "model": {"name": "gsa", "tokenizer": "bytes", "settings": TINY_GSA}, "data.source": text_file(folder),
        "max_seq_len": 64, "output_dir": str(folder / "out"), "max_steps": 3, "precision": "fp32",
    }  # fmt: skip
    return config_from(document, name="tiny", over=changes)

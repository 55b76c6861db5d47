"""Sizes of GSA models, as the published code and its pre-training files have them: numbers only, no torch."""

from __future__ import annotations

from typing import Any

GSA: dict[str, int] = {
    "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ffn": 11008, "vocab_size": 128256,
    "max_position_embeddings": 131072, "k_base": 2048, "k_min": 256, "k_max": 4096, "indexer_heads": 4,
    "indexer_dim": 64,
}  # fmt: skip
"""The defaults of its class."""

_PRETRAINED = {
    **GSA, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 151936, "max_position_embeddings": 8192,
    "k_base": 512, "k_min": 64, "k_max": 1024,
}  # fmt: skip

GSA_SIZES: dict[str, dict[str, Any]] = {
    "gsa": GSA,
    "gsa-512m": {**_PRETRAINED, "d_model": 512, "n_layers": 8, "d_ffn": 1536},
    "gsa-512m-copy1": {**_PRETRAINED, "d_model": 768, "n_layers": 12, "d_ffn": 2048},
    "gsa-1b": {**_PRETRAINED, "d_model": 896, "n_layers": 14, "d_ffn": 2304},
}
GATHER = "-gather"
GSA_SIZES |= {f"{name}{GATHER}": {**sizes, "path": "gather"} for name, sizes in GSA_SIZES.items()}
"""Each again on the path of the published code, which copies the chosen keys and values out for every query."""


def parameters_of(size: dict[str, Any]) -> int:
    """Of an untied model, counted from its sizes."""
    d, width = size["d_model"], size["d_model"] // size["n_heads"]
    wide, narrow = size["n_heads"] * width, size["n_kv_heads"] * width
    indexer = d * (size["indexer_heads"] + 1) * size["indexer_dim"] + (d + 2) * size["indexer_heads"]
    layer = 2 * d * (wide + narrow) + (d + 1) * (wide + narrow) + indexer + 2 * d + 3 * d * size["d_ffn"]
    return int(size["n_layers"] * layer + 2 * size["vocab_size"] * d + d)

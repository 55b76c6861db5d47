"""What can be set of a GSA model, by name. No torch here: a config file is checked before torch is imported."""

from __future__ import annotations

GSA_TYPE = "gsa"
"""`model_type` in a config.json."""

GSA_SETTINGS = (
    "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ffn", "vocab_size", "max_position_embeddings", "rope_theta",
    "norm_eps", "k_base", "k_min", "k_max", "temperature", "adaptive_k", "indexer_heads", "indexer_dim", "path",
    "tie_word_embeddings", "initializer_range",
)  # fmt: skip


GATHER = "-gather"
"""At the end of a name: the path of the published code."""


def is_gsa(model: str) -> bool:
    name = model.strip().lower()
    return name == GSA_TYPE or name.startswith(f"{GSA_TYPE}-")

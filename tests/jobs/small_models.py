"""Models of two blocks, as folders with a config.json, and a module of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bigram import Bigram
from torch import nn

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32,
}  # fmt: skip
OPT: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 128, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "opt": OPT, "deepseek": DEEPSEEK}


def model_folder(parent: Path, name: str, **changes: Any) -> str:
    folder = parent / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return str(folder)


def bigram() -> nn.Module:
    return Bigram()


def without_a_vocabulary() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))

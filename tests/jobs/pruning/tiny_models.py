"""Small random models of every family that is pruned, written as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_LLAMA: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_PLAIN = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 8},
    "mistral": {**_LLAMA, "sliding_window": 6},
    "gemma2": {**_LLAMA, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        **_LLAMA, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "opt": {
        "vocab_size": 96, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "word_embed_proj_dim": 16, "max_position_embeddings": 64,
    },
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neox": _PLAIN,
    "phi": _PLAIN,
    "phi3": {**_LLAMA, "pad_token_id": 0},
    "mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
}  # fmt: skip


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    special = {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**special, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than transformers' 0.02, so that blocks matter
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
    return model.eval()


def tiny_folder(where: Path, family: str, *, shards: int = 1, **changes: Any) -> Path:
    model = tiny_model(family, **changes)
    folder = where / family
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + 4096 if shards > 1 else "5GB")
    return folder


def tiny_windows(count: int = 5, length: int = 16, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (count, length), generator=generator)

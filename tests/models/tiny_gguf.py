"""A GGUF file of a Llama with two blocks, written as llama.cpp's converter does; and two kinds of tokenizer in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level() -> dict[str, Any]:
    """As GPT-2 has it: the bytes, two merges, three special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "th", "in"]
    return {
        "model": "gpt2", "tokens": tokens, "types": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3), "scores": None,
        "merges": ["t h", "i n"],
    }  # fmt: skip


def sentence_pieces() -> dict[str, Any]:
    """As Gemma has it: pieces with scores, bytes for what is in no piece, runs of spaces added by hand."""
    pieces = ["▁", "t", "h", "e", "n", "x", "th", "the", "he", "▁the", "en"]
    scores = [-20.0, -21.0, -22.0, -23.0, -24.0, -25.0, -1.0, -3.0, -9.0, -4.0, -2.0]
    byte_pieces = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_pieces, *pieces, "▁▁", "\n"]
    return {
        "model": "llama",
        "tokens": tokens,
        "types": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED] * 2,
        "scores": [-1000.0] * 259 + scores + [-1000.0] * 2,
        "merges": None,
    }


def write(path: Path, model: Any, tokenizer: dict[str, Any], **more: Any) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_rope_dimension_count(CONFIG["hidden_size"] // CONFIG["num_attention_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokenizer["tokens"]))
    writer.add_tokenizer_model(tokenizer["model"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["types"])
    if tokenizer["scores"] is not None:
        writer.add_token_scores(tokenizer["scores"])
    if tokenizer["merges"] is not None:
        writer.add_token_merges(tokenizer["merges"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in more.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    for name, weight in model.state_dict().items():
        writer.add_tensor(_name(name), _as_llama_cpp(name, weight.numpy().astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if name in outer:
        return outer[name]
    _, _, number, *middle, _ = name.split(".")
    return f"blk.{number}.{NAMES['.'.join(middle)]}.weight"


def _as_llama_cpp(name: str, weight: np.ndarray) -> np.ndarray:
    """Rotary pairs lie side by side there and half a head apart in transformers."""
    heads = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

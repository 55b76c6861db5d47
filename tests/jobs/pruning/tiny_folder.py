"""A model folder as the Hub has it, small enough to prune in a blink: config, weights, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LLAMA: dict[str, Any] = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 257,
    "eos_token_id": 256,
}  # fmt: skip


def byte_tokenizer(*, begin: bool = False) -> Any:
    """One token for each byte; with `begin` a text starts with <s>, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {character: i for i, character in enumerate(alphabet)} | {"</s>": 256, "<s>": 257}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if begin:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>")


def model_folder(parent: Path, *, tokenizer: bool = True, seed: int = 0, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = parent / "model"
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | changes))
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def english(words: int = 4000) -> str:
    """Text without a data set: numbers in words, no two stretches alike."""
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return " ".join(" ".join(names[int(digit)] for digit in str(i * i)) + "." for i in range(words))

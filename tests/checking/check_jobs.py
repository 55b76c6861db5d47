"""Small training jobs for pre-flights: a Llama's folder without weights, files of data, configs and factories."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memfit.checking.situation import CheckRequest, Finding, Situation
from memfit.jobs.training.config_file import config_from

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip

FACTORIES = '''
from functools import partial

from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM


def plain():
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=300)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def with_adapters():
    return get_peft_model(plain(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def checkpointed_without_input_grads():
    model = with_adapters()
    for layer in model.base_model.model.model.layers:
        inner = layer.forward
        layer.forward = lambda state, inner=inner, **more: checkpoint(partial(inner, **more), state, use_reentrant=True)
    return model


def one_block_detached():
    """Its first block is trained in name only."""
    model = plain()
    model.model.layers[0].register_forward_hook(lambda module, given, made: made.detach())
    model.model.embed_tokens.requires_grad_(False)
    return model


def with_an_unused_head():
    model = plain()
    model.never_called = nn.Linear(16, 16, bias=False)
    return model


def base_not_frozen():
    model = with_adapters()
    for weight in model.parameters():
        weight.requires_grad_(True)
    return model


def all_frozen():
    return plain().requires_grad_(False)


def too_large_for_fp16():
    """Its states pass 65,504, where fp16 ends."""
    model = plain()
    model.model.embed_tokens.register_forward_hook(lambda module, given, made: made * 1e7)
    return model
'''


def llama_folder(folder: Path) -> str:
    place = folder / "llama"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(LLAMA))
    return str(place)


def text_file(folder: Path, text: str = "to be or not to be. " * 100) -> str:
    path = folder / "play.txt"
    path.write_text(text)
    return str(path)


def rows_file(folder: Path, rows: list[dict[str, str]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words_tokenizer(folder: Path) -> str:
    """A tokenizer of a few words, one of which is its padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "yes": 2, "no": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="no"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    place = folder / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>").save_pretrained(place)
    return str(place)


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"name": llama_folder(folder), "tokenizer": "bytes", "from_scratch": True},
        "data.source": text_file(folder), "max_seq_len": 32, "output_dir": str(folder / "out"), "max_steps": 4,
        "precision": "fp32", "global_batch_size": 4, "micro_batch_size": 2, "save_steps": 2, "device": "cpu",
    } | changes  # fmt: skip


def situation(folder: Path, *, gpu: str | None = None, world_size: int = 1, **changes: Any) -> Situation:
    config = config_from(document(folder, **changes), name="tiny")
    return Situation(CheckRequest(config=config, gpu=gpu, world_size=world_size))


def factory_situation(
    folder: Path, name: str, monkeypatch: Any, *, world_size: int = 1, **changes: Any
) -> Situation:  # fmt: skip
    """A model that somebody's own code makes."""
    module = f"own_models_{abs(hash(str(folder))):x}"
    (folder / f"{module}.py").write_text(FACTORIES)
    monkeypatch.chdir(folder)
    model = {"name": f"{module}:{name}", "tokenizer": "bytes"}
    return situation(folder, world_size=world_size, model=model, **changes)


def only(look: Callable[[Situation], Finding | Iterator[Finding]], where: Situation) -> Finding:
    found = look(where)
    (finding,) = [found] if isinstance(found, Finding) else found
    return finding

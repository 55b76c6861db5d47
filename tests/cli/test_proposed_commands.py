"""Whatever command `memfit train` and `memfit check` propose can be typed as it stands, and is of the very same job."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.quick import quick

from memfit.cli.main import main

pytestmark = pytest.mark.usefixtures("shared_traces")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
JOBS: dict[str, dict[str, Any]] = {
    "flat keys of LoRA": {"r": 128, "lora_alpha": 256, "lora_dropout": 0.1, "target_modules": ["q_proj", "up_proj"]},
    "unused keys of LoRA": {"method": "full", "r": 128, "optimizer": "sgd", "max_grad_norm": 0, "attention": "eager"},
    "levers": {
        "loss": {"kind": "chunked", "chunk": 64},
        "gradient_checkpointing": True,
        "fp16": True,
        "alloc_conf": "expandable_segments:True,max_split_size_mb:128",
    },
    "offload": {
        "method": "lora",
        "adapter_dtype": "same",
        "precision": "bf16",
        "offload": ["weights", "optimizer"],
        "gradient_checkpointing": "selective",
    },
    "four processes": {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "global_batch_size": 16,
        "gradient_as_bucket_view": False,
    },
    "shards": {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "global_batch_size": 16, "parallel": "fsdp2"},
}
COMMAND = re.compile(r"memfit ((?:fit|plan|check|train|prune|explain) [^`\n]+)")


def job_file(folder: Path, **changes: Any) -> str:
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "play.txt").write_text("to be or not to be. " * 400)
    document = {
        "model": {"name": str(folder / "llama"), "tokenizer": "bytes", "from_scratch": True},
        "data.source": str(folder / "play.txt"),
        "max_seq_len": 128,
        "output_dir": str(folder / "out"),
        "max_steps": 4,
        "micro_batch_size": 4,
        "memory.gpu": "600MiB",
        **changes,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    return str(folder / "job.yaml")


def proposed(text: str) -> list[list[str]]:
    return [shlex.split(found) for found in COMMAND.findall(text)]


@pytest.mark.parametrize("name", quick(JOBS.keys() - {"four processes"}, JOBS))
def test_every_command_that_train_and_check_propose_is_one(name: str, tmp_path: Path, capsys: Any) -> None:
    config = job_file(tmp_path, **JOBS[name])
    assert main(["train", "--config", config, "--dry-run"]) == 1
    of_train = proposed(capsys.readouterr().out)
    assert main(["check", "--config", config, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["checks"]
    of_check = proposed("\n".join(str(each[key]) for each in found for key in ("found", "next")))
    fits = [[words for words in said if words[0] == "fit"] for said in (of_train, of_check)]
    assert fits[0] and fits[0] == fits[1], "both propose the same"
    for words in {tuple(each) for each in (*of_train, *of_check)}:
        assert main(list(words)) in (0, 1), words

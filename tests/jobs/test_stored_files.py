"""Files beside a quantised config.json that are damaged, lie, or point elsewhere: refused by name, not passed over."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from memfit.errors import InputError
from memfit.jobs.build import prepare_without_memory
from memfit.jobs.stored import check_files
from memfit.jobs.workload import Workload

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}  # fmt: skip


def entry(dtype: Any, shape: Any, offsets: Any) -> dict[str, Any]:
    return {WEIGHT: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def write(path: Path, header: Any) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"abcd")


@pytest.mark.parametrize("header", [
    b"junk{", [1], entry("U8", [-5, 1], [0, -1]), entry("U8", [10**9, 10**9], [0, 4]), entry("ZZ", "x", None),
    entry("U8", [float("inf")], [0, 4]),
])  # fmt: skip
def test_a_damaged_header_is_refused_by_its_file(tmp_path: Path, header: Any) -> None:
    write(tmp_path / "model.safetensors", header)
    with pytest.raises(InputError, match=r"model\.safetensors: "):
        check_files(nn.Module(), tmp_path)


@pytest.mark.parametrize("named", ["../../../etc/passwd", "/etc/passwd", "a/b.safetensors"])
def test_an_index_names_no_file_elsewhere(tmp_path: Path, named: str) -> None:
    index = {"weight_map": {WEIGHT: named, "lm_head.weight": "!missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json names a file in another folder"):
        check_files(nn.Module(), tmp_path)


@pytest.mark.parametrize("index", ["[1]", "5", '{"weight_map": 5}', "["])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match="holds no map of weights"):
        check_files(nn.Module(), tmp_path)


def test_weights_that_are_not_here_are_not_needed(tmp_path: Path) -> None:
    check_files(nn.Module(), tmp_path)
    index = {"weight_map": {WEIGHT: "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_files(nn.Module(), tmp_path)


def test_a_plan_refuses_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    write(tmp_path / "model.safetensors", [1])
    with pytest.raises(InputError, match=r"model\.safetensors: its table of tensors is damaged"):
        prepare_without_memory(Workload(kind="forward", model=str(tmp_path), seq_len=8))


@pytest.mark.parametrize("error", [TypeError("x"), AttributeError("x"), ValueError("x"), KeyError("x")])
def test_whatever_transformers_raises_on_such_values_names_file_and_key(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from memfit.jobs import stored

    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(stored, "_fp8", fails)
    work: Any = SimpleNamespace(model="a/model", quant="none", kind="forward")
    said: Any = SimpleNamespace(method="fp8", kind="fp8", said={})
    with pytest.raises(InputError, match=r"^a/model: its 'quantization_config' cannot be used: '?x"):
        stored.as_stored(nn.Module(), work, said)

"""Weights on disk: found, read by position, and refused in words when they are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_hub import put_into_cache
from safetensors.torch import save_file

from memfit.errors import InputError
from memfit.models.checkpoint import PIECE_BYTES, WeightStore
from memfit.models.files import locate


def header(path: Path, table: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_tensor_is_read_whole_or_from_a_byte_on(tmp_path: Path) -> None:
    value = torch.arange(6, dtype=torch.float16)
    save_file({"b": torch.ones(3), "a": value}, tmp_path / "model.safetensors")
    store = WeightStore.open(tmp_path)
    room = bytearray(12)
    store.read_into("a", memoryview(room))
    assert torch.equal(torch.frombuffer(room, dtype=torch.float16), value)
    part = bytearray(4)
    store.read_into("a", memoryview(part), 4)
    assert torch.frombuffer(part, dtype=torch.float16).tolist() == [2, 3]
    store.close()


def test_a_large_tensor_is_read_in_pieces_by_several_threads(tmp_path: Path) -> None:
    value = torch.randint(0, 255, (2 * PIECE_BYTES + 77,), dtype=torch.uint8)
    save_file({"a": value}, tmp_path / "model.safetensors")
    room = bytearray(len(value))
    WeightStore.open(tmp_path).read_into("a", memoryview(room))
    assert torch.equal(torch.frombuffer(room, dtype=torch.uint8), value)


def test_an_index_says_which_files_there_are(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "x-2.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: t.shape for name, t in WeightStore.open(tmp_path).stored.items()} == {"a": (1,), "b": (2,)}
    (tmp_path / "x-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks the file x-2\.safetensors"):
        WeightStore.open(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(InputError, match="a file in another folder"):
        WeightStore.open(tmp_path)


def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match="pickled weights") as raised:
        WeightStore.open(tmp_path)
    assert "save_pretrained" in str(raised.value.hint)


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no weights"):
        WeightStore.open(tmp_path)


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 16, (5).to_bytes(8, "little") + b"{nope"])
def test_what_is_no_safetensors_is_told(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        WeightStore.open(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 1600]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "4", "data_offsets": [16]},
        [],
    ],
)
def test_a_table_that_lies_is_not_believed(entry: Any, tmp_path: Path) -> None:
    header(tmp_path / "model.safetensors", {"a": entry}, bytes(16))
    with pytest.raises(InputError, match="weight 'a'"):
        WeightStore.open(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    store = WeightStore.open(tmp_path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match="ends before byte"):
        store.read_into("a", memoryview(bytearray(4000)))


def test_a_preset_stands_for_its_weights_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputError, match=r"'meta-llama/Llama-3\.2-1B' is not in the Hugging Face cache.*OFFLINE is set"
    ):
        locate("llama-3.2-1b", cache_dir=tmp_path)
    found = put_into_cache(tmp_path, "models", "meta-llama/Llama-3.2-1B", "model.safetensors", b"")
    assert locate("llama-3.2-1b", cache_dir=tmp_path) == found.parent
    assert locate(str(tmp_path)) == tmp_path


def test_a_download_that_was_cut_off_is_not_taken_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    small = {"model.safetensors.index.json": json.dumps(index), "config.json": "{}", "vocab.json": "[]"}
    for name, content in small.items():
        put_into_cache(tmp_path, "models", "org/cut", name, content.encode())
    put_into_cache(tmp_path, "models", "org/cut", "model-00001-of-00002.safetensors", b"")
    with pytest.raises(InputError, match="cannot be fetched"):
        locate("org/cut", cache_dir=tmp_path)
    assert locate("org/cut", cache_dir=tmp_path, weights=False).is_dir(), "settings and tokenizer are there"
    put_into_cache(tmp_path, "models", "org/cut", "model-00002-of-00002.safetensors", b"whole")
    assert locate("org/cut", cache_dir=tmp_path).is_dir()

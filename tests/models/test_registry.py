"""`--model`: what each kind of text leads to, and what is said when it leads nowhere. No test may use the network."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.errors import InputError, MemfitError, UnknownName, UsageError
from memfit.models.registry import (
    ModelSource,
    build_model,
    load_config,
    parameter_count,
    resolve,
    source_notes,
    supports_sdpa,
)

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
# embedding 64x32, per block q and o 32x32, k and v 16x32, three MLP matrices 48x32, two norms of 32; a final norm of 32
TINY_PARAMETERS = 64 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was looked for on the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def on_meta(source: ModelSource, **more: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return build_model(source, **{"dtype": torch.float32, **more})


def test_importing_the_registry_and_naming_a_model_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from memfit.models.registry import resolve; import memfit.gpus; resolve('llama-3.2-1b');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("meta-llama/Llama-7B", "llama-7b"),
        ("meta-llama/Llama-13B", "llama-13b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen 2.5 7B", "qwen2.5-7b"),
        ("LLaMA 1B", "llama-3.2-1b"),
        ("LLaMA 3B", "llama-3.2-3b"),
        ("LLaMA 7B", "llama-7b"),
        ("LLaMA 13B", "llama-13b"),
        ("LLaMA 30B", "llama-30b"),
        ("LLaMA 70B", "llama-3.1-70b"),
    ],
)
def test_every_model_that_the_guides_name_is_known(text: str, name: str) -> None:
    source = resolve(text)

    assert (source.kind, source.name) == ("preset", name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("1b", "llama-3.2-1b"),
        ("3B", "llama-3.2-3b"),
        ("7b", "llama-7b"),
        ("8b", "llama-3.1-8b"),
        ("13b", "llama-13b"),
        ("30b", "llama-30b"),
        ("65b", "llama-65b"),
        ("70b", "llama-3.1-70b"),
        ("405b", "llama-3.1-405b"),
    ],
)
def test_a_bare_size_is_the_llama_of_that_size_and_the_origin_says_so(text: str, name: str) -> None:
    source = resolve(text)

    assert source.name == name
    assert f"'{text}' is read as {name}" in source.origin


def test_a_size_no_llama_has_is_refused_with_the_sizes_there_are() -> None:
    with pytest.raises(UsageError, match="no Llama called '9b'") as caught:
        resolve("9b")

    assert "llama-3.2-1b" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("lama-3.2-1b", "llama-3.2-1b"),
        ("meta-lama/Llama-3.2-1B", "llama-3.2-1b"),
        ("qwen2.5-7", "qwen2.5-7b"),
        ("gpt-2-xxl", "gpt2-xl"),
        ("pythia14b", "pythia-1.4b"),
    ],
)
def test_a_close_name_is_suggested_and_not_taken(text: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match="no model called") as caught:
        resolve(text)

    assert nearest in caught.value.nearest


def test_an_unknown_hub_id_says_how_to_get_it() -> None:
    with pytest.raises(UnknownName) as caught:
        resolve("someone/some-model")

    assert "hf download someone/some-model config.json" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "   ", "a\0b", "x" * 5000, "~nobody-at-all/x", "..:..", "://", "\ud800"])
def test_text_that_can_be_nothing_is_refused_in_words(text: str) -> None:
    with pytest.raises(MemfitError):
        resolve(text)


def test_a_folder_with_a_config_is_a_model(folder: Path) -> None:
    source = resolve(str(folder))

    assert (source.kind, source.name) == ("folder", folder.name)
    assert parameter_count(on_meta(source)) == TINY_PARAMETERS


def test_a_json_file_is_a_model_under_any_name(folder: Path) -> None:
    (folder / "mine.json").write_text(json.dumps(TINY))
    source = resolve(str(folder / "mine.json"))

    assert (source.kind, source.name) == ("config", "mine")
    assert parameter_count(on_meta(source)) == TINY_PARAMETERS


def test_a_folder_wins_over_a_preset_of_its_name_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2").kind == "preset"  # an empty folder is not a model

    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(TINY))
    assert resolve("gpt2").kind == "folder"


def test_a_folder_without_a_config_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_an_adapter_folder_asks_for_the_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")

    with pytest.raises(InputError, match=r"has no config\.json") as caught:
        resolve(str(tmp_path))

    assert "LoRA adapter" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["./no-such-folder", "no-such.json", "/no/such/place", "~/no-such-folder"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_name(text: str) -> None:
    with pytest.raises(InputError, match="no file"):
        resolve(text)


def test_a_file_that_is_not_json_by_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")

    with pytest.raises(InputError, match=r"is not a config\.json"):
        resolve(str(tmp_path / "weights.bin"))


def test_a_hub_id_is_found_in_the_local_cache_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--someone--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    source = resolve("someone/some-model")

    assert (source.kind, source.name) == ("hub", "someone/some-model")
    assert parameter_count(on_meta(source)) == TINY_PARAMETERS


def test_a_tied_head_is_counted_once_and_an_untied_one_twice(folder: Path) -> None:
    tied = parameter_count(on_meta(resolve(str(folder))))
    (folder / "config.json").write_text(json.dumps({**TINY, "tie_word_embeddings": False}))
    untied = parameter_count(on_meta(resolve(str(folder))))

    assert untied - tied == 64 * 32


def test_on_the_cpu_the_head_is_tied_although_weights_are_left_unfilled(folder: Path) -> None:
    model: Any = build_model(resolve(str(folder)), dtype=torch.float32)

    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert next(model.parameters()).device.type == "cpu"


def test_filled_weights_give_finite_logits(folder: Path) -> None:
    model: Any = build_model(resolve(str(folder)), dtype=torch.float32, attention="eager", init_weights=True)

    assert torch.isfinite(model(torch.zeros(1, 8, dtype=torch.long)).logits).all()


def test_building_leaves_initialisation_as_it_was_for_everyone_else(folder: Path) -> None:
    on_meta(resolve(str(folder)))
    weight = torch.full((4, 4), 7.0)

    torch.nn.init.zeros_(weight)

    assert weight.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_dtype_that_was_asked_for_whatever_the_file_says(folder: Path, dtype: torch.dtype) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, "torch_dtype": "float64"}))

    assert {parameter.dtype for parameter in on_meta(resolve(str(folder)), dtype=dtype).parameters()} == {dtype}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_and_cache_are_the_callers_choice_whatever_the_file_says(folder: Path, attention: str) -> None:
    ours = {**TINY, "use_cache": True, "_attn_implementation": "someone/kernel", "attn_implementation": "flash"}
    (folder / "config.json").write_text(json.dumps(ours))

    config: Any = on_meta(resolve(str(folder)), attention=attention).config

    assert (config._attn_implementation, config.use_cache) == (attention, False)


def test_layers_keeps_the_first_blocks_and_their_kinds() -> None:
    model: Any = on_meta(resolve("gemma-2-2b"), layers=3)

    assert len(model.model.layers) == 3
    assert model.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("layers", [0, -1, 27])
def test_more_layers_than_the_model_has_are_refused(layers: int) -> None:
    with pytest.raises(UsageError, match="between 1 and the model's 26"):
        on_meta(resolve("gemma-2-2b"), layers=layers)


def test_gpt_oss_has_no_fused_attention_and_gets_what_transformers_would_take() -> None:
    source = resolve("gpt-oss-20b")

    assert not supports_sdpa(load_config(source))
    config: Any = on_meta(source, layers=1).config
    assert config._attn_implementation == "eager"


def test_a_head_of_its_own_that_transformers_ties_by_itself_is_said(folder: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert any(note.startswith("not modelled: the head's own weights") for note in source_notes(resolve(str(folder))))


def test_notes_say_what_is_left_out(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, "auto_map": {"A": "b"}}))

    (code,) = source_notes(resolve(str(folder)))

    assert "not run" in code
    assert "MXFP4" in source_notes(resolve("gpt-oss-20b"))[0]
    assert source_notes(resolve("gpt2")) == ()


def test_a_config_is_fresh_each_time() -> None:
    source = resolve("gpt2")
    load_config(source).n_layer = 1

    assert load_config(source).n_layer == 12


FACTORY = """
import torch

class Nested:
    @staticmethod
    def build():
        return torch.nn.Linear(3, 5)

def build():
    return torch.nn.Linear(3, 5, bias=False)

def fails():
    raise RuntimeError("out of\\nideas")

def leaves():
    raise SystemExit(3)

def gives_a_number():
    return 7

number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, in the working folder."""
    name = "memfit_users_model"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_factory_in_the_working_folder_is_called_and_its_module_used(module: str) -> None:
    source = resolve(f"{module}:build")

    assert (source.kind, source.name) == ("factory", "build")
    assert parameter_count(on_meta(source)) == 15
    assert source_notes(source) == ()


def test_a_factory_builds_in_the_dtype_asked_for(module: str) -> None:
    model = on_meta(resolve(f"{module}:Nested.build"), dtype=torch.bfloat16)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_naming_a_factory_does_not_yet_run_it(module: str) -> None:
    resolve(f"{module}:build")

    assert module not in sys.modules


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        ("fails", "raised RuntimeError: out of ideas"),
        ("leaves", "raised SystemExit: 3"),
        ("gives_a_number", "returned a int"),
        ("number", "is a int, not a function"),
        ("biuld", "no factory in"),
    ],
)
def test_a_factory_that_does_not_give_a_model_is_refused_in_one_line(module: str, attribute: str, says: str) -> None:
    with pytest.raises(MemfitError, match=says) as caught:
        on_meta(resolve(f"{module}:{attribute}"))

    assert "\n" not in caught.value.message


def test_a_module_that_cannot_be_imported_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot import 'no_such_module_of_mine'") as caught:
        on_meta(resolve("no_such_module_of_mine:build"))

    assert "PYTHONPATH" in str(caught.value.hint)


def test_a_factory_has_no_config_and_decides_its_own_layers(module: str) -> None:
    source = resolve(f"{module}:build")

    with pytest.raises(UsageError, match="has no config"):
        load_config(source)
    with pytest.raises(UsageError, match="up to its own code"):
        on_meta(source, layers=2)

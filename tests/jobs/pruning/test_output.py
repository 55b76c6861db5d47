"""The saved folder: whole or resumable, never something in between."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_folder, tiny_model, tiny_windows

from memfit.errors import InputError
from memfit.jobs.pruning.decoder import Decoder
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.result import BlockReport, PruningOutcome
from memfit.jobs.pruning.saved_runs import journal_of, partial_of
from memfit.jobs.pruning.settings import PruneSettings
from memfit.models.checkpoint import WeightStore

BLOCKS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("source"), "llama", shards=3)


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(run(source, tmp_path_factory.mktemp("undisturbed") / "out"))


class Stopped(Exception):
    pass


def run(
    source: Path, save: Path, *, resume: bool = False, dtype: str = "auto", size: int = 2, key: str = "same",
    on_block: Callable[[BlockReport], None] = lambda _: None, **settings: Any,
) -> Path:  # fmt: skip
    decoder = Decoder.open(source, dtype=dtype)
    output = OutputFolder.create(save, decoder, {"method": key}, resume=resume)
    try:
        with Engine(decoder, device="cpu", micro_batch=size) as engine:
            engine.prune(PruneSettings.asked(model="-", **settings), tiny_windows(), output=output, on_block=on_block)
        return output.finish()
    finally:
        output.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_at(block: int) -> Callable[[BlockReport], None]:
    def stop(report: BlockReport) -> None:
        if report.index == block:
            raise Stopped

    return stop


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_files_are_those_of_the_source_with_the_same_tensors_in_the_same_order(
    source: Path, tmp_path: Path
) -> None:
    saved = run(source, tmp_path / "out")
    before, after = WeightStore.open(source), WeightStore.open(saved)
    assert [file.path.name for file in after.files] == [file.path.name for file in before.files]
    assert len(after.files) > 1
    for one, other in zip(before.files, after.files, strict=True):
        assert [(t.name, t.dtype, t.shape) for t in one.tensors] == [(t.name, t.dtype, t.shape) for t in other.tensors]
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]


def test_transformers_loads_it_without_a_word_about_missing_weights(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = run(source, tmp_path / "out")
    _, told = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]


def test_config_and_tokenizer_go_along_and_a_model_card_does_not(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path, "llama")
    for name in ("tokenizer.json", "vocab.txt", "README.md", "pytorch_model.bin"):
        (source / name).write_text("{}")
    saved = run(source, tmp_path / "out")
    found = {path.name for path in saved.iterdir()}
    assert found == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "vocab.txt"}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path, "llama", tie_word_embeddings=True)
    saved = run(source, tmp_path / "out")
    assert "lm_head.weight" not in WeightStore.open(source).stored
    assert "lm_head.weight" not in WeightStore.open(saved).stored


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_are_written_in_the_type_they_are_stored_in(stored: torch.dtype, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path, "llama", dtype=stored)
    saved = WeightStore.open(run(source, tmp_path / "out"))
    kept = {t.dtype for t in saved.stored.values()}
    assert kept == {"BF16" if stored == torch.bfloat16 else "F16"}


def test_another_type_is_computed_with_and_written_if_asked_for(tmp_path: Path) -> None:
    saved = run(tiny_folder(tmp_path, "llama"), tmp_path / "out", dtype="bf16")
    assert {t.dtype for t in WeightStore.open(saved).stored.values()} == {"BF16"}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_few_weights_of_another_type_keep_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_folder(tmp_path, "llama", dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    odd = {"model.layers.1.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight"}
    save_file({n: t.float() if n in odd else t for n, t in tensors.items()}, source / "model.safetensors")
    saved = run(source, tmp_path / "out")
    kept = load_file(saved / "model.safetensors")
    assert {name for name, tensor in kept.items() if tensor.dtype == torch.float32} == odd
    assert (kept["model.layers.0.mlp.down_proj.weight"] == 0).float().mean() == 0.5


def test_an_old_gpt2_checkpoint_without_prefix_and_with_saved_masks_is_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_folder(tmp_path, "gpt2")
    tensors = load_file(source / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(old, source / "model.safetensors", metadata={"format": "pt"})
    saved = load_file(run(source, tmp_path / "out") / "model.safetensors")
    assert saved.keys() == old.keys()
    assert torch.equal(saved["h.0.attn.bias"], old["h.0.attn.bias"])
    assert (saved["h.2.mlp.c_fc.weight"] == 0).float().mean() == 0.5


def test_without_save_nothing_is_written(source: Path, tmp_path: Path) -> None:
    with Engine(Decoder.open(source), device="cpu") as engine:
        engine.prune(PruneSettings.asked(model="-"), tiny_windows())
    assert list(tmp_path.iterdir()) == []


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_run_that_was_stopped_at_any_block_ends_with_the_same_bytes(
    block: int, source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    save = tmp_path / "out"
    with pytest.raises(Stopped):
        run(source, save, on_block=stop_at(block))
    assert not save.exists()
    found: list[int] = []
    run(source, save, resume=True, on_block=lambda report: found.append(report.index) if report.resumed else None)
    assert contents(save) == undisturbed
    assert found == list(range(len(found)))
    assert not partial_of(save).exists() and not journal_of(save).exists()


def test_a_line_of_the_journal_that_was_cut_off_is_done_again(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    save = tmp_path / "out"
    with pytest.raises(Stopped):
        run(source, save, on_block=stop_at(BLOCKS - 1))
    journal = journal_of(save)
    journal.write_bytes(journal.read_bytes()[:-20])
    run(source, save, resume=True)
    assert contents(save) == undisturbed


def test_the_micro_batches_of_the_first_run_are_kept(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    save = tmp_path / "out"
    with pytest.raises(Stopped):
        run(source, save, on_block=stop_at(1))
    run(source, save, resume=True, size=5)
    assert contents(save) == undisturbed


def prune_without_finishing(source: Path, save: Path, size: int = 2) -> PruningOutcome:
    """All blocks are on disk and in the journal; then the run ends, as if it were killed."""
    decoder = Decoder.open(source)
    output = OutputFolder.create(save, decoder, {"method": "same"}, resume=True)
    try:
        with Engine(decoder, device="cpu", micro_batch=size) as engine:
            return engine.prune(PruneSettings.asked(model="-"), tiny_windows(), output=output)
    finally:
        output.close()


def test_half_a_line_is_gone_when_the_next_one_is_written(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Stopped in the middle of a line, resumed, stopped again: what was written since is believed."""
    save = tmp_path / "out"
    prune_without_finishing(source, save)
    journal = journal_of(save)
    journal.write_bytes(journal.read_bytes()[:-20])
    prune_without_finishing(source, save)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["block"] for line in lines if "block" in line] == list(range(BLOCKS))
    found: list[int] = []
    run(source, save, resume=True, on_block=lambda report: found.append(report.index) if report.resumed else None)
    assert (found, contents(save)) == (list(range(BLOCKS)), undisturbed)


def test_a_block_out_of_order_is_not_believed(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    save = tmp_path / "out"
    prune_without_finishing(source, save)
    journal = journal_of(save)
    kept = [line for line in journal.read_text().splitlines(keepends=True) if '"block": 1' not in line]
    journal.write_text("".join(kept))
    assert '"block": 2' in "".join(kept)
    found: list[int] = []
    run(source, save, resume=True, on_block=lambda report: found.append(report.index) if report.resumed else None)
    assert (found, contents(save)) == ([0], undisturbed)


def test_a_blocks_line_follows_its_bytes_to_the_disk_and_is_there_itself_before_the_next(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which files are written and synced, of the thread that settles blocks and of the one that writes."""
    order: list[str] = []
    journal = journal_of(tmp_path / "out")

    def what(descriptor: int) -> str:
        return "line" if os.path.realpath(f"/proc/self/fd/{descriptor}") == str(journal) else "bytes"

    def noted(name: str, verb: str) -> None:
        usual = getattr(os, name)

        def call(descriptor: int, *rest: Any) -> Any:
            made = usual(descriptor, *rest)
            if threading.current_thread().name.startswith(("memfit-sync", "memfit-write")):
                order.append(f"{verb} {what(descriptor)}")
            return made

        monkeypatch.setattr(os, name, call)

    for name, verb in (("pwrite", "write"), ("write", "write"), ("fdatasync", "sync"), ("fsync", "sync")):
        noted(name, verb)
    monkeypatch.setattr(OutputFolder, "write", one_at_a_time(OutputFolder.write))
    run(source, tmp_path / "out")
    told = [each for each, _ in itertools.groupby(order)]
    assert told == ["write bytes", "sync bytes", "write line", "sync line"] * BLOCKS


def one_at_a_time(write: Callable[..., None]) -> Callable[..., None]:
    def then_settled(self: OutputFolder, *rest: Any) -> None:
        write(self, *rest)
        self.settle()

    return then_settled


def test_the_micro_batch_of_the_first_run_is_recalled(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(source, tmp_path / "out", on_block=stop_at(1), size=2)
    assert prune_without_finishing(source, tmp_path / "out", size=5).micro_batch == 2


def test_owl_is_not_asked_again(source: Path, tmp_path: Path) -> None:
    expected = contents(run(source, tmp_path / "whole", allocation="owl"))
    with pytest.raises(Stopped):
        run(source, tmp_path / "out", on_block=stop_at(1), allocation="owl")
    assert '"outliers"' in journal_of(tmp_path / "out").read_text()
    assert contents(run(source, tmp_path / "out", resume=True, allocation="owl")) == expected


def test_a_full_disk_is_said_and_can_be_resumed(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, usual, calls = tmp_path / "out", os.pwrite, 0

    def pwrite(descriptor: int, data: Any, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return usual(descriptor, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(InputError, match="cannot be written: No space left on device") as raised:
            run(source, save)
    assert raised.value.hint == "make room and run the same command with --resume"
    run(source, save, resume=True)
    assert contents(save) == undisturbed


def test_too_little_room_is_said_at_the_start(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(InputError, match="its disk has"):
        run(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_room_is_taken_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(InputError, match="cannot be written: No space left on device"):
            run(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_changed_under_a_stopped_run_are_noticed(source: Path, tmp_path: Path) -> None:
    save = tmp_path / "out"
    with pytest.raises(Stopped):
        run(source, save, on_block=stop_at(1))
    store = WeightStore.open(partial_of(save))
    tensor = store.stored["model.layers.0.mlp.up_proj.weight"]
    with store.files[tensor.file].path.open("r+b") as file:
        file.seek(tensor.start + 100)
        file.write(b"\x01\x02\x03")
    with pytest.raises(InputError, match=r"block 0 in .* is not as it was written"):
        run(source, save, resume=True)


def test_other_settings_do_not_resume(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(source, tmp_path / "out", on_block=stop_at(0))
    with pytest.raises(InputError, match="was begun with other settings: method 'same'"):
        run(source, tmp_path / "out", resume=True, key="other")


def test_a_model_that_changed_does_not_resume(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path, "llama")
    with pytest.raises(Stopped):
        run(source, tmp_path / "out", on_block=stop_at(0))
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(InputError, match="the model has changed since"):
        run(source, tmp_path / "out", resume=True)


def test_an_unfinished_run_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(source, tmp_path / "out", on_block=stop_at(0))
    with pytest.raises(InputError, match="an earlier run was not finished"):
        run(source, tmp_path / "out")


def test_a_folder_that_is_there_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(InputError, match="already exists"):
        run(source, tmp_path / "out")


def test_an_empty_folder_is_as_good_as_none(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert contents(run(source, tmp_path / "out")) == undisturbed


def test_resuming_what_was_never_begun_begins_it(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    assert contents(run(source, tmp_path / "out", resume=True)) == undisturbed


# -- what cannot be read -----------------------------------------------------------------------------------------------


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_folder(tmp_path, "llama")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.2.self_attn.o_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(InputError, match=r"the weights lack 'model\.layers\.2\.self_attn\.o_proj\.weight'"):
        Decoder.open(source)


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path, "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(InputError, match=r"has the shape \[32, 64\]; the model's config asks for \[32, 128\]"):
        Decoder.open(source)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="is an encoder"):
        Decoder.open(tmp_path / "bert")


def test_the_models_own_tables_are_made_as_transformers_makes_them(tmp_path: Path) -> None:
    for family in ("llama", "gemma3_text"):
        decoder = Decoder.open(tiny_folder(tmp_path, family))
        expected = dict(tiny_model(family).named_buffers())
        assert all(torch.equal(buffer, expected[name]) for name, buffer in decoder.model.named_buffers())

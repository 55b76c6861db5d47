"""What reaches the disk, and in which order: the calls as they are really made, and journals that were cut anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_output import BLOCKS, Stopped, contents, prune_without_finishing, run, stop_at
from tiny_models import tiny_folder

from memfit.errors import InputError
from memfit.jobs.host import HostMemory, as_bytes
from memfit.jobs.pruning import output as outputs
from memfit.jobs.pruning.decoder import Decoder, Layout, Slot, StoredPiece
from memfit.jobs.pruning.output import OutputFolder, _checksum
from memfit.jobs.pruning.saved_runs import FORMAT, Journal, discard, forget_blocks, journal_of, partial_of, replaced_of
from memfit.jobs.pruning.streaming import Uploads, bring
from memfit.jobs.pruning.sweep import Sweep
from memfit.models.checkpoint import WeightStore


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("source"), "llama", shards=3)


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(run(source, tmp_path_factory.mktemp("undisturbed") / "out"))


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes, syncs, renames and deletions below this folder, in their order, by the names of files."""
    made: list[str] = []

    def name(where: Any) -> str:
        path = Path(os.path.realpath(f"/proc/self/fd/{where}") if isinstance(where, int) else where)
        return str(path.relative_to(tmp_path)) if path.is_relative_to(tmp_path) else ""

    def noted(call: str, verb: str) -> None:
        usual = getattr(os, call)

        def done(first: Any, *rest: Any, **more: Any) -> Any:
            about = [name(first), *(name(each) for each in rest if verb == "rename")]
            result = usual(first, *rest, **more)
            if about[0]:
                made.append(" ".join((verb, *about)))
            return result

        monkeypatch.setattr(os, call, done)

    for call, verb in (
        ("write", "write"), ("pwrite", "write"), ("fsync", "sync"), ("fdatasync", "sync"), ("rename", "rename"),
        ("unlink", "delete"), ("ftruncate", "cut"),
    ):  # fmt: skip
        noted(call, verb)
    return made


# -- the journal -------------------------------------------------------------------------------------------------------


def test_a_journal_is_begun_with_its_first_line_and_its_name_on_the_disk(tmp_path: Path, calls: list[str]) -> None:
    journal = Journal(tmp_path / "j", {"a": 1})
    journal.begin()
    assert calls == ["write j", "sync j", "sync ."]
    journal.add_block(0, 17, {})
    assert calls[3:] == ["write j", "sync j"]
    journal.remember("size", 2)
    assert calls[5:] == ["write j", "sync j"]
    journal.close()


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


FIRST = json.dumps({"format": FORMAT, "run": {"a": 1}}) + "\n"
BLOCK = [json.dumps({"block": number, "checksum": number, "facts": {}}) + "\n" for number in range(3)]


def test_a_whole_line_without_its_end_is_not_believed_and_is_written_over(tmp_path: Path) -> None:
    """It may be the beginning of a longer one: `"checksum": 1` of `"checksum": 17`."""
    path = written(tmp_path / "j", FIRST, BLOCK[0], BLOCK[1].rstrip("\n"))
    journal = Journal.read(path)
    assert journal is not None and [line["block"] for line in journal.blocks] == [0]
    journal.go_on({"a": 1}, save="out")
    journal.add_block(1, 99, {})
    journal.close()
    again = Journal.read(path)
    assert again is not None and [line["checksum"] for line in again.blocks] == [0, 99]


@pytest.mark.parametrize("junk", ["{", "[]\n", "null\n", '{"block": 1, "chec', "\x00\x00\x00\n"])
def test_nothing_after_a_line_that_is_no_line_is_believed(tmp_path: Path, junk: str) -> None:
    journal = Journal.read(written(tmp_path / "j", FIRST, BLOCK[0], junk, BLOCK[1]))
    assert journal is not None and [line["block"] for line in journal.blocks] == [0]


@pytest.mark.parametrize("order", [(0, 2), (1,), (0, 0), (2, 1, 0)])
def test_blocks_count_from_the_first_on_without_a_gap(tmp_path: Path, order: tuple[int, ...]) -> None:
    journal = Journal.read(written(tmp_path / "j", FIRST, *(BLOCK[number] for number in order)))
    assert journal is not None
    assert [line["block"] for line in journal.blocks] == ([0] if 0 in order else [])


def test_a_run_that_was_begun_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    journal = Journal.read(written(tmp_path / "j", FIRST, BLOCK[0]))
    assert journal is not None
    with pytest.raises(InputError, match="'out' was begun with other settings: a 1"):
        journal.go_on({"a": 2}, save="out")
    with pytest.raises(InputError, match="was begun with other settings"):
        journal.go_on({"a": 1, "b": 1}, save="out")
    assert (tmp_path / "j").read_text() == FIRST + BLOCK[0]


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    other = FIRST.replace(FORMAT, "memfit.prune-journal/2")
    with pytest.raises(InputError, match="is of another version of memfit"):
        Journal.read(written(tmp_path / "j", other, BLOCK[0]))


def test_blocks_are_forgotten_on_the_disk_before_their_files_go(tmp_path: Path, calls: list[str]) -> None:
    path = written(tmp_path / "j", FIRST, *BLOCK)
    forget_blocks(path)
    assert path.read_text() == FIRST
    assert calls == ["cut j", "sync j"]


def test_of_an_unfinished_run_the_journal_goes_last(source: Path, tmp_path: Path, calls: list[str]) -> None:
    save = tmp_path / "out"
    prune_without_finishing(source, save)
    calls.clear()
    discard(save)
    assert calls[:2] == ["cut out.partial.jsonl", "sync out.partial.jsonl"]
    assert calls[-1] == "delete out.partial.jsonl"
    assert list(tmp_path.iterdir()) == []


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_its_files_on_the_disk_then_its_name_then_without_its_journal(
    source: Path, tmp_path: Path, calls: list[str]
) -> None:
    decoder = Decoder.open(source)
    output = OutputFolder.create(tmp_path / "out", decoder, {})
    output.copy_rest().result()
    calls.clear()
    output.finish()
    files = [f"sync out.partial/{file.path.name}" for file in decoder.weights.files]  # type: ignore[union-attr]
    assert len(files) == 3
    assert calls == [
        *files, "sync out.partial", "rename out.partial out", "sync .", "delete out.partial.jsonl",
    ]  # fmt: skip


def test_an_old_result_is_there_under_another_name_until_the_new_one_is_in_its_place(
    source: Path, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "out"
    save.mkdir()
    (save / "old").write_text("seven hours of work")
    output = OutputFolder.create(save, Decoder.open(source), {}, replace=True)
    output.copy_rest().result()
    there: list[bool] = []
    rename = Path.rename

    def looked(self: Path, target: Any) -> Any:
        if self == partial_of(save):
            there.append((replaced_of(save) / "old").is_file())
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", looked)
    output.finish()
    assert there == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (save / "old").exists()


def test_a_file_of_another_size_is_not_gone_on_with(source: Path, tmp_path: Path) -> None:
    save = tmp_path / "out"
    prune_without_finishing(source, save)
    path = next(partial_of(save).glob("*.safetensors"))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)
    with pytest.raises(InputError, match="is not as the run left it"):
        run(source, save, resume=True)


def test_what_is_not_pruned_is_copied_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prune_without_finishing(source, tmp_path / "out")
    assert '{"set": {"rest": true}}' in journal_of(tmp_path / "out").read_text()

    def copied(*_: object) -> None:
        raise AssertionError("copied again")

    monkeypatch.setattr(OutputFolder, "_copy", copied)
    run(source, tmp_path / "out", resume=True)


def test_copies_through_a_small_buffer_are_the_same_bytes(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "COPY_BYTES", 100)
    assert contents(run(source, tmp_path / "out")) == undisturbed


def test_the_index_says_how_many_bytes_all_tensors_have(source: Path, tmp_path: Path) -> None:
    saved = run(source, tmp_path / "out")
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    tensors = [each for path in saved.glob("*.safetensors") for each in load_file(path).values()]
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors)


def test_a_part_in_the_middle_of_a_tensor_goes_to_its_place_in_a_file_of_another_type(tmp_path: Path) -> None:
    """The model computes in bf16 and one of its matrices is stored in fp32: parts of 64 bytes become 128 there."""
    source = tiny_folder(tmp_path, "llama", dtype=torch.bfloat16)
    odd = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(source / "model.safetensors")
    save_file({n: t.float() if n == odd else t for n, t in tensors.items()}, source / "model.safetensors")
    output = OutputFolder.create(tmp_path / "out", Decoder.open(source), {})
    sent: dict[str, torch.Tensor] = {}

    def parts(piece: StoredPiece) -> Iterator[tuple[int, memoryview]]:
        sent[piece.stored.name] = value = torch.randn(piece.slot.shape).to(piece.slot.dtype)
        data = as_bytes(value.view(-1).view(torch.uint8))
        for start in range(0, len(data), 64):
            yield start, data[start : start + 64]

    output.write(0, parts, {})
    output.copy_rest().result()
    saved = load_file(output.finish() / "model.safetensors")
    assert (saved[odd].dtype, sent[odd].dtype) == (torch.float32, torch.bfloat16)
    assert all(torch.equal(saved[name].to(value.dtype), value) for name, value in sent.items())


@pytest.mark.parametrize("at", [0, 7, 8, 10])
def test_every_byte_counts_in_a_checksum(at: int) -> None:
    data = bytearray(b"abcdefghijk")
    before = _checksum(memoryview(data), 5)
    data[at] += 1
    assert _checksum(memoryview(data), 5) != before


def test_a_run_that_is_resumed_goes_on_with_the_micro_batches_that_are_written_down(
    source: Path, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        run(source, tmp_path / "out", on_block=stop_at(1), size=2)
    journal = journal_of(tmp_path / "out").read_text()
    assert '{"set": {"micro_batch": 2}}' in journal
    outcome = prune_without_finishing(source, tmp_path / "out", size=5)
    assert (outcome.micro_batch, len(outcome.blocks)) == (2, BLOCKS)
    assert journal_of(tmp_path / "out").read_text().count("micro_batch") == 1


def test_of_a_tensor_that_is_converted_what_lies_on_the_disk_is_shown(tmp_path: Path) -> None:
    """Checksums are of the bytes that were written."""
    value = torch.randn(5, 40)
    save_file({"w": value}, tmp_path / "model.safetensors")
    weights = WeightStore.open(tmp_path)
    slot = Slot("w", (5, 40), torch.bfloat16, 0)
    layout = Layout((slot,), (StoredPiece(weights.stored["w"], slot, 0),), slot.nbytes)
    flat, shown = torch.zeros(slot.nbytes, dtype=torch.uint8), bytearray()
    cpu = torch.device("cpu")
    bring(weights, layout, flat, Uploads(cpu, HostMemory(cpu), 64), lambda _, data: shown.extend(data))
    weights.close()
    assert bytes(shown) == bytes(as_bytes(value.view(-1).view(torch.uint8)))


def test_outliers_that_were_counted_are_not_counted_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        run(source, tmp_path / "out", on_block=stop_at(1), allocation="owl")

    def counted(_: Sweep) -> list[float]:
        raise AssertionError("counted again")

    monkeypatch.setattr(Sweep, "_outliers", counted)
    run(source, tmp_path / "out", resume=True, allocation="owl")

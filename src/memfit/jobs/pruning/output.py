"""The folder that `--save` asks for: written beside, one block at a time, and renamed when it is whole.

The files are those of the source, with the same names and the same tensors in the same order, so tied weights stay tied
and nothing is renamed. A block's line is written to the journal (`saved_runs.py`) only after its bytes are on disk;
whatever kills the run, the journal says what can be relied on, and `--resume` does the rest again. A run that was
killed before its first block was done is begun anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.errors import InputError, MemfitError
from memfit.files import to_disk
from memfit.jobs.host import as_bytes
from memfit.jobs.pruning.decoder import TORCH_DTYPES, Decoder, StoredPiece
from memfit.jobs.pruning.observation import find_matrices
from memfit.jobs.pruning.result import is_result
from memfit.jobs.pruning.saved_runs import (
    ALONG,
    CLOEXEC,
    Journal,
    absolute,
    check_room,
    discard,
    is_taken,
    journal_of,
    partial_of,
    replaced_of,
    unfinished,
    writing_to,
)
from memfit.jobs.pruning.streaming import Parts
from memfit.models.checkpoint import INDEX, StoredTensor, WeightStore

MAX_ALONG_BYTES = 1 << 28
COPY_BYTES = 32 << 20
SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """Where a tensor goes in the new files, and as what."""

    stored: StoredTensor
    dtype: str
    file: int
    start: int
    nbytes: int


class OutputFolder:
    def __init__(self, save: Path, decoder: Decoder, journal: Journal) -> None:
        self.save = save
        self.working = partial_of(save)
        self.journal = journal
        self._decoder = decoder
        self._targets, self._headers, self._sizes = _plan(decoder)
        self._written = _pruned_names(decoder)
        self._files: list[int] = []
        self._beside = ThreadPoolExecutor(1, "memfit-copy")
        self._syncing = ThreadPoolExecutor(1, "memfit-sync")
        self._synced: list[Future[None]] = []

    @classmethod
    def create(
        cls,
        save: str | Path,
        decoder: Decoder,
        run_key: Mapping[str, Any],
        *,
        resume: bool = False,
        replace: bool = False,
    ) -> OutputFolder:
        """Everything that can be wrong with `--save` is found here, before any work. With `replace`, a result that is
        there goes when the new one is whole."""
        path = absolute(save)
        key = {**run_key, "source": identity_of(decoder)}
        with writing_to(save):
            path.parent.mkdir(parents=True, exist_ok=True)
            journal = unfinished(path, str(save), resume=resume)
            replaces = replace or (journal is not None and bool(journal.settings.get("replaces")))
            if is_taken(path) and not replaces:
                what = "is complete already" if resume and journal is None else "already exists"
                or_else = "--force replaces it" if is_result(path) else "move this one away"
                raise InputError(f"--save '{save}' {what}", hint=f"choose another folder, or {or_else}")
            if journal is not None:
                journal.go_on(key, save=str(save))
                made = cls(path, decoder, journal)
                made._continue()
                return made
            made = cls(path, decoder, Journal(journal_of(path), key))
            try:
                made._begin()
                if is_taken(path):
                    made.journal.remember("replaces", True)
            except BaseException:
                made.close()
                discard(path)
                raise
            return made

    # -- what the engine asks and tells ----------------------------------------------------------------------------

    @property
    def finished_blocks(self) -> int:
        """So many blocks, from the first on, are safely there."""
        return len(self.journal.blocks)

    def facts(self, block: int) -> Mapping[str, Any]:
        """What was told about a finished block."""
        return self.journal.blocks[block]["facts"]  # type: ignore[no-any-return]

    def recall(self, name: str) -> Any:
        return self.journal.settings.get(name)

    def remember(self, name: str, value: Any) -> None:
        with writing_to(self.save):
            self.journal.remember(name, value)

    def weights(self) -> WeightStore:
        """The new files as a source, for blocks that are finished."""
        return WeightStore.open(self.working)

    def write(self, block: int, parts: Parts, facts: Mapping[str, Any]) -> None:
        """A block's pruned tensors. Its line in the journal follows once they are on disk, while others are written."""
        for done in self._synced:
            if done.done():
                done.result()
        total, files = 0, set()
        with writing_to(self.save):
            for piece in self._pruned_pieces(block):
                target = self._targets[piece.stored.name]
                files.add(target.file)
                for start, part in parts(piece):
                    at, data = self._outgoing(piece, start, part)
                    _pwrite(self._files[target.file], data, target.start + at)
                    total = _checksum(data, total)
        self._synced.append(self._syncing.submit(self._settle, block, sorted(files), total, dict(facts)))

    def settle(self) -> None:
        """Until all that was written is on disk and in the journal."""
        for done in self._synced:
            done.result()
        self._synced.clear()

    def checking(self, block: int) -> Check:
        """To be shown what is read back of a finished block."""
        return Check(self, block, {piece.stored.name for piece in self._pruned_pieces(block)})

    def copy_rest(self) -> Future[None]:
        """Everything that is not pruned, from the source as it is; in the background."""
        return self._beside.submit(self._copy_rest)

    def finish(self) -> Path:
        """All on disk, under its own name."""
        with writing_to(self.save):
            self.settle()
            self._sync(range(len(self._files)))
            self.close()
            to_disk(self.working)
            if is_taken(self.save):
                self.save.rename(replaced_of(self.save))
            elif self.save.is_dir():
                self.save.rmdir()
            self.working.rename(self.save)
            to_disk(self.save.parent)
            shutil.rmtree(replaced_of(self.save), ignore_errors=True)
            self.journal.delete()
        return self.save

    def close(self) -> None:
        """Leave it as it is, for --resume."""
        self._beside.shutdown(wait=True)
        self._syncing.shutdown(wait=True)
        while self._files:
            os.close(self._files.pop())
        self.journal.close()

    # -- files -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        check_room(self.save, sum(self._sizes), said=f"--save '{self.save}'")
        self.journal.begin()
        self.working.mkdir()
        names = [file.path.name for file in self._source.files]
        for name, header, size in zip(names, self._headers, self._sizes, strict=True):
            descriptor = os.open(self.working / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | CLOEXEC, 0o666)
            self._files.append(descriptor)
            _reserve(descriptor, size)
            _pwrite(descriptor, memoryview(header), 0)
        if len(names) > 1:
            index = {
                "metadata": {"total_size": sum(t.nbytes for t in self._targets.values())},
                "weight_map": {name: names[target.file] for name, target in sorted(self._targets.items())},
            }
            (self.working / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        self._copy_along()
        self._sync(range(len(names)))
        to_disk(self.working)
        to_disk(self.working.parent)

    def _continue(self) -> None:
        for file, size in zip(self._source.files, self._sizes, strict=True):
            path = self.working / file.path.name
            if not path.is_file() or path.stat().st_size != size:
                raise InputError(f"'{path}' is not as the run left it", hint="--force begins anew")
            self._files.append(os.open(path, os.O_RDWR | CLOEXEC))

    @property
    def _source(self) -> WeightStore:
        assert isinstance(self._decoder.weights, WeightStore)
        return self._decoder.weights

    def _copy_along(self) -> None:
        assert self._decoder.folder is not None
        for path in sorted({found for pattern in ALONG for found in self._decoder.folder.glob(pattern)}):
            if path.is_file() and path.stat().st_size <= MAX_ALONG_BYTES:
                shutil.copyfile(path, self.working / path.name)
        if self._decoder.converts:
            path = self.working / "config.json"
            config = json.loads(path.read_bytes())
            config.pop("torch_dtype", None)
            config["dtype"] = str(self._decoder.dtype).removeprefix("torch.")
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _pruned_pieces(self, block: int) -> list[StoredPiece]:
        return [p for p in self._decoder.layouts[block].pieces if p.stored.name in self._written]

    def _settle(self, block: int, files: list[int], checksum: int, facts: Mapping[str, Any]) -> None:
        with writing_to(self.save):
            self._sync(files)
            self.journal.add_block(block, checksum, facts)

    def _outgoing(self, piece: StoredPiece, start: int, part: memoryview) -> tuple[int, memoryview]:
        """A part in the type of its file, and where in the tensor it begins there."""
        dtype = TORCH_DTYPES[self._targets[piece.stored.name].dtype]
        if dtype == piece.slot.dtype:
            return start, part
        converted = torch.frombuffer(part, dtype=piece.slot.dtype).to(dtype)
        return start // piece.slot.dtype.itemsize * dtype.itemsize, as_bytes(converted)

    def _copy_rest(self) -> None:
        if self.journal.settings.get("rest"):
            return
        with writing_to(self.save):
            for name, target in self._targets.items():
                if name not in self._written:
                    self._copy(target)
            self._sync(range(len(self._files)))
            self.journal.remember("rest", True)

    def _copy(self, target: NewTensor) -> None:
        stored, descriptor = target.stored, self._files[target.file]
        if target.dtype != stored.dtype:
            raw = torch.empty(stored.nbytes, dtype=torch.uint8)
            self._source.read_into(stored.name, as_bytes(raw))
            converted = raw.view(TORCH_DTYPES[stored.dtype]).to(TORCH_DTYPES[target.dtype])
            _pwrite(descriptor, as_bytes(converted), target.start)
            return
        buffer = memoryview(bytearray(min(COPY_BYTES, stored.nbytes)))
        for start in range(0, stored.nbytes, COPY_BYTES):
            part = buffer[: min(COPY_BYTES, stored.nbytes - start)]
            self._source.read_into(stored.name, part, start)
            _pwrite(descriptor, part, target.start + start)

    def _sync(self, files: Iterable[int]) -> None:
        for file in files:  # the data and what is needed to find it; not every system can leave out the rest
            getattr(os, "fdatasync", os.fsync)(self._files[file])


@dataclass
class Check:
    """Is what is read back of a finished block what was written?"""

    output: OutputFolder
    block: int
    names: set[str]
    total: int = 0

    def seen(self, name: str, data: memoryview) -> None:
        if name in self.names:
            self.total = _checksum(data, self.total)

    def end(self) -> None:
        if self.total != self.output.journal.blocks[self.block]["checksum"]:
            raise InputError(
                f"block {self.block} in '{self.output.working}' is not as it was written: is the disk failing?",
                hint="--force begins anew",
            )


# -- the plan of the new files -----------------------------------------------------------------------------------------


def _plan(decoder: Decoder) -> tuple[dict[str, NewTensor], list[bytes], list[int]]:
    assert isinstance(decoder.weights, WeightStore)
    targets: dict[str, NewTensor] = {}
    headers, sizes = [], []
    for number, file in enumerate(decoder.weights.files):
        table: dict[str, Any] = {"__metadata__": {**file.metadata, "format": "pt"}}
        at = 0
        placed = []
        for stored in file.tensors:
            dtype = stored.dtype
            if decoder.converts and stored.dtype in TORCH_DTYPES:
                dtype = SAFETENSORS_NAMES[decoder.dtype]
            nbytes = stored.nbytes if dtype == stored.dtype else math.prod(stored.shape) * decoder.dtype.itemsize
            table[stored.name] = {"dtype": dtype, "shape": list(stored.shape), "data_offsets": [at, at + nbytes]}
            placed.append((stored, dtype, at, nbytes))
            at += nbytes
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        for stored, dtype, start, nbytes in placed:
            targets[stored.name] = NewTensor(stored, dtype, number, len(header) + start, nbytes)
        headers.append(header)
        sizes.append(len(header) + at)
    return targets, headers, sizes


def _pruned_names(decoder: Decoder) -> set[str]:
    """Stored tensors that hold weights which are pruned."""
    names: set[str] = set()
    for block, layout in zip(decoder.blocks, decoder.layouts, strict=True):
        pruned = {matrix.slot for matrix in find_matrices(block)}
        names.update(piece.stored.name for piece in layout.pieces if piece.slot.name in pruned)
    return names


def identity_of(decoder: Decoder) -> str:
    """The source as its files look from outside: a source that changes under a run is another source."""
    assert isinstance(decoder.weights, WeightStore)
    seen = hashlib.sha256()
    for file in decoder.weights.files:
        stats = file.path.stat()
        seen.update(f"{file.path.name} {stats.st_size} {stats.st_mtime_ns}\n".encode())
        for tensor in file.tensors:
            seen.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.start}\n".encode())
    return seen.hexdigest()


# -- bytes -------------------------------------------------------------------------------------------------------------


def _checksum(data: memoryview, total: int) -> int:
    """The sum of all 8-byte words, at the speed of memory: enough to tell a page that never reached the disk. By numpy,
    in this thread: torch would start others here, beside those that compute."""
    whole = len(data) // 8 * 8
    words = int(torch.frombuffer(data, dtype=torch.int64, count=whole // 8).numpy().sum()) if whole else 0
    return (total + words + int.from_bytes(data[whole:], "little")) % (1 << 64)


def _pwrite(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + COPY_BYTES], at + done)


def _reserve(descriptor: int, size: int) -> None:
    """Take the room now, so that a full disk is found before the work and not at its end."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
            return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    os.ftruncate(descriptor, size)


def leave(output: OutputFolder) -> None:
    """After a run that broke: keep what --resume can use, and nothing else."""
    with suppress(MemfitError, OSError):
        output.close()
    if output.finished_blocks == 0:
        with suppress(OSError):
            discard(output.save)

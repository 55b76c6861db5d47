"""The folder that `--save` asks for: written beside, one block at a time, and renamed when it is whole.

    NAME.partial.jsonl    the journal: what the run is, then a line for each block that is safely on disk
    NAME.partial/         config, tokenizer, and files of safetensors at their full size, filled block by block
    NAME.partial.old/     for a moment: the result that NAME held before and that the new one replaces

The files are those of the source, with the same names and the same tensors in the same order, so tied weights stay tied
and nothing is renamed. A block's line is written only after its bytes are on disk; whatever kills the run, the journal
says what can be relied on, and `--resume` does the rest again. A run that was killed before its first block was done is
begun anew.

    NAME.partial.lock    while a run writes to NAME: locked, with the process that holds it; a killed one holds nothing
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from memfit.errors import InputError, MemfitError, UsageError
from memfit.files import to_disk, written_whole
from memfit.jobs.host import as_bytes
from memfit.jobs.pruning.decoder import TORCH_DTYPES, Decoder, StoredPiece
from memfit.jobs.pruning.journal import CLOEXEC, Journal, forget_blocks
from memfit.jobs.pruning.observation import find_matrices
from memfit.jobs.pruning.result import FILE, document_in, is_result
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.pruning.streaming import Parts
from memfit.models.checkpoint import INDEX, WEIGHTS, StoredTensor, WeightStore
from memfit.units import format_bytes

CHOOSE = "name a folder that is empty or not there yet, such as --save pruned"
ALONG = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "*.model", "*.tiktoken", "chat_template*", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""What goes along with the weights; a model card that describes the dense model does not."""
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
            journal = _unfinished(path, str(save), resume=resume)
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


# -- names, and what lies under them -----------------------------------------------------------------------------------


def absolute(save: str | Path) -> Path:
    """Of a symbolic link, where it leads: what is renamed and replaced is there, and the link stays."""
    path = Path(os.path.abspath(os.path.expanduser(save)))
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def place_of(save: str) -> Path:
    """`absolute`, of what can be written as far as names tell."""
    if not save:
        raise UsageError("--save is empty", hint=CHOOSE)
    path = absolute(save)
    if not path.name:
        raise UsageError(f"--save '{save}' is the root of all folders", hint=CHOOSE)
    for place in (path, *path.parents):
        why = None
        if os.path.islink(place) and not place.exists():
            why = "a symbolic link that leads nowhere"
        elif place != path and place.exists() and not place.is_dir():
            why = "a file"
        if why is not None:
            raise InputError(f"--save '{save}' cannot be written: '{place}' is {why}", hint=CHOOSE)
    return path


def partial_of(save: Path) -> Path:
    return save.with_name(f"{save.name}.partial")


def journal_of(save: Path) -> Path:
    return save.with_name(f"{save.name}.partial.jsonl")


def replaced_of(save: Path) -> Path:
    return save.with_name(f"{save.name}.partial.old")


def is_taken(save: Path) -> bool:
    """An empty folder is as good as none."""
    return save.exists() and (not save.is_dir() or any(save.iterdir()))


def discard(save: Path) -> None:
    """An unfinished run, in an order that may be cut off anywhere: the journal, without which the rest is nobody's,
    goes last, and says from the beginning that no block can be relied on."""
    journal = journal_of(save)
    if journal.exists():
        forget_blocks(journal)
        shutil.rmtree(partial_of(save), ignore_errors=True)
        journal.unlink()


def check_room(path: Path, needed: int, *, said: str) -> None:
    free = shutil.disk_usage(_existing(path)).free
    if free < needed:
        raise InputError(
            f"{said} needs {format_bytes(needed)}; its disk has {format_bytes(free)} free",
            hint="make room, or choose a folder on another disk",
        )


def is_same_disk(one: Path, other: Path) -> bool:
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _unfinished(save: Path, said: str, *, resume: bool) -> Journal | None:
    """The journal to go on with. What has no finished block is cleared away instead: there is nothing to lose."""
    working, beside = partial_of(save), journal_of(save)
    found = Journal.read(beside) if beside.exists() else None
    if found is not None and found.blocks:
        if not resume:
            raise InputError(
                f"--save '{said}': an earlier run was not finished ({working.name})",
                hint="--resume continues it, --force begins anew",
            )
        return found
    if working.exists() and found is None:
        raise InputError(
            f"'{working}' is in the way: it has no journal of memfit ({beside.name}) that says what it is",
            hint="move it away, or delete it if it is the rest of a run that was killed",
        )
    discard(save)
    return None


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


@contextmanager
def writing_to(save: object) -> Iterator[None]:
    """A disk that is full, or gone, in words."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise InputError(
            f"--save '{save}' cannot be written: {error.strerror}",
            hint="make room and run the same command with --resume" if full else None,
        ) from error


LOGS = "memory_log*.csv"
RESULTS = (FILE, "log_*.txt", LOGS)


@contextmanager
def held(save: str | None, warn: Callable[[str], None]) -> Iterator[None]:
    """The folder is this process's while this is open. A second run is told whose it is."""
    if save is None:
        yield
        return
    path = place_of(save)
    with writing_to(save):
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.partial.lock")
        descriptor = _locked(lock, save, warn)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held: whoever has opened it meanwhile finds that it is gone
        os.close(descriptor)
        for folder in made:
            with suppress(OSError):  # something was saved there
                folder.rmdir()


def check(settings: PruneSettings, *, force: bool) -> dict[str, Any] | None:
    """An existing folder is found before the model is even looked for. Nothing is deleted yet but remains. Answers with
    the document of a result where nothing is left to resume."""
    if settings.save is None:
        return None
    path, said = place_of(settings.save), settings.save
    if force and settings.resume:
        raise UsageError("--force begins anew and --resume continues: give one of them")
    model = Path(settings.workload.model).expanduser()
    if model.exists() and path.exists() and model.samefile(path):
        raise InputError(f"--save '{said}' is the model itself", hint="choose another folder")
    with writing_to(said):
        _tidy(path)
    if not is_taken(path) or (settings.resume and journal_of(path).exists()):
        return None
    if not is_result(path):
        why = " and is not the result of an earlier run (it has no result.json of memfit)" if force else ""
        hint = "--force deletes only such results: choose another folder, or move this one away"
        raise InputError(f"--save '{said}' already exists{why}", hint=hint if force else "choose another folder")
    if not force and not _asks_for_the_same(path, settings):
        what = "is the complete result of another run" if settings.resume else "already exists"
        raise InputError(f"--save '{said}' {what}", hint="choose another folder, or --force replaces it")
    if settings.resume:
        return document_in(path)
    if not (force or settings.log_memory) and any(path.glob(LOGS)):
        hint = "--log-memory writes one again; or choose another folder, or --force replaces it"
        raise InputError(f"--save '{said}' holds a memory log, which this run would not write", hint=hint)
    return None


def holds_same_run(save: str, key: Mapping[str, Any]) -> bool:
    """Whether the folder is the untouched result of the same settings, model and text: doing it again loses nothing."""
    path = absolute(save)
    if not is_taken(path) or document_in(path).get("run") != {**key}:
        return False
    written = (path / FILE).stat().st_mtime_ns
    ours = (*ALONG, WEIGHTS, INDEX, *RESULTS)
    return all(
        each.is_file() and each.stat().st_mtime_ns <= written and any(fnmatch(each.name, name) for name in ours)
        for each in path.iterdir()
    )


def leave(output: OutputFolder) -> None:
    """After a run that broke: keep what --resume can use, and nothing else."""
    with suppress(MemfitError, OSError):
        output.close()
    if output.finished_blocks == 0:
        with suppress(OSError):
            discard(output.save)


def check_results(folder: str | None, settings: PruneSettings, *, force: bool) -> None:
    """A folder that is to hold results only may exist and hold other things, but not another run's results."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    with writing_to(folder):
        path.mkdir(parents=True, exist_ok=True)
    if (path / FILE).exists() and not (force or settings.resume or _asks_for_the_same(path, settings)):
        raise InputError(
            f"--save '{folder}' has results already", hint="choose another folder, or --force replaces them"
        )


def copy_results(saved: Path, folder: str | None) -> None:
    if folder is not None:
        for name in RESULTS:
            for path in saved.glob(name):
                with written_whole(Path(folder).expanduser() / path.name) as beside:
                    shutil.copyfile(path, beside)


def _locked(path: Path, said: str, warn: Callable[[str], None]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise InputError(
                f"--save '{said}' is being written by {holder}", hint="wait until it ends, or choose another folder"
            ) from error
        except OSError as error:  # not every network file system can
            warn(f"'{path.parent}' knows no locks ({error.strerror}): see to it that no other run writes to '{said}'")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return descriptor
        os.close(descriptor)  # its owner has just removed it


def _tidy(path: Path) -> None:
    """Finish what a run did not that was killed between its last steps."""
    old = replaced_of(path)
    if old.exists() and not is_taken(path):
        old.rename(path)
    if is_result(path) and journal_of(path).exists() and not partial_of(path).exists():
        shutil.rmtree(old, ignore_errors=True)
        journal_of(path).unlink()


def _asks_for_the_same(path: Path, settings: PruneSettings) -> bool:
    """Whether a result is of this very run, as far as the settings alone can tell."""
    document, asked = document_in(path), settings.to_json()
    run = document.get("run")
    if document.get("model") != settings.workload.model or not isinstance(run, dict):
        return False
    return all(run[name] == asked[name] for name in run.keys() & asked.keys() - {"seqlen", "device"})

"""The weights of a model as they lie on disk: names, types, shapes, and where each one's bytes are.

Files are read by position into memory that the caller owns, never mapped or loaded whole, so that a block of a model of
any size can be had without the rest. A safetensors file begins with its length and a JSON table; nothing in it is
believed before it is checked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
    "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100 << 20
PIECE_BYTES = 8 << 20
"""A few threads share what is larger: one copies slower than a disk reads."""
READERS = 4
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = "*.safetensors"


class MissingWeights(InputError):
    """A folder has none, or not all of them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file."""

    name: str
    dtype: str
    """As safetensors spells it: F32, F16, BF16, ..."""
    shape: tuple[int, ...]
    file: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    path: Path
    tensors: tuple[StoredTensor, ...]
    """In the order in which their bytes lie."""
    metadata: Mapping[str, str]


class WeightStore:
    """A folder of safetensors, open for reading from any thread."""

    def __init__(self, files: list[WeightFile]) -> None:
        self.files = tuple(files)
        self.stored: dict[str, StoredTensor] = {}
        for file in files:
            for tensor in file.tensors:
                if tensor.name in self.stored:
                    raise InputError(f"{file.path}: weight '{tensor.name}' is stored twice")
                self.stored[tensor.name] = tensor
        self._open: list[int] = []
        self._pool = ThreadPoolExecutor(READERS, "memfit-read")

    @classmethod
    def open(cls, where: str | Path) -> WeightStore:
        """A folder as transformers writes it, or one file of safetensors."""
        path = Path(where)
        found = [path] if path.is_file() else list(_files_of(path))
        return cls([read_header(each, number) for number, each in enumerate(found)])

    def read_into(self, name: str, out: memoryview, start: int = 0) -> None:
        """A tensor's bytes, or those from `start` on, as many as `out` holds."""
        tensor = self.stored[name]
        at, file = tensor.start + start, tensor.file
        self._descriptors()
        if len(out) < 2 * PIECE_BYTES:
            self._read(file, at, out)
            return
        pieces = range(0, len(out), PIECE_BYTES)
        list(self._pool.map(lambda first: self._read(file, at + first, out[first : first + PIECE_BYTES]), pieces))

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        while self._open:
            os.close(self._open.pop())

    def _descriptors(self) -> list[int]:
        if not self._open:
            self._open = [os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) for file in self.files]
        return self._open

    def _read(self, file: int, at: int, out: memoryview) -> None:
        descriptor, done = self._descriptors()[file], 0
        try:
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], at + done)
                if count == 0:
                    raise InputError(f"{self.files[file].path} ends before byte {at + len(out):,}; was it cut off?")
                done += count
        except OSError as error:
            raise InputError(f"cannot read {self.files[file].path}: {error.strerror}") from error


def read_header(path: Path, number: int = 0) -> WeightFile:
    """What a file says it holds, checked against its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise InputError(f"{path} is no file of safetensors, or was cut off")
            table = json.loads(stream.read(length))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: its table of tensors is damaged") from error
    if not isinstance(table, dict):
        raise InputError(f"{path}: its table of tensors is damaged")
    metadata = table.pop("__metadata__", {})
    tensors = sorted(
        (_tensor(path, name, entry, 8 + length, size, number) for name, entry in table.items()),
        key=lambda t: (t.start, t.name),
    )
    return WeightFile(path, tuple(tensors), metadata if isinstance(metadata, dict) else {})


def _tensor(path: Path, name: str, entry: Any, base: int, size: int, number: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: the entry of weight '{name}' is damaged") from error
    if dtype not in ITEM_BYTES:
        raise InputError(f"{path}: weight '{name}' has the unknown type {dtype!r}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if min(shape, default=0) < 0 or begin < 0 or end - begin != nbytes or base + end > size:
        raise InputError(f"{path}: weight '{name}' does not lie where its table says; was the file cut off?")
    return StoredTensor(name, dtype, shape, number, base + begin, nbytes)


def _files_of(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise InputError(f"no folder '{folder}'")
    if (index := folder / INDEX).is_file():
        yield from _indexed(folder, index)
    elif (folder / SINGLE).is_file():
        yield folder / SINGLE
    else:
        raise _no_weights(folder)


def _indexed(folder: Path, index: Path) -> Iterator[Path]:
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(f"cannot read {index}: it holds no map of weights") from error
    for outside in (name for name in names if Path(name).name != name):
        raise InputError(f"{index} names a file in another folder: {outside!r}")
    for name in names:
        if not (folder / name).is_file():
            raise MissingWeights(f"{folder} lacks the file {name} that its index names", hint="download it again")
        yield folder / name


def _no_weights(folder: Path) -> MissingWeights:
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")) or list(folder.glob("*.pth")):
        return MissingWeights(
            f"'{folder}' holds pickled weights (*.bin), which may run any code when they are read",
            hint="load them once with transformers and `model.save_pretrained(folder)`: that writes safetensors",
        )
    if list(folder.glob("*.gguf")):
        return MissingWeights(f"'{folder}' holds a GGUF file", hint="give the file itself: --model FOLDER/NAME.gguf")
    return MissingWeights(f"'{folder}' holds no weights", hint=f"a model's folder has {SINGLE} or {INDEX}")


def is_whole(folder: Path) -> bool:
    """Whether all weights are there that the folder's index names, or the one file that needs none."""
    try:
        return (folder / SINGLE).is_file() or bool(list(_indexed(folder, folder / INDEX)))
    except InputError:
        return False

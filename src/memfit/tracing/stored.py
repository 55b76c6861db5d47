"""Tensors in files as a trace reads and writes them: shapes and small values, no gigabytes.

Weights that a program loads become tensors of the host without memory: their shapes come from the headers, and they
take GPU memory when they are moved there. What it saves is kept here, in the same form, and is what it then loads.
Large weights that it makes on the host itself have no memory there either.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit.tracing.values import MOST_NUMBERS

if TYPE_CHECKING:
    from memfit.tracing.own_code import OwnCodeTracer

Tensor = torch.Tensor
SMALL_BYTES = 1 << 14
"""So much is read as it is: positions, a table of frequencies."""
IDS = (torch.int64, torch.bool)
"""Ids, labels, edges and masks are data, which decides shapes; weights, also packed ones, have other types."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
"""As safetensors writes them."""
LARGE_WEIGHT = 1 << 22
"""Of so many numbers: a model of 7 billion would take more memory than many a machine has that plans it."""
MANY_WEIGHTS, ONE_OF_MANY = 1 << 28, 1 << 16
"""A large model may have small weights, one for each head: after so many numbers those of so many are large too."""
MARK = b"memfit: saved in a trace, "


class Headers:
    """An open safetensors file of which only the header is read."""

    def __init__(self, file: Any, tracer: OwnCodeTracer, device: Any, again: Callable[[], Any]) -> None:
        self._file, self._tracer, self._device, self._again = file, tracer, device, again

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Headers:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118

    def get_slice(self, name: str) -> StoredSlice:
        return StoredSlice(self._file, name, self._tracer, self._device, lambda: self._again().get_tensor(name))


class StoredSlice:
    """One of its tensors, to be indexed."""

    def __init__(self, file: Any, name: str, tracer: OwnCodeTracer, device: Any, read: Callable[[], Tensor]) -> None:
        self._header, self._name, self._file = file.get_slice(name), name, file
        self._tracer, self._device, self._read = tracer, device, read

    def get_shape(self) -> list[int]:
        found: list[int] = self._header.get_shape()
        return found

    def get_dtype(self) -> str:
        return str(self._header.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        dtype = DTYPES.get(self.get_dtype())
        made = None if dtype is None else without_memory(self._tracer, self.get_shape(), dtype)
        if made is None or made.nbytes <= SMALL_BYTES:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                made = self._file.get_tensor(self._name)
        else:
            self._tracer.put_in_file(made, self._read)
        return made[index] if self._device is None else made[index].to(self._device)


def without_memory(tracer: OwnCodeTracer, shape: Any, dtype: torch.dtype) -> Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        made = torch.empty(tuple(shape), dtype=dtype, device=tracer.device)
    tracer.put_on_host(made, "cpu")
    return made


def kept_on_host(tracer: OwnCodeTracer, func: Any, args: Any, kwargs: Any) -> Any:
    """`weight.to("cpu")`, `weight.cpu()`: without memory too it stays the tensor that it is, which may be trained."""
    first, where = args[0], kwargs.get("device", args[1] if len(args) > 1 else None)
    if first.device.type != tracer.device.type or tracer.place(first) != "cpu":
        return NotImplemented
    if func is Tensor.cpu:
        return first
    if str(where) not in ("cpu", "cpu:0"):
        return NotImplemented
    by_place, by_name = args[1:], dict(kwargs)
    if "device" in kwargs:
        by_name["device"] = tracer.device
    else:
        by_place = (tracer.device, *args[2:])
    with torch._C.DisableTorchFunction():
        return func(first, *by_place, **by_name)


@contextmanager
def large_weights_without_memory(tracer: OwnCodeTracer) -> Iterator[None]:
    """Those that the code makes on the host: before it fills them, the system has given no memory for them."""
    make = nn.Parameter.__new__
    made = 0

    def is_large(numbers: int) -> bool:
        nonlocal made
        made += numbers
        return numbers >= LARGE_WEIGHT or (made > MANY_WEIGHTS and numbers >= ONE_OF_MANY)

    def make_parameter(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if kind is nn.Parameter and isinstance(data, Tensor) and data.numel() >= ONE_OF_MANY:
            with torch._C.DisableTorchFunction():
                lies_on_host = type(data) in (Tensor, nn.Parameter) and data.device.type == "cpu"
                plain = lies_on_host and data.layout == torch.strided and data.is_contiguous()
            if plain and is_large(data.numel()):
                data = without_memory(tracer, data.shape, data.dtype)
        return make(kind, data, requires_grad)

    with mock.patch.object(nn.Parameter, "__new__", staticmethod(make_parameter)):
        yield


@dataclass
class StoredStorage:
    nbytes: int
    is_on_gpu: bool
    value: Tensor | None
    """Its bytes, where they are known and few."""


class SavedThings:
    """What the program has saved, by path. Tensors are taken out of it and put back as they were."""

    def __init__(self, tracer: OwnCodeTracer) -> None:
        self.tracer = tracer
        self._kept: dict[str, tuple[bytes, list[Any], list[StoredStorage]]] = {}

    def keep(self, thing: Any, file: Any) -> None:
        tensors: list[Any] = []
        storages: list[StoredStorage] = []
        numbers: dict[int, int] = {}

        class Writer(pickle.Pickler):
            def persistent_id(_, each: Any) -> int | None:
                if not isinstance(each, Tensor):
                    return None
                tensors.append(self._describe(each, storages, numbers))
                return len(tensors) - 1

        written = io.BytesIO()
        try:
            with torch._C.DisableTorchFunction():
                Writer(written).dump(thing)
        except Exception:  # it cannot be pickled: then it is merely left out
            return
        name = _name(file)
        if name is None:
            name = str(len(self._kept))
            file.write(MARK + name.encode())
        self._kept[name] = (written.getvalue(), tensors, storages)

    def find(self, file: Any) -> str | None:
        name = _name(file)
        if name is None and hasattr(file, "read") and hasattr(file, "seek"):
            here = file.tell()
            start = file.read(len(MARK) + 20)
            file.seek(here)
            name = start[len(MARK) :].decode() if start.startswith(MARK) else None
        return name if name in self._kept else None

    def move(self, file: Any, to: Any, *, stays: bool) -> bool:
        """Renamed, copied or, to None, removed. False where it is no file of these."""
        name, there = _name(file), _name(to)
        if name not in self._kept or os.path.lexists(name):
            return False
        kept = self._kept[name]
        if not stays:
            del self._kept[name]
        if there is not None:
            self._kept[os.path.join(there, os.path.basename(name)) if os.path.isdir(there) else there] = kept
        return True

    def take(self, name: str, where: Callable[[str], Any]) -> Any:
        """`where` says to which device what lay on "cuda" or "cpu" goes."""
        written, tensors, storages = self._kept[name]
        made: dict[int, Tensor] = {}

        class Reader(pickle.Unpickler):
            def persistent_load(_, number: int) -> Tensor:
                return self._restore(tensors[number], storages, made, where)

        return Reader(io.BytesIO(written)).load()

    def _describe(self, tensor: Tensor, storages: list[StoredStorage], numbers: dict[int, int]) -> Any:
        key = tensor.untyped_storage()._cdata
        if key not in numbers:
            numbers[key] = len(storages)
            whole = _bytes_of(tensor)
            value = self.tracer.values.read(whole) if whole.nbytes <= SMALL_BYTES else None
            place = self.tracer.place(tensor) == "cuda"
            storages.append(StoredStorage(whole.nbytes, place, None if value is None else value.clone()))
        shape, kind = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()), type(tensor)
        return numbers[key], tensor.dtype, shape, issubclass(kind, nn.Parameter), tensor.requires_grad

    def _restore(
        self, described: Any, storages: list[StoredStorage], made: dict[int, Tensor], where: Callable[[str], Any]
    ) -> Tensor:
        number, dtype, (offset, shape, stride), is_parameter, needs_grad = described
        if number not in made:
            stored = storages[number]
            whole = stored.value
            if whole is None:
                whole = without_memory(self.tracer, (stored.nbytes,), torch.uint8)
            device = where("cuda:0" if stored.is_on_gpu else "cpu")
            made[number] = whole.clone() if torch.device(device).type == "cpu" else whole.to(device)
        tensor = seen_as(made[number], dtype, offset, shape, stride)
        return nn.Parameter(tensor, needs_grad) if is_parameter else tensor.requires_grad_(needs_grad)


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return seen_as(tensor, torch.uint8, 0, (storage.nbytes(),), (1,))


def seen_as(whole: Tensor, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        made = torch.empty(0, dtype=dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), offset, shape, stride)


def _name(file: Any) -> str | None:
    if isinstance(file, (str, os.PathLike)):
        return os.path.abspath(os.fspath(file))
    return os.path.abspath(file.name) if isinstance(getattr(file, "name", None), str) else None


RENAMED = ((os, "replace"), (os, "rename"), (os, "remove"), (os, "unlink"), (shutil, "move"))
COPIED = ((os, "link"), (shutil, "copy"), (shutil, "copy2"), (shutil, "copyfile"))


@contextmanager
def _moved(saved: SavedThings) -> Iterator[None]:
    """What was saved here lies in no file: a program may put it where the best or the last one is."""

    def with_saved(real: Any, stays: bool) -> Any:
        def move(*given: Any, **named: Any) -> Any:
            file = given[0] if given else named.get("src", named.get("path"))
            to = given[1] if len(given) > 1 else named.get("dst")
            return to if saved.move(file, to, stays=stays) else real(*given, **named)

        return move

    with ExitStack() as stack:
        for group, stays in ((RENAMED, False), (COPIED, True)):
            for module, name in group:
                stack.enter_context(mock.patch.object(module, name, with_saved(getattr(module, name), stays)))
        yield


@contextmanager
def files_read_as_shapes(tracer: OwnCodeTracer, saved: SavedThings) -> Iterator[None]:
    """`torch.load` and safetensors, in whatever package they were imported."""
    load, active = torch.load, [True]

    def load_shapes(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not active:
            return load(file, map_location, *args, **kwargs)
        if (name := saved.find(file)) is not None:
            return saved.take(name, _destination(map_location))
        return _load_without_memory(tracer, load, file, map_location, args, kwargs)

    with ExitStack() as stack:
        stack.enter_context(_moved(saved))
        for owner in (torch, torch.serialization):
            stack.enter_context(mock.patch.object(owner, "load", load_shapes))
        seen: set[str] = set()
        opened: dict[Any, Any] = {}

        def patch() -> None:
            package = sys.modules.get("safetensors")
            real = opened.setdefault("real", getattr(package, "safe_open", None)) if package else None
            if real is None:
                return
            if "ours" not in opened:
                opened["ours"] = _opening_headers(real, tracer, active)
            for name in set(sys.modules) - seen:
                seen.add(name)
                if getattr(sys.modules[name], "__dict__", {}).get("safe_open") is real:
                    stack.enter_context(mock.patch.object(sys.modules[name], "safe_open", opened["ours"]))

        patch()
        tracer.after_import.append(patch)
        try:
            yield
        finally:
            tracer.after_import.remove(patch)
            active.clear()


def _opening_headers(real: Any, tracer: OwnCodeTracer, active: list[bool]) -> Callable[..., Any]:
    def safe_open(file: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
        if not active or framework not in ("pt", "torch", "pytorch"):
            return real(file, framework, device, **kwargs)
        on_host = torch.device(device if type(device) is not int else f"cuda:{device}").type == "cpu"
        open_it = partial(real, file, framework, "cpu", **kwargs)
        return Headers(open_it(), tracer, None if on_host else device, open_it)

    return safe_open


def _destination(map_location: Any) -> Callable[[str], Any]:
    """Of a storage by where it was, as torch.load has it."""
    if map_location is None:
        return lambda place: place
    if isinstance(map_location, dict):
        return lambda place: map_location.get(place, place)
    if callable(map_location):
        return lambda place: "cpu"  # `lambda storage, place: storage`
    return lambda _: map_location


def _load_without_memory(tracer: OwnCodeTracer, load: Any, file: Any, map_location: Any, args: Any, kwargs: Any) -> Any:
    places: dict[int, str] = {}

    def note(storage: Any, place: str) -> Any:
        places[storage._cdata] = place
        return storage

    on_disk = isinstance(file, (str, os.PathLike))
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        try:
            found = load(file, note, *args, **{**kwargs, "mmap": on_disk or None})
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            found = load(file, note, *args, **{**kwargs, "mmap": None})
    where, made = _destination(map_location), {}

    def placed(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        device = where(places.get(storage._cdata, "cpu"))
        stays = torch.device(device).type == "cpu"
        few = storage.nbytes() <= SMALL_BYTES or (tensor.dtype in IDS and tensor.numel() <= MOST_NUMBERS)
        if stays and few:
            return tensor
        if storage._cdata not in made:
            whole = _bytes_of(tensor) if few else without_memory(tracer, (storage.nbytes(),), torch.uint8)
            made[storage._cdata] = whole if stays else whole.to(device)
        offset = int(tensor.storage_offset())
        seen = seen_as(made[storage._cdata], tensor.dtype, offset, tensor.shape, tensor.stride())
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(seen, tensor.requires_grad) if is_parameter else seen.requires_grad_(tensor.requires_grad)

    return _with_tensors(found, placed)


def _with_tensors(thing: Any, placed: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(thing, Tensor):
        return placed(thing)
    if isinstance(thing, dict):
        for key, value in thing.items():
            thing[key] = _with_tensors(value, placed)
    elif isinstance(thing, list):
        thing[:] = [_with_tensors(each, placed) for each in thing]
    elif type(thing) is tuple:
        return tuple(_with_tensors(each, placed) for each in thing)
    elif isinstance(thing, nn.Module):
        for module in thing.modules():
            for held in (module._parameters, module._buffers):
                tensors: dict[str, Any] = held
                tensors.update({name: placed(each) for name, each in tensors.items() if each is not None})
    return thing

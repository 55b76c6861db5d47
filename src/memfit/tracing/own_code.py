"""The traced device as a person's own code meets it: a CUDA device, beside a host that has memory.

memfit's own jobs keep to what memfit knows. Other people's code asks a tensor where it lies and takes another path on
the CPU, builds models on meta, moves results to the host, compares, indexes and branches by values. So here every
tensor has a place, an op on several of them is checked as CUDA checks it, and what is on the host is no GPU memory.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, Literal
from unittest import mock

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as default_device
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.errors import MemfitError, TraceError
from memfit.events import Action
from memfit.platform import Platform
from memfit.replay.alloc_config import AllocatorConfig
from memfit.tracing.answers import Answers, asked_by, asking_line
from memfit.tracing.cuda_names import CUDA_TENSOR_TYPES, FROM_HOST, CudaNames, CudaTensorType
from memfit.tracing.kernels import indexing
from memfit.tracing.kernels.products import PRODUCTS, SCALED, Workspaces
from memfit.tracing.stored import kept_on_host
from memfit.tracing.tracer import KnownOp, Tracer
from memfit.tracing.unknown import is_unknown
from memfit.tracing.values import Values, tensors_in

aten = torch.ops.aten
Tensor = torch.Tensor
Place = Literal["cuda", "cpu", "meta"]
CUDA = torch.device("cuda", 0)
BY_DEFAULT = torch._C.DispatchKey.CompositeExplicitAutograd
DEVICES: dict[str, torch.device] = {"cuda": CUDA, "cpu": torch.device("cpu"), "meta": torch.device("meta")}
ANYWHERE = frozenset(
    {
        aten.copy_.default,
        aten._to_copy.default,
        aten._foreach_copy_.default,
        aten.is_same_size.default,
        aten._has_compatible_shallow_copy_type.default,
        aten._pack_padded_sequence.default,
        aten._ctc_loss.Tensor,
        aten._ctc_loss_backward.Tensor,
    }
)
"""Ops between devices, and those that only look at shapes and types."""
IN_TENSORS = "a number that nobody knows, such as a loss, is NaN where the code puts it into a tensor of the host"
KEPT_AS_MADE = "tensors of the host into which weights without values are copied keep the values they were made with"
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
MOST_LISTED = 1 << 12
"""Unknown numbers that `tolist` gives: logged, not computed with."""
INDEXED_FROM_HOST = frozenset(indexing.BY_INDEX)
"""Indices may lie on the host: they move to the device."""


_WITHOUT_RULES = """
    randperm cdist _cdist_forward _cdist_backward _unique2 unique_consecutive unique_dim _linalg_svd _linalg_eigh
    linalg_eig linalg_qr linalg_inv_ex linalg_lu_factor_ex linalg_lu _linalg_solve_ex linalg_lstsq linalg_pinv
    linalg_matrix_exp _linalg_slogdet _linalg_det geqrf ormqr lu_unpack linalg_ldl_factor_ex _scaled_mm _int_mm
    cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update batch_norm_backward bincount _fft_r2c _fft_c2c
    _fft_c2r pinverse _pdist_forward _pdist_backward _trilinear _euclidean_dist upsample_bicubic2d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward affine_grid_generator glu_backward take put
"""
UNMODELLED = frozenset(_WITHOUT_RULES.split())
"""Ops whose kernels take memory beside their results that no rule here tells: a plan with one of them says so."""


ORDERED = frozenset(
    ["index_put", "_index_put_impl", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce", "put"]
)
"""Ops that sort or copy first where torch.use_deterministic_algorithms is on: no rule here tells what that takes."""


class OwnCodeTracer(Tracer):
    def __init__(self, device: torch.device, platform: Platform, answers: Answers) -> None:
        super().__init__(device, platform, answers)
        self.workspaces = Workspaces(platform, os.environ)
        self.values = answers.values = Values(device, answers.chooses_evenly)
        self.assumed: dict[str, None] = {}
        """What was taken for granted, to be told with the plan."""
        self.after_import: list[Callable[[], None]] = []
        """To be called when the code has imported something."""
        self.kernels_of: dict[str, Mapping[str, Callable[..., Any]]] = {}
        """Of packages that bring their own: by namespace and op, what they do on CUDA."""
        self.stopped: type[BaseException] | None = None
        """Why the code is to end here: from then on nothing is written down, whatever it catches."""
        self.alloc_conf: str | None = None
        """What the code itself told the allocator before it first took memory; None: nothing."""
        self.gpu_is_named = False
        """Whether the call that runs names "cuda" as its device."""
        self._in_kernel = False
        self._lock = threading.RLock()
        self._on_host: weakref.WeakKeyDictionary[torch.UntypedStorage, Place] = weakref.WeakKeyDictionary()
        self._in_files: weakref.WeakKeyDictionary[torch.UntypedStorage, Callable[[], Tensor]] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def after_each_import(self, do: Callable[[], None]) -> Iterator[None]:
        """Now, and whenever the code has imported something."""
        do()
        self.after_import.append(do)
        try:
            yield
        finally:
            self.after_import.remove(do)

    def assume(self, what: str) -> None:
        self.assumed[what] = None

    def settle_allocator(self, said: str, where: str) -> None:
        """torch reads its settings when it first takes memory; what is told later is not replayed."""
        if Action.ALLOC in self.trace.actions:
            self.assume(f"not modelled: {where} sets {said!r} after memory was taken: planned as it stood before")
            return
        try:
            AllocatorConfig.parse(said)
        except MemfitError as error:
            self.answers.refused = self.answers.refused or TraceError(f"{where}: {error.message}", hint=error.hint)
        else:
            self.alloc_conf = said
            self.assume(f"the allocator's settings are those that {where} sets: {said}")

    # -- where a tensor lies -----------------------------------------------------------------------------------------

    def place(self, tensor: Tensor) -> Place:
        """Tensors on meta are of three kinds: those of the traced device, what came from there to the host, and those
        that were asked for on meta, also before the trace began."""
        tensor = _unwrapped(tensor)
        if tensor.device.type != self.device.type:
            return "cpu"
        storage = tensor.untyped_storage()
        entry = self._blocks.get(storage._cdata)
        if entry is not None and entry[1] is not None:
            return "cuda"
        return self._on_host.get(storage, "cuda" if storage.nbytes() == 0 else "meta")

    def owns(self, tensor: Tensor) -> bool:
        return self.block_of(tensor) is not None

    def block_of(self, tensor: Tensor) -> int | None:
        return super().block_of(_unwrapped(tensor))

    def passed_on(self, tensor: Tensor) -> None:
        """Nothing is told of it: what is noted beside the trace names blocks."""

    def put_on_host(self, made: Any, place: Place) -> Any:
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type and not self.owns(tensor):
                self._on_host[tensor.untyped_storage()] = place
        return made

    def put_in_file(self, made: Tensor, read: Callable[[], Tensor]) -> None:
        """`made` stands for a tensor that `read` would read, should its values be asked for."""
        self._in_files[made.untyped_storage()] = read

    def pass_on_file(self, source: Tensor, copy: Tensor) -> None:
        storage = source.untyped_storage()
        read = self._in_files.get(storage)
        if read is not None and source.nbytes == storage.nbytes():
            self.put_in_file(copy, read)

    # -- the mode ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stopped is not None:
            self.forget()
            raise self.stopped
        with torch._C.DisableTorchFunction():
            if _is_of_host(args, kwargs):
                return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _run(self, op: KnownOp, func: Any, args: Any, kwargs: Any) -> Any:
        with self._lock:
            return self._run_alone(op, func, args, kwargs)

    def _run_alone(self, op: KnownOp, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        places = [self.place(tensor) for tensor in tensors]
        on_host = "cuda" not in places and any(tensor.device.type == self.device.type for tensor in tensors)
        if on_host and not (self.gpu_is_named and "device" in kwargs):
            return self._on_the_host(func, args, kwargs, "meta" if "meta" in places else "cpu")
        made_here = not tensors and kwargs.get("device") == self.device
        if _is_unmodelled(func) and ("cuda" in places or made_here):
            self.unmodelled[_plain_name(func)] = None
        if _is_ordered(func) and "cuda" in places and torch.are_deterministic_algorithms_enabled():
            self.unmodelled[f"{_plain_name(func)} (deterministic)"] = None
        if "cuda" in places and (kernels := self.kernels_of.get(func.namespace)) is not None:
            return self._run_kernel(kernels.get(func.name(), partial(func._op_dk, BY_DEFAULT)), args, kwargs)
        if "cuda" in places:
            _check_places(func, tensors, places)
            if func in PRODUCTS and func not in SCALED:  # whose factors are in 8 bits, their scales in 32
                _check_types(tensors)
            if func is aten.equal.default:
                return self._compare(args[0], args[1])
            if (read := self._read_back(func, args, kwargs)) is not NotImplemented:
                return read
            if _needs_data(func) and (found := self.values.compute(func, args, kwargs)) is not NotImplemented:
                self.answers.note_draws(tensors)
                return self._to_gpu(found, op.name)
        lacks_one = self.values.lacks_one(tensors)
        del tensors  # gradients are summed in place only where nobody else holds them
        out = super()._run(op, func, args, kwargs)
        if func is aten._to_copy.default:
            self._note_widened(args[0], out)
            self.pass_on_file(args[0], out)
        if not (op.is_composite and self.meets_composites and self._is_traced(args)):  # else its parts were followed
            self.values.follow(func, args, kwargs, out, lacks_one)
        return out

    @property
    def meets_composites(self) -> bool:
        return self._in_kernel or super().meets_composites

    def _run_kernel(self, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A package's own code for CUDA: what it asks of torch is traced."""
        before, self._in_kernel = self._in_kernel, True
        try:
            with self:
                return kernel(*args, **kwargs)
        finally:
            self._in_kernel = before

    def _note_widened(self, source: Tensor, copy: Tensor) -> None:
        block = self.block_of(copy)
        if copy.dtype == torch.float32 and source.dtype in SIXTEEN_BITS and block is not None:
            self.trace.facts.setdefault("widened", []).append(block)

    def _on_the_host(self, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
        """What came from the GPU without its values has none here either."""
        if func is aten._local_scalar_dense.default:
            return self.answers.value(args[0])
        if func.overloadpacket in (aten._to_copy, aten.to) and kwargs.get("device") == DEVICES["cpu"]:
            kwargs = {**kwargs, "device": self.device}  # the latter of what inference mode has made
        if func is aten.equal.default:
            return self._are_equal(args[0], args[1])
        if func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
            self.assume(KEPT_AS_MADE)
            return args[0]
        with _disable_current_modes():
            taken, named = tree_map_only(Tensor, _without_memory, (args, kwargs))
            try:
                made = self.put_on_host(func(*taken, **named), place)
            except NotImplementedError as error:  # a size that follows from values
                raise self.answers.refusal(args[0]) from error
        if func is aten._to_copy.default:
            self.pass_on_file(args[0], made)
            self.values.pass_on_choice(args[0], made)
        return made

    def _are_equal(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return False
        if (known := self._are_equal_in_files(one, other)) is not None:
            return known
        self.assume("weights of one shape that the code compares while it has no values for them are equal")
        return True

    def _compare(self, one: Tensor, other: Tensor) -> Any:
        """As torch does on CUDA: elements first, then the host asks for one answer."""
        if one.shape != other.shape:
            return False
        with self:
            answer = torch.eq(one, other).all()
        known = self._are_equal_in_files(one, other)
        return self.answers.value(answer) if known is None else known

    def _are_equal_in_files(self, *weights: Tensor) -> bool | None:
        """transformers ties two that a checkpoint has both only where they are equal. None: not known."""
        read = [self._in_files.get(each.untyped_storage()) for each in weights]
        if read[0] is None or read[1] is None or any(w.nbytes != w.untyped_storage().nbytes() for w in weights):
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return torch.equal(read[0](), read[1]())

    def _read_back(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies to the host: with the values, where they are known."""
        if func is aten._to_copy.default and kwargs.get("device") == DEVICES["cpu"]:
            known = self.values.compute(func, args, kwargs)
            if known is not NotImplemented:
                self.answers.note_draws(args[:1])
                return known.clone()
            with _disable_current_modes():
                made = self.put_on_host(func(*args, **{**kwargs, "device": self.device}), "cpu")
            self.values.pass_on_choice(args[0], made)
            return made
        if func is aten.copy_.default and self.place(args[0]) == "cpu" and args[0].device.type == "cpu":
            value = self.values.read(args[1])
            if value is None and args[0].is_floating_point():
                self.assume(IN_TENSORS)
                self.values.hide(args[0])
                with _disable_current_modes():
                    return args[0].fill_(math.nan)
            if value is None and asked_by("torch/autograd/graph.py"):  # save_on_cpu: nobody but backward reads it
                self.values.hide(args[0])
                return args[0]
            if value is None:
                raise TraceError(
                    f"{asking_line()}the code copies a {_kind(args[1])} from the GPU into a tensor of the host, and"
                    " memfit knows no values for it",
                    hint="memfit does not cover this: x.cpu() or x.to('cpu') gives a tensor without values instead",
                )
            self.answers.note_draws(args[1:2])
            with _disable_current_modes():
                return args[0].copy_(value)
        return NotImplemented

    def _to_gpu(self, found: Any, op: str) -> Any:
        """What could only be computed with values, as tensors of the device that keep them."""
        if isinstance(found, Tensor):
            with _disable_current_modes():
                made = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=self.device)
            self.track(made, op)
            self.values.put(made, found)
            return made
        if isinstance(found, (tuple, list)):
            return type(found)(self._to_gpu(each, op) for each in found)
        return found


def _unwrapped(tensor: Tensor) -> Tensor:
    """What torch.func computes with holds others."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta") if tensor.device.type == "cpu" and tensor.dim() else tensor


def _is_of_host(args: Any, kwargs: Any) -> bool:
    """Whether an op works on tensors in host memory alone, and its results stay there: programs that read data do
    little else."""
    if kwargs and "device" in kwargs:
        return False
    found = False
    for value in args:
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                return False
            found = True
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    if item.device.type != "cpu":
                        return False
                    found = True
    return found and not any(isinstance(value, (Tensor, list, tuple)) for value in (kwargs or {}).values())


def _plain_name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


@cache
def _is_unmodelled(func: Any) -> bool:
    return _plain_name(func) in UNMODELLED


@cache
def _is_ordered(func: Any) -> bool:
    return _plain_name(func).rstrip("_") in ORDERED


@cache
def _needs_data(func: Any) -> bool:
    asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return bool(asks) and func not in indexing.DATA_DEPENDENT


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} tensor"


def _check_places(func: Any, tensors: list[Tensor], places: list[Place]) -> None:
    """As CUDA's ops do: numbers may come from the host, tensors may not."""
    if func in ANYWHERE:
        return
    strangers = [place for tensor, place in zip(tensors, places, strict=True) if place != "cuda" and tensor.dim() > 0]
    if not strangers or (func in INDEXED_FROM_HOST and _are_indices(tensors, places)):
        return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and {strangers[0]}!"
        f" (when running {func})"
    )


def _are_indices(tensors: list[Tensor], places: list[Place]) -> bool:
    return places[0] == "cuda" and all(
        place == "cuda" or tensor.dim() == 0 or tensor.dtype in (torch.int64, torch.int32, torch.bool, torch.uint8)
        for tensor, place in zip(tensors, places, strict=True)
    )


def _check_types(tensors: list[Tensor]) -> None:
    """Products of two types are an error on CUDA; without data nobody would notice."""
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(kinds) > 1:
        first, second = (tensor.dtype for tensor in tensors[-2:])
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {first} != {second}")


class OwnCodeNames(CudaNames):
    """Devices are what they are called: a tensor of the traced device says that it is on "cuda:0"."""

    tracer: OwnCodeTracer

    def __init__(self, tracer: OwnCodeTracer) -> None:
        super().__init__(tracer)
        place, values = tracer.place, tracer.values

        def text(tensor: Tensor, how: Callable[[Tensor], Any], without: Callable[[Tensor], Any]) -> Any:
            is_copied = how is Tensor.tolist and tensor.device.type != "cpu" and place(tensor) == "cpu"
            if place(tensor) != "cuda" and not is_copied:
                return NotImplemented
            value = values.read(tensor)
            if value is None:
                return without(tensor)
            tracer.answers.note_draws([tensor])
            return how(value)

        def is_hidden(tensor: Tensor) -> bool:
            return tensor.device.type != "cpu" and tensor.numel() == 1 and values.read(tensor) is None

        def number(tensor: Tensor) -> Any:
            return tracer.answers.unknown(tensor) if is_hidden(tensor) else NotImplemented

        def listed(tensor: Tensor) -> Any:
            if not tensor.is_floating_point():
                each = tracer.answers.fill(tensor)
                return _as_lists(tensor.shape, lambda: each)
            if tensor.numel() > MOST_LISTED:
                raise tracer.answers.refusal(tensor)
            return _as_lists(tensor.shape, lambda: tracer.answers.unknown(tensor))

        self._answered: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda t: DEVICES[place(t)],
            Tensor.is_cuda.__get__: lambda t: place(t) == "cuda",  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda t: place(t) == "cpu",  # type: ignore[attr-defined]
            Tensor.is_meta.__get__: lambda t: place(t) == "meta",  # type: ignore[attr-defined]
            Tensor.get_device: lambda t: 0 if place(t) == "cuda" else -1,
            Tensor.type: self._type,
            Tensor.pin_memory: lambda t, *_: t if place(t) == "cpu" else NotImplemented,
            Tensor.is_pinned: lambda t, *_: False,
            Tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            Tensor.data_ptr: lambda t: t.untyped_storage()._cdata + t.storage_offset(),
            Tensor.item: number,
            Tensor.tolist: lambda t: text(t, Tensor.tolist, listed),
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._array,
            Tensor.__float__: lambda t: tracer.answers.plain_float(t) if is_hidden(t) else NotImplemented,
            Tensor.__format__: lambda t, spec: text(
                t,
                lambda v: v.__format__(spec),
                lambda u: f"{number(u):{spec}}" if spec and u.numel() == 1 else repr_of(u),
            ),
            Tensor.__repr__: lambda t, **_: text(t, lambda v: repr(v)[:-1] + ", device='cuda:0')", repr_of),
        }
        self._constructors = default_device._device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": _numbered(kwargs["device"])}
        if func is Tensor.to and len(args) > 1:
            args = (args[0], _numbered(args[1]), *args[2:])
        if func is Tensor.__getitem__ and self.tracer.place(args[0]) == "cuda":
            args = (args[0], indexing.lists_on_host(args[1]))
        if func is Tensor.new and len(args) == 2 and isinstance(args[1], list):
            func, kwargs = Tensor.new_tensor, {"dtype": args[0].dtype}
        if any(map(is_unknown, args)):
            self.tracer.assume(IN_TENSORS)
        answer = self._answered.get(func)
        if (
            answer is not None
            and (said := answer(*args[:1] if _is_getter(func) else args, **kwargs)) is not NotImplemented
        ):
            return said
        if func is Tensor.cuda and type(where := kwargs.get("device", args[1] if len(args) > 1 else None)) is int:
            check_number(torch.device("cuda", where))
        if func is torch._C._nn._parse_to:  # it only reads what `Module.to` was given
            return func(*map(_numbered, args), **{name: _numbered(value) for name, value in kwargs.items()})
        if func in self._constructors and kwargs.get("device") is None and default_device.CURRENT_DEVICE is not None:
            kwargs = {**kwargs, "device": default_device.CURRENT_DEVICE}
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], DEVICES[self.tracer.place(args[1])], args[1].dtype, *args[2:])
        if func in (Tensor.to, Tensor.cpu) and isinstance(args[0], Tensor):
            kept = kept_on_host(self.tracer, func, args, kwargs)
            if kept is not NotImplemented:
                return kept
        if func is not torch.device and _names(args, kwargs, "meta"):
            return self._on_meta(func, args, kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs.get("generator") is not None:
            kwargs = self._without_generator(args, kwargs)
        self.tracer.gpu_is_named = _names(args, kwargs, "cuda")
        try:
            made = super().__torch_function__(func, types, args, kwargs)
        finally:
            self.tracer.gpu_is_named = False
        if func in FROM_HOST and self.tracer.place(made) == "cuda":
            self._keep_values(made, args[0])
        return made

    def _keep_values(self, made: Tensor, given: Any) -> None:
        with _disable_current_modes(), suppress(LookupError):  # one of them is not known
            numbers = None if isinstance(given, Tensor) else self._numbers(given)
            value = given if numbers is None else torch.tensor(numbers, dtype=made.dtype, device="cpu")
            if (known := self.tracer.values.read(value)) is not None:
                self.tracer.values.put(made, known)

    def _numbers(self, given: Any) -> Any:
        """A list in which numbers may be tensors of one number."""
        if isinstance(given, (list, tuple)):
            return [self._numbers(each) for each in given]
        if not isinstance(given, Tensor):
            return given
        if (known := self.tracer.values.read(given)) is None:
            raise LookupError
        return known.tolist()

    def _set_data(self, tensor: Tensor, value: Tensor) -> Any:
        """`p.data = p.data.cuda()`: torch sets no data of another device's kind, but it swaps whole tensors."""
        if tensor.device.type == value.device.type:
            return NotImplemented
        made = value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, made)
        return None

    def _numpy(self, tensor: Tensor, **_: Any) -> Any:
        if self.tracer.place(tensor) == "cuda":
            _cannot_be_numpy(tensor)
        if tensor.device.type != self.tracer.device.type:
            return NotImplemented
        if tensor.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        each = self.tracer.answers.fill(tensor)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return torch.full(tensor.shape, each, dtype=tensor.dtype, device="cpu").numpy()

    def _array(self, tensor: Tensor, dtype: Any = None) -> Any:
        """`np.asarray(tensor)`, and whatever else of numpy is given one."""
        made = self._numpy(tensor)
        return made if made is NotImplemented or dtype is None else made.astype(dtype, copy=False)

    def _type(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        on_gpu = self.tracer.place(tensor) == "cuda"
        kind = args[0] if args else kwargs.get("dtype")
        if kind is None:
            return (
                torch.empty(0, dtype=tensor.dtype).type().replace("torch.", "torch.cuda.") if on_gpu else NotImplemented
            )
        if type(kind) is str and kind.startswith("torch.cuda."):
            kind = CUDA_TENSOR_TYPES.get(kind.removeprefix("torch.cuda."), kind)
        if isinstance(kind, CudaTensorType) or (on_gpu and isinstance(kind, type(torch.FloatTensor))):
            with self:
                return tensor.to("cuda" if isinstance(kind, CudaTensorType) else "cpu", kind.dtype)
        return NotImplemented

    def _on_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Shapes without memory, asked for by that name: no GPU memory."""
        first = args[0] if args else None
        if func is Tensor.to and isinstance(first, Tensor) and self.tracer.place(first) == "cuda":
            with _disable_current_modes():
                return self.tracer.put_on_host(torch.empty_like(first), "meta")
        with _disable_current_modes():
            return self.tracer.put_on_host(func(*args, **kwargs), "meta")

    def _without_generator(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """One of the GPU draws nothing here."""
        given = kwargs["generator"]
        first = next((value for value in args if isinstance(value, Tensor)), None)
        device = kwargs.get("device")
        on_gpu = (
            self._device(device) == self.tracer.device
            if device is not None
            else (first is not None and self.tracer.place(first) == "cuda")
        )
        if on_gpu and given.device.type != "cuda":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return {**kwargs, "generator": None} if on_gpu else kwargs

    def _move(self, host: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.tracer.place(host) == "cuda" or host.device.type != self.tracer.device.type:
            return super()._move(host, dtype)
        with _disable_current_modes():
            made = torch.empty_like(host, dtype=dtype or host.dtype, requires_grad=host.requires_grad)
        self.tracer.track(made, "aten._to_copy.default")
        self.tracer.pass_on_file(host, made)
        return made

    def _made_device(self, *args: Any, **kwargs: Any) -> torch.device:
        first = kwargs.get("type", args[0] if args else None)
        made = torch.device("cuda", first) if type(first) is int else torch.device(*args, **kwargs)
        check_number(made)
        return made

    def _device(self, value: Any) -> Any:
        if type(value) is str and (value == "cuda" or value.startswith("cuda:")):
            check_number(torch.device(value))
        elif type(value) is torch.device:
            check_number(value)
        return super()._device(value)


def _numbered(value: Any) -> Any:
    """`model.to(0)`: a number is a GPU's."""
    if type(value) is not int:
        return value
    check_number(device := torch.device("cuda", value))
    return device


def _as_lists(shape: torch.Size, make: Callable[[], Any]) -> Any:
    return [_as_lists(shape[1:], make) for _ in range(shape[0])] if shape else make()


def repr_of(tensor: Tensor) -> str:
    return f"tensor(..., device='cuda:0', size={tuple(tensor.shape)}, dtype={tensor.dtype})"


def _cannot_be_numpy(_: Tensor) -> Any:
    raise TypeError(
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


def _is_getter(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def _names(args: Any, kwargs: Any, kind: str) -> bool:
    """Whether one of these is a device of that kind."""
    return any(_is_device(value, kind) for value in args) or _is_device(kwargs.get("device"), kind)


def _is_device(value: Any, kind: str) -> bool:
    if type(value) is torch.device:
        return value.type == kind
    return type(value) is str and value.split(":")[0] == kind


def check_number(device: torch.device) -> None:
    if device.type == "cuda" and device.index not in (None, 0):
        raise TraceError(
            f"{asking_line()}the code uses {device}, and memfit traces one GPU",
            hint='memfit does not cover several GPUs in one process: trace the part of "cuda:0" alone',
        )


@contextmanager
def devices_grouped_by_name() -> Iterator[None]:
    """torch's optimizers sort tensors by device in C++, which knows only the traced device's own name."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(*args: Any, **kwargs: Any) -> Any:
        found = group(*args, **kwargs)
        return {(CUDA if device.type == "meta" else device, kind): rest for (device, kind), rest in found.items()}

    with mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped):
        yield


@contextmanager
def saved_tensors_met_by_name(names: OwnCodeNames) -> Iterator[None]:
    """Hooks on what autograd saves are called from inside an op, where torch has taken the mode off: they too must find
    tensors on "cuda"."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    make = hooks.__init__

    def with_names(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            with nullcontext() if names in _get_current_function_mode_stack() else names:
                return hook(value)

        return run

    def make_with_names(self: Any, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        make(self, with_names(pack), with_names(unpack))

    with mock.patch.object(hooks, "__init__", make_with_names):
        yield


@contextmanager
def streams_recorded(tracer: OwnCodeTracer) -> Iterator[None]:
    def record_stream(*_: Any) -> None:
        tracer.assume("record_stream: a block counts as free when its last reference goes, whatever stream reads it")

    with mock.patch.object(Tensor, "record_stream", record_stream):
        yield

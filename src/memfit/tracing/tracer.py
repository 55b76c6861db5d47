"""Run a callable on a device without memory, and write down when each storage is born and dies.

Storages, not tensors: views and in-place ops then need no care. A storage dies when its last reference does, exactly
as on the GPU, because the code that holds the references is the same. What CUDA does beyond what this device shows
comes from tables of rules: attention, hidden buffers, workspaces.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from memfit.errors import TraceError
from memfit.events import LISTS, FrameRow, Trace
from memfit.extrapolation.reused import REUSED
from memfit.platform import H200, Platform
from memfit.tracing import distributed
from memfit.tracing.answers import Answers
from memfit.tracing.cuda_names import Streams
from memfit.tracing.distributed import Sent
from memfit.tracing.kernels import (
    composites,
    indexing,
)
from memfit.tracing.kernels.composites import EngineSums
from memfit.tracing.kernels.products import PRODUCTS, Workspaces
from memfit.tracing.kernels.tables import HIDDEN, REPLACED
from memfit.tracing.memo import Gives, remembered_on, what_is_given
from memfit.tracing.node_numbers import NodeNumbers
from memfit.tracing.python_stacks import stacks_of
from memfit.tracing.rule_calls import RuleCalls

if TYPE_CHECKING:
    from memfit.tracing.cuda_names import CudaNames

aten = torch.ops.aten
ONE_AT_A_TIME = threading.RLock()
"""Held by the thread that traces: what torch is told for a trace, the whole process is told."""
os.register_at_fork(after_in_child=ONE_AT_A_TIME._at_fork_reinit)  # type: ignore[attr-defined]
_FAKE = torch._C._TorchDispatchModeKey.FAKE
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


IN_FULL = "as an ordinary tensor it is planned: sparse=False of nn.Embedding, .to_dense() before it goes to the GPU"


class Tracer(TorchDispatchMode):
    def __init__(self, device: torch.device, platform: Platform, answers: Answers) -> None:
        super().__init__()
        self.device = device
        self.platform = platform
        self.answers = answers
        self.trace = Trace(facts={"device": str(device), "torch": torch.__version__, "arch": list(platform.arch)})
        self.numbers = NodeNumbers()
        self.modules = ModuleStack(self.numbers)
        self.workspaces = Workspaces(platform)
        self.rule_calls = RuleCalls()
        self._stacks = stacks_of(self.trace, self.numbers)
        self.streams = Streams()
        self._gpu_is_awake = False
        self.sent: Sent | None = None
        """What DDP sends to other processes and reads back."""
        self.unmodelled: dict[str, None] = {}
        """Ops that were met whose kernels may take more than is traced."""
        self.loads_fused_attention = False
        """Whether kernels of flash or cuDNN attention were met: to load them takes memory of CUDA's own."""
        self.tuned: set[tuple[str, bool]] = set()
        """Convolutions whose plans cuDNN has tried, and whether in backward."""
        self.default_category = ""
        self.maker: str | None = None
        """The module whose result compiled code makes now; None outside of it."""
        self.lines: tuple[FrameRow, ...] = ()
        """The lines of the code that was compiled for whose sake it is made."""
        self.on_backward: Callable[[bool], None] = lambda begins: None
        self.on_call: Callable[[], None] = lambda: None
        """Before a model is called."""
        self.on_weight: Callable[[torch.Tensor, str], None] = lambda weight, path: None
        """Before compiled code first has it from a module."""
        self._engine_sums = EngineSums(device)
        self._remembered = remembered_on(device, platform) if device.type == "meta" else None
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], int | None]] = {}
        """Every storage that is known, with its block; host memory has none."""

    # -- what the traced code and the rules see ----------------------------------------------------------------

    @property
    def meets_composites(self) -> bool:
        """Whether ops written in terms of others come here as they are: below autograd nobody takes them apart."""
        return torch.is_inference_mode_enabled()

    @property
    def in_backward(self) -> bool:
        return torch._C._current_autograd_node() is not None

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and tensor.untyped_storage()._cdata in self._blocks

    def block_of(self, tensor: torch.Tensor) -> int | None:
        entry = self._blocks.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry else None

    def temporary(self, nbytes: int, label: str) -> None:
        """A buffer that lives for the length of one kernel."""
        block = self._alloc(nbytes, label)
        self.trace.free(block)

    def counts(self, tensors: list[torch.Tensor]) -> None:
        """The block made last has an entry for each of these tensors, so it grows with the number of layers."""
        if not tensors:
            return
        self.rule_calls.as_traced()
        self.trace.facts.setdefault(LISTS, {})[str(len(self.trace.requested) - 1)] = [self.block_of(t) for t in tensors]

    @contextmanager
    def temporaries(self) -> Iterator[Callable[[int, str], None]]:
        held: list[int] = []
        yield lambda nbytes, label: held.append(self._alloc(nbytes, label)) if nbytes else None
        for block in reversed(held):
            self.trace.free(block)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize.cuda: the new block is there before the old one goes."""
        known = self._blocks.get(storage._cdata)
        self._blocks.pop(storage._cdata, None)
        if nbytes:
            self._follow(storage, self._alloc(nbytes, "resize"))
        if known is not None and known[1] is not None:
            self.trace.free(known[1])

    def passed_on(self, tensor: torch.Tensor) -> None:
        """Called when compiled code reuses a buffer."""
        storage = tensor.untyped_storage()
        entry = self._blocks.get(storage._cdata)
        if entry is not None and entry[1] is not None:
            self.trace.free(entry[1])
            self._follow(storage, self._alloc(self.trace.requested[entry[1]], REUSED))

    def track(self, tensor: torch.Tensor, op: str, source: torch.Tensor | None = None) -> None:
        """Begin the life of a storage not seen before. Outside all modules it belongs to the module of its source: a
        parameter's optimizer state is that parameter's."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError as error:
            kind = str(tensor.layout).removeprefix("torch.").replace("_", " ")
            raise TraceError(f"memfit does not cover {kind} tensors: {op} makes one", hint=IN_FULL) from error
        key = storage._cdata
        if key in self._blocks or tensor.device.type != self.device.type:
            return
        nbytes = storage.nbytes()
        if not nbytes or (source is not None and source.untyped_storage() is storage):  # a view of what was here before
            return
        self._follow(storage, self._alloc(nbytes, op, source))

    def _follow(self, storage: torch.UntypedStorage, block: int) -> None:
        key = storage._cdata

        def died(_: object, blocks: dict[int, Any] = self._blocks, trace: Trace = self.trace) -> None:
            del blocks[key]
            trace.free(block)

        self._blocks[key] = (weakref.ref(storage, died), block)

    def alive_blocks(self) -> set[int]:
        return {block for _, block in self._blocks.values() if block is not None}

    def free_now(self, tensor: torch.Tensor) -> None:
        """Record the free now, before the storage dies."""
        _, block = self._blocks.pop(tensor.untyped_storage()._cdata)
        if block is not None:
            self.trace.free(block)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A buffer in host memory, without data as all else here, to copy from and to: no block of the device."""
        with _disable_current_modes():
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        storage = tensor.untyped_storage()
        key = storage._cdata

        def died(_: object, blocks: dict[int, Any] = self._blocks) -> None:
            blocks.pop(key, None)

        self._blocks[key] = (weakref.ref(storage, died), None)
        return tensor

    @contextmanager
    def host_computes(self) -> Iterator[None]:
        """What is made inside from such buffers is the host's, too."""
        with _disable_current_modes():
            yield

    def name(self, tensor: torch.Tensor, module: str) -> None:
        """Say whose a tensor is, where that is known better than by the module that ran when it was made. Of a shard it
        is what lies here."""
        block = self.block_of(getattr(tensor, "_local_tensor", tensor))
        if block is not None:
            self.trace.module_of[block] = self.trace.name_id(module)

    @contextmanager
    def making(self, category: str, module: str | None = None) -> Iterator[None]:
        """What is made here is of this category; and of this module, where neither a module nor a node of the autograd
        graph says whose it is."""
        before, self.default_category = self.default_category, category
        named = module is not None and torch._C._current_autograd_node() is None
        try:
            with self.modules.inside(module or "") if named else nullcontext():
                yield
        finally:
            self.default_category = before

    def forget(self) -> None:
        """Stop following storages: what dies after the trace has ended is no event of it."""
        self._blocks.clear()

    def _alloc(self, nbytes: int, op: str, source: torch.Tensor | None = None) -> int:
        module, category, outside = self.surroundings()
        if outside and source is not None:
            block = self.block_of(source)
            module = self.trace.module(block) if block is not None else module
        if self._stacks is not None:
            self._stacks.note(self.lines)
        return self.trace.alloc(nbytes, stream=self.streams.current.stream_id, op=op, module=module, category=category)

    def surroundings(self) -> tuple[str, str, bool]:
        """Module and category of what is made now, and whether that is outside all modules."""
        if self.maker is not None:
            return self.maker, self.default_category, False
        node = torch._C._current_autograd_node()
        module, category = self.modules.current, self.default_category
        outside = self.modules.depth == 0
        if node is not None:
            if self.modules.depth_above_backward:
                category = "activations"  # a checkpointed block being run again
            elif _accumulates(node):
                outside = True
            else:
                module, outside = self.modules.of_node(node), False
        return module, category, outside

    # -- the mode ------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap every call for the sake of its compiler, at half the cost of a trace."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile would leave all code as it is."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_is_made_of_others(kind) for kind in types):
            if func is aten.empty_like.default and kwargs and kwargs.get("device") is not None:
                self._wake_gpu()
            return NotImplemented  # and what it is made of comes here next
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **(kwargs or {}))  # torch asks itself for shapes
        if self._stacks is not None and torch.is_grad_enabled():
            self._stacks.passes()
        with torch._C.DisableTorchFunction():  # else every look at a shape in backward goes through `CudaNames`
            return self._run(_known_op(func), func, args, kwargs or {})

    def _wake_gpu(self) -> None:
        """fake_tensor.py, init_gpu_context: shards that are given memory ask for their shapes on "cuda", and then on
        "cuda:0"; the first time, one element is made on each."""
        for _ in range(0 if self._gpu_is_awake else 2):
            self.temporary(4, "torch's first look at the GPU")
        self._gpu_is_awake = True

    def _run(self, op: KnownOp, func: Any, args: Any, kwargs: Any) -> Any:
        if op.asks_value and args[0].device.type == self.device.type:
            sent = None if self.sent is None else self.sent.number(args[0])
            return self.answers.value(args[0]) if sent is None else sent
        if self.sent is not None and (known := self.sent.read_back(func, args, kwargs)) is not None:
            return known
        if op.adds and self.in_backward and self._engine_sums.in_place(args, kwargs):
            return args[0]
        if op.indexes:
            self._track_lists(args[1])
        if op.replaced is not None and self._is_traced(args):
            with self, self.rule_calls.noted(self, func, False, args, kwargs):
                replaced = op.replaced(self, *args, **kwargs)
            if replaced is not NotImplemented:
                return replaced
        if op.is_composite and self.meets_composites and self._is_traced(args):
            with self:
                return func.decompose(*args, **kwargs)
        try:
            if op.gives is Gives.OTHER or self._remembered is None:
                out = func(*args, **kwargs)
            else:
                out = self._remembered.call(func, op.gives, args, kwargs)
        except RuntimeError as error:
            if not _lacks_shapes(error):
                raise
            if rule := indexing.DATA_DEPENDENT.get(func):
                with self:
                    return rule(self, *args, **kwargs)
            if _NO_DATA in str(error):
                raise self.answers.refusal(args[0]) from error
            raise TraceError(
                f"cannot trace {func}: torch has no shape-only kernel for it",
                hint="what it returns depends on data, or its author wrote none (torch.library.register_fake)",
            ) from error
        if op.resizes:
            self._track_growth(args[0])
        if out is not None:
            self._track_results(out, op.name, args)
        if self.sent is not None:
            self.sent.keep(func, args, out)
        if op.multiplies:
            if self._is_traced(args):
                self.workspaces.after_product(self, func, args)
        elif op.hidden is not None and self._is_traced(args):
            with self.rule_calls.noted(self, func, True, (out, *args), kwargs):
                op.hidden(self, out, *args, **kwargs)
        if op.detaches and self.in_backward:
            self._note_gradient(out)
        return out

    def _track_growth(self, tensor: torch.Tensor) -> None:
        """Resize.h: a storage that is too small gets a new block; it never shrinks."""
        storage = tensor.untyped_storage()
        block = self.block_of(tensor)
        held = 0 if block is None else self.trace.requested[block]
        if tensor.device.type == self.device.type and storage.nbytes() > held:
            self.resized(storage, storage.nbytes())

    def _track_lists(self, indices: Sequence[torch.Tensor | None]) -> None:
        """A list of numbers as an index becomes a tensor below what a mode sees."""
        for index in indices:
            if index is not None:
                self.track(index, "index from a list")

    def _track_results(self, out: Any, name: str, args: Any) -> None:
        first = args[0] if args else None
        if isinstance(out, torch.Tensor):
            self.track(out, name, first if isinstance(first, torch.Tensor) else None)
            if self.modules.depth == 0 and self.owns(out):
                self._count(out, first)
            return
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        sources = first if isinstance(first, (list, tuple)) and len(first) == len(results) else None
        for i, tensor in enumerate(results):
            self.track(tensor, name, sources[i] if sources else None)

    def _count(self, out: torch.Tensor, first: Any) -> None:
        """An entry for each tensor of a list, or for each entry of such a one."""
        if isinstance(first, (list, tuple)):
            tensors = [t for t in first if isinstance(t, torch.Tensor)]
            self.counts(tensors if out.shape == (len(tensors),) else [])
        elif isinstance(first, torch.Tensor) and out.dim() == 1 and out.shape == first.shape:
            lists, made = self.trace.facts.get(LISTS, {}), self.block_of(out)
            if made != self.block_of(first) and (members := lists.get(str(self.block_of(first)))) is not None:
                lists[str(made)] = members

    def _is_traced(self, args: Any) -> bool:
        first = _first_tensor(args)
        return first is not None and first.device.type == self.device.type

    def _note_gradient(self, tensor: torch.Tensor) -> None:
        """An optimizer may step amid a backward pass, and looks at weights there."""
        node = torch._C._current_autograd_node()
        block = self.block_of(tensor)
        steps = bool(self.trace.marks) and self.trace.marks[-1].phase == "step"
        if block is not None and node is not None and _accumulates(node) and not steps:
            self.trace.set_category(block, self.trace.category(block) or "gradients")


@dataclass(frozen=True, slots=True)
class KnownOp:
    """What the tracer has to know of an op, looked up once."""

    name: str
    gives: Gives
    replaced: Callable[..., Any] | None
    hidden: Callable[..., Any] | None
    multiplies: bool
    adds: bool
    indexes: bool
    asks_value: bool
    detaches: bool
    resizes: bool
    is_composite: bool
    """Written in terms of other ops, which inference mode does not show by themselves."""


@cache
def _known_op(func: Any) -> KnownOp:
    return KnownOp(
        name=str(func),
        gives=what_is_given(func),
        replaced=REPLACED.get(func),
        hidden=HIDDEN.get(func) or distributed.HIDDEN.get(str(func)),
        multiplies=func in PRODUCTS,
        adds=func is aten.add.Tensor,
        indexes=func in indexing.BY_INDEX,
        asks_value=func is aten._local_scalar_dense.default,
        detaches=func is aten.detach.default,
        is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        resizes=func in (aten.resize_.default, aten.resize_as_.default),
    )


@cache
def _is_made_of_others(kind: type) -> bool:
    """A tensor that wraps others and takes ops apart itself, such as FSDP's shards (DTensor)."""
    return hasattr(kind, "__tensor_flatten__") and kind is not FakeTensor


def _accumulates(node: Any) -> bool:
    """Asked of its type: functions of a person's own may keep something else as `ctx.name`."""
    return bool(type(node).name(node) == ACCUMULATE_GRAD)


def _first_tensor(values: Any) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_tensor(value)) is not None:
            return found
    return None


def _lacks_shapes(error: RuntimeError) -> bool:
    """How torch says that an op cannot run without data: by type, or in these words (2.11 to 2.13)."""
    said = str(error)
    return isinstance(error, NotImplementedError) or any(words in said for words in _WITHOUT_DATA)


_WITHOUT_DATA = ("cannot be called on meta tensors", "no fake impl registered")
_NO_DATA = "Cannot copy out of meta tensor"


class ModuleStack:
    """Which module runs now, and which one made a given node of the autograd graph.

    Nodes are numbered in the order of their making, so the numbers at which modules were entered and left are enough.
    """

    def __init__(self, numbers: NodeNumbers) -> None:
        self._numbers = numbers
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        self._bounds: list[int] = []
        self._owners: list[str] = []
        self._base: list[int] = []

    def know(self, module: torch.nn.Module, path: str) -> None:
        """Names of a module and those in it, where it is not entered by way of the one that holds it."""
        for name, child in module.named_modules():
            self._names[child] = ".".join(part for part in (path, name) if part)

    def known(self) -> list[tuple[torch.nn.Module, str]]:
        return list(self._names.items())

    def name_of(self, module: torch.nn.Module) -> str:
        return self._names.get(module, "")

    @property
    def current(self) -> str:
        return self._stack[-1] if self._stack else ""

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def depth_above_backward(self) -> int:
        """How many modules were entered since backward began."""
        return len(self._stack) - (self._base[-1] if self._base else 0)

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._base.append(len(self._stack))
        try:
            yield
        finally:
            del self._stack[self._base.pop() :]

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """As if the module were running."""
        self._stack.append(name)
        try:
            yield
        finally:
            self._stack.pop()

    def of_node(self, node: Any) -> str:
        at = bisect_right(self._bounds, self._numbers.as_made(node)) - 1
        return self._owners[at] if at >= 0 else ""

    def _bound(self) -> None:
        self._bounds.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self.current)

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._names:
            root = "" if not self._stack else self.current
            for name, child in module.named_modules():
                path = ".".join(part for part in (root, name) if part)
                self._names.setdefault(child, path.replace("_orig_mod.", "").removesuffix("_orig_mod"))
        self._stack.append(self._names[module])
        self._bound()

    @contextmanager
    def running(self, module: torch.nn.Module) -> Iterator[None]:
        """Of one that is called past its hooks."""
        self._enter(module, None)
        try:
            yield
        finally:
            self._leave()

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._bound()

    @contextmanager
    def watching(self) -> Iterator[None]:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def collector_off() -> Iterator[None]:
    """A collection in the middle of a step would free storages where no GPU run does. One that the traced code asks for
    looks only at what was made since: everything else in the process takes longer than the trace."""
    was_on, freezes = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_on:
            gc.enable()


def trace(
    fn: Callable[[Tracer], object],
    *,
    device: str | torch.device = "meta",
    platform: Platform = H200,
    answers: Answers | None = None,
) -> Trace:
    """What `fn` would allocate. It is given the tracer: its `device`, `mark` for phases, `rule_calls`."""
    from memfit.tracing.cuda_names import CudaNames

    check_not_nested()
    tracer = Tracer(torch.device(device), platform, answers or Answers())
    return run_traced(fn, tracer, CudaNames(tracer))


def check_not_nested() -> None:
    if any(isinstance(mode, Tracer) for mode in _get_current_dispatch_mode_stack()):
        raise TraceError("a trace inside a trace", hint="trace the whole, and mark its parts")


def run_traced(fn: Callable[[Any], object], tracer: Tracer, names: CudaNames) -> Trace:
    from memfit.tracing.compiled.hooks import compiling
    from memfit.tracing.cuda_names import cuda_names

    with ExitStack() as stack:
        stack.enter_context(ONE_AT_A_TIME)
        stack.enter_context(collector_off())
        stack.enter_context(composites.composites_of_cuda(tracer.platform, tracer.device))
        stack.enter_context(tracer.modules.watching())
        stack.enter_context(cuda_names(names))
        stack.enter_context(compiling(names))
        stack.enter_context(tracer)
        result = fn(tracer)
        tracer.forget()
    del result
    if tracer.answers.refused is not None:
        raise tracer.answers.refused
    return tracer.trace

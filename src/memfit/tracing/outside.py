"""What was there before a trace is there after it: models, optimizers, files, random numbers, torch's settings.

In a trace `model.cuda()` puts a model of the caller on a device without memory. Its weights, buffers and gradients come
back afterwards, into the same parameter objects. Checkpoints that the code saves would hold no data: none is written.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass
class _Before:
    """Of one module, without what is in it."""

    buffers: dict[str, Any]
    gradients: dict[str, torch.Tensor]
    """Those on the host. One that is moved is held no longer: the code may let it go."""
    moved: dict[str, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """Gradients that were moved with the module, with what they held on the host."""
    weights: dict[str, Any] = field(default_factory=dict)
    """A parameter that holds what was on the host, by the name of the one that it was swapped with."""


@contextmanager
def put_back(is_on_gpu: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    remembered = _MovedTensors(is_on_gpu)
    random, settings = torch.get_rng_state(), _settings()
    hook = register_optimizer_step_pre_hook(remembered.note_state)
    try:
        with (
            mock.patch.object(nn.Module, "_apply", remembered.apply_of_modules()),
            mock.patch.object(torch.utils, "swap_tensors", remembered.swap),
        ):
            yield
    finally:
        hook.remove()
        torch.set_rng_state(random)
        for put, value in settings:
            put(value)
        remembered.restore()


class _MovedTensors:
    """What the traced code has moved to the GPU, with what it was before."""

    def __init__(self, is_on_gpu: Callable[[torch.Tensor], bool]) -> None:
        self.is_on_gpu = is_on_gpu
        self.modules: weakref.WeakKeyDictionary[nn.Module, _Before] = weakref.WeakKeyDictionary()
        self.moving: list[nn.Module] = []
        """The modules that are being moved now, the outermost first."""
        self.alone: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        """Tensors that were given memory of the GPU by themselves, with what they held."""
        self.states: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self.swap_of_torch = torch.utils.swap_tensors

    def apply_of_modules(self) -> Callable[..., Any]:
        """In place of `nn.Module._apply`, by which modules are moved."""
        apply = nn.Module._apply

        def apply_and_remember(module: nn.Module, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if module not in self.modules:
                gradients = {name: p.grad for name, p in module._parameters.items() if p is not None}
                on_host = {
                    name: grad for name, grad in gradients.items() if grad is not None and not self.is_on_gpu(grad)
                }
                self.modules[module] = _Before(dict(module._buffers), on_host)
            self.moving.append(module)
            try:
                return apply(module, lambda tensor: _as_tensor(fn(tensor)), *args, **kwargs)
            finally:
                self.moving.pop()

        return apply_and_remember

    def swap(self, here: torch.Tensor, there: torch.Tensor) -> None:
        """In place of `torch.utils.swap_tensors`."""
        module = self.moving[-1] if self.moving else None
        if module is not None and self.is_on_gpu(here) and self.is_on_gpu(there):
            here.data = there  # as torch does on a GPU: a graph may hold what is swapped
            return
        name = _name_in(module._parameters, here) if module is not None else None
        if _has_its_own_class(here) or (
            module is not None and name is None and type(here) is type(there) is torch.Tensor
        ):
            torch._C._swap_tensor_impl(here, there)  # a gradient may be held and looked at by others: on a GPU too
        else:
            there.__dict__.update(here.__dict__)  # a GPU run changes what is inside a parameter, not its attributes
            try:
                self.swap_of_torch(here, there)
            except RuntimeError:  # a graph holds it, as weight norm's from when the layer was made; on a GPU it may
                torch._C._swap_tensor_impl(here, there)
        if self.is_on_gpu(here) and not self.is_on_gpu(there):
            self._note_moved(module, name, here, there)

    def _note_moved(self, module: nn.Module | None, name: str | None, here: torch.Tensor, there: torch.Tensor) -> None:
        """`here` was on the host, with what `there` holds now."""
        if module is None:
            self.alone.append((weakref.ref(here), there))
            return
        before = self.modules[module]
        if name is not None:
            before.weights.setdefault(name, there)
        elif (name := _name_in(before.gradients, here)) is not None:
            del before.gradients[name]
            before.moved[name] = weakref.ref(here), there

    def note_state(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in self.states:
            self.states[optimizer] = {key: dict(value) for key, value in optimizer.state.items()}

    def restore(self) -> None:
        with ExitStack() as stack:  # from the last to the first, whatever fails
            for optimizer, state in list(self.states.items()):
                stack.callback(optimizer.state.update, state)
                stack.callback(optimizer.state.clear)
            for held, there in self.alone:
                stack.callback(self._restore_alone, held, there)
            modules = list(self.modules.items())
            for module, before in modules:
                stack.callback(_restore_gradients, module, before)
            for module, before in modules:
                stack.callback(_restore, module, before)

    def _restore_alone(self, held: weakref.ref[torch.Tensor], there: torch.Tensor) -> None:
        if (here := held()) is not None and self.is_on_gpu(here):
            torch._C._swap_tensor_impl(here, there)


def _name_in(named: Mapping[str, Any], tensor: torch.Tensor) -> str | None:
    return next((name for name, each in named.items() if each is tensor), None)


def _has_its_own_class(tensor: Any) -> bool:
    """A parameter that holds one tensor and knows more of it, such as packed weights."""
    return (
        isinstance(tensor, nn.Parameter)
        and type(tensor) not in (nn.Parameter, nn.UninitializedParameter)
        and not is_traceable_wrapper_subclass(tensor)
    )


def _as_tensor(made: Any) -> Any:
    """What is in such a parameter goes into the one that is there."""
    if not _has_its_own_class(made):
        return made
    with torch._C.DisableTorchFunction():
        return made.as_subclass(torch.Tensor)


@contextmanager
def settings_of_a_new_process() -> Iterator[None]:
    """memfit's own jobs run as in one, whatever this one has set."""
    backends: Any = torch.backends.cuda
    kernels = [
        (getattr(backends, f"enable_{name}_sdp"), getattr(backends, f"{name}_sdp_enabled")())
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ]
    before, anomaly = [*_settings(), *kernels], torch.is_anomaly_enabled()
    for enable, _ in kernels:
        enable(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.autograd.set_detect_anomaly(anomaly)
        for put, value in before:
            put(value)


def what_is_around() -> str | None:
    """Contexts of the caller in which all of torch's code runs, and which nothing ends from within."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    plain = ("DeviceContext", "Profiler", "_MemoryProfile")
    for mode in modes:
        if type(mode).__name__ not in plain:
            return type(mode).__name__
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved_tensors_hooks (save_on_cpu is one)"
    return None


def _settings() -> list[tuple[Callable[[Any], Any], Any]]:
    """torch's own, which code may change for the whole process."""
    cudnn: Any = torch.backends.cudnn
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    return [
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]), deterministic),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (lambda value: setattr(cudnn, "benchmark", value), cudnn.benchmark),
        (lambda value: setattr(cudnn, "deterministic", value), cudnn.deterministic),
    ]


def _restore(module: nn.Module, before: _Before) -> None:
    """A graph that somebody still holds keeps what was on the device."""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        parameter.grad = None
        if (held := before.weights.get(name)) is not None:
            held.requires_grad_(parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, held)
    for name, buffer in before.buffers.items():
        if name in module._buffers:
            module._buffers[name] = buffer


def _restore_gradients(module: nn.Module, before: _Before) -> None:
    """Once all weights are back: modules may share them."""
    gradients = dict(before.gradients)
    for name, (moved, held) in before.moved.items():
        if (gradient := moved()) is not None:
            torch._C._swap_tensor_impl(gradient, held)
        gradients[name] = held if gradient is None else gradient
    for name, gradient in gradients.items():
        parameter = module._parameters.get(name)
        if parameter is not None and _kind(parameter) == _kind(gradient):
            parameter.grad = gradient


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape


LEFT_OUT = "checkpoints that the code saves are left out: nothing was written"
WRITERS = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("safetensors.torch", "serialize_file"),
    ("safetensors.torch", "_flatten"),
    ("safetensors.torch", "_flatten_as_ptr"),
)
"""What safetensors offers has been imported by name all over; these are what it calls, by its versions."""
IN_TORCH = (torch, torch.serialization)
FOLDER_WRITERS = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("peft.peft_model", "PeftModel"),
    ("diffusers.models.modeling_utils", "ModelMixin"),
)


@contextmanager
def nothing_saved(
    assume: Callable[[str], None], after_import: list[Callable[[], None]], keep: Callable[[Any, Any], None]
) -> Iterator[None]:
    """`keep` is given what torch saves, and where to."""

    def kept(thing: Any, f: Any, *_: Any, **__: Any) -> None:
        keep(thing, f)
        assume(LEFT_OUT)

    def left_out(*_: Any, **__: Any) -> None:
        assume(LEFT_OUT)

    def folder_left_empty(_: Any, save_directory: Any, *__: Any, **___: Any) -> None:
        """The code may write files of its own beside."""
        os.makedirs(save_directory, exist_ok=True)
        assume(LEFT_OUT)

    with ExitStack() as stack:
        for module, name in WRITERS:
            owner = sys.modules.get(module) or import_module(module)
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, kept if owner in IN_TORCH else left_out))
        patched: set[Any] = set()

        def leave_folders_out() -> None:
            for module, name in FOLDER_WRITERS:
                kind = getattr(sys.modules.get(module), name, None)
                if kind is not None and kind not in patched:
                    patched.add(kind)
                    stack.enter_context(mock.patch.object(kind, "save_pretrained", folder_left_empty))

        leave_folders_out()
        after_import.append(leave_folders_out)
        yield
        after_import.remove(leave_folders_out)

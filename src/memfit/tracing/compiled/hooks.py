"""Where memfit takes hold of torch.compile: from the first thing that a trace compiles until the trace ends."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

from memfit.analysis.stacks import is_own
from memfit.errors import TraceError
from memfit.extrapolation.reused import say
from memfit.tracing.autocast import LAYER
from memfit.tracing.compiled.autotuning import GeneratedKernels
from memfit.tracing.compiled.generated import GeneratedCode, whose_buffers
from memfit.tracing.compiled.numbers import any_number
from memfit.tracing.compiled.padding import TimedProducts
from memfit.tracing.compiled.pretended_gpu import (
    CUDA,
    PRETENDED,
    forget_the_card,
    gpu_pretended,
    guard_of_no_device,
    nothing_logged_about_the_card,
)
from memfit.tracing.compiled.settings import settings_put_back, tell_graph
from memfit.tracing.compiled.stages import (
    FakeDevice,
    gradients_by_shape,
    nothing_computed,
    numbers_from_host,
    without_function_modes,
)
from memfit.tracing.compiled.torch_names import EAGERLY, compiler
from memfit.tracing.kernels.composites import composites_of_compiler, run_frames_as_before

MEMFIT = Path(__file__).parents[2]
OF_JOBS = tuple(str(MEMFIT / room) for room in ("jobs", "models"))
"""What runs elsewhere in memfit is none of the job's code."""
PASSED_THROUGH = str(MEMFIT / "tracing" / "repeated")
"""What runs there calls the job's code."""
AUTOCAST = ("is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "set_autocast_enabled",
            "set_autocast_dtype", "clear_autocast_cache")  # fmt: skip
NOT_GUARDED = frozenset((*AUTOCAST, *PRETENDED, "__call__"))
"""Names whose values memfit changes between the compiler's look at the code and the code's run."""
REFUSED = {
    "triton.cudagraphs": "{}, whose CUDA graphs keep pools of memory of their own",
    "max_autotune": "{}, which times kernels on the card and takes the fastest",
    "max_autotune_gemm": "max_autotune_gemm, which times kernels on the card and takes the fastest",
    "benchmark_fusion": "benchmark_fusion, which times kernels on the card and fuses those that gain",
    "coordinate_descent_tuning": "coordinate_descent_tuning, which times kernels on the card step by step",
    "triton.multi_kernel": "triton.multi_kernel, which times kernels on the card and takes the fastest",
    "triton.native_matmul": "triton.native_matmul, whose products are kernels that are timed on the card",
    "freezing": "freezing, which computes with the weights while it compiles",
    "cpp_wrapper": "cpp_wrapper",
    "memory_planning": "memory_planning",
}
GENERATION_COMPILES = "transformers.modeling_utils", "get_compiled_call"
NOTHING_COMPILED = "torch.compile was asked for, and compiled nothing: the plan is that of eager mode"
IN_SOURCE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
"""A part of a module, as Dynamo says where a tensor comes from: L['net']._modules['0']._parameters['weight']."""


@contextmanager
def compiling(names: Any) -> Iterator[None]:
    """torch.compile in the traced code is torch's own; code that compiles nothing is not touched."""
    hooks, refuse = Hooks(names), names.tracer.answers.refuse
    inductor, others = torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper
    make, compile_graph, make_other = inductor.__init__, inductor.__call__, others.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if _while_a_library_is_imported(sys._getframe(1)):  # bitsandbytes does, for the CPU: nobody asked for it
            wait_for_a_frame()
        else:
            hooks.put_on()
        make(self, *args, **kwargs)
        self.memfit_mode = args[0] if args else kwargs.get("mode")
        self.memfit_of_generation = _of_generation(sys._getframe(1))

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (why := _uncovered(self.config, getattr(self, "memfit_mode", None))) is not None:
            refuse(by_generate(why) if getattr(self, "memfit_of_generation", False) else why)
        for weight, path in _weights(args[0]):
            names.tracer.on_weight(weight, path)
        tell_graph(hooks.graphs + 1)
        with warnings.catch_warnings():  # where it is stopped, torch would print what it was at
            warnings.filterwarnings("ignore", message="Error detected in ")
            made = compile_graph(self, *args, **kwargs)
        hooks.graphs += 1
        return made

    def wait_for_a_frame() -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            frames = importlib.import_module("torch._dynamo.convert_frame")
        if not hooks.is_awake:
            stack.enter_context(hooks.at_the_first_frame(frames.CatchErrorsWrapper))

    def made_other(self: Any, backend: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(backend, str):
            make_other(self, backend, *args, **kwargs)  # which knows the names that there are
        refuse(TraceError(f"memfit does not cover torch.compile with backend={backend!r}", hint=EAGERLY))

    with ExitStack() as stack:
        stack.enter_context(settings_put_back())
        # Of a module that was compiled before the trace, torch warns before it asks the compiler.
        hooked = mock.patch.object(torch.nn.modules.module, "_has_any_global_hook", lambda: False, create=True)
        stack.enter_context(hooked)
        stack.callback(hooks.take_off)
        stack.enter_context(mock.patch.object(inductor, "__init__", made))
        stack.enter_context(mock.patch.object(inductor, "__call__", compiled))
        stack.enter_context(mock.patch.object(others, "__init__", made_other))
        if loaded := sys.modules.get("torch._dynamo.convert_frame"):  # compiled before the trace, maybe
            stack.enter_context(hooks.at_the_first_frame(loaded.CatchErrorsWrapper))
        if loaded := sys.modules.get("torch._dynamo.compiled_autograd"):
            stack.enter_context(mock.patch.object(loaded, "_enable", lambda *_, **__: refuse(compiled_autograd())))
        yield


def _uncovered(config: dict[str, Any], mode: str | None) -> TraceError | None:
    for setting, what in REFUSED.items():
        if config.get(setting, getattr_path(compiler().inductor_config, setting)):
            asked = f'mode="{mode}"' if mode and setting in config else setting
            return TraceError(f"memfit does not cover torch.compile with {what.format(asked)}", hint=EAGERLY)
    if compiler().dynamo_config.compiled_autograd or compiler().compiled_autograd.compiled_autograd_enabled:
        return compiled_autograd()
    return None


def by_generate(why: TraceError) -> TraceError:
    what = f"transformers compiles the model by itself for generate with a cache that is not dynamic: {why.message}"
    return TraceError(what, hint="generate(..., disable_compile=True), in the run too: the cache stays as it is")


def _while_a_library_is_imported(frame: FrameType | None) -> bool:
    """Whether `torch.compile` is called by what a library does as it is imported, not by anybody's program."""
    while frame is not None and not is_own(file := frame.f_code.co_filename) and not file.startswith(str(MEMFIT)):
        if frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False


def _of_generation(frame: FrameType | None) -> bool:
    """Whether it is transformers that asks for the compiler: from within `torch.compile`."""
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code.co_name == GENERATION_COMPILES[1] and frame.f_globals["__name__"] == GENERATION_COMPILES[0]:
            return True
        frame = frame.f_back
    return False


def _weights(graph: Any) -> Iterator[tuple[torch.Tensor, str]]:
    """Weights and buffers of modules that a graph is given, with their paths: it calls none of the modules."""
    for node in graph.graph.find_nodes(op="placeholder"):
        if (given := node.meta.get("grapharg")) is None or not isinstance(given.example, torch.Tensor):
            continue
        said = given.source.name if isinstance(given.source.name, str) else given.source.name()
        if parts := IN_SOURCE.findall(said):
            yield given.example, ".".join(parts)


def compiled_autograd() -> TraceError:
    return TraceError("memfit does not cover torch.compile with compiled_autograd", hint=EAGERLY)


def getattr_path(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


class Hooks:
    """Of one trace."""

    def __init__(self, names: Any) -> None:
        self.names, self.tracer = names, names.tracer
        self._device = FakeDevice()
        self._kernels = GeneratedKernels(self.tracer)
        self._stack = ExitStack()
        self._is_on = False
        self.is_awake = False
        """On, or to be put on by the first frame that is compiled."""
        self.graphs = 0
        self._wait_no_more: Callable[[], None] = lambda: None
        self._codes: set[Any] = set()
        """Functions that were compiled in this trace: what was made for them is dropped at its end."""
        self._called: list[tuple[weakref.ref[torch.nn.Module], Any]] = []
        """Modules that were compiled by themselves in this trace, and how they were called then."""

    # -- on and off --------------------------------------------------------------------------------------------------

    def put_on(self) -> None:
        if self._is_on:
            return
        self._is_on = self.is_awake = True
        self._wait_no_more()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            torchs = compiler()
            forget_the_card()
        stack, fx = self._stack, torchs.compile_fx
        stack.callback(forget_the_card)
        stack.callback(self._forget_codes)
        stack.enter_context(guard_of_no_device())
        stack.enter_context(nothing_logged_about_the_card())
        stack.enter_context(self.names.autocast.told_to_torch())
        stack.enter_context(
            torchs.inductor_config.patch(
                {"compile_threads": 1, "fx_graph_cache": False, "fx_graph_remote_cache": False}
            )
        )
        stack.enter_context(torchs.functorch_config.patch({"enable_autograd_cache": False}))
        stack.enter_context(torchs.dynamo_config.patch({"automatic_dynamic_local_pgo": False}))
        stack.callback(self._give_calls_back)
        stack.enter_context(TimedProducts(self.tracer).asked())
        stack.enter_context(self._ops_of_ops_under_autocast())
        for owner, name, value in (
            (torch.nn.Module, "compile", self._blocks()),
            (torchs.known_shapes, "_CODE_STATE", None),
            (torchs.known_shapes, "_INIT_CODE_STATE", None),
            (torchs.function_modes.SymbolicTorchFunctionState, "__init__", self._function_modes()),
            (torchs.dynamo_utils, "set_torch_function_mode_stack", self._function_modes_put_back()),
            (torchs.regions.AutocastModeVariable, "__init__", self._regions()),
            (torchs.convert_frame.CatchErrorsWrapper, "__call__", self._frames()),
            (fx, "compile_fx", self._whole_graphs()),
            (fx, "InductorError", self._skipped()),
            (fx, "partition_fn", self._partition()),
            (fx, "compile_fx_forward", self._forward()),
            (fx, "compile_fx_backward", self._backward()),
            (torchs.graph.GraphLowering, "_compile_to_module_lines", self._generated()),
            (torchs.optimizers, "_is_static_for_cudagraphs", lambda _: True),
            (torchs.optimizers.OptimizerVariable, "call_method", self._optimizers()),
            (torchs.optimizers.OptimizerVariable, "_set_capturable", self._steps_on_the_card()),
            (torchs.flex_attention, "create_fw_bw_graph", self._scores()),
            (torchs.select_algorithm, "PyCodeCache", _Unloaded),
            (fx, "_warn_tf32_disabled", lambda: None),  # about speed
            (fx, "warnings", SimpleNamespace(warn=lambda *_: None)),  # that a card has no bf16
            (torch.fx.GraphModule, "print_readable", lambda *_, **__: ""),  # for logs alone, and takes its time
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        if self.tracer.platform.torch < (2, 12) and hasattr(BackwardCFunction, "apply_boxed"):
            stack.enter_context(mock.patch.object(BackwardCFunction, "apply_boxed", _holding_tangents()))

    @contextmanager
    def at_the_first_frame(self, wrapper: Any) -> Iterator[None]:
        convert = wrapper.__call__

        def put_on_first(frames: Any, *args: Any, **kwargs: Any) -> Any:
            self.put_on()
            return wrapper.__call__(frames, *args, **kwargs)

        def wait_no_more() -> None:
            wrapper.__call__ = convert

        self._wait_no_more, wrapper.__call__ = wait_no_more, put_on_first
        self.is_awake = True
        try:
            yield
        finally:
            self._wait_no_more()

    def take_off(self) -> None:
        self._stack.close()
        if self._is_on:
            run_frames_as_before()
            compiled = f"torch.compile: buffers as the compiler of torch {torch.__version__} plans them"
            say(self.tracer.trace, compiled if self.graphs else NOTHING_COMPILED)

    def _forget_codes(self) -> None:
        for code in self._codes:
            compiler().eval_frame.reset_code(code)

    # -- Dynamo ------------------------------------------------------------------------------------------------------

    def _function_modes(self) -> Callable[..., None]:
        """The mode that gives "cuda" its meaning is guarded, but is no code of the job."""
        make = compiler().function_modes.SymbolicTorchFunctionState.__init__

        def made(state: Any, modes: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            make(state, [mode for mode in modes if mode is not self.names], *args, **kwargs)

        return made

    def _function_modes_put_back(self) -> Callable[..., None]:
        """Code that enters modes of its own, as `create_block_mask` does, puts back those that Dynamo was told of."""
        put_back = compiler().dynamo_utils.set_torch_function_mode_stack

        def with_names(stack: list[Any]) -> None:
            is_there = self.names in torch.overrides._get_current_function_mode_stack()
            put_back([self.names, *stack] if is_there and self.names not in stack else stack)

        return with_names

    def _regions(self) -> Callable[..., None]:
        """A region of the traced device, as accelerate makes it for the Trainer, is read as one of the card."""
        make = compiler().regions.AutocastModeVariable.__init__

        def made(region: Any, target_values: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            device, *rest = target_values
            make(region, [CUDA.type if device == self.tracer.device.type else device, *rest], *args, **kwargs)

        return made

    def _blocks(self) -> Callable[..., None]:
        """Compiled by themselves, modules are called past the hooks that say which of them runs."""
        compile_it = torch.nn.Module.compile

        def compile_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            compile_it(module, *args, **kwargs)
            compiled = module._compiled_call_impl

            def call(*args: Any, **kwargs: Any) -> Any:
                with self.tracer.modules.running(module):
                    return compiled(*args, **kwargs)  # type: ignore[misc]

            module._compiled_call_impl = call
            self._called.append((weakref.ref(module), compiled))

        return compile_module

    def _give_calls_back(self) -> None:
        for reference, compiled in self._called:
            if (module := reference()) is not None:
                module._compiled_call_impl = compiled

    def _optimizers(self) -> Callable[..., Any]:
        """Dynamo has an optimizer make its state while it reads the step: that is the job's doing."""
        call = compiler().optimizers.OptimizerVariable.call_method

        def call_method(variable: Any, reader: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            make = getattr(variable.value, name, None)
            if name != "_init_group" or make is None:
                return call(variable, reader, name, *args, **kwargs)

            def traced(*args: Any, **kwargs: Any) -> Any:
                with self.tracer:
                    return make(*args, **kwargs)

            with mock.patch.object(variable.value, name, traced):
                return call(variable, reader, name, *args, **kwargs)

        return call_method

    def _steps_on_the_card(self) -> Callable[..., None]:
        """Of weights on a card, Dynamo has an optimizer count its steps there too, if it has no state yet."""
        set_capturable = compiler().optimizers.OptimizerVariable._set_capturable

        def set_here(variable: Any, *args: Any) -> None:
            for group in variable.value.param_groups:
                weights = group.get("params", [])
                if all(p.device == self.tracer.device and p not in variable.value.state for p in weights):
                    group.update({"capturable": True} if "capturable" in group else {})
            set_capturable(variable, *args)

        return set_here

    @contextmanager
    def _ops_of_ops_under_autocast(self) -> Iterator[None]:
        """Memfit's layer is to them what CUDA's is."""
        layer, flex = getattr(torch._C.DispatchKey, LAYER), compiler().flex_attention.flex_attention
        with ExitStack() as stack:
            for op in torch._ops._higher_order_ops.values():
                if op is not flex:
                    rest = op.non_fallthrough_keys.remove(layer)
                    stack.enter_context(mock.patch.object(op, "non_fallthrough_keys", rest))
            stack.enter_context(mock.patch.dict(flex.py_kernels, {layer: self._cast_scores}))
            yield

    def _cast_scores(self, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        """FlexAttention under autocast, as torch has it for CUDA."""
        cast = (tensor.to(self.names.autocast.dtype) for tensor in (query, key, value))
        layers = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, LAYER))
        with torch._C._ExcludeDispatchKeyGuard(layers.add(torch._C.DispatchKey.AutocastCUDA)):
            return compiler().flex_attention.flex_attention(*cast, *rest)

    def _scores(self) -> Callable[..., Any]:
        """FlexAttention asks autograd for the backward of its scores: Dynamo does not need it."""
        make = compiler().flex_attention.create_fw_bw_graph

        def made(score: Any, *args: Any) -> Any:
            return (score, None) if self._device.now == CUDA else make(score, *args)

        return made

    def _frames(self) -> Callable[..., Any]:
        torchs = compiler()
        convert, action = torchs.convert_frame.CatchErrorsWrapper.__call__, torchs.dynamo_types.FrameAction

        def skipped(then: Any) -> Any:
            strategy = torchs.convert_frame.FrameExecStrategy(action.SKIP, then)
            return torchs.convert_frame.ConvertFrameReturn(frame_exec_strategy=strategy)

        def converted(wrapper: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            several = torch.distributed.is_available() and torch.distributed.is_initialized()
            if several and not torchs.dynamo_config.disable:
                # Before Dynamo looks: it would break the graph at what memfit has put in place of DDP's reducer.
                refused = "memfit does not cover torch.compile in a job of several processes"
                self.tracer.answers.refuse(TraceError(refused, hint=EAGERLY))
            self._codes.add(frame.f_code)
            file = frame.f_code.co_filename
            if file.startswith(str(MEMFIT)) and not file.startswith(OF_JOBS):
                return skipped(action.DEFAULT if file.startswith(PASSED_THROUGH) else action.SKIP)
            filtered = wrapper.hooks.guard_filter_fn
            wrapper.hooks.guard_filter_fn = _guards_kept(filtered)
            try:
                with self._dynamo():
                    return convert(wrapper, frame, *args, **kwargs)
            except Exception as error:
                raise _refusal_in(error) or _compiler_fails(error) from error
            finally:
                wrapper.hooks.guard_filter_fn = filtered

        return converted

    @contextmanager
    def _dynamo(self) -> Iterator[None]:
        """The layer of autocast stays as it is: guards on tensors see it."""
        on = torch._C._dispatch_tls_is_dispatch_key_included(LAYER)
        hooks = compiler().module_hooks
        none: dict[str, Any] = {name: OrderedDict() for name in vars(hooks) if name.startswith("_global_forward")}
        with (
            _disable_current_modes(),
            gpu_pretended(self.tracer.platform),
            self._at(CUDA, layer=on, autocast=torch._C),
            composites_of_compiler(self.tracer.platform, "AutogradCUDA", ("scaled_dot_product_attention",)),
            mock.patch.object(compiler().fake_tensor.FakeTensorMode, "avoid_device_init", True),  # by `torch.tensor`
            gradients_by_shape(),
            any_number(lambda note: say(self.tracer.trace, note), self.tracer.answers.refuse),
            mock.patch.multiple(hooks, **none),
            mock.patch.object(torch.nn.Module, "__call__", torch.nn.Module._wrapped_call_impl),
            mock.patch.object(torch.autograd, "_engine_run_backward", torch.autograd.graph._engine_run_backward),
        ):
            yield

    @contextmanager
    def _at(self, device: torch.device, *, layer: bool, autocast: Any) -> Iterator[None]:
        """Whether memfit's layer of autocast is on, and who answers about autocast: torch itself, or memfit."""
        tls = torch._C
        was = tls._dispatch_tls_is_dispatch_key_included(LAYER), tls._dispatch_tls_is_dispatch_key_excluded(LAYER)
        answers = {name: getattr(autocast, name) for name in AUTOCAST}
        if layer != was[0]:
            tls._dispatch_tls_set_dispatch_key_included(LAYER, layer)
            tls._dispatch_tls_set_dispatch_key_excluded(LAYER, not layer)
        try:
            with self._device.at(device), self._device.followed(), mock.patch.multiple(torch, **answers):
                yield
        finally:
            tls._dispatch_tls_set_dispatch_key_included(LAYER, was[0])
            tls._dispatch_tls_set_dispatch_key_excluded(LAYER, was[1])

    # -- AOTAutograd -------------------------------------------------------------------------------------------------

    def _whole_graphs(self) -> Callable[..., Any]:
        whole = compiler().compile_fx.compile_fx

        def compile_whole(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._device.now != CUDA:
                return whole(graph, inputs, *args, **kwargs)
            numbers_from_host(graph)
            with self._autograd():
                return whole(graph, self._device.carry(graph, inputs, propagate=False), *args, **kwargs)

        return compile_whole

    @contextmanager
    def _autograd(self) -> Iterator[None]:
        autocast = self.names.autocast
        with (
            self._at(self.tracer.device, layer=autocast.enabled, autocast=autocast.functions),
            composites_of_compiler(self.tracer.platform, "AutogradMeta"),
        ):
            yield

    # -- Inductor ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _lowering(self) -> Iterator[None]:
        with (
            _disable_current_modes(),
            without_function_modes(),
            gpu_pretended(self.tracer.platform),
            self._at(CUDA, layer=False, autocast=torch._C),
            nothing_computed(),
        ):
            yield

    def _partition(self) -> Callable[..., Any]:
        partition = compiler().compile_fx.partition_fn

        def partitioned(graph: Any, inputs: Any, **kwargs: Any) -> Any:
            with self._lowering():
                return partition(graph, self._device.carry(graph, inputs), **kwargs)

        return partitioned

    def _forward(self) -> Callable[..., Any]:
        compile_forward = compiler().compile_fx.compile_fx_forward

        def forward(graph: Any, inputs: Any, *args: Any, is_inference: bool = False, **kwargs: Any) -> Any:
            with self._lowering():
                if is_inference:
                    inputs = self._device.carry(graph, inputs)
                else:
                    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
                return compile_forward(graph, inputs, *args, is_inference=is_inference, **kwargs)

        return forward

    def _backward(self) -> Callable[..., Any]:
        """It is compiled when it first runs."""
        compile_backward = compiler().compile_fx.compile_fx_backward

        def backward(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with self._lowering():
                return compile_backward(graph, self._device.carry(graph, inputs, propagate=False), *args, **kwargs)

        return backward

    def _skipped(self) -> Callable[..., Exception]:
        """Of bf16 on a card without it, Inductor has Dynamo leave the frame as it is, but only where it looks into its
        cache on disk first, as a run does."""
        make, skip = compiler().compile_fx.InductorError, compiler().dynamo_exceptions.SkipFrame

        def made(error: Exception, *args: Any) -> Exception:
            if isinstance(error, skip):
                say(self.tracer.trace, f"torch leaves some of what it was to compile as it is on this card: {error}")
            wrapped: Exception = error if isinstance(error, skip) else make(error, *args)
            return wrapped

        return made

    def _generated(self) -> Callable[..., Any]:
        def generated(graph: Any, code: Any) -> GeneratedCode:
            constants = {**graph.constants, **graph.torchbind_constants}
            whose = whose_buffers(graph, self._names_by_id())
            return GeneratedCode(code.value, constants, self._kernels, whose)

        return generated

    def _names_by_id(self) -> Callable[[str], str]:
        known = {str(id(module)): name for module, name in self.tracer.modules.known()}
        return lambda ident: known.get(ident, "")


def _guards_kept(filtered: Callable[..., Any] | None) -> Callable[[Sequence[Any]], list[bool]]:
    def kept(guards: Sequence[Any]) -> list[bool]:
        asked = filtered(guards) if filtered is not None else [True] * len(guards)
        return [bool(keep) and not _is_memfit_s(guard.name) for keep, guard in zip(asked, guards, strict=True)]

    return kept


def _is_memfit_s(name: str) -> bool:
    last = name.rpartition(".")[2]
    if last in PRETENDED and "torch" not in name:
        return False  # a `device` of somebody's own
    return last in NOT_GUARDED or "_global_forward" in name


def _refusal_in(error: BaseException | None) -> TraceError | None:
    while error is not None:
        if isinstance(error, TraceError):
            error.args = (error.message,)  # torch writes the line and its own hints below it
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


def _compiler_fails(error: Exception) -> TraceError:
    """What lies deepest says most."""
    said: BaseException = getattr(error, "inner_exception", None) or error
    while (deeper := said.__cause__ or said.__context__) is not None:
        said = deeper
    line = next((line for line in str(said).splitlines() if line.strip()), "")
    if isinstance(said, ModuleNotFoundError) and said.name == "triton":
        return TraceError(
            "torch's compiler asks triton here, by a setting of its own, and triton is not installed",
            hint="pip install triton, or plan it without that setting",
        )
    what = f"{type(said).__name__}: {line[:300]}"
    stack, torchs = getattr(error, "real_stack", None) or (), str(Path(torch.__file__).parent)
    place = next((f"{at.filename}:{at.lineno}" for at in reversed(stack) if not at.filename.startswith(torchs)), "")
    of_the_card = any(word in line.lower() for word in ("cuda", "meta", "fake"))
    if type(error).__name__ == "TorchRuntimeError" and place and not of_the_card:  # it fails without compiling too
        return TraceError(f"the job itself fails: {what}", hint=f"raised at {place}")
    return TraceError(f"torch's compiler fails on this code{place and f' at {place}'}: {what}", hint=EAGERLY)


class _Unloaded:
    """Templates, as of FlexAttention, are written to a file and loaded, to be timed."""

    @staticmethod
    def load(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(__file__="", key="")


def _holding_tangents() -> Callable[..., Any]:
    """Before 2.12 the engine held the gradients of all outputs until the backward of the graph had returned; 2.13 hands
    them over in a list, which the code empties."""
    apply = BackwardCFunction.apply_boxed

    def apply_boxed(self: Any, *args: Any) -> Any:
        held = [list(each) if isinstance(each, list) else each for each in args]
        try:
            return apply(self, *args)
        finally:
            del held

    return apply_boxed

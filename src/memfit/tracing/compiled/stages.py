"""Where the compiler's tensors lie, stage by stage, and a graph that is carried from one stage to the next.

Dynamo reads the code and Inductor plans it with shapes that say they are on "cuda:0", so that both decide as they would
for a card. In between, autograd makes the backward graph. Its engine wants a card in C++, so this happens on the traced
device, where memfit's rules already choose the kernels that CUDA would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from memfit.tracing.compiled.pretended_gpu import CUDA
from memfit.tracing.compiled.torch_names import compiler

CPU = torch.device("cpu")
TRACED = ("meta", "cuda")
"""Kinds of devices that mean the traced one here."""


class FakeDevice:
    """Where shapes of the traced device say that they lie, now."""

    def __init__(self) -> None:
        self.now = CUDA

    @contextmanager
    def at(self, device: torch.device) -> Iterator[None]:
        before, self.now = self.now, device
        try:
            yield
        finally:
            self.now = before

    def of(self, device: Any) -> Any:
        return self.now if isinstance(device, torch.device) and device.type in TRACED else device

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Every fake tensor that is made lies there."""
        fakes = compiler().fake_tensor
        kind = fakes.FakeTensor
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(fakes, "init_gpu_context", lambda _: None))
            if hasattr(kind, "_normalize_fake_device"):  # 2.12 on
                normalise = kind._normalize_fake_device

                def normalised(device: torch.device) -> torch.device:
                    return self.now if device.type in TRACED else normalise(device)

                stack.enter_context(mock.patch.object(kind, "_normalize_fake_device", staticmethod(normalised)))
            else:
                make = kind.__new__

                def made(cls: Any, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
                    return make(cls, mode, elem, self.of(torch.device(device)), *args, **kwargs)

                stack.enter_context(mock.patch.object(kind, "__new__", staticmethod(made)))
                kept = property(lambda t: vars(t)["fake_device"], self._set_device)  # of a view it is set afterwards
                stack.enter_context(mock.patch.object(kind, "fake_device", kept, create=True))
            yield

    def _set_device(self, tensor: Any, device: torch.device) -> None:
        vars(tensor)["fake_device"] = self.of(device)

    def carry(self, graph: GraphModule, inputs: Sequence[Any], *, propagate: bool = True) -> list[Any]:
        """The same graph with every value of it on the device of this stage, and its inputs there."""
        mode = torch._guards.detect_fake_mode(inputs)

        def carried(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device in (CPU, self.now):
                return tensor
            with mode:  # type: ignore[union-attr]
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.now)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)

        with torch.no_grad():
            for module in graph.modules():
                for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                    node.args, node.kwargs = map_aggregate(node.args, self.of), map_aggregate(node.kwargs, self.of)
                    if module is not graph and "val" in node.meta:  # what an op is given to call, as FlexAttention is
                        node.meta["val"] = tree_map_only(torch.Tensor, carried, node.meta["val"])
            here: list[Any] = tree_map_only(torch.Tensor, carried, list(inputs))
            if propagate:
                compiler().fake_prop.FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*here)
            graph.recompile()
        return here


class FoldedOnHost(TorchDispatchMode):
    """Inductor computes single values to fold constants, on the card if there is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def host(value: Any) -> Any:
            return CPU if isinstance(value, torch.device) else value

        return func(*map_aggregate(tuple(args), host), **map_aggregate(dict(kwargs or {}), host))


@contextmanager
def nothing_computed() -> Iterator[None]:
    """What Inductor would compute on the card while it plans: patterns, and constants of one value."""
    torchs = compiler()
    folder = torchs.joint_graph.UniformValueConstantFolder
    tensor, prepare = torch.tensor, torchs.misc_patterns._misc_patterns_init

    def tensor_without_values(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = tensor(data, **kwargs)
        if device is None or torch.device(device).type == "cpu":
            return made
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    def on_host(fold: Callable[..., Any]) -> Callable[..., Any]:
        def folded(*args: Any, **kwargs: Any) -> Any:
            with FoldedOnHost():
                return fold(*args, **kwargs)

        return folded

    with (
        mock.patch.object(torch, "tensor", tensor_without_values),
        mock.patch.object(folder, "__init__", on_host(folder.__init__)),  # products with 0
        mock.patch.object(folder, "run", on_host(folder.run)),
        mock.patch.object(torchs.misc_patterns, "_misc_patterns_init", lambda *_: prepare(CPU)),
    ):
        yield


@contextmanager
def gradients_by_shape() -> Iterator[None]:
    """torch.func.grad in the code: Dynamo asks autograd what it gives, whose engine wants a card."""
    utils = compiler().dynamo_utils
    run, ask = utils.run_node, compiler().gradients._autograd_grad

    def run_node(tracer: Any, node: Any, args: Any, kwargs: Any, module: Any) -> Any:
        if node.target is not ask:
            return run(tracer, node, args, kwargs, module)
        return tuple(torch.zeros_like(given) for given in (args[1] if len(args) > 1 else kwargs["inputs"]))

    with mock.patch.object(utils, "run_node", run_node):
        yield


def numbers_from_host(graph: GraphModule) -> None:
    """`torch.tensor([...], device="cuda")` in the code: made on the host and moved, which needs no card."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.tensor):
        device = node.kwargs.get("device", CPU)
        if torch.device(device).type in TRACED:
            node.update_kwarg("device", CPU)
            with graph.graph.inserting_after(node):
                moved = graph.graph.call_method("to", (node, device))
            node.replace_all_uses_with(moved, delete_user_cb=lambda user, moved=moved: user is not moved)
            moved.meta.update(node.meta)
    graph.recompile()


@contextmanager
def without_function_modes() -> Iterator[None]:
    torchs = compiler()
    stack = torch.overrides._get_current_function_mode_stack()
    torchs.dynamo_utils.clear_torch_function_mode_stack()
    try:
        yield
    finally:
        torchs.dynamo_utils.set_torch_function_mode_stack(stack)

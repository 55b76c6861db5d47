"""Where the compiler's tensors lie, stage by stage, and a graph that is carried from one stage to the next.

Dynamo reads the code and Inductor plans it with shapes that say they are on "cuda:0", so that both decide as they would
for a card. In between, autograd makes the backward graph. Its engine wants a card in C++, so this happens on the traced
device, where memfit's rules already choose the kernels that CUDA would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        with torch.no_grad():
            for module in graph.modules():
                for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                    node.args, node.kwargs = map_aggregate(node.args, self.of), map_aggregate(node.kwargs, self.of)

            def carried(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.device in (CPU, self.now):
                    return tensor
                with mode:  # type: ignore[union-attr]
                    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.now)
                if isinstance(tensor, torch.nn.Parameter):
                    made = torch.nn.Parameter(made, tensor.requires_grad)
                return made.requires_grad_(tensor.requires_grad)

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
    tensor, fold = torch.tensor, torchs.joint_graph.UniformValueConstantFolder.run
    prepare = torchs.misc_patterns._misc_patterns_init

    def tensor_without_values(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = tensor(data, **kwargs)
        if device is None or torch.device(device).type == "cpu":
            return made
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    def fold_on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        with FoldedOnHost():
            return fold(self, *args, **kwargs)

    with (
        mock.patch.object(torch, "tensor", tensor_without_values),
        mock.patch.object(torchs.joint_graph.UniformValueConstantFolder, "run", fold_on_host),
        mock.patch.object(torchs.misc_patterns, "_misc_patterns_init", lambda *_: prepare(CPU)),
    ):
        yield


@contextmanager
def without_function_modes() -> Iterator[None]:
    torchs = compiler()
    stack = torch.overrides._get_current_function_mode_stack()
    torchs.dynamo_utils.clear_torch_function_mode_stack()
    try:
        yield
    finally:
        torchs.dynamo_utils.set_torch_function_mode_stack(stack)

"""AdamW whose state lies in host memory and whose step is done by the CPU.

It is torch's own AdamW, given copies of the weights in pinned memory. When a step is due, gradients are copied to the
host, AdamW runs there, and the new weights are copied back: the GPU holds weights and gradients alone. Clipping, a
gradient scaler and schedules see an ordinary optimizer over the GPU's parameters; what is saved is what AdamW saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memfit.jobs.host import Lane, finished
from memfit.jobs.training.offload.host import HostPieces


class AdamWOnHost(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        """The arguments of torch.optim.AdamW."""
        self._inner: torch.optim.AdamW | None = None
        self._copies: dict[Tensor, _Copy] = {}
        super().__init__(params, {})
        device = self.param_groups[0]["params"][0].device
        self._lane, self._pieces = Lane(device), HostPieces(device, "optimizer")
        groups = [{**group, "params": [self._copy_of(each) for each in group["params"]]} for group in self.param_groups]
        with self._pieces.memory.computing():
            self._inner = torch.optim.AdamW(groups, **settings)
        self._take_settings()

    def _copy_of(self, parameter: Tensor) -> Tensor:
        self._copies[parameter] = copy = _Copy(parameter, self._pieces)
        return copy.weight

    @property
    def _adamw(self) -> torch.optim.AdamW:
        assert self._inner is not None
        return self._inner

    # -- an optimizer's state is AdamW's own -------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        return {} if self._inner is None else self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._inner is not None:
            self._inner.state = value

    def state_dict(self) -> dict[str, Any]:
        self._give_settings()
        return self._adamw.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state_dict)
        self._take_settings()

    def _take_settings(self) -> None:
        for mine, inner in zip(self.param_groups, self._adamw.param_groups, strict=True):
            mine.update({name: value for name, value in inner.items() if name != "params"})

    def _give_settings(self) -> None:
        """Schedules write the learning rate into this optimizer's groups."""
        for mine, inner in zip(self.param_groups, self._adamw.param_groups, strict=True):
            inner.update({name: value for name, value in mine.items() if name != "params"})

    # -- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._give_settings()
        arrived = None
        for parameter, copy in self._copies.items():
            arrived = copy.take_gradient(parameter, self._lane) or arrived
        finished(arrived)
        with self._pieces.memory.computing():
            self._adamw.step()
        for parameter, copy in self._copies.items():
            copy.give_weight(parameter)
        return loss


class _Copy:
    """Of one parameter: its weight, and room for its gradient."""

    def __init__(self, parameter: Tensor, pieces: HostPieces) -> None:
        self.weight = pieces.empty(parameter.shape, parameter.dtype)
        self._gradient = pieces.empty(parameter.shape, parameter.dtype)
        self._seen: tuple[int, int] | None = None
        """The parameter as it was when the two were last the same."""

    def take_gradient(self, parameter: Tensor, lane: Lane) -> Any:
        if parameter.grad is None:
            self.weight.grad = None
            return None
        if self._seen != _state_of(parameter):  # loaded, or written by somebody else
            lane.copy(self.weight, parameter, after=lane.now())
        self.weight.grad = self._gradient
        return lane.copy(self._gradient, parameter.grad, after=lane.now())

    def give_weight(self, parameter: Tensor) -> None:
        if self.weight.grad is not None:
            parameter.copy_(self.weight, non_blocking=True)
            self._seen = _state_of(parameter)


def _state_of(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version

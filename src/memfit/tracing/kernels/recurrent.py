"""Recurrent layers as cuDNN runs them: weights in one buffer, what is kept for backward, and workspaces.

`nn.LSTM`, `nn.GRU` and `nn.RNN` on a GPU are one kernel over all steps (native/cudnn/RNN.cpp, 2.11). It wants all
weights in one buffer: `flatten_parameters` lays them so, but not in bf16, where each call makes a buffer of its own. In
training it fills a reserve, which autograd keeps. The reserve follows from the shapes without exception on an H200 (486
layers, cuDNN 9.19). The workspace is 8 MiB for each layer and direction, a copy of the matrices, and buffers for all
steps: exact for most layers, and within a few per cent where inputs are wider than the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.tracing.autocast import Autocast
from memfit.tracing.kernels.layouts import aligned, contiguous_copy
from memfit.units import MiB

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
Tensor = torch.Tensor

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
GATES = (1, 1, 4, 3)
KEPT = (1, 1, 5, 6)
"""Values that the reserve has for each unit and step: gates, and the cell of an LSTM."""
LSTM = 2
STATE_BYTES_PER_THREAD = 24


_aligned = partial(aligned, to=32)


@dataclass(frozen=True)
class Layers:
    mode: int
    inputs: int
    hidden: int
    projected: int
    layers: int
    directions: int
    batch: int
    steps: int
    positions: int
    """Of all rows together; steps x batch, unless the rows are packed."""
    packed: bool
    dtype: torch.dtype
    drops: bool
    training: bool

    @property
    def out(self) -> int:
        return self.projected or self.hidden

    @property
    def matrices(self) -> int:
        gates, both = GATES[self.mode] * self.hidden, self.out * self.directions
        rows = sum((self.inputs if layer == 0 else both) + self.out for layer in range(self.layers))
        return self.directions * (gates * rows + self.layers * self.projected * self.hidden)

    @property
    def weights(self) -> int:
        """In one buffer, with two biases for each gate, also where the layer has none."""
        return self.matrices + self.directions * self.layers * 2 * GATES[self.mode] * self.hidden

    @property
    def reserve_bytes(self) -> int:
        size, wide = self.dtype.itemsize, self.positions * self.hidden * self.directions
        kept = KEPT[self.mode] * self.hidden + (self.hidden + self.projected if self.projected else 0)
        masked = self.steps * self.batch * self.hidden * self.directions
        mask = self.directions * _aligned(-(-masked // 8)) if self.drops else 0
        return (
            256
            + _aligned(self.positions * kept * self.layers * self.directions * size)
            + _aligned((self.layers - 1) * wide * size)
            + (self.layers - 1) * mask
        )

    def workspace_bytes(self, forward: bool) -> int:
        values = self._packed_values() if self.packed else self._values(forward) + self._persistent_values(forward)
        small = 0 if self.packed else _aligned(8 * self.batch)
        each = 8 * MiB * self.layers * self.directions
        return each + _aligned(self.matrices * self.dtype.itemsize) + values * self.dtype.itemsize + 256 + small

    def _values(self, forward: bool) -> int:
        """Of all steps; the largest of what forward, the gradient of the input and that of the weights need."""
        n, i, h, rows = self.positions, self.inputs, self.hidden, self.batch * self.hidden * self.layers
        dropped = n * h if self.drops else 0
        trained, deep = self.training, self.training and self.layers > 1
        if self.mode == LSTM and self.directions == 2:
            return max(n * (14 * h + i) + 24 * rows, trained * (n * (6 * h + 6 * i) + 26 * rows + 2 * dropped))
        if self.mode == LSTM:
            plain = n * (5 * h + i) + 10 * rows + dropped + n * self.projected
            persists = self._persists(forward)
            one = n * (4 * h + 2 * i) + self.batch * h + 10 * rows
            wide = n * ((-1 if persists else 3) * h + 3 * i) + 11 * rows
            return max(plain, trained * (not self.drops) * max(wide, one * (not deep and not persists)))
        plain_rnn = GATES[self.mode] == 1
        if self.directions == 2:
            each = 8 * h + i if plain_rnn and not trained else 10 * h + 2 * i if plain_rnn and not deep else 12 * h + i
            steps = n * (each + i * deep) + (14 if trained or not plain_rnn else 10) * rows
            return max(steps, trained * (n * ((8 if deep else 6) * h + 6 * i) + 14 * rows))
        if plain_rnn and not trained:
            return n * (2 * h + i) + 3 * rows
        return n * (4 * h + i if deep or not trained else 3 * h + 2 * i + max(h, i)) + 5 * rows + dropped

    def _persistent_values(self, forward: bool) -> int:
        """Beside those, where units stay in registers."""
        if not self._persists(forward):
            return 0
        if GATES[self.mode] == 1 and not self.training:
            return self.positions * 4 * self.hidden
        step = {4: 16, 3: 14, 1: 9}[GATES[self.mode]] * self.positions * self.hidden
        rows = self.batch * self.hidden * self.layers * (self.directions == 1)
        return step - 2 * rows if self.mode == LSTM else step + rows

    def _packed_values(self) -> int:
        gates, each = {4: (4, 6), 3: (3, 3), 1: (2, 1)}[GATES[self.mode]]
        both = (self.directions == 2) * GATES[self.mode]
        steps = self.positions * (gates * self.directions + both) * self.hidden
        return steps + self.batch * self.hidden * self.layers * (each * self.directions + both)

    def _persists(self, forward: bool) -> bool:
        """RNN.cpp, `get_algo`: few units stay in registers; in fp16 so do up to 1,024 of one layer in one direction."""
        if self.projected or self.packed or self.dtype not in (torch.float16, torch.float32):
            return False
        gated = GATES[self.mode] > 1
        if self.hidden <= ((192 if gated else 384) if forward else (128 if gated else 256)):
            return True
        fits = self.layers == self.directions == 1 and self.hidden <= 1024
        even = self.hidden % 128 == 0 and self.inputs % 128 == 0 and self.batch % 8 == 0 and self.batch <= 128
        return self.dtype == torch.float16 and fits and even and GATES[self.mode] != 3


# -- what `torch.lstm` and its like do on CUDA ----------------------------------------------------------------------


def _run(mode: int, x: Tensor, hx: Tensor, cx: Tensor | None, rest: Sequence[Any], batch_sizes: list[int]) -> Any:
    weights, biased, layers, dropout, train, both, *first = rest
    x, hx, cx, weights = _autocast(x, hx, cx, weights)
    projected = hx.shape[2] if cx is not None and hx.shape[2] != cx.shape[2] else 0
    hidden = (hx if cx is None else cx).shape[2]
    each = (4 if biased else 2) + bool(projected)
    dropout = dropout if layers > 1 else 0.0
    out, hy, cy, *_ = aten._cudnn_rnn(
        x, weights, each, _buffer(weights), hx, cx, mode, hidden, projected, layers, bool(first and first[0]),
        dropout, train, both, batch_sizes, None,
    )  # fmt: skip
    return (out, hy, cy) if cx is not None else (out, hy)


def _autocast(x: Tensor, hx: Tensor, cx: Tensor | None, weights: Sequence[Tensor]) -> Any:
    """autocast_rnn.cpp: weights are cast into one new buffer at each call, whatever the cache has."""
    state = Autocast.running
    if state is None or not state.enabled or not state.eligible(x):
        return x, hx, cx, weights
    if weights[0].dtype != state.dtype:
        weights = WeightsInOneBuffer.apply(state.dtype, *weights)
    cx = None if cx is None else cx.to(state.dtype)
    hx = hx.to(state.dtype)
    return x.to(state.dtype), hx, cx, weights


class WeightsInOneBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        buffer = torch.zeros(sum(w.numel() for w in weights), dtype=dtype, device=weights[0].device)
        return tuple(_parts(buffer, weights))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The last layer's first."""
        made = [None if grad is None else grad.to(ctx.dtype) for grad in reversed(grads)]
        return None, *reversed(made)


def _buffer(weights: Sequence[Tensor]) -> Tensor | None:
    """`try_get_weight_buf`: the one in which all weights lie, if they do."""
    storage = weights[0].untyped_storage()
    if len(weights) < 2 or any(w.untyped_storage()._cdata != storage._cdata for w in weights):
        return None
    with torch.no_grad():
        held = torch.empty(0, dtype=weights[0].dtype, device=weights[0].device)
        return held.set_(storage)


def _of_rows(mode: int) -> Callable[..., Any]:
    def run(x: Tensor, hx: Any, *rest: Any) -> Any:
        h, c = (hx[0], hx[1]) if mode == LSTM else (hx, None)
        return _run(mode, x, h, c, rest, [])

    return run


def _of_packed(mode: int) -> Callable[..., Any]:
    def run(x: Tensor, batch_sizes: Tensor, hx: Any, *rest: Any) -> Any:
        h, c = (hx[0], hx[1]) if mode == LSTM else (hx, None)
        return _run(mode, x, h, c, rest, batch_sizes.tolist())

    return run


def _lstm_cell(
    x: Tensor, hx: Sequence[Tensor], w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None
) -> Any:
    """native/RNN.cpp: products without biases, which the kernel of the cell adds."""
    gates = torch.matmul(x, w.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(gates, torch.matmul(hx[0], u.t()), hx[1], b, c)
    return hy, cy


def _gru_cell(x: Tensor, hx: Tensor, w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
    gates = torch.matmul(x, w.t())
    return aten._thnn_fused_gru_cell(gates, torch.matmul(hx, u.t()), hx, b, c)[0]


COMPOSITES: dict[str, Callable[..., Any]] = {
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    **{f"{name}.input": _of_rows(mode) for name, mode in MODES.items()},
    **{f"{name}.data": _of_packed(mode) for name, mode in MODES.items()},
}


# -- the kernels ---------------------------------------------------------------------------------------------------


def _layers(
    x: Tensor,
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    both: bool,
    batch_sizes: Sequence[int],
) -> Layers:
    positions = x.shape[0] if batch_sizes else x.shape[0] * x.shape[1]
    batch = batch_sizes[0] if batch_sizes else x.shape[0 if batch_first else 1]
    return Layers(
        mode=mode, inputs=x.shape[-1], hidden=hidden, projected=projected, layers=layers, directions=1 + both,
        batch=batch, steps=len(batch_sizes) or positions // max(batch, 1), positions=positions,
        packed=bool(batch_sizes), dtype=x.dtype, drops=train and dropout > 0, training=train,
    )  # fmt: skip


def _in_steps(x: Tensor, batch_first: bool, packed: bool) -> Tensor:
    """As the kernel reads it."""
    return x.transpose(0, 1) if batch_first and not packed else x


def _forward(
    tracer: Tracer,
    x: Tensor,
    weights: Sequence[Tensor],
    each: int,
    buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    both: bool,
    batch_sizes: Sequence[int],
    state: Tensor | None,
) -> Any:
    of = _layers(x, mode, hidden, projected, layers, batch_first, dropout, train, both, batch_sizes)
    if of.drops:
        platform = tracer.platform
        tracer.workspaces.hold_dropout_state(
            tracer, platform.sm_count * platform.max_threads_per_sm * STATE_BYTES_PER_THREAD
        )
    given = _in_steps(x, batch_first, of.packed)
    with tracer.temporaries() as hold:
        hold(contiguous_copy(given), "recurrent input, step by step")
        out = x.new_empty(*given.shape[:-1], of.out * of.directions)
        hy = torch.empty_like(hx)
        cy = x.new_empty(0) if cx is None else torch.empty_like(cx)
        if buffer is None:
            buffer = x.new_empty(of.weights)
        hold(of.workspace_bytes(forward=True), "recurrent workspace")
        reserve = x.new_empty(of.reserve_bytes if train else 0, dtype=torch.uint8)
    return _in_steps(out, batch_first, of.packed), hy, cy, reserve, buffer


def _backward(
    tracer: Tracer,
    x: Tensor,
    weights: Sequence[Tensor],
    each: int,
    buffer: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    both: bool,
    batch_sizes: Sequence[int],
    state: Tensor | None,
    reserve: Tensor,
    wanted: Sequence[bool],
) -> Any:
    of = _layers(x, mode, hidden, projected, layers, batch_first, dropout, train, both, batch_sizes)
    workspace = of.workspace_bytes(forward=False)
    if grad is None:
        grad = torch.zeros_like(output, memory_format=torch.contiguous_format)
    grad_hy = torch.zeros_like(hx) if grad_hy is None else grad_hy
    grad_cy = torch.zeros_like(cx) if grad_cy is None and cx is not None else grad_cy
    given = _in_steps(x, batch_first, of.packed)
    with tracer.temporaries() as hold:
        hold(contiguous_copy(given), "recurrent input, step by step")
        hold(contiguous_copy(_in_steps(grad, batch_first, of.packed)), "recurrent gradient, step by step")
        dx = _in_steps(torch.empty_like(given, memory_format=torch.contiguous_format), batch_first, of.packed)
        hold(contiguous_copy(grad_hy), "gradient of the last state, contiguous")
        dhx, dcx = torch.empty_like(hx), None if cx is None else torch.empty_like(cx)
        hold(workspace, "recurrent workspace")
    gradients: list[Tensor | None] = [None] * len(weights)
    if wanted[3]:
        with tracer.temporaries() as hold:
            hold(contiguous_copy(given), "recurrent input, step by step")
            dw = torch.zeros_like(buffer)
            hold(workspace, "recurrent workspace")
            gradients = list(_parts(dw, weights)) if each >= 4 else [torch.empty_like(w) for w in weights]
        del dw
    return dx if wanted[0] else None, dhx if wanted[1] else None, dcx if wanted[2] else None, gradients


def _flatten(
    tracer: Tracer,
    weights: Sequence[Tensor],
    each: int,
    inputs: int,
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    both: bool,
) -> Tensor:
    of = _layers(weights[0].new_empty(0, 1, inputs), mode, hidden, projected, layers, False, 0.0, False, both, [])
    buffer = torch.zeros(of.weights, dtype=weights[0].dtype, device=weights[0].device)
    with _disable_current_modes():
        for weight, part in zip(weights, _parts(buffer, weights), strict=True):
            weight.set_(part)  # type: ignore[call-overload]
    return buffer


def _parts(buffer: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """One after the other: where in the buffer makes no difference to memory."""
    made, at = [], 0
    for weight in weights:
        made.append(buffer.as_strided(weight.shape, weight.stride() if weight.is_contiguous() else (1,), at))
        at += weight.numel()
    return made


def _pack(tracer: Tracer, x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """native/PackedSequence.cpp: the steps that as many rows have are cut out together, and put one after the other."""
    if lengths.device.type != "cpu":
        return NotImplemented
    ends = lengths.tolist()
    counts = [sum(end > step for end in ends) for step in range(max(ends, default=0))]
    given, parts, start = _in_steps(x, batch_first, packed=False), [], 0
    for end in sorted(set(ends)):
        part = given[start:end, : counts[start]].contiguous()
        parts.append(part.view(-1, *x.shape[2:]))
        start = end
    packed = torch.cat(parts)
    with _disable_current_modes():
        return packed, torch.tensor(counts)


def _fused_lstm_cell(tracer: Tracer, gates: Tensor, hidden: Tensor, cx: Tensor, *_: Any) -> Any:
    workspace = torch.empty_like(gates)
    return torch.empty_like(cx), torch.empty_like(cx), workspace


def _fused_lstm_cell_backward(
    tracer: Tracer,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    biased: bool,
) -> Any:
    gates = torch.empty_like(workspace)
    before = torch.empty_like(cx)
    return gates, before, gates.sum(0) if biased else None


def _fused_gru_cell(tracer: Tracer, gates: Tensor, hidden: Tensor, hx: Tensor, *_: Any) -> Any:
    workspace = hx.new_empty(hx.shape[0], 5 * hx.shape[1])
    return torch.empty_like(hx), workspace


def _fused_gru_cell_backward(tracer: Tracer, grad: Tensor, workspace: Tensor, biased: bool) -> Any:
    gates = [grad.new_empty(grad.shape[0], 3 * grad.shape[1]) for _ in range(2)]
    before = torch.empty_like(grad)
    return *gates, before, *(each.sum(0) if biased else None for each in gates)


REPLACED: dict[Any, Any] = {
    aten._thnn_fused_lstm_cell.default: _fused_lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _fused_lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: _fused_gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _fused_gru_cell_backward,
    aten._pack_padded_sequence.default: _pack,
    aten._cudnn_rnn.default: _forward,
    aten._cudnn_rnn_backward.default: _backward,
    aten._cudnn_rnn_flatten_weight.default: _flatten,
}

"""torchao's weight-only layers as a plan sees them: int8 and float8 by rows, int4 in groups, shapes only.

After torchao 0.18 (quantization/quantize_/workflows, quant_primitives.py) and the way transformers 5 loads them: the
steps are torchao's own ops in their order, so that what lives beside what is the same. None of its code runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from memfit.jobs.quantised import QuantisedLinear

WIDTH_OF_TILES, ROWS_OF_TILES = 1024, 8


class Int8Rows(QuantisedLinear):
    """`Int8Tensor`: a scale for each row."""

    scales: Tensor
    offsets: Tensor

    def pack(self, loaded: Tensor, shared: list[Tensor]) -> None:
        scales, offsets = _scales_of_rows(loaded)
        rounded = torch.clamp(torch.round(loaded * (1.0 / scales)) + offsets, -128, 127)
        self.keep(rounded.to(torch.int8), scales=scales, offsets=offsets)

    def place(self, device: torch.device | str) -> None:
        packed = torch.empty((self.out_features, self.in_features), dtype=torch.int8, device=device)
        scales = torch.empty((self.out_features, 1), dtype=torch.float32, device=device)
        self.keep(packed, scales=scales, offsets=torch.empty((self.out_features, 1), dtype=torch.int8, device=device))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.mm(x.reshape(-1, x.shape[-1]), self.weight.t().to(x.dtype))
        y = (made * self.scales.to(made.dtype).flatten()).reshape(*x.shape[:-1], self.out_features)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


def _scales_of_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`choose_qparams_affine`, symmetric."""
    least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    below = torch.min(least, torch.zeros_like(least))
    above = torch.max(most, torch.zeros_like(most))
    above = torch.max(-below, above)
    halves = above / 127.5
    zeros = torch.full_like(halves, 0)
    halves = torch.clamp(halves, min=1e-7)
    return halves.to(torch.float32), zeros.to(torch.int8)


class Float8Rows(QuantisedLinear):
    """`Float8Tensor`: a scale for each row, products in the type that the weight had."""

    scales: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dtype = self.weight.dtype

    def pack(self, loaded: Tensor, shared: list[Tensor]) -> None:
        scales = (loaded.abs().amax(1, keepdim=True) / 448.0).to(torch.float32)
        whole = loaded.to(torch.float32)
        scaled = whole / scales
        clamped = scaled.clamp(min=-448.0, max=448.0)
        self.keep(clamped.to(torch.float8_e4m3fn), scales=scales)

    def place(self, device: torch.device | str) -> None:
        packed = torch.empty((self.out_features, self.in_features), dtype=torch.float8_e4m3fn, device=device)
        self.keep(packed, scales=torch.empty((self.out_features, 1), dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.matmul(x, self._unpacked())
        return out if self.bias is None else out + self.bias

    def _unpacked(self) -> Tensor:
        whole = self.weight.t().to(torch.float32)
        scaled = whole * self.scales.t()
        return scaled.to(self.dtype)


class Int4Tiles(QuantisedLinear):
    """`Int4TilePackedTo4dTensor`: bf16 only, rows padded to whole tiles; the kernel is torch's own."""

    bits = 4
    scales_and_zeros: Tensor

    def __init__(self, *args: Any, group: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.width = -(-self.in_features // WIDTH_OF_TILES) * WIDTH_OF_TILES
        self.rows = -(-self.out_features // ROWS_OF_TILES) * ROWS_OF_TILES

    def pack(self, loaded: Tensor, shared: list[Tensor]) -> None:
        whole = pad(loaded, (0, self.width - self.in_features, 0, self.rows - self.out_features))
        grouped = whole.view(self.rows, self.width // self.group, self.group)
        scales, zeros = _scales_of_groups(grouped)
        codes = self._rounded(grouped, scales.unsqueeze(2), zeros.unsqueeze(2))
        packed = self._tiles(codes)
        both = torch.cat([scales.unsqueeze(-1), zeros.unsqueeze(-1)], 2)
        self.keep(packed, scales_and_zeros=both.transpose(-3, -2).contiguous())

    def _rounded(self, grouped: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        least = zeros - scales * 8.0
        codes = torch.clamp(torch.round((grouped - least) / scales), 0, 15)
        return codes.view(self.rows, self.width).to(torch.int32)

    def _tiles(self, codes: Tensor) -> Tensor:
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
        return torch.empty((self.rows // 8, self.width // 128, 32, 4), dtype=torch.int32, device=pairs.device)

    def place(self, device: torch.device | str) -> None:
        packed = torch.empty((self.rows // 8, self.width // 128, 32, 4), dtype=torch.int32, device=device)
        shape = (self.width // self.group, self.rows, 2)
        self.keep(packed, scales_and_zeros=torch.empty(shape, dtype=torch.bfloat16, device=device))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        rows = pad(rows, (0, self.width - rows.shape[-1]))
        y = torch.empty((rows.shape[0], self.rows), dtype=torch.bfloat16, device=x.device)[:, : self.out_features]
        y = y.reshape(*x.shape[:-1], self.out_features)
        if self.bias is not None:
            y += self.bias.to(y.dtype)
        return y.to(x.dtype)


def _scales_of_groups(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """`_choose_qparams_affine_tinygemm`."""
    least, most = grouped.amin(2), grouped.amax(2)
    scales = torch.clamp((most - least) / 15.0, min=1e-7)
    return scales, least + scales * 8.0


LAYERS: dict[str, type[QuantisedLinear]] = {
    "torchao-int8": Int8Rows, "torchao-float8": Float8Rows, "torchao-int4": Int4Tiles,
}  # fmt: skip

"""Weights of 4 and 8 bits as a plan sees them: the layers of bitsandbytes and of torchao, shapes only.

What is allocated, in which order and for how long is what bitsandbytes 0.50 does on CUDA (nn/modules.py,
autograd/_functions.py, backends/cuda/ops.py), and torchao 0.18 (quantization/quantize_/workflows, quant_primitives.py)
in the way transformers 5 loads its weight-only layers: the steps are torchao's own ops in their order, so that what
lives beside what is the same. None of its code runs, and the numbers themselves are nobody's.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from memfit.errors import UsageError
from memfit.jobs.workload import Workload

BLOCK, BLOCK_OF_SCALES = 64, 256
UNPACKED = "unpacked"
"""An attribute of a weight that is packed in the files: what comes to the device, given the weight and the device; and
how the weight is made of that."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# -- bitsandbytes' layers ----------------------------------------------------------------------------------------------


class QuantisedLinear(nn.Linear):
    """In host memory the weight is as the checkpoint has it; `pack` is what loading makes of it on the GPU."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool) -> None:
        nn.Module.__init__(self)
        self.transposed = transposed
        rows, columns = weight.shape
        self.in_features, self.out_features = (rows, columns) if transposed else (columns, rows)
        self.weight, self.bias = weight, bias  # type: ignore[assignment]
        self.requires_grad_(False)

    bits = 8

    def pack(self, loaded: Tensor, shared: list[Tensor]) -> None:
        raise NotImplementedError

    def place(self, device: torch.device | str) -> None:
        """What a checkpoint has of it when it is quantised already."""
        raise NotImplementedError

    def keep(self, packed: Tensor, **kept: Tensor) -> None:
        self.weight.data = packed
        for name, tensor in kept.items():
            self.register_buffer(name, tensor, persistent=False)


class FourBitLinear(QuantisedLinear):
    absmax: Tensor
    offset: Tensor
    bits = 4

    def __init__(self, *args: Any, compute: torch.dtype, double: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute, self.scales_packed = compute, double
        self.dtype = self.weight.dtype

    def pack(self, loaded: Tensor, shared: list[Tensor]) -> None:
        """`quantize_4bit`. Scales of scales are looked up in a table that is made once and kept in `shared`."""
        loaded = loaded.t().contiguous() if self.transposed else loaded
        device = loaded.device
        scales = -(-loaded.numel() // BLOCK)
        absmax = torch.empty(scales, dtype=torch.float32, device=device)
        packed = torch.empty(((loaded.numel() + 1) // 2, 1), dtype=torch.uint8, device=device)
        code = torch.tensor([0.0] * 16, device=device)
        code.div_(code.abs().max())
        kept = {"absmax": absmax, "code": code}
        if self.scales_packed:
            offset = absmax.mean()
            centred = absmax - offset
            if not shared:
                shared.append(torch.tensor([0.0] * 256, device=device))
            second = torch.empty(-(-scales // BLOCK_OF_SCALES), dtype=torch.float32, device=device)
            small = torch.empty_like(centred, dtype=torch.uint8)
            kept |= {"absmax": small, "offset": offset, "absmax2": second, "code2": shared[0].clone()}
            del centred
        self.keep(packed, **kept)

    def place(self, device: torch.device | str) -> None:
        """`Params4bit.from_prequantized`, after the file's tensors came one by one."""
        count, small = self.weight.numel(), {"dtype": torch.float32, "device": device}
        scales = -(-count // BLOCK)
        packed = torch.empty(((count + 1) // 2, 1), dtype=torch.uint8, device=device)
        kept = {
            "absmax": torch.empty(scales, dtype=torch.uint8 if self.scales_packed else torch.float32, device=device)
        }
        if self.scales_packed:
            kept["absmax2"] = torch.empty(-(-scales // BLOCK_OF_SCALES), **small)  # type: ignore[call-overload]
            kept["code2"] = torch.empty(256, **small)  # type: ignore[call-overload]
        kept["code"] = torch.empty(16, **small)  # type: ignore[call-overload]
        _described = torch.empty(100, dtype=torch.uint8, device=device)
        if self.scales_packed:
            kept["offset"] = torch.empty((), **small)  # type: ignore[call-overload]
        self.keep(packed, **kept)

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(self.compute)
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias.data = bias.data.to(x.dtype)
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        made: Tensor = PackedProduct.apply(x, self) if needs_grad else self.product(x)
        return made.to(given)

    def product(self, x: Tensor) -> Tensor:
        """An op of the traced device."""
        scales = (self.absmax, self.offset) if self.scales_packed else (None, None)
        made: Tensor = torch.ops.memfit.four_bit_product(x, self.weight, *scales, self.bias, self.out_features)
        return made

    def unpacked(self) -> Tensor:
        """`dequantize_4bit`, in the type that the checkpoint had."""
        if self.scales_packed:
            scales = torch.empty_like(self.absmax, dtype=torch.float32)
            scales += self.offset
        return torch.empty((self.out_features, self.in_features), dtype=self.dtype, device=self.weight.device)


class PackedProduct(torch.autograd.Function):
    """`MatMul4Bit`: nothing but the packed weight is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return torch.matmul(grad, ctx.layer.unpacked().to(grad.dtype)), None


class EightBitLinear(QuantisedLinear):
    scales: Tensor

    def pack(self, loaded: Tensor, shared: list[Tensor]) -> None:
        """`Int8Params`: it goes back to the host, and comes again as fp16 beside what was loaded first."""
        half = torch.empty((self.out_features, self.in_features), dtype=torch.float16, device=loaded.device)
        scales = torch.empty(self.out_features, dtype=torch.float32, device=loaded.device)
        self.keep(torch.empty_like(half, dtype=torch.int8), scales=scales)

    def place(self, device: torch.device | str) -> None:
        scales = torch.empty(self.out_features, dtype=torch.float32, device=device)
        self.keep(torch.empty((self.out_features, self.in_features), dtype=torch.int8, device=device), scales=scales)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        made: Tensor = Int8Product.apply(x, self)
        return made

    def product(self, x: Tensor) -> Tensor:
        _kept = _rounded(x.to(torch.float16))
        added = torch.empty((x.shape[0], self.out_features), dtype=torch.int32, device=x.device)
        out = torch.empty_like(added, dtype=torch.float16)
        if self.bias is not None and self.bias.dtype != torch.float16:
            out.add_(self.bias)
        return out.to(x.dtype)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """`int8_vectorwise_quant` of activations among which no column stands out."""
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    rows = torch.empty_like(x, dtype=torch.int8)
    outliers = x.abs() >= 6.0
    outliers.any()
    if len(x) > 1:
        torch.empty((), dtype=torch.int8, device=x.device)  # the 0 that outliers are set to, though there are none
    return rows, scales


class Int8Product(torch.autograd.Function):
    """`MatMul8bitLt`: the input is kept by the node itself, so that checkpointing does not let go of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EightBitLinear) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        made = layer.product(x)
        ctx.layer, ctx.shape, ctx.dtype = layer, shape, x.dtype
        ctx.kept = x if ctx.needs_input_grad[0] else None
        return made.reshape(*shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, layer = grads[0], ctx.layer
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        weight = layer.weight.to(ctx.dtype, copy=True).mul_(layer.scales.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad.to(ctx.dtype), weight).view(ctx.shape), None


# -- torchao's: int8 and float8 by rows, int4 in groups ----------------------------------------------------------------

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


TORCHAO_LAYERS: dict[str, type[QuantisedLinear]] = {
    "torchao-int8": Int8Rows, "torchao-float8": Float8Rows, "torchao-int4": Int4Tiles,
}  # fmt: skip


# -- the model ---------------------------------------------------------------------------------------------------------


def quantise(
    model: nn.Module, work: Workload, kept: tuple[str, ...] | None = None, group: int = 128
) -> tuple[str, ...]:
    """Every linear layer but those that transformers leaves, or a checkpoint has `kept`; what is to be known of it.
    `group` is of torchao's 4-bit weights."""
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"--quant {work.quant} needs a transformers model", hint="quantise inside your own factory")
    skipped = get_keys_to_not_convert(model) if kept is None else kept
    left = [*skipped, *(model._keep_in_fp32_modules or ())]
    by_torchao = work.quant.startswith("torchao-")
    for name, module in list(model.named_modules()):
        turned = isinstance(module, Conv1D) and not by_torchao
        if not (type(module) is nn.Linear or turned) or not should_convert_module(name, left):
            continue
        if work.quant == "torchao-int4" and int(module.in_features) % group:
            continue  # torchao leaves it as it is
        model.set_submodule(name, _layer(module, work, turned, group))
    layers = [each for each in model.modules() if isinstance(each, QuantisedLinear)]
    if not layers:
        raise UsageError(f"--quant {work.quant}: {work.model} has no linear layer that transformers would quantise")
    inside = {id(each.weight) for each in layers}
    experts = [
        (name, p) for name, p in model.named_parameters() if p.dim() == 3 and id(p) not in inside and "expert" in name
    ]
    if not experts:
        return ()
    share = sum(p.numel() for _, p in experts) / sum(p.numel() for p in model.parameters())
    return (f"the fused experts stay as they are: transformers 5 quantises none of them ({share:.0%} of the weights)",)


def _layer(module: Any, work: Workload, turned: bool, group: int) -> QuantisedLinear:
    given = (module.weight, module.bias)
    if work.quant.startswith("torchao-"):
        more: dict[str, Any] = {"group": group} if work.quant == "torchao-int4" else {}
        return TORCHAO_LAYERS[work.quant](*given, transposed=False, **more)
    if work.quant == "int8":
        return EightBitLinear(*given, transposed=turned)
    compute = DTYPES[work.compute_precision]
    return FourBitLinear(*given, transposed=turned, compute=compute, double=work.double_quant)


def adapt_as_peft_does(model: nn.Module) -> None:
    """peft's LoRA around a layer of bitsandbytes (tuners/lora/bnb.py) is not the one around a plain layer."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear) and module.weight.requires_grad:
            head = name.removeprefix("base_model.model.").partition(".modules_to_save")[0]
            raise UsageError(
                f"transformers quantises {head!r} too, and peft would train it: quantised weights have no gradient",
                hint="leave --quant out; in code of your own, llm_int8_skip_modules keeps it as it is",
            )
        if isinstance(getattr(module, "base_layer", None), (FourBitLinear, EightBitLinear)):
            module.forward = MethodType(_adapted_forward, module)


def _adapted_forward(self: Any, x: Tensor) -> Tensor:
    result: Tensor = self.base_layer(x)
    if isinstance(self.base_layer, FourBitLinear):
        result = result.clone()
    for name in self.active_adapters:
        first, second = self.lora_A[name], self.lora_B[name]
        dropout, scaling = self.lora_dropout[name], self.scaling[name]
        converts, expected = not torch.is_autocast_enabled(), result.dtype
        if converts:
            x = self._cast_input_dtype(x, first.weight.dtype)
        output = second(first(dropout(x))) * scaling
        if converts:
            output = output.to(expected)
        result = result + output
    return result

"""Weights of 4 and 8 bits as a plan sees them: bitsandbytes' layers, its loading and peft's preparation, shapes only.

What is allocated, in which order and for how long is what bitsandbytes 0.50 does on CUDA (nn/modules.py,
autograd/_functions.py, backends/cuda/ops.py), transformers 5 where it loads a checkpoint (core_model_loading.py,
`caching_allocator_warmup`), and peft where it prepares and adapts such a model. The numbers themselves are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.jobs.conversions import ARRIVES, COMES_AS
from memfit.jobs.workload import Workload

BLOCK, BLOCK_OF_SCALES = 64, 256
UNPACKED = "unpacked"
"""An attribute of a weight that is packed in the files: what comes to the device, given the weight and the device; and
how the weight is made of that."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# -- layers ------------------------------------------------------------------------------------------------------------


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
        from memfit.jobs.torchao import LAYERS  # which needs what is here

        more: dict[str, Any] = {"group": group} if work.quant == "torchao-int4" else {}
        return LAYERS[work.quant](*given, transposed=False, **more)
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


# -- loading -----------------------------------------------------------------------------------------------------------


def loaded_bytes(model: nn.Module, within: tuple[str, ...] = ("",)) -> int:
    """What transformers asks for at once before it loads: all weights, quantised ones without their scales."""
    bits = {id(each.weight): each.bits for each in _layers(model)}
    counted = [
        (p, bits.get(id(p), 8 * p.element_size())) for name, p in _base_weights(model) if name.startswith(within)
    ]
    return sum(p.numel() * size for p, size in counted) // 8


def load(model: nn.Module, device: torch.device | str, whole_bytes: int | None, phases: Any, work: Workload) -> None:
    """`from_pretrained`, `prepare_model_for_kbit_training`, and the adapters, each as a phase of its own."""
    from transformers.core_model_loading import dot_natural_key

    if torch.device(device).type != "meta":
        raise UsageError(f"quantised weights ({work.quant}) are planned, not run", hint="memfit plan")
    layers = {id(layer.weight): layer for layer in _layers(model)}
    named = [(getattr(weight, COMES_AS, name), weight) for name, weight in _base_weights(model)]
    base = sorted(named, key=lambda each: dot_natural_key(each[0]))
    with phases("load"):
        at_once = loaded_bytes(model) if whole_bytes is None else whole_bytes
        torch.empty(at_once // 2, dtype=torch.float16, device=device)
        shared: list[Tensor] = []
        if work.stored is None:
            _load_in_turn(base, layers, shared, device)
        else:
            _load_by_threads(base, layers, device)
        vars(model)["table_of_scales"] = shared
        _move_buffers(model, device)
        del layers, named, base  # what is unpacked below must die there
        if work.stored is not None and work.stored.method == "mxfp4":
            torch.cuda.empty_cache()  # its quantizer does, once all are there
    if work.stored is not None and work.stored.method == "compressed-tensors":
        from memfit.jobs.stored import decompress  # which needs what is here

        with phases("decompress"):  # before anything else is there, be it at the end of loading or in the first pass
            decompress(model)
    if work.is_kbit_prepared and work.casts_when_prepared:
        with phases("prepare"):
            _prepare(model)
    if work.kind == "lora":
        adapters = [each for each in model.parameters() if each.requires_grad]
        with phases("adapt"):
            _load_adapters(adapters, device, work)
        with phases("adapt"):  # a phase of its own for whoever follows them
            for parameter in adapters if work.adapter_dtype == "fp32" else ():
                parameter.data = parameter.data.to(torch.float32)


def _load_in_turn(
    base: list[tuple[str, Any]], layers: dict[int, QuantisedLinear], shared: list[Tensor], device: torch.device | str
) -> None:
    """Weight after weight, each quantised or stacked before the next one comes."""
    for _, weight in base:
        if (layer := layers.get(id(weight))) is not None:
            loaded = weight.data.to(device)
            layer.pack(loaded, shared)
            del loaded
        elif (stacked := getattr(weight, ARRIVES, None)) is not None:
            weight.data = stacked.made([partial(stacked.part, weight, source, device) for source in stacked.sources])
        else:
            weight.data = weight.data.to(device)


def _load_by_threads(
    base: list[tuple[str, Any]], layers: dict[int, QuantisedLinear], device: torch.device | str
) -> None:
    """Of a checkpoint that is quantised already: threads bring all tensors in the order of their names. What is stacked
    is so, in turn, as soon as all of it is there; what is unpacked, which takes longer, when all weights are."""
    from transformers.core_model_loading import dot_natural_key

    coming: list[tuple[str, Any, Any]] = []
    for name, weight in base:
        stacked = getattr(weight, ARRIVES, None)
        coming += [(name, weight, None)] if stacked is None else [(each[0], weight, each) for each in stacked.sources]
    waiting = [weight for _, weight in base if hasattr(weight, ARRIVES)]
    there: dict[int, list[Any]] = {id(weight): [] for _, weight in base}
    for _, weight, source in sorted(coming, key=lambda each: dot_natural_key(each[0])):
        if (layer := layers.get(id(weight))) is not None:
            layer.place(device)
        elif source is not None:
            there[id(weight)].append(getattr(weight, ARRIVES).part(weight, source, device))
        elif (unpacked := getattr(weight, UNPACKED, None)) is not None:
            there[id(weight)].extend(unpacked[0](weight, device))
        else:
            weight.data = weight.data.to(device)
        while waiting and len(there[id(waiting[0])]) == len(getattr(waiting[0], ARRIVES).sources):
            first = waiting.pop(0)
            first.data = getattr(first, ARRIVES).made(there[id(first)])
    for _, weight in base:
        if hasattr(weight, UNPACKED):
            given, there[id(weight)] = tuple(there[id(weight)]), []
            weight.data = getattr(weight, UNPACKED)[1](weight, *given)
            del given


def _prepare(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16) and not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    torch.cuda.empty_cache()


def _load_adapters(adapters: list[nn.Parameter], device: torch.device | str, work: Workload) -> None:
    """Around a 4-bit layer they come in the type that it computes in, around what shows a 16-bit type in that."""
    first = None
    if work.quant in ("nf4", "fp4"):
        first = DTYPES[work.compute_precision]
    elif work.quant != "none" and work.quant != "int8":
        first = DTYPES[work.weight_precision]
    for parameter in adapters:
        parameter.data = parameter.data.to(device, first or parameter.dtype)


def _move_buffers(model: nn.Module, device: torch.device | str) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _layers(model: nn.Module) -> Iterator[QuantisedLinear]:
    return (each for each in model.modules() if isinstance(each, QuantisedLinear))


def _base_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All but adapters, by the names that the checkpoint has."""
    named: list[tuple[str, Any]] = [
        (name, p) for name, p in model.named_parameters() if not p.requires_grad or not hasattr(model, "peft_config")
    ]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):  # has buffers if its tensors are those of a packed format
            named += [(f"{name}.{own}", buffer) for own, buffer in module._buffers.items() if buffer is not None]
    return [(name.removeprefix("base_model.model.").replace(".base_layer.", "."), p) for name, p in named]

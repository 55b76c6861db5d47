"""A checkpoint that is already quantised, as a plan sees it: its layers as they are stored, and how they are loaded.

fp8 and MXFP4 run transformers' own layers, with kernels that only make their results; GPTQ, AWQ and compressed-tensors
have layers of the same tensors here, for their packages need a GPU. What bitsandbytes and torchao have stored becomes
the layers of `quantised.py`. With `--quant dequantize` weights become 16-bit while they are loaded, by
transformers' own functions where it has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from memfit.errors import InputError, MemfitError, UsageError
from memfit.jobs.quantised import UNPACKED, Float8Rows, FourBitLinear, Int4Tiles, Int8Rows, quantise
from memfit.jobs.workload import Workload
from memfit.models.checkpoint import MissingWeights, WeightStore
from memfit.models.files import first_line
from memfit.models.stored_weights import StoredWeights, facts_of

NOT_MODELLED = "not modelled:"
TO_TRAIN = ("bitsandbytes", "gptq", "awq", "torchao")
"""Under adapters; others have kernels without a backward pass, or unpack only when the whole model is called."""
TO_DEQUANTISE = ("fp8", "mxfp4", "compressed-tensors")
"""transformers takes `dequantize=True` of these."""


class StoredLinear(nn.Linear):
    """Its tensors are buffers, under the names that they have in the files."""

    def __init__(self, given: nn.Linear, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = given.in_features, given.out_features, given.bias
        self.plain_type = given.weight.dtype
        self.requires_grad_(False)
        for name, (shape, dtype) in tensors.items():
            self.register_buffer(name, torch.empty(shape, dtype=getattr(torch, dtype)))
        if "weight" not in self._buffers:
            vars(self)["weight"] = next(iter(self._buffers.values()))  # which peft asks for its type

    def forward(self, x: Tensor) -> Tensor:
        """A kernel that reads packed weights; where there is a backward pass, a copy of the weight that it keeps."""
        if "weight" in self._parameters:
            return linear(x, self.weight, self.bias)
        if torch.is_grad_enabled() and x.requires_grad:
            copy = torch.empty((self.out_features, self.in_features), dtype=x.dtype, device=x.device)
            return linear(x, copy, self.bias)
        return torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype, device=x.device)

    def decompress(self) -> None:
        """compressed-tensors: int8 where it was packed, then the weight; its scales stay."""
        packed = next(name for name in ("weight_packed", "weight") if name in self._buffers)
        stored = self._buffers.pop(packed)
        assert stored is not None
        vars(self).pop("weight", None)
        shape = (self.out_features, self.in_features)
        unpacked = stored if packed == "weight" else torch.empty(shape, dtype=torch.int8, device=stored.device)
        whole = torch.empty(shape, dtype=self.plain_type, device=stored.device)
        self.weight = nn.Parameter(whole, requires_grad=False)
        del unpacked


def as_stored(model: nn.Module, work: Workload, stored: StoredWeights) -> tuple[Workload, tuple[str, ...]]:
    """The model with its layers as the checkpoint has them, the job with what that says, and what is to be known."""
    try:
        return _as_stored(model, work, stored)
    except (TypeError, AttributeError, ValueError, LookupError) as error:  # transformers trusts what it is given
        if isinstance(error, MemfitError):
            raise
        raise InputError(f"{work.model}: its 'quantization_config' cannot be used: {first_line(error)}") from error


def _as_stored(model: nn.Module, work: Workload, stored: StoredWeights) -> tuple[Workload, tuple[str, ...]]:
    if work.quant == "dequantize":
        return work, tuple(_make_plain(model, work, stored))
    if stored.said.get("dequantize") and stored.method in TO_DEQUANTISE:
        raise UsageError(
            f"{work.model}: its 'quantization_config' says dequantize", hint="--quant dequantize plans that"
        )
    same = {"bitsandbytes": stored.kind, "torchao": f"torchao-{stored.kind}"}.get(stored.method, "none")
    if work.quant not in ("none", same):
        raise already_quantised(work, stored)
    if work.kind == "lora" and (stored.method not in TO_TRAIN or stored.kind == "int4"):
        way = "--quant dequantize plans 16-bit weights under adapters" if stored.method in TO_DEQUANTISE else None
        trains = stored.method == "fp8" and _transformers_has("finegrained_fp8", "FP8LinearFunction")  # since 5.23
        what = "a backward pass that memfit does not plan" if trains else "no backward pass"
        raise UsageError(f"{work.model}: {stored.in_words()} has {what}", hint=way)
    if stored.method == "bitsandbytes":
        work = work.with_found(**stored.by_bitsandbytes)
        return work, (_said(stored), *quantise(model, work, stored.kept))
    if stored.method == "torchao":
        work = work.with_found(quant=f"torchao-{stored.kind}")
        return work, (_said(stored), *quantise(model, work, stored.kept, stored.group))
    notes = {"fp8": _fp8, "mxfp4": _mxfp4}.get(stored.method, _packed)(model, stored)
    return work, (*left_out(work, stored), _said(stored), *notes)


def _transformers_has(integration: str, name: str) -> bool:
    try:
        return hasattr(import_module(f"transformers.integrations.{integration}"), name)
    except ImportError:
        return False


def already_quantised(work: Workload, stored: StoredWeights) -> UsageError:
    way = f"memfit plan {work.kind} without --quant plans it as it is stored"
    if work.kind == "lora":
        way += " (plan qlora is plan lora --quant nf4)"
    if stored.method in TO_DEQUANTISE:
        way += ", or with --quant dequantize"
    return UsageError(f"--quant {work.quant}: {work.model} is already quantised ({stored.in_words()})", hint=way)


def _said(stored: StoredWeights) -> str:
    return f"the checkpoint is quantised ({stored.in_words()}): planned as it is stored"


def left_out(work: Workload, stored: StoredWeights) -> Iterator[str]:
    for each in facts_of(stored):
        yield f"{NOT_MODELLED} {each}: the peak may be higher"
    if work.kind == "lora":
        yield f"{NOT_MODELLED} how gptqmodel unpacks weights: a 16-bit copy of each is kept for backward"


def check_files(model: nn.Module, folder: Path) -> None:
    """Where the weights themselves are at hand, their headers must say what the config.json says."""
    try:
        store = WeightStore.open(folder)
    except MissingWeights:
        return
    store.close()
    for name, module in model.named_modules():
        for own, shape in _expected(module):
            found = store.stored.get(f"{name}.{own}")
            other_bytes = isinstance(module, FourBitLinear)  # which may be kept as any type
            if found is not None and (found.nbytes != shape[0] if other_bytes else found.shape != shape):
                raise InputError(
                    f"{folder}: {name}.{own} has the shape {list(found.shape)}, and by its config.json {list(shape)}",
                    hint="the weights are quantised in another way than 'quantization_config' says",
                )


def _expected(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(module, StoredLinear):
        yield from ((name, tuple(each.shape)) for name, each in module.named_buffers())
    elif isinstance(module, FourBitLinear):
        yield "weight", ((module.weight.numel() + 1) // 2, 1)
    elif isinstance(module, nn.Linear) and not isinstance(module, (Int4Tiles, Int8Rows, Float8Rows)):
        yield "weight", tuple(module.weight.shape)


# -- layers ------------------------------------------------------------------------------------------------------------


def _linears(model: nn.Module, stored: StoredWeights) -> Iterator[tuple[str, nn.Linear]]:
    """Those that are quantised in the files."""
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    by_rule = stored.method in ("compressed-tensors", "gptq")
    usual = [] if stored.kept is not None and stored.method != "awq" else get_keys_to_not_convert(model)
    left = [*usual, *(stored.kept or ())]
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or (module is head and stored.method == "gptq" and not stored.head_too):
            continue
        if not (stored.keeps(name) if by_rule else not should_convert_module(name, left)):
            yield name, module


def _packed(model: nn.Module, stored: StoredWeights) -> Iterator[str]:
    experts = any(p.dim() == 3 and "expert" in name for name, p in model.named_parameters())
    if experts and stored.method != "compressed-tensors":  # which unpacks them while it loads
        raise UsageError(
            f"{stored.method}: the experts of a {type(model).__name__} are fused, and memfit does not know them so"
        )
    _pack(model, stored)
    if stored.method == "compressed-tensors":
        yield "compressed-tensors unpacks all weights to 16 bits in the first forward pass, as transformers 5 has it"


def _pack(model: nn.Module, stored: StoredWeights) -> None:
    halves = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    for name, module in _linears(model, stored):
        tensors = stored.tensors(module.out_features, module.in_features, halves[module.weight.dtype])
        model.set_submodule(name, StoredLinear(module, tensors))


def decompress(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, StoredLinear) and "weight" not in module._parameters:
            module.decompress()


def _fp8(model: Any, stored: StoredWeights) -> Iterator[str]:
    """transformers' own layers."""
    from transformers.integrations import finegrained_fp8
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    said = {key: value for key, value in stored.said.items() if key not in ("dequantize", "quant_method")}
    quantizer: Any = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**said))
    quantizer.pre_quantized = True
    quantizer._process_model_before_weight_loading(model)
    model.requires_grad_(False)
    kernels = Fp8Products()
    used = finegrained_fp8.FineGrainedFP8(
        matmul=kernels.of_layer, batched_matmul=kernels.of_batch, grouped_matmul=kernels.of_group
    )
    patches = {"_FINEGRAINED_FP8": used, "is_deepgemm_loadable": lambda: False}
    _run_with(model, finegrained_fp8, patches)
    yield "fp8 products on cards of 8.9 and later; transformers makes weights bf16 on others (--quant dequantize)"
    yield "Triton tunes each fp8 product when it first meets its sizes, which takes 256 MiB; later runs do so again"


def _tile(rows: int) -> int:
    return min(max(1 << max(rows - 1, 0).bit_length(), 16), 128)


class Fp8Products:
    """Triton's kernels of the package `kernels` (finegrained-fp8, version 4): the result, then, the first time, what
    Triton clears the card's cache with before each timing (nvidia/driver.py, `get_empty_cache_for_benchmark`)."""

    CLEARED = 256 << 20

    def __init__(self) -> None:
        self.tuned: set[tuple[str, int, int, int]] = set()

    def of_layer(self, x: Tensor, weight: Tensor, _: Any, block: Any = None, *__: Any, **___: Any) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if block is None or tuple(block) == tuple(weight.shape):
            small = torch.empty_like(x, dtype=torch.float8_e4m3fn)  # noqa: F841  until the product is done
            scales = torch.empty(rows, dtype=torch.float32, device=x.device)  # noqa: F841
        made = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
        self._tune("layer", weight, rows)
        return made

    def of_group(self, x: Tensor, weight: Tensor, *_: Any, tokens_per_expert: Tensor, **__: Any) -> Tensor:
        """Rows of each expert lie together; how many tiles each has is counted on the card."""
        rows = self._rows(x, weight)
        made, tile = torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device), _tile(rows)
        tiles = (tokens_per_expert + tile - 1) // tile
        ends = torch.cumsum(tiles, dim=0).to(torch.int32)
        del tiles
        self._tune("group", weight, rows)
        del ends
        return made

    def of_batch(self, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        made = torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
        self._tune("batch", weight, self._rows(x, weight))
        return made

    @staticmethod
    def _rows(x: Tensor, weight: Tensor) -> int:
        return -(-x.shape[0] // weight.shape[0])

    def _tune(self, kernel: str, weight: Tensor, rows: int) -> None:
        key = (kernel, weight.shape[-2], weight.shape[-1], _tile(rows))
        if key not in self.tuned:
            self.tuned.add(key)
            torch.empty(self.CLEARED, dtype=torch.uint8, device=weight.device)


def _mxfp4(model: Any, stored: StoredWeights) -> Iterator[str]:
    """transformers' own layers; the kernels come from the Hub."""
    from transformers.integrations import mxfp4

    replaced = [_with_mxfp4(model, name, module, mxfp4) for name, module in list(model.named_modules())]
    if not any(replaced):
        raise UsageError(f"mxfp4 is planned of gpt-oss, not of a {type(model).__name__}")
    model.requires_grad_(False)
    as_given = lambda *given: given  # noqa: E731
    hub = SimpleNamespace(
        matmul_ogs=SimpleNamespace(FnSpecs=as_given, FusedActivation=as_given, matmul_ogs=_grouped_product),
        swiglu=SimpleNamespace(swiglu_fn=None),
        routing=SimpleNamespace(routing=_routing),
    )
    _run_with(model, mxfp4, {"triton_kernels_hub": hub})
    yield "MXFP4 products need the package 'kernels' and triton 3.4; else transformers makes bf16 (--quant dequantize)"


def _with_mxfp4(model: Any, name: str, module: Any, mxfp4: Any) -> bool:
    """The layer around the experts is one of its own since transformers 5.23; before, it got another `forward`."""
    if type(module).__name__ != "GptOssMLP":
        return False
    experts = mxfp4.Mxfp4GptOssExperts(model.config)
    for weight in ("gate_up_proj", "down_proj"):  # scales: loading puts them beside, one for 32 entries
        out = getattr(experts, weight).flatten(2)
        scales = torch.empty((*out.shape[:2], out.shape[2] * 2 // 32), dtype=torch.uint8)
        experts.register_buffer(f"{weight}_scales", scales)
    if hasattr(mxfp4, "Mxfp4GptOssMLP"):
        model.set_submodule(name, mxfp4.Mxfp4GptOssMLP(module.router, experts))
    else:
        module.experts, module.forward = experts, MethodType(mxfp4.mlp_forward, module)
    return True


def _routing(logits: Tensor, chosen: int) -> tuple[Any, Any, Any]:
    """Which expert gets which token, as arrays of one entry for each pair."""
    pairs = logits.shape[0] * chosen
    weights = torch.empty(pairs, dtype=logits.dtype, device=logits.device)
    gather, scatter = (torch.empty((2, pairs), dtype=torch.int32, device=logits.device) for _ in range(2))
    return SimpleNamespace(gate_scal=weights, chosen=chosen), gather, scatter


def _grouped_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    routed: Any,
    *,
    gather_indx: Any = None,
    scatter_indx: Any = None,
    fused_activation: Any = None,
    **_: Any,
) -> Tensor:
    """One row for each pair of token and expert; what is scattered back is summed for each token."""
    rows = x.shape[0] * routed.chosen if gather_indx is not None else x.shape[0]
    width = bias.shape[-1] // (2 if fused_activation is not None else 1)
    made = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if scatter_indx is None:
        return made
    return torch.empty((rows // routed.chosen, width), dtype=x.dtype, device=x.device)


def _run_with(model: Any, module: Any, names: Mapping[str, Any]) -> None:
    """While the model runs, kernels that are not here are those that only make results."""
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as patched:
            for name, value in names.items():
                patched.enter_context(mock.patch.object(module, name, value, create=True))
            return forward(*args, **kwargs)

    model.forward = run


# -- weights that become 16-bit ----------------------------------------------------------------------------------------


def _make_plain(model: Any, work: Workload, stored: StoredWeights) -> Iterator[str]:
    if stored.method not in TO_DEQUANTISE:
        raise UsageError(f"--quant dequantize: transformers does not do it to {stored.method} while it loads")
    yield (
        f"the checkpoint is quantised ({stored.in_words()}) and becomes {work.weight_precision} while it is loaded "
        "(dequantize=True)"
    )
    if stored.method == "compressed-tensors":
        _pack(model, stored)
        if _transformers_has("compressed_tensors", "CompressedTensorsDequantize"):  # since 5.23
            yield f"{NOT_MODELLED} that each weight is unpacked as it arrives: loading may take less"
        return
    for weight in _packed_weights(model, stored):
        bring, make = _DEQUANTISE[stored.method]
        vars(weight)[UNPACKED] = (functools.partial(bring, stored), make)
    yield "weights are taken to have all arrived, by threads of transformers, before the first becomes 16-bit"


def _packed_weights(model: Any, stored: StoredWeights) -> Iterator[Tensor]:
    stacked = [(name, p) for name, p in model.named_parameters() if p.dim() == 3]
    if stored.method == "mxfp4":  # of gpt-oss, its experts alone
        yield from (p for name, p in stacked if name.endswith(("gate_up_proj", "down_proj")))
        return
    yield from (module.weight for _, module in _linears(model, stored))
    yield from (p for name, p in stacked if ".experts." in name)


def _bring_fp8(stored: StoredWeights, weight: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The loader gives an 8-bit float the type of the weight that it is for."""
    block = stored.said.get("weight_block_size", [128, 128])
    rows, columns = (weight.shape[-2], weight.shape[-1]) if block is None else block
    grid = (*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns))
    return torch.empty(weight.shape, dtype=weight.dtype, device=device), torch.empty(grid, device=device)


def _from_fp8(weight: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    made: Tensor = Fp8Dequantize(None)._dequantize_one(packed, scales, output_dtype=weight.dtype)
    return made


def _bring_mxfp4(_: StoredWeights, weight: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor]:
    experts, inner, out = weight.shape
    blocks = torch.empty((experts, out, inner // 32, 16), dtype=torch.uint8, device=device)
    return blocks, torch.empty((experts, out, inner // 32), dtype=torch.uint8, device=device)


def _from_mxfp4(weight: Tensor, blocks: Tensor, scales: Tensor) -> Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=weight.dtype)
    return made


_DEQUANTISE: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "fp8": (_bring_fp8, _from_fp8), "mxfp4": (_bring_mxfp4, _from_mxfp4),
}  # fmt: skip

"""How quantised weights come to the GPU: transformers' loading, weights that it stacks and renames, peft's preparation.

What is allocated, in which order and for how long is what transformers 5 does where it loads a checkpoint
(core_model_loading.py, `caching_allocator_warmup`), and peft where it prepares and adapts such a model.

The experts of a mixture are files' tensors of their own, and one weight in transformers 5. What makes one of the other
on the device is transformers' own code (core_model_loading.py, `WeightConverter.convert`), run here on empty tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import UsageError
from memfit.jobs.quantised import DTYPES, UNPACKED, QuantisedLinear
from memfit.jobs.stored import decompress
from memfit.jobs.workload import Workload
from memfit.models.checkpoint import MissingWeights, WeightStore

ARRIVES = "arrives"
"""An attribute of a weight that is made from others while it is loaded: a `StackedWeight`."""
COMES_AS = "comes_as"
"""One of a weight that has another name in the files: the first of them, which says when its turn is."""
Source = tuple[str, str, tuple[int, ...]]
"""A tensor in the files: its name, the pattern by which transformers knows it, its shape."""


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
        with phases("decompress"):  # before anything else is there, be it at the end of loading or in the first pass
            decompress(model)
    if work.is_kbit_prepared and work.casts_when_prepared:
        with phases("prepare"):
            for parameter in model.parameters():
                if parameter.dtype in (torch.float16, torch.bfloat16) and not parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.float32)
            torch.cuda.empty_cache()
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


# -- weights that lie otherwise in the files ---------------------------------------------------------------------------


def note_conversions(model: Any, folder: Path | None) -> bool:
    """Of each weight that is made from others, or has another name in the files, which `folder` has if they are here.
    Whether any is made from others."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    if not mapping:
        return False
    weights = dict(model.named_parameters())
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    made_from: dict[str, list[Source]] = {}
    for key, shape in sorted(_in_files(model, weights, folder).items(), key=lambda each: dot_natural_key(each[0])):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, weights)
        weight = weights.get(name)
        if weight is None:
            continue
        if not hasattr(weight, COMES_AS):
            setattr(weight, COMES_AS, key)
        if pattern is not None and len(converter_of[pattern].target_patterns) == 1:
            made_from.setdefault(name, []).append((key, pattern, shape))
    for name, sources in made_from.items():
        converter = converter_of[sources[0][1]]
        setattr(weights[name], ARRIVES, StackedWeight(name, sources, converter, model.config))
    return bool(made_from)


def _in_files(model: Any, weights: Mapping[str, Tensor], folder: Path | None) -> Mapping[str, tuple[int, ...]]:
    """As they are there; else as transformers would save them."""
    from transformers.core_model_loading import revert_weight_conversion

    if folder is not None:
        try:
            store = WeightStore.open(folder)
        except MissingWeights:
            pass
        else:
            store.close()
            return {name: each.shape for name, each in store.stored.items()}
    empty = {name: torch.empty_like(each, device="meta") for name, each in weights.items()}
    return {name: tuple(each.shape) for name, each in revert_weight_conversion(model, empty).items()}


class StackedWeight:
    """How a weight comes: its `sources`, one after the other, then what is made of them."""

    def __init__(self, name: str, sources: list[Source], converter: Any, config: Any) -> None:
        self.name, self.sources, self.converter, self.config = name, sources, converter, config

    def part(self, weight: Tensor, source: Source, device: torch.device | str) -> Tensor:
        return torch.empty(source[2], dtype=weight.dtype, device=device)

    def made(self, parts: list[Any]) -> Tensor:
        """Of all parts, or of functions that bring them when transformers asks; it lets them go."""
        converter = deepcopy(self.converter)
        converter.collected_tensors = {}
        for _, pattern, _ in self.sources:
            converter.collected_tensors.setdefault(pattern, []).append(parts.pop(0))
        (made,) = converter.convert(self.name, config=self.config).values()
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole

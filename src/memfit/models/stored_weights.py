"""Weights that are stored quantised: what a config.json says of them, and which tensors a layer then has.

Sizes follow the formats themselves: bitsandbytes 0.50, GPTQ and AWQ as gptqmodel packs them, block-wise fp8 and MXFP4
as transformers 5 has them, compressed-tensors 0.20, torchao 0.18. A method that is not here is refused, never planned
in 16 bits. No torch: types go by the names that torch has for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.models.config_check import PRECISIONS, read_config, show
from memfit.models.presets import find_preset

KEYS = ("quantization_config", "compression_config")
PACKED_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
TORCHAO = {"Int8WeightOnlyConfig": "int8", "Float8WeightOnlyConfig": "float8", "Int4WeightOnlyConfig": "int4"}
GROUPS_OF_INT4 = (32, 64, 128, 256)
GROUPS = {"gptq": (-1, 16, 32, 64, 128, 256, 512, 1024), "awq": (-1, 16, 32, 64, 128)}
"""Of gptqmodel's kernels; -1 is a whole row."""
BLOCKS = tuple(1 << power for power in range(4, 11))
"""Sides of a block of fp8 weights: Triton's tiles are powers of two."""
BYTES = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")
"""As which bitsandbytes keeps packed bytes."""
LEFT_OUT = ("llm_int8_skip_modules", "dynamic", "modules_to_not_convert", "ignored_layers", "ignore")
"""Keys whose entries are matched as patterns against the names of modules."""
NAME_LENGTH = 64
MAX_PATTERN = 1000
MAX_WAYS = 1 << 26

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Names in the files, shapes, types."""


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """How a checkpoint has its linear layers."""

    method: str
    """bitsandbytes, gptq, awq, fp8, mxfp4, compressed-tensors or torchao."""
    kind: str
    """Within the method: nf4, fp4, int8 of bitsandbytes; int8, int4, float8 of torchao; a format."""
    bits: int
    group: int = 0
    """Weights that share a scale; 0 is a whole row."""
    symmetric: bool = True
    kept: tuple[str, ...] | None = None
    """Modules that are as they were; None is those that transformers leaves by itself."""
    head_too: bool = False
    double: bool = False
    compute: str = "fp32"
    """Of 4-bit layers by bitsandbytes."""
    said: Mapping[str, Any]
    """As it stands in the file."""

    def in_words(self) -> str:
        """As a plan and a list show it."""
        group = f", groups of {self.group}" if self.group else ""
        named = {
            "bitsandbytes": f"bitsandbytes {self.kind}{', double quantisation' if self.double else ''}",
            "compressed-tensors": f"compressed-tensors {self.kind}, {self.bits} bits{group}",
            "torchao": f"torchao {self.kind} weight-only{group}",
        }
        return named.get(self.method, f"{self.method}, {self.bits} bits{group}")

    @property
    def by_bitsandbytes(self) -> dict[str, Any]:
        """The settings of a job that say the same; none of other methods."""
        loaded = {"quant": self.kind, "double_quant": self.double, "quant_compute": self.compute}
        return loaded if self.method == "bitsandbytes" else {}

    def as_loaded(self) -> str:
        """What bitsandbytes has stored, with what it does when it runs."""
        double = "double" if self.double else "no double"
        return self.kind if self.bits == 8 else f"{self.kind}, {double} quantisation, compute {self.compute}"

    def to_json(self) -> dict[str, Any]:
        return {"method": self.method, "kind": self.kind, "bits": self.bits, "group": self.group or None}

    def keeps(self, name: str) -> bool:
        """Whether a layer is left out by a rule of compressed-tensors or gptqmodel: a name, or a pattern."""
        return any(re.match(rule[3:], name) if rule.startswith("re:") else rule == name for rule in self.kept or ())

    def tensors(self, out: int, inner: int, half: str) -> Tensors:
        """Of a layer, its bias aside. `half` is the type of what is not quantised."""
        groups = -(-inner // self.group) if self.group else 1
        words, zeros = -(-inner * self.bits // 32), -(-out * self.bits // 32)
        packed: Tensors = {"qzeros": ((groups, zeros), "int32"), "scales": ((groups, out), "float16")}
        if self.method == "gptq":
            return {"g_idx": ((inner,), "int32"), "qweight": ((words, out), "int32"), **packed}
        if self.method == "awq":
            return {"qweight": ((inner, zeros), "int32"), **packed}
        (scheme, *_) = self.said["config_groups"].values()
        weights, inputs = scheme["weights"], scheme.get("input_activations")
        rows = 1 if weights.get("strategy") == "tensor" else out
        scales: Tensors = {"weight_scale": ((rows, groups), half)}
        if self.kind != "pack-quantized":
            made = {"weight": ((out, inner), "float8_e4m3fn" if weights.get("type") == "float" else "int8"), **scales}
            static = isinstance(inputs, dict) and not inputs.get("dynamic", False)
            return made | ({"input_scale": ((1,), half)} if static else {})
        offset: Tensors = {} if self.symmetric else {"weight_zero_point": ((zeros, groups), "int32")}
        return {"weight_packed": ((out, words), "int32"), **scales, "weight_shape": ((2,), "int64"), **offset}


def stored_weights(kind: str, target: str) -> StoredWeights | None:
    """Of a preset by its name, or of a config.json; None where weights are plain."""
    if kind == "factory":
        return None
    if kind == "preset":
        preset = find_preset(target)
        return read_stored({} if preset is None else preset.config, f"preset {target}")
    return read_stored(read_config(Path(target)), target)


def refuse_stored(kind: str, target: str, name: str) -> None:
    """Of jobs that need all weights as numbers."""
    if (stored := stored_weights(kind, target)) is not None:
        raise InputError(
            f"{name}: its weights are quantised ({stored.in_words()}), and such weights are neither trained nor pruned",
            hint="plan lora trains adapters beside them; or give the plain model",
        )


def read_stored(data: Mapping[str, Any], where: str) -> StoredWeights | None:
    said = next((data[key] for key in KEYS if data.get(key) is not None), None)
    if said is None:
        return None
    if not isinstance(said, dict):
        raise InputError(f"{where}: 'quantization_config' is {show(said)}, not an object")
    method = said.get("quant_method") or ("bitsandbytes" if _loads_in(said) else None)
    readers = {
        "bitsandbytes": _bitsandbytes, "gptq": _gptq, "awq": _awq, "fp8": _fp8, "mxfp4": _mxfp4,
        "compressed-tensors": _compressed, "torchao": _torchao,
    }  # fmt: skip
    if method is not None and not isinstance(method, str):
        raise InputError(f"{where}: 'quant_method' of 'quantization_config' is {show(method)}, not a name")
    if method not in readers:
        raise InputError(
            f"{where}: its weights are quantised by {show(method)}, whose storage memfit does not know",
            hint=f"it knows {', '.join(readers)}; the unquantised model has a config.json of its own",
        )
    stored = readers[method](said, where)
    _check_patterns(stored, where)
    return stored


def _check_patterns(stored: StoredWeights, where: str) -> None:
    key = next((key for key in LEFT_OUT if stored.said.get(key)), "quantization_config")
    ways = 0
    for rule in stored.kept or ():
        if len(rule) <= MAX_PATTERN:  # compiling a long one takes seconds
            try:
                re.compile(rule.removeprefix("re:"))
            except (re.error, RecursionError, OverflowError) as error:
                raise InputError(f"{where}: '{key}': {show(rule)} is no pattern: {error}") from None
        ways += _ways_to_match(rule)
        if ways > MAX_WAYS:
            raise InputError(
                f"{where}: '{key}': {show(rule)} may take for ever to match",
                hint=f"a pattern has at most {MAX_PATTERN} characters, four .* and no repeated group",
            )


def _ways_to_match(pattern: str) -> int:
    """At most so many are tried on a name. A repeated group may be tried without end."""
    text = re.sub(r"(\\d|\[0-9\])[*+]?", "0", pattern)  # numbers of layers are short
    text = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "c", text, flags=re.DOTALL)
    if len(pattern) > MAX_PATTERN or re.search(r"\)[*+{]", text):
        return MAX_WAYS + 1
    repeated, optional = len(re.findall(r"[*+{]", text)), len(re.findall(r"(?<![(*+?}])\?", text))
    if repeated + optional > MAX_WAYS.bit_length():
        return MAX_WAYS + 1
    ways: int = NAME_LENGTH**repeated << optional
    while group := re.search(r"\(([^()]*)\)", text):  # the innermost first
        ways *= group[1].count("|") + 1
        text = text[: group.start()] + "c" + text[group.end() :]
    return ways * (text.count("|") + 1)


def _loads_in(said: Mapping[str, Any]) -> str:
    """`load_in_4bit`, as transformers has it, or as it is written by older versions."""
    bits = [each for each in ("4bit", "8bit") if said.get(f"load_in_{each}") or said.get(f"_load_in_{each}")]
    return " and ".join(bits)


def _yes(said: Mapping[str, Any], key: str, where: str, usual: bool = False) -> bool:
    value = said.get(key, usual)
    if not isinstance(value, bool):
        raise InputError(f"{where}: '{key}' is {show(value)}, neither true nor false")
    return value


def _refused(where: str, method: str, what: str) -> InputError:
    return InputError(f"{where}: {method} with {what} is not planned", hint="give the config.json of the plain model")


def _names(said: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | None:
    if (names := said.get(key)) is None:
        return None
    if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
        raise InputError(f"{where}: '{key}' is {show(names)}, not a list of names")
    return tuple(names)


def _whole(said: Mapping[str, Any], key: str, where: str, usual: int | None = None) -> int:
    value = said.get(key, usual)
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= 1 << 20:
        raise InputError(f"{where}: '{key}' is {show(value)}, not a number that weights can be packed by")
    return value


def _bitsandbytes(said: Mapping[str, Any], where: str) -> StoredWeights:
    kept = _names(said, "llm_int8_skip_modules", where)
    offload, double_weights = "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"
    for key in ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", offload, double_weights):
        _yes(said, key, where)
    if not isinstance(threshold := said.get("llm_int8_threshold", 6.0), float) or not 0 < threshold < math.inf:
        raise InputError(f"{where}: 'llm_int8_threshold' is {show(threshold)}, not a number with a point above 0.0")
    storage = said.get("bnb_4bit_quant_storage")
    storage = "uint8" if storage is None else str(storage).removeprefix("torch.")
    if storage not in BYTES:
        raise InputError(f"{where}: 'bnb_4bit_quant_storage' is {show(storage)}, none of {', '.join(BYTES)}")
    if (bits := _loads_in(said)) not in ("4bit", "8bit"):
        what = "both load_in_4bit and load_in_8bit" if bits else "neither load_in_4bit nor load_in_8bit"
        raise InputError(f"{where}: 'quantization_config' has {what}; transformers loads no such checkpoint")
    if bits == "8bit":
        if said.get(double_weights):
            raise _refused(where, "bitsandbytes", "fp16 weights beside the 8-bit ones")
        return StoredWeights(method="bitsandbytes", kind="int8", bits=8, kept=kept, said=said)
    kind, compute = said.get("bnb_4bit_quant_type", "fp4"), str(said.get("bnb_4bit_compute_dtype", "float32"))
    compute = PRECISIONS.get(compute.removeprefix("torch."), compute)
    if kind not in ("nf4", "fp4") or compute not in PRECISIONS.values():
        raise _refused(where, "bitsandbytes", f"4-bit weights of the type {show(kind)} computed in {show(compute)}")
    double = _yes(said, "bnb_4bit_use_double_quant", where)
    return StoredWeights(
        method="bitsandbytes", kind=kind, bits=4, kept=kept, double=double, compute=compute, said=said
    )  # fmt: skip


def _gptq(said: Mapping[str, Any], where: str) -> StoredWeights:
    bits, group = _whole(said, "bits", where), _group(said, "gptq", where)
    if bits not in (2, 3, 4, 8):
        raise _refused(where, "gptq", f"{bits} bits")
    formats = [said[key] for key in ("checkpoint_format", "format") if said.get(key) is not None]
    if (form := formats[0] if formats else "gptq") not in ("gptq", "gptq_v2"):
        raise _refused(where, "gptq", f"the format {show(form)}")
    _yes(said, "desc_act", where)
    if said.get("modules_in_block_to_quantize") is not None:
        raise _refused(where, "gptq", "some layers of a block alone ('modules_in_block_to_quantize')")
    damp = said.get("damp_percent", 0.1)
    if isinstance(damp, bool) or not isinstance(damp, (int, float)) or not 0 < damp < 1:
        raise InputError(f"{where}: 'damp_percent' is {show(damp)}, not between 0 and 1")
    rules = {} if said.get("dynamic") is None else said["dynamic"]
    if not isinstance(rules, dict) or any(not str(rule).startswith("-:") for rule in rules):
        raise _refused(where, "gptq", "bits that differ from layer to layer ('dynamic')")
    return StoredWeights(
        method="gptq", kind="gptq", bits=bits, group=group, symmetric=_yes(said, "sym", where, usual=True),
        kept=tuple(f"re:{rule[2:]}" for rule in rules), head_too=_yes(said, "lm_head", where), said=said,
    )  # fmt: skip


def _group(said: Mapping[str, Any], method: str, where: str) -> int:
    """0 is a whole row."""
    group = _whole(said, "group_size", where, 128)
    if group not in GROUPS[method]:
        raise InputError(
            f"{where}: 'group_size' is {group}, and gptqmodel has no kernel of {method} for it",
            hint=f"it has {', '.join(map(str, GROUPS[method]))}",
        )
    return max(0, group)


def _awq(said: Mapping[str, Any], where: str) -> StoredWeights:
    bits, group = _whole(said, "bits", where, 4), _group(said, "awq", where)
    version = str(said.get("version", said.get("format", "gemm"))).lower()
    if not isinstance(backend := said.get("backend", "auto"), (str, type(None))):
        raise InputError(f"{where}: 'backend' is {show(backend)}, not a name")
    if bits != 4 or version != "gemm":
        raise _refused(where, "awq", f"{bits} bits packed as {show(version)}")
    return StoredWeights(
        method="awq", kind=version, bits=bits, group=group, symmetric=not _yes(said, "zero_point", where, usual=True),
        kept=_names(said, "modules_to_not_convert", where), said=said,
    )  # fmt: skip


def _fp8(said: Mapping[str, Any], where: str) -> StoredWeights:
    block = said.get("weight_block_size", [128, 128])
    sizes = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n in BLOCKS for n in block)
    if block is not None and not sizes:
        raise InputError(
            f"{where}: 'weight_block_size' is {show(block)}, not two powers of two from {BLOCKS[0]} to {BLOCKS[-1]}"
        )
    _yes(said, "dequantize", where)
    if said.get("modules_to_convert"):
        raise _refused(where, "fp8", "embeddings in 8 bits ('modules_to_convert')")
    if str(scheme := said.get("activation_scheme", "dynamic")).lower() not in ("dynamic", "static"):
        raise InputError(f"{where}: 'activation_scheme' is {show(scheme)}, neither 'dynamic' nor 'static'")
    kept = _names(said, "modules_to_not_convert", where)
    kept = _names(said, "ignored_layers", where) if kept is None else kept
    return StoredWeights(method="fp8", kind="fp8", bits=8, kept=kept, said=said)


def _mxfp4(said: Mapping[str, Any], where: str) -> StoredWeights:
    kept = _names(said, "modules_to_not_convert", where)
    _yes(said, "dequantize", where)
    return StoredWeights(method="mxfp4", kind="mxfp4", bits=4, group=32, kept=kept, said=said)


def _compressed(said: Mapping[str, Any], where: str) -> StoredWeights:
    schemes, form = said.get("config_groups"), said.get("format", "dense")
    if not isinstance(schemes, dict) or not schemes:
        raise InputError(f"{where}: 'config_groups' is {show(schemes)}, not an object that says what is quantised")
    if form not in PACKED_FORMATS:
        raise _refused(where, "compressed-tensors", f"the format {show(form)}")
    if said.get("kv_cache_scheme") is not None:
        raise _refused(where, "compressed-tensors", "a quantised cache ('kv_cache_scheme')")
    sparse = {} if said.get("sparsity_config") is None else said["sparsity_config"]
    if not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        raise _refused(where, "compressed-tensors", "sparse weights ('sparsity_config')")
    if (status := said.get("quantization_status", "compressed")) not in ("compressed", "frozen"):
        raise InputError(f"{where}: 'quantization_status' is {show(status)}, neither 'compressed' nor 'frozen'")
    (scheme, *more) = schemes.values()
    weights = scheme.get("weights") if isinstance(scheme, dict) else None
    if more or not isinstance(weights, dict) or scheme.get("targets") != ["Linear"]:
        raise _refused(where, "compressed-tensors", "layers that differ from each other ('config_groups')")
    if weights.get("strategy") not in ("group", "channel", "tensor"):
        raise _refused(where, "compressed-tensors", f"scales by {show(weights.get('strategy'))}")
    group = _whole(weights, "group_size", where) if weights["strategy"] == "group" else 0
    bits, numbers = _whole(weights, "num_bits", where), weights.get("type", "int")
    if weights["strategy"] == "group" and group < 1:
        raise InputError(f"{where}: 'group_size' of 'config_groups' is {group}, not a number of weights")
    if bits not in ((4, 8) if form == "pack-quantized" else (8,)) or numbers not in ("int", "float"):
        raise _refused(where, "compressed-tensors", f"{bits} bits of the type {show(numbers)} as {form}")
    return StoredWeights(
        method="compressed-tensors", kind=form, bits=bits, group=group,
        symmetric=_yes(weights, "symmetric", where, usual=True), kept=_names(said, "ignore", where), said=said,
    )  # fmt: skip


def _torchao(said: Mapping[str, Any], where: str) -> StoredWeights:
    asked = said.get("quant_type")
    asked = asked.get("default") if isinstance(asked, dict) else asked
    name = asked.get("_type") if isinstance(asked, dict) else asked
    details = asked.get("_data") or {} if isinstance(asked, dict) else {}
    if not isinstance(details, dict):
        raise InputError(f"{where}: '_data' of 'quant_type' is {show(details)}, not an object")
    if not isinstance(name, str) or name not in TORCHAO:
        raise _refused(where, "torchao", f"{show(name)} ('quant_type')")
    if (extra := said.get("quant_type_kwargs")) not in (None, {}) or isinstance(extra, (bool, int)):
        raise _refused(where, "torchao", f"{show(extra)} ('quant_type_kwargs')")
    if _yes(said, "include_input_output_embeddings", where):
        raise _refused(where, "torchao", "a quantised embedding")
    packing = details.get("int4_packing_format", "plain")
    packing = packing.get("_data") if isinstance(packing, dict) else packing
    of_int4 = name == "Int4WeightOnlyConfig"
    if not of_int4 and details.get("group_size") is not None:
        raise _refused(where, "torchao", f"{TORCHAO[name]} weights in groups of {show(details['group_size'])}")
    group = _whole(details, "group_size", where, 128) if of_int4 else 0
    if of_int4 and (str(packing).lower() != "tile_packed_to_4d" or group not in GROUPS_OF_INT4):
        raise _refused(where, "torchao", f"int4 weights packed as {show(packing)} in groups of {group}")
    return StoredWeights(
        method="torchao", kind=TORCHAO[name], bits=4 if group else 8, group=group,
        kept=_names(said, "modules_to_not_convert", where), said=said,
    )  # fmt: skip


def facts_of(stored: StoredWeights) -> Iterator[str]:
    """What a plan of such a checkpoint leaves out, beside what it counts."""
    by_gptqmodel = "what gptqmodel's kernels take beside their results, and its repacking after loading"
    kernels = {
        **dict.fromkeys(("gptq", "awq"), by_gptqmodel),
        "fp8": "what DeepGEMM takes beside its results, where it is there; planned are Triton's fp8 kernels",
        "mxfp4": "what the Triton kernels of gpt-oss (package 'kernels') take for routing and for their layout",
        "compressed-tensors": "the steps by which compressed-tensors unpacks a weight",
    }
    if stored.method in kernels:
        yield kernels[stored.method]

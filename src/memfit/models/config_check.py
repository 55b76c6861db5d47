"""Is this `config.json` fit to be built? Files come from anywhere, so nothing in them is believed unread.

transformers is lenient: a key it misses becomes the class default, and a file without `hidden_size` silently is a 7B
model. Here a file must state the sizes itself, in possible numbers, and every refusal is one line that names the file
and the key as written. What transformers would run or look up by itself (`auto_map`, attention kernels from the Hub) is
left out of what it gets to see.

What a model ends in is the class under `architectures`. Most name a language model; some were fine-tuned into something
else, with another head and another loss: such a one is planned as that, or refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.units import MiB, format_bytes

MAX_FILE_BYTES = 4 * MiB
MAX_DEPTH = 16
MAX_WEIGHT_ELEMENTS = 1 << 40
MAX_LAYERS = 1024  # the deepest published models have a few hundred; each costs time to build even without memory
MAX_EXPERTS = 1 << 15

GENERIC = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Sizes for which some class has a default of its own: in the families that memfit knows, a file must state them too.
OWN_DEFAULT = (
    "ffn_dim", "num_key_value_heads", "head_dim", "moe_intermediate_size", "kv_lora_rank", "v_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok",
)  # fmt: skip
POSITIVE = {*GENERIC, *OWN_DEFAULT, "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "max_position_embeddings"}
POSITIVE |= {"word_embed_proj_dim", "q_lora_rank", "sliding_window"}
DTYPES = ("float64", "float32", "float16", "bfloat16")
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Types by the names that torch has for them, and by those of settings."""

# Irrelevant to memory or set by the caller, yet acted upon by transformers: some keys run code, some fetch kernels, and
# `num_labels` makes a dict that long.
UNSEEN = {"auto_map", "custom_pipelines", "quantization_config", "use_cache", "return_dict", "torchscript"}
UNSEEN |= {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "output_attentions"}
UNSEEN |= {"id2label", "label2id", "num_labels", "problem_type", "task_specific_params"}
UNSEEN |= {"attn_implementation", "_attn_implementation", "_attn_implementation_internal"}
UNSEEN |= {"experts_implementation", "_experts_implementation", "_experts_implementation_internal"}


@dataclass(frozen=True)
class ConfigFamily:
    """What a config class of transformers says of itself."""

    model_type: str
    defaults: Mapping[str, object]  # its fields
    renamed: Mapping[str, str] = field(default_factory=dict)  # generic names that it spells its own way
    known: bool = False  # a family of the presets: checked more strictly
    methods: frozenset[str] = frozenset()  # a file must not overwrite these
    constants: frozenset[str] = frozenset()  # nor these; they are left out quietly, for old files hold some of them


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or an InputError; never more than `MAX_FILE_BYTES` are read."""
    where = str(path)
    if not os.path.isfile(path):  # which says so of an impossible name too
        raise InputError(f"no file '{where}'", hint="give a folder with config.json, a *.json, or a preset's name")
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read '{where}': {one_line(error)}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(f"'{where}' is larger than {format_bytes(MAX_FILE_BYTES)}, too large for a config.json")
    try:
        data = json.loads(raw.decode("utf-8-sig"), parse_constant=_constant, object_pairs_hook=without_doubles)
    except InputError as error:
        raise InputError(f"'{where}': {error.message}", hint=error.hint) from error
    except RecursionError as error:
        raise InputError(f"'{where}' is nested too deeply for a model's config.json") from error
    except ValueError as error:
        raise InputError(f"'{where}' is not a JSON file: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise InputError(f"'{where}' holds a JSON {type(data).__name__}, not an object with a model's settings")
    return data


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of a key that stands in it twice Python would take the last, and not say so."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise InputError(f"{show(key)} stands in it twice, as {show(made[key])} and as {show(value)}")
        made[key] = value
    return made


def _constant(name: str) -> float:
    """transformers itself writes Infinity for the open end of a range, as in Mamba's `time_step_limit`."""
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)


def model_type_of(data: Mapping[str, Any], where: str) -> str:
    value = data.get("model_type")
    if value is None:
        raise InputError(f"{where}: 'model_type' is missing", hint='it names the architecture: "model_type": "llama"')
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: 'model_type' is {show(value)}, not a name")
    return value


def check_config(data: Mapping[str, Any], family: ConfigFamily, where: str) -> dict[str, Any]:
    """The settings that transformers may see, once they are stated, of the right type and possible together."""
    unseen = UNSEEN | family.constants
    seen = {key: value for key, value in data.items() if key not in unseen and key.isidentifier()}
    _check_names(seen, family, where)
    for key, value in seen.items():
        for scalar in _scalars(key, value, where):
            if isinstance(scalar, float) and not math.isfinite(scalar) and key != "time_step_limit":
                raise InputError(f"{where}: '{key}' is not a finite number")
            if isinstance(scalar, int) and abs(scalar) > MAX_WEIGHT_ELEMENTS:
                raise InputError(f"{where}: '{key}' is {show(scalar)}, which no model has")
    _check_stated(seen, family, where)
    one_level_down = [pair for value in seen.values() if isinstance(value, dict) for pair in value.items()]
    for key, value in (*seen.items(), *one_level_down):  # as the experts in DBRX's `ffn_config`
        _check_value(key, value, family, where)
    _check_heads(seen, family, where)
    _check_weights(seen, family, where)
    return seen | {key: _dtype(seen[key], key, where) for key in ("dtype", "torch_dtype") if seen.get(key) is not None}


def _scalars(key: str, value: object, where: str) -> Iterator[object]:
    """Every number, text and null in a value. Not recursive: a file must not choose how deep Python goes."""
    todo = [(value, 1)]
    while todo:
        item, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise InputError(f"{where}: '{key}' is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, (dict, list)):
            todo.extend((inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item))
        else:
            yield item


def _check_names(data: Mapping[str, Any], family: ConfigFamily, where: str) -> None:
    for key in data:
        if key.startswith("__") or key in family.methods:
            raise InputError(f"{where}: '{key}' is not a setting of a '{family.model_type}' model")
    if data.get("per_layer_config"):
        raise InputError(f"{where}: 'per_layer_config' (layers of different sizes) is not supported")


def _check_stated(data: Mapping[str, Any], family: ConfigFamily, where: str) -> None:
    """Whatever the class would otherwise fill in by itself."""
    for name in (*GENERIC, *OWN_DEFAULT) if family.known else GENERIC:
        own = family.renamed.get(name, name)
        if family.defaults.get(own) is not None and _get(data, family, name) is None:
            raise InputError(
                f"{where}: '{own}' is missing",
                hint=f"memfit takes sizes from the file only, never from the defaults of '{family.model_type}'",
            )


def _get(data: Mapping[str, Any], family: ConfigFamily, name: str) -> tuple[str, Any] | None:
    """A setting under its own or its generic name: GPT-2 writes `n_embd` and also takes `hidden_size`."""
    for key in (family.renamed.get(name, name), name):
        if data.get(key) is not None:
            return key, data[key]
    return None


def _check_value(key: str, value: Any, family: ConfigFamily, where: str) -> None:
    if value is None:
        return
    names = {key, *(name for name, own in family.renamed.items() if own == key)}
    if names & POSITIVE and (family.known or not isinstance(value, list)):  # Gemma 3n has a size per layer
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{where}: '{key}' is {show(value)}, not a whole number")
        if value < 1 and (family.known or key != "sliding_window"):  # some write 0 for no window
            raise InputError(f"{where}: '{key}' is {value}; it must be 1 or more")
    if isinstance(value, int) and key.endswith(("layers", "n_layer")) and value > MAX_LAYERS:
        raise InputError(f"{where}: '{key}' is {value:,}; memfit builds {MAX_LAYERS:,} layers at most")
    if isinstance(value, int) and key.endswith("experts") and value > MAX_EXPERTS:
        raise InputError(f"{where}: '{key}' is {value:,}; memfit builds {MAX_EXPERTS:,} experts at most")
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    if ("dropout" in key or "pdrop" in key) and not is_share:
        raise InputError(f"{where}: '{key}' is {show(value)}, not a number from 0 to 1")


def _check_heads(data: Mapping[str, Any], family: ConfigFamily, where: str) -> None:
    """Only for known families: elsewhere a head's width may follow rules of its own, which transformers checks."""
    if not family.known:
        return
    hidden, heads = _get(data, family, "hidden_size"), _get(data, family, "num_attention_heads")
    kv_heads, head_dim = _get(data, family, "num_key_value_heads"), _get(data, family, "head_dim")
    if heads and kv_heads and heads[1] % kv_heads[1]:
        raise InputError(f"{where}: '{heads[0]}' {heads[1]} is not divisible by '{kv_heads[0]}' {kv_heads[1]}")
    if "qk_nope_head_dim" in family.defaults or not (hidden and heads):
        return
    if head_dim is None and hidden[1] % heads[1]:
        hint = _divisors_hint(hidden[1], heads[1])
        raise InputError(f"{where}: '{hidden[0]}' {hidden[1]} is not divisible by '{heads[0]}' {heads[1]}", hint=hint)
    width = head_dim[1] if head_dim else hidden[1] // heads[1]
    if "rope_parameters" in family.defaults and width % 2:
        raise InputError(f"{where}: heads of width {width} cannot be rotated; rotary positions need an even width")


def _divisors_hint(hidden: int, heads: int) -> str:
    """`4096 works with 16, 32 or 64 heads`: what divides, nearest to what was asked."""
    fits = [n for n in range(1, min(hidden, 4 * heads, 4096) + 1) if hidden % n == 0]
    nearest = sorted(sorted(fits, key=lambda n: max(n / heads, heads / n))[:3])
    *most, last = [str(n) for n in nearest]
    return f"{hidden} works with {', '.join(most) + ' or ' if most else ''}{last} heads"


def _check_weights(data: Mapping[str, Any], family: ConfigFamily, where: str) -> None:
    """No single weight beyond `MAX_WEIGHT_ELEMENTS`, as far as the named sizes tell."""

    def size(*names: str) -> int:
        found = (_get(data, family, name) for name in names)
        return max((item[1] for item in found if item and isinstance(item[1], int)), default=1)

    hidden = size("hidden_size")
    wide = size("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size")
    experts = size("num_experts", "num_local_experts", "n_routed_experts")
    heads = size("num_attention_heads") * size("head_dim", "v_head_dim", "qk_nope_head_dim")
    weights = {
        "the token embedding": size("vocab_size") * hidden,
        "an MLP weight": experts * wide * hidden * 2,
        "an attention weight": heads * hidden,
    }
    for what, elements in weights.items():
        if elements > MAX_WEIGHT_ELEMENTS:
            raise InputError(f"{where}: {what} would have {elements:,} elements, which no machine holds")


def _dtype(value: object, key: str, where: str) -> str:
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    if name not in DTYPES:
        raise InputError(f"{where}: '{key}' is {show(value)}, not one of {', '.join(DTYPES)}")
    return name


def one_line(error: BaseException) -> str:
    """An exception's text for an error message: one line, not too long, never empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def show(value: object) -> str:
    """A value from a file for an error message: quoted, escaped, not too long."""
    text = json.dumps(value, default=str) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""`--model`: what a person typed, as a source; a source, as a `transformers` config; a config, as a module.

    source = resolve("meta-llama/Llama-3.2-1B")          # no torch yet
    with torch.device("meta"):                           # shapes without memory
        model = build_model(source, dtype=torch.bfloat16, attention="sdpa")
    parameter_count(model)                               # 1235814400

Nothing is ever downloaded, and no code that comes with a model is run (`trust_remote_code` does not exist here). The
one exception is asked for by name: `module:factory` imports and calls the user's own Python.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memfit.errors import InputError, MemfitError, UnknownName, UsageError
from memfit.models.config_check import (
    MAX_LAYERS,
    MAX_WEIGHT_ELEMENTS,
    PRECISIONS,
    ConfigFamily,
    check_config,
    model_type_of,
    one_line,
    read_config,
    show,
)
from memfit.models.heads import (
    HEAD_NAMES,
    LANGUAGE_MODELS,
    PICTURE_FAMILIES,
    TEXT_TO_TEXT,
    Head,
    class_named,
    head_of,
    labels_of,
    problem_of,
)
from memfit.models.presets import BASICS, GSA_TYPE, find_preset, presets

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig


TIED_BY_CONFIG = ("longt5", "mt5", "t5", "umt5")
"""Whose config is made to say that weights are tied; those of a checkpoint that has both are not."""
OWN_TYPES = (GSA_TYPE, BASICS)
"""Their attention is their own: transformers has no other for them."""
CAUSAL = ("ForCausalLM", "LMHeadModel")
Kind = Literal["preset", "config", "folder", "hub", "factory"]
Attention = Literal["sdpa", "eager"]

_BARE_SIZE = re.compile(r"\d+(\.\d+)?b", re.IGNORECASE)
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HELP = "`memfit models` lists the presets; a folder with config.json works too"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `name` is for reports, `origin` says in words how it was found."""

    kind: Kind
    name: str
    origin: str
    target: str
    """What to open: the preset's name, the config's path, or `module:factory`."""


def resolve(name: str) -> ModelSource:
    """Find what `name` means: a folder or file that exists, a preset, a bare size, a factory, or the Hub's local cache.

    A folder that holds a config.json wins over a preset of the same name, as it does in transformers. What is merely
    close to a known name is suggested in the error, never taken.
    """
    text = name.strip()
    if not text:
        raise UsageError("the model's name is empty", hint=_HELP)
    found = _on_disk(text) or _shipped(text) or _factory(text) or _cached(text)
    if found is None:
        raise _unknown(text)
    return found


def _on_disk(text: str) -> ModelSource | None:
    path = Path(os.path.expanduser(text))  # unlike Path.expanduser, it leaves an unknown ~user alone
    config = path / "config.json"
    try:
        if config.is_file():
            return ModelSource("folder", path.resolve().name or str(path), f"folder '{text}'", str(config))
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError):
        exists = is_folder = False
    if path.suffix.lower() == ".json":
        if not exists or is_folder:
            raise InputError(f"no file '{text}'", hint=_HELP)
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
        return ModelSource("config", name, f"file '{text}'", str(path))
    if is_folder and find_preset(text) is None:
        hint = "a model's folder holds config.json; `model.config.save_pretrained(folder)` writes it"
        if (path / "adapter_config.json").is_file():
            hint = "it holds a LoRA adapter: give the base model it was trained on"
        raise InputError(f"folder '{text}' has no config.json", hint=hint)
    if text.startswith(("./", "../", "/", "~")) or (exists and not is_folder):
        what = f"'{text}' is not a config.json" if exists else f"no file or folder '{text}'"
        raise InputError(what, hint="give a folder with config.json, a *.json file, or a preset's name")
    return None


def _shipped(text: str) -> ModelSource | None:
    """A preset by any of its names. A bare size is a Llama: `7b` is `llama-7b`."""
    wanted = f"llama-{text}" if _BARE_SIZE.fullmatch(text) else text
    preset = find_preset(wanted)
    if preset is None:
        if wanted != text:
            sizes = [p.name for p in presets() if p.name.startswith("llama-")]
            raise UnknownName("Llama", text, sizes, more=f"a bare size means a Llama: {', '.join(sizes)}")
        return None
    if preset.storage is not None and (copy_here := _cached(text)) is not None:
        return copy_here
    origin = "preset" if wanted == text else f"preset; '{text}' is read as {preset.name}, the Llama of that size"
    return ModelSource("preset", preset.name, origin, preset.name)


_CODE_IS_REFUSED: list[bool] = []


def refuse_code() -> None:
    """From now on, in this process: `module:factory` is no model, whoever asks for it, and nothing is imported."""
    _CODE_IS_REFUSED.append(True)


def names_code(name: str) -> bool:
    """Whether a model of this name is made by Python that is imported for it."""
    text = name.strip()
    return bool(_FACTORY.fullmatch(text)) and _on_disk(text) is None and _shipped(text) is None


def _factory(text: str) -> ModelSource | None:
    if not _FACTORY.fullmatch(text):
        return None
    if _CODE_IS_REFUSED:
        raise UsageError(f"model {text!r} names code, and none is run here", hint="a preset, a hub id or a folder")
    return ModelSource("factory", text.partition(":")[2], f"factory '{text}'", text)


def _cached(text: str) -> ModelSource | None:
    """A model whose config.json some earlier download left in the local Hugging Face cache. No network."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(text, "config.json")
    except (ImportError, ValueError, OSError):  # not installed, or not a possible id
        return None
    return ModelSource("hub", text, "local Hugging Face cache", path) if isinstance(path, str) else None


def _unknown(text: str) -> UnknownName:
    known = [preset.name for preset in presets()]
    if not _HUB_ID.fullmatch(text):
        return UnknownName("model", text, known, more=_HELP)
    more = f"nor is it in the Hugging Face cache: `hf download {text} config.json` puts it there; or give a config.json"
    error = UnknownName("model", text, known, more=more)
    hub_ids = [alias.lower() for preset in presets() for alias in preset.aliases if "/" in alias]
    return error if error.nearest else UnknownName("model", text, [*known, *hub_ids], more=more)


def source_notes(source: ModelSource) -> tuple[str, ...]:
    """What a reader of the plan should know: what of the file memfit leaves out."""
    if source.kind == "factory":
        return ()
    preset = find_preset(source.target) if source.kind == "preset" else None
    if preset is not None:
        return (preset.note,) if preset.note else ()
    return tuple(_left_out(read_config(Path(source.target)), source.target))


def _left_out(data: dict[str, Any], where: str) -> Iterator[str]:
    if data.get("auto_map"):
        yield "the code that comes with this model (auto_map) is not run; transformers' own class is used"
    if data.get("tie_word_embeddings") is False and data.get("model_type") in TIED_BY_CONFIG:
        yield "not modelled: the head's own weights (tie_word_embeddings: false): transformers ties them here"
    if data.get("gradient_checkpointing"):
        yield "config.json itself switches gradient checkpointing on, whatever the setting says"
    for name in ("_attn_implementation", "attn_implementation", "output_attentions"):
        if data.get(name):
            yield f"{name} in config.json is left out: --attention says how attention is computed, no scores are kept"
    if (head := head_of(data, where)) is not None and class_named(data) is not None:
        labels = f" of {labels_of(data, where)} labels" if head.labels else ""
        own = "" if head.reads in ("text to text", "pictures and text") else ": no language-model head"
        yield f"a {class_named(data)}{labels}, as config.json names it{own}"


def load_config(source: ModelSource) -> PretrainedConfig:
    """The source's checked settings as a fresh transformers config, free to be changed."""
    if source.kind == "factory":
        raise UsageError(f"'{source.target}' is a factory and has no config", hint="build_model() calls it")
    data, where = _settings_of(source)
    config_class = _config_class(data, where)
    seen = check_config(data, _family(config_class, data), where)
    try:
        config: PretrainedConfig = config_class.from_dict(seen)
    except Exception as error:
        raise InputError(f"{where}: transformers cannot read these settings: {one_line(error)}") from error
    if head_of(data, where) is not None:
        _set_labels(config, data, where)
    return config


def _settings_of(source: ModelSource) -> tuple[dict[str, Any], str]:
    """As they stand in its config.json, and where that is."""
    if source.kind != "preset":
        return read_config(Path(source.target)), source.target
    preset = find_preset(source.target)
    assert preset is not None
    return copy.deepcopy(dict(preset.config)), f"preset {preset.name}"


def stored_type(name: str) -> str | None:
    """In which type a model's weights are stored, as its config.json has it: what `dtype="auto"` loads them in. None
    where nobody says so."""
    try:
        source = resolve(name)
    except MemfitError:  # which is told where the model is wanted
        return None
    if source.kind == "factory":
        return None
    data, _ = _settings_of(source)
    inner = data.get("text_config")
    places = (data, inner) if isinstance(inner, dict) else (data,)
    said = next((str(each[key]) for each in places for key in ("dtype", "torch_dtype") if each.get(key)), "")
    return PRECISIONS.get(said.removeprefix("torch."))


def _set_labels(config: Any, data: dict[str, Any], where: str) -> None:
    config.num_labels, config.problem_type = labels_of(data, where), problem_of(data, where)


def _config_class(data: dict[str, Any], where: str) -> Any:
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    from memfit.models.registry import make_known

    make_known()
    model_type = model_type_of(data, where)
    if model_type not in CONFIG_MAPPING:
        if data.get("auto_map"):
            why = f"{where}: {show(model_type)} needs code that comes with the model (auto_map); memfit does not run it"
            raise InputError(why, hint="load it in a function of your own and pass that: --model my_module:build")
        near = get_close_matches(model_type, list(CONFIG_MAPPING), n=3)
        guess = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else None
        raise InputError(f"{where}: transformers knows no model_type {show(model_type)}", hint=guess)
    config_class = CONFIG_MAPPING[model_type]
    inner = getattr(config_class, "sub_configs", None) or {}
    # What has no type of its own is no model but a group of settings, as MPT has for its attention.
    parts = [name for name, part in inner.items() if getattr(part, "model_type", None) != ""]
    if parts and model_type not in PICTURE_FAMILIES:
        why = f"{where}: a '{model_type}' model has several parts ({', '.join(parts)}); of those memfit plans only"
        raise InputError(
            f"{why} {', '.join(PICTURE_FAMILIES)}", hint="save its text_config as a config.json of its own"
        )
    kinds = (
        MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )  # fmt: skip
    if not any(config_class in kind for kind in kinds):
        why = f"{where}: a '{model_type}' model is no language model and classifies no pictures"
        raise InputError(f"{why}; memfit plans only those")
    return config_class


@cache
def make_known() -> None:
    """The models that come with memfit as code, to transformers. GSA is one of its own kind in all respects; the
    course's Transformer is a plain module, of which it keeps the settings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from memfit.models.basics import BasicsSettings, BasicsTransformer
    from memfit.models.gsa import GsaConfig, GsaForCausalLM

    AutoConfig.register(GSA_TYPE, GsaConfig)
    AutoModelForCausalLM.register(GsaConfig, GsaForCausalLM)
    AutoConfig.register(BASICS, BasicsSettings)
    AutoModelForCausalLM.register(BasicsSettings, BasicsTransformer)


def _family(config_class: Any, data: dict[str, Any]) -> ConfigFamily:
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(config_class)}
    others = {name: getattr(config_class, name, None) for name in dir(config_class) if name not in defaults}
    methods = frozenset(name for name, value in others.items() if callable(value))
    constants = {name for name, value in others.items() if not isinstance(value, property)} - methods - {"model_type"}
    model_type = str(data["model_type"])
    known = any(preset.model_type == model_type for preset in presets())
    return ConfigFamily(model_type, defaults, config_class.attribute_map, known, methods, frozenset(constants))


def build_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    attention: Attention = "sdpa",
    layers: int | None = None,
    use_cache: bool = False,
    init_weights: bool = False,
    head: Head | None = None,
) -> nn.Module:
    """The model, in training mode. Call it under `torch.device("meta")` to get shapes without memory.

    Weights are left as the memory was found, for their values do not matter to memory and random numbers take minutes;
    `init_weights=True` fills them. `layers` keeps only the first so many blocks; `head` is
    another one than the config.json names.
    """
    if source.kind == "factory":
        if layers is not None:
            raise UsageError(f"the number of layers of '{source.target}' is up to its own code")
        return _call_factory(source.target, dtype)
    config, said = load_config(source), head_named(source)
    for part in (config, config.get_text_config()):
        part.use_cache = use_cache
    if layers is not None:
        _keep_layers(config, layers)
    chosen = head or said
    if head is not None and head.labels and source.kind != "preset":
        _set_labels(config, read_config(Path(source.target)), source.target)
    auto = chosen.auto if chosen else language_model(config)
    if head is not None:
        _refuse_other_family(head, config, source)
    if attention != "sdpa" and _attention_is_its_own(config):
        raise UsageError(f"--attention {attention}: the attention of {source.name} is its own")
    if not supports_sdpa(config, auto):  # transformers, too, takes eager by itself where a family has no other
        attention = "eager"
    try:
        built = build_from_config(config, auto, dtype=dtype, attention=attention, init_weights=init_weights)
    except Exception as error:
        where = source.target if source.kind != "preset" else f"preset {source.name}"
        why = f"{where}: transformers cannot build this model: {type(error).__name__}: {one_line(error)}"
        raise InputError(why) from error
    for name, parameter in built.named_parameters():
        if not 0 < parameter.numel() <= MAX_WEIGHT_ELEMENTS:
            raise InputError(f"{source.target}: weight '{name}' would have {parameter.numel():,} elements")
    named = (config.architectures or [""])[0]
    own = head is None and said is not None and not named.endswith(LANGUAGE_MODELS)
    if own and named and type(built).__name__ != named:
        raise InputError(f"{source.target}: memfit cannot plan a {show(named)} ('architectures')")
    return built


def _refuse_other_family(head: Head, config: PretrainedConfig, source: ModelSource) -> None:
    import transformers

    had = [name for name, each in HEAD_NAMES.items() if type(config) in getattr(transformers, each.auto)._model_mapping]
    said = next(name for name, each in HEAD_NAMES.items() if each.auto == head.auto)
    if said not in had:
        raise UsageError(
            f"--head {said}: transformers has no such head for {source.name}, a {config.model_type!r} model",
            hint=f"it has {', '.join(had)}" if had else "leave --head out",
        )


def build_from_config(
    config: PretrainedConfig, auto: str, *, dtype: torch.dtype, attention: str | None, init_weights: bool = True
) -> nn.Module:
    """By the class of transformers that is called `auto`, but for memfit's plain modules. Raises what they raise."""
    import transformers
    from transformers.initialization import no_init_weights

    from memfit.models.basics import BasicsSettings, BasicsTransformer

    # transformers' own switch against filling new weights also skips tying them.
    with nullcontext() if init_weights else no_init_weights():
        if isinstance(config, BasicsSettings):
            return BasicsTransformer(config.sizes()).to(dtype)
        model: Any = getattr(transformers, auto).from_config(config, dtype=dtype, attn_implementation=attention)
    if not init_weights and hasattr(model, "tie_weights"):
        model.tie_weights()
    return model  # type: ignore[no-any-return]


def head_named(source: ModelSource) -> Head | None:
    """What the model ends in where that is no language model's head: its config.json names another class, or names none
    and is of a family that has no language model."""
    if source.kind in ("factory", "preset"):
        return None
    data = read_config(Path(source.target))
    found = head_of(data, source.target)
    return found if found is not None or class_named(data) else _head_of_family(_config_class(data, source.target))


def _head_of_family(config_class: Any) -> Head | None:
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    if config_class in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return HEAD_NAMES["image-classification"]
    both = getattr(config_class, "is_encoder_decoder", False) and config_class in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return TEXT_TO_TEXT if both else None


def language_model(config: PretrainedConfig) -> str:
    return "AutoModelForMaskedLM" if is_encoder(config) else "AutoModelForCausalLM"


def _attention_is_its_own(config: PretrainedConfig) -> bool:
    from memfit.models.registry import OWN_TYPES

    return config.model_type in OWN_TYPES


def is_encoder(config: PretrainedConfig) -> bool:
    """A model that fills in masked words, as BERT does, unless its config says that it is used as a decoder, or names a
    class that goes from word to word."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    named = (config.architectures or [""])[0]
    decodes = getattr(config, "is_decoder", False) or (named.endswith(CAUSAL) and "WithLM" not in named)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decodes


def supports_sdpa(config: PretrainedConfig, auto: str | None = None) -> bool:
    """Whether transformers has fused attention for this family. gpt-oss has eager attention only; so has Gemma 2 in
    5.22, where it was fused in 5.17."""
    import transformers

    known: Any = getattr(transformers, auto or language_model(config))._model_mapping
    kind = known.get(type(config), None)
    first = kind[0] if isinstance(kind, tuple) else kind
    return bool(getattr(first, "_supports_sdpa", False)) or _attention_is_its_own(config)


def _keep_layers(config: PretrainedConfig, layers: int) -> None:
    available = int(config.num_hidden_layers)
    if not 1 <= layers <= min(available, MAX_LAYERS):
        raise UsageError(f"{layers} layers are not between 1 and the model's {available}")
    lists = {name: getattr(config, name, None) for name in ("layer_types", "mlp_layer_types")}
    config.num_hidden_layers = layers
    for name, kinds in lists.items():
        if not isinstance(kinds, list):
            continue
        if not isinstance(getattr(type(config), config.attribute_map.get(name, name), None), property):
            setattr(config, name, kinds[:layers])
        elif getattr(config, name) != kinds[:layers]:  # made from the number of layers, and not by leaving out the last
            raise UsageError(f"the kinds of a {config.model_type}'s layers depend on how many there are")


def _call_factory(target: str, dtype: torch.dtype) -> nn.Module:
    from torch import nn

    module_name, _, attribute = target.partition(":")
    with _working_folder_importable(), _default_dtype(dtype):
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            hint = f"it is looked for in {os.getcwd()} and on PYTHONPATH"
            why = f"cannot import '{module_name}': {type(error).__name__}: {one_line(error)}"
            raise InputError(why, hint=hint) from error
        try:
            factory = reduce(getattr, attribute.split("."), module)
        except AttributeError as error:
            raise UnknownName(f"factory in '{module_name}'", attribute, vars(module)) from error
        if not callable(factory):
            raise InputError(f"'{target}' is a {type(factory).__name__}, not a function that returns a model")
        try:
            model = factory()
        except (Exception, SystemExit) as error:
            raise InputError(f"'{target}' raised {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"'{target}' returned a {type(model).__name__}, not a torch.nn.Module")
    return model


@contextmanager
def _working_folder_importable() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def parameter_count(model: nn.Module) -> int:
    """Parameters, each counted once: a tied output head is the embedding and adds nothing."""
    return sum(parameter.numel() for parameter in model.parameters())


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The longest list of modules that is in no other list, with its path."""
    from torch import nn

    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = [(n, m) for n, m in lists.items() if len(m) > 1 and not any(n.startswith(f"{o}.") for o in lists)]
    return max(outer, key=lambda found: len(found[1])) if outer else None

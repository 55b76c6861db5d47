"""What a model looks like, before it is built: its architecture's settings, with the config's changes applied."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import UnknownName, UsageError
from memfit.jobs.training.config import FACTORY, ModelConfig
from memfit.models.config_check import read_config
from memfit.models.files import Source
from memfit.models.presets import BASICS, GSA_SIZES, LATER_SIZES, SIZES, BasicsConfig, is_basics, is_gsa

VOCABULARY = ("vocab_size",)
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length")
NOT_SHAPE = (
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache", "path",
    "_attn_implementation", "attn_implementation", "chunk_size_feed_forward", "output_hidden_states",
    "output_attentions", "return_dict", "id2label", "label2id", "problem_type", "is_encoder_decoder",
)  # fmt: skip
"""What a config.json holds beside the architecture, and GSA's `path`, which changes no weight."""


def gsa_config(model: ModelConfig) -> Any:
    """A GsaConfig: the published one of that name, with the config's changes."""
    from memfit.models.gsa import GsaConfig

    name = model.name.strip().lower()
    if name not in GSA_SIZES:
        raise UnknownName("GSA model", model.name, GSA_SIZES)
    _check_kinds(model, {each.name: each.default for each in dataclasses.fields(GsaConfig)})
    try:
        return GsaConfig(**{**GSA_SIZES[name], **model.settings})
    except (TypeError, ValueError) as error:
        raise UsageError(f"model {model.name}: {error}") from error


def basics_config(model: ModelConfig) -> BasicsConfig:
    """`basics-small` and so on, as the CS336 hand-out has them, or `basics` with all of its settings given."""
    size = model.name.lower().removeprefix(BASICS).removeprefix("-")
    sizes = {name.lower(): each for name, each in {**SIZES, **LATER_SIZES}.items()}
    known = [each.name for each in dataclasses.fields(BasicsConfig)]
    for key in model.settings:
        if key not in known:
            raise UnknownName("setting of the model", key, known, more=f"settings of basics: {', '.join(known)}")
    if size and size not in sizes:
        raise UnknownName("model", model.name, [f"{BASICS}-{each}" for each in sizes])
    _check_kinds(model, dataclasses.asdict(SIZES["small"]))
    start = dataclasses.asdict(sizes[size]) if size else {}
    try:
        return BasicsConfig(**{**start, **model.settings})
    except TypeError as error:
        raise UsageError(
            f"model basics: {error}", hint=f"or a size: {', '.join(f'basics-{each}' for each in sizes)}"
        ) from error


def transformers_config(model: ModelConfig) -> Any:
    """Of a model that is trained from scratch: its published config with the changes."""
    from memfit.models.registry import load_config

    config: Any = load_config(model.source)
    for key, value in model.settings.items():
        if not hasattr(config, key):
            raise UnknownName("setting of the model", f"model.{key}", [f"model.{each}" for each in config.to_dict()])
        try:
            setattr(config, key, value)
        except Exception as error:  # a config of transformers checks itself in its own ways
            raise UsageError(f"model.{key} {value!r}: {type(error).__name__}") from error
    return config


def model_config(model: ModelConfig) -> Any:
    """Of a model that is trained from scratch, as transformers keeps it."""
    if is_gsa(model.name):
        return gsa_config(model)
    if is_basics(model.name):
        from memfit.models.basics import BasicsSettings

        return BasicsSettings(**dataclasses.asdict(basics_config(model)))
    return transformers_config(model)


def _check_kinds(model: ModelConfig, like: Mapping[str, Any]) -> None:
    """A setting is of the kind that its default is of, and a count is at least one."""
    for key, value in model.settings.items():
        usual = like[key]
        kinds = (int, float) if isinstance(usual, float) else (type(usual),)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(usual, bool):
            raise UsageError(f"model.{key} {value!r} is not of the kind of {usual!r}")
        if not isinstance(value, (bool, str)) and not value > 0:
            raise UsageError(f"model.{key} {value!r} is not above 0")


def shape_of(model: ModelConfig, source: Source | None) -> dict[str, Any] | None:
    """The settings that decide which weights there are; None where the model is somebody's own code."""
    if FACTORY.fullmatch(model.name):
        return None
    if is_gsa(model.name):
        settings = gsa_config(model).to_dict()
    elif is_basics(model.name):
        settings = {"model_type": BASICS, **dataclasses.asdict(basics_config(model))}
    elif source is not None:
        settings = read_shape(source.folder / "config.json")
    else:
        settings = transformers_config(model).to_dict()
    return architecture(settings)


def read_shape(path: Path) -> dict[str, Any]:
    return architecture(read_config(path))


def architecture(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key not in NOT_SHAPE}
    made: dict[str, Any] = json.loads(json.dumps(copy.deepcopy(kept), default=str))
    return made


def number_in(shape: Mapping[str, Any] | None, names: tuple[str, ...]) -> int | None:
    found = next((shape[name] for name in names if name in shape), None) if shape else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None

"""Sizes of the CS336 course's Transformer as transformers keeps settings, in a config.json."""

from __future__ import annotations

from dataclasses import fields

from transformers import PreTrainedConfig

from memfit.models.presets import BASICS, SIZES, BasicsConfig


class BasicsSettings(PreTrainedConfig):  # type: ignore[misc,unused-ignore]
    model_type = BASICS
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff", "max_position_embeddings": "context_length",
    }  # fmt: skip

    d_model: int = SIZES["small"].d_model
    d_ff: int = SIZES["small"].d_ff
    num_layers: int = SIZES["small"].num_layers
    num_heads: int = SIZES["small"].num_heads
    vocab_size: int = SIZES["small"].vocab_size
    context_length: int = SIZES["small"].context_length
    rope_theta: float = SIZES["small"].rope_theta

    def sizes(self) -> BasicsConfig:
        return BasicsConfig(**{each.name: getattr(self, each.name) for each in fields(BasicsConfig)})

"""The Transformer of Stanford's CS336 course: pre-norm, RoPE, SwiGLU, untied head.

Written from the assignment's specification, nothing fused: attention makes its score matrix several times over, which
is what its students are asked to find in the memory timeline.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig

from memfit.models.presets import BASICS, SIZES, BasicsConfig


class BasicsSettings(PreTrainedConfig):  # type: ignore[misc,unused-ignore]
    """Its sizes as transformers keeps settings, in a config.json."""

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


class BasicsRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * (x * rms)).to(kind)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        std = math.sqrt(2 / (inputs + outputs))
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class BasicsRotaryPositions(nn.Module):
    tables: torch.Tensor

    def __init__(self, width: int, context_length: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(context_length).float(), frequencies)
        tables = torch.stack((angles.cos(), angles.sin())).to(torch.get_default_dtype())  # as the weights are
        self.register_buffer("tables", tables, persistent=False)

    def forward(self, length: int) -> torch.Tensor:
        return self.tables[:, :length]


def rotated(x: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbouring features are rotated and the halves put one after the other."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = tables
    return torch.cat((cos * first - sin * second, sin * first + cos * second), -1)


def softmax(x: torch.Tensor) -> torch.Tensor:
    exponentials = torch.exp(x - x.max(-1, keepdim=True).values)
    return exponentials / exponentials.sum(-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, config: BasicsConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            Linear(config.d_model, config.d_model) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, tables), rotated(k, tables)
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = softmax(torch.where(causal, scores, float("-inf")))
        mixed = torch.einsum("...qk,...kd->...qd", weights, v)
        return self.output_proj(mixed.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    def __init__(self, config: BasicsConfig) -> None:
        super().__init__()
        self.w1, self.w3 = Linear(config.d_model, config.d_ff), Linear(config.d_model, config.d_ff)
        self.w2 = Linear(config.d_ff, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))  # type: ignore[no-any-return]


class BasicsBlock(nn.Module):
    def __init__(self, config: BasicsConfig) -> None:
        super().__init__()
        self.ln1, self.ln2 = BasicsRMSNorm(config.d_model), BasicsRMSNorm(config.d_model)
        self.attn, self.ffn = Attention(config), SwiGLU(config)

    def forward(self, x: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x), tables)
        return x + self.ffn(self.ln2(x))  # type: ignore[no-any-return]


class BasicsTransformer(nn.Module):
    def __init__(self, config: BasicsConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = BasicsRotaryPositions(
            config.d_model // config.num_heads, config.context_length, config.rope_theta
        )
        self.layers = nn.ModuleList(BasicsBlock(config) for _ in range(config.num_layers))
        self.ln_final = BasicsRMSNorm(config.d_model)
        self.lm_head = Linear(config.d_model, config.vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token_embeddings(ids)
        tables = self.positions(ids.shape[-1])
        for layer in self.layers:
            x = layer(x, tables)
        return self.lm_head(self.ln_final(x))  # type: ignore[no-any-return]

    @property
    def longest_sequence(self) -> int:
        return self.config.context_length

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


small, medium, large, xl, two_point_seven_b = (partial(BasicsTransformer, size) for size in SIZES.values())
"""Factories, for `memfit.models.basics:small`."""

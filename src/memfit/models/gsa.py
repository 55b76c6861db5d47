"""GSA, a decoder with gated sparse attention: each query attends to the keys that a small indexer picks for it.

Two ways to the same numbers. `gather` is the method as published: the chosen keys and values are copied out for every
query, [batch, length, k, heads, width], and those copies are nearly all of its memory. `masked` keeps the choice as a
mask over ordinary attention and copies nothing. Written from the specification of arXiv 2601.15305 and its public code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import GradientCheckpointingLayer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from memfit.models.presets import GSA

PATHS = ("gather", "masked")


class GsaConfig(PreTrainedConfig):  # type: ignore[misc,unused-ignore]
    """As published, where nothing else is said; `models/presets.py` has the published settings of each size."""

    model_type = "gsa"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads", "intermediate_size": "d_ffn",
    }  # fmt: skip

    d_model: int = GSA["d_model"]
    n_layers: int = GSA["n_layers"]
    n_heads: int = GSA["n_heads"]
    n_kv_heads: int = GSA["n_kv_heads"]
    d_ffn: int = GSA["d_ffn"]
    vocab_size: int = GSA["vocab_size"]
    max_position_embeddings: int = GSA["max_position_embeddings"]
    k_base: int = GSA["k_base"]
    k_min: int = GSA["k_min"]
    k_max: int = GSA["k_max"]
    indexer_heads: int = GSA["indexer_heads"]
    indexer_dim: int = GSA["indexer_dim"]
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    temperature: float = 1.0
    adaptive_k: bool = True
    path: str = "masked"
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **rest: Any) -> None:
        super().__post_init__(**rest)
        if self.d_model % self.n_heads or self.n_heads % self.n_kv_heads:
            heads = f"{self.n_heads} heads do not divide {self.d_model}"
            raise ValueError(f"{heads}, or {self.n_kv_heads} do not divide {self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(f"heads of width {self.head_dim} cannot be rotated; rotary positions need an even width")
        if not 0 < self.k_min <= self.k_base <= self.k_max:
            raise ValueError(f"k_min {self.k_min}, k_base {self.k_base} and k_max {self.k_max} are not in order")
        if self.path not in PATHS:
            raise ValueError(f"path {self.path!r} is not one of {', '.join(PATHS)}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


class GsaRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps  # as transformers calls it

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
            x.dtype
        )


class GsaRotaryPositions(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, longest: int, theta: float) -> None:
        super().__init__()
        self.width, self.longest, self.theta = width, longest, theta
        self.register_buffer("cos", torch.empty(longest, width, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(longest, width, dtype=torch.float32), persistent=False)
        self.fill()

    def fill(self) -> None:
        """The tables are in no checkpoint: a model that was loaded from one makes them anew."""
        frequencies = self.theta ** -(torch.arange(0, self.width, 2, device=self.cos.device).float() / self.width)
        positions = torch.arange(self.longest, device=self.cos.device).float()
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        return self.cos[:length, None, :], self.sin[:length, None, :]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """On [batch, length, heads, width]; the tables are fp32, and so is what comes out."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos + turned * sin


class Indexer(nn.Module):
    """A cheap score for every pair of query and key; no gradient reaches it, for only its ranking is used."""

    def __init__(self, config: GsaConfig) -> None:
        super().__init__()
        self.heads, self.width = config.indexer_heads, config.indexer_dim
        self.q_proj = nn.Linear(config.d_model, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.d_model, self.width, bias=False)
        self.weight_proj = nn.Linear(config.d_model, self.heads)
        self.bias = nn.Parameter(torch.zeros(self.heads))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, length], -inf where a key lies after the query."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.width))
        k = self.k_proj(x)
        weights = torch.sigmoid(self.weight_proj(x))
        total: Tensor | None = None
        for head in range(self.heads):  # one head at a time: all at once would be four matrices of the scores' size
            score = torch.bmm(q[:, :, head], k.transpose(1, 2)) / math.sqrt(self.width) + self.bias[head]
            score = weights[:, :, head, None] * torch.sigmoid(score)
            total = score if total is None else total + score
        assert total is not None
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return total.float().masked_fill(later, float("-inf"))


class SparseAttention(nn.Module):
    def __init__(self, config: GsaConfig) -> None:
        super().__init__()
        self.config = config
        wide, narrow = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, wide, bias=False)
        self.k_proj = nn.Linear(config.d_model, narrow, bias=False)
        self.v_proj = nn.Linear(config.d_model, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.d_model, bias=False)
        self.value_gate = nn.Linear(config.d_model, narrow)
        self.output_gate = nn.Linear(config.d_model, wide)
        self.indexer = Indexer(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads, width = self.config.n_heads, self.config.n_kv_heads, self.config.head_dim
        q = rotated(self.q_proj(x).unflatten(-1, (heads, width)), cos, sin)
        k = rotated(self.k_proj(x).unflatten(-1, (kv_heads, width)), cos, sin)
        v = (self.v_proj(x) * torch.sigmoid(self.value_gate(x))).unflatten(-1, (kv_heads, width))
        with torch.no_grad():
            chosen, valid = select(self.indexer(x), self.config)
        attend = _gathered if self.config.path == "gather" else _masked
        mixed = attend(q, k, v, chosen, valid)
        return self.o_proj(mixed.flatten(-2).to(x.dtype) * torch.sigmoid(self.output_gate(x)))  # type: ignore[no-any-return]


def select(scores: Tensor, config: GsaConfig) -> tuple[Tensor, Tensor]:
    """For each query the keys with the highest scores, [batch, length, k], and which of these places are in use."""
    length = scores.shape[-1]
    most = min(config.k_max if config.adaptive_k else config.k_base, length)
    top, chosen = scores.topk(most, dim=-1)
    wanted = keys_wanted(scores, config)
    rank = torch.arange(most, device=scores.device)
    return chosen, (rank < wanted[..., None]) & (top > float("-inf"))


def keys_wanted(scores: Tensor, config: GsaConfig) -> Tensor:
    """How many keys each query gets, [batch, length]: fewer where its scores vary more than the others' do."""
    length = scores.shape[-1]
    valid = torch.arange(1, length + 1, device=scores.device)
    if not config.adaptive_k:
        return valid.clamp(max=config.k_base).expand(scores.shape[:2])
    spread = scores.masked_fill(scores == float("-inf"), 0.0).var(-1, correction=min(1, length - 1))
    relative = spread / (spread.mean() + 1e-8)
    wanted = config.k_base * (0.5 + 1.0 / (1.0 + relative * config.temperature))
    return torch.minimum(wanted.clamp(config.k_min, config.k_max), valid).long()


def _gathered(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, valid: Tensor) -> Tensor:
    """The chosen keys and values copied out for every query: [batch, length, k, heads, width]."""
    _, length, heads, width = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    index = chosen[..., None, None].expand(-1, -1, -1, heads, width)
    near_k, near_v = (t[:, None].expand(-1, length, -1, -1, -1).gather(2, index) for t in (k, v))
    scores = torch.einsum("blhd,blkhd->blhk", q, near_k) / math.sqrt(width)
    weights = scores.masked_fill(~valid[:, :, None, :], float("-inf")).softmax(-1).to(near_v.dtype)
    return torch.einsum("blhk,blkhd->blhd", weights, near_v)


def _masked(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, valid: Tensor) -> Tensor:
    """The choice as a mask over ordinary attention; the scores stay inside the fused kernel."""
    batch, length, heads, _ = q.shape
    mask = torch.zeros(batch, length, length, dtype=torch.bool, device=q.device).scatter_(2, chosen, valid)
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2).to(v.dtype) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, config: GsaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ffn, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ffn, bias=False)
        self.down_proj = nn.Linear(config.d_ffn, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class GsaBlock(GradientCheckpointingLayer):  # type: ignore[misc,unused-ignore]
    def __init__(self, config: GsaConfig) -> None:
        super().__init__()
        self.attention_norm = GsaRMSNorm(config.d_model, config.norm_eps)
        self.attention = SparseAttention(config)
        self.ffn_norm = GsaRMSNorm(config.d_model, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class GsaForCausalLM(PreTrainedModel):  # type: ignore[misc,unused-ignore]
    config_class = GsaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["GsaBlock"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: GsaConfig) -> None:
        super().__init__(config)
        self.model = GsaDecoder(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model(input_ids))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **rest)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    @property
    def longest_sequence(self) -> int:
        return int(self.config.max_position_embeddings)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens  # type: ignore[no-any-return,unused-ignore]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head  # type: ignore[no-any-return,unused-ignore]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std, depth = self.config.initializer_range, self.config.n_layers
        if isinstance(module, nn.Embedding) or module is self.lm_head:
            nn.init.normal_(module.weight, std=std)  # type: ignore[arg-type,unused-ignore]
        elif isinstance(module, SparseAttention):
            for projection in (module.q_proj, module.k_proj, module.v_proj):
                nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
            nn.init.xavier_uniform_(module.o_proj.weight, gain=1 / math.sqrt(2 * depth))
            for gate in (module.value_gate, module.output_gate):
                nn.init.xavier_uniform_(gate.weight, gain=0.1)
                nn.init.constant_(gate.bias, 0.5)
        elif isinstance(module, Indexer):
            nn.init.xavier_uniform_(module.weight_proj.weight, gain=0.1)
            nn.init.zeros_(module.weight_proj.bias)
            nn.init.zeros_(module.bias)
        elif isinstance(module, GsaRotaryPositions):
            module.fill()


class GsaDecoder(nn.Module):
    def __init__(self, config: GsaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        # One pair of tables for all layers: the published code has one for each, 4 GiB of them at its class defaults.
        self.positions = GsaRotaryPositions(config.head_dim, config.max_position_embeddings, config.rope_theta)
        self.layers = nn.ModuleList(GsaBlock(config) for _ in range(config.n_layers))
        self.norm = GsaRMSNorm(config.d_model, config.norm_eps)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = self.positions(input_ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]

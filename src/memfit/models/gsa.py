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

PATHS = ("gather", "masked")


class GsaConfig(PreTrainedConfig):  # type: ignore[misc,unused-ignore]
    """The published defaults. `pretrain_512m` of the pre-training guide is `GsaConfig(**GSA_512M)`."""

    model_type = "gsa"

    def __init__(
        self, d_model: int = 4096, n_layers: int = 32, n_heads: int = 32, n_kv_heads: int = 8, d_ffn: int = 11008,
        vocab_size: int = 128256, max_position_embeddings: int = 131072, rope_theta: float = 10000.0,
        norm_eps: float = 1e-5, k_base: int = 2048, k_min: int = 256, k_max: int = 4096, temperature: float = 1.0,
        adaptive_k: bool = True, indexer_heads: int = 4, indexer_dim: int = 64, path: str = "masked",
        tie_word_embeddings: bool = False, initializer_range: float = 0.02, **rest: Any,
    ) -> None:  # fmt: skip
        if d_model % n_heads or n_heads % n_kv_heads:
            raise ValueError(f"{n_heads} heads do not divide {d_model}, or {n_kv_heads} do not divide {n_heads}")
        if not 0 < k_min <= k_base <= k_max:
            raise ValueError(f"k_min {k_min}, k_base {k_base} and k_max {k_max} are not in order")
        if path not in PATHS:
            raise ValueError(f"path {path!r} is not one of {', '.join(PATHS)}")
        self.d_model, self.n_layers, self.n_heads, self.n_kv_heads = d_model, n_layers, n_heads, n_kv_heads
        self.d_ffn, self.vocab_size, self.max_position_embeddings = d_ffn, vocab_size, max_position_embeddings
        self.rope_theta, self.norm_eps, self.initializer_range = rope_theta, norm_eps, initializer_range
        self.k_base, self.k_min, self.k_max, self.temperature = k_base, k_min, k_max, temperature
        self.adaptive_k = adaptive_k
        self.indexer_heads, self.indexer_dim, self.path = indexer_heads, indexer_dim, path
        super().__init__(tie_word_embeddings=tie_word_embeddings, **rest)  # type: ignore[call-arg,unused-ignore]

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def hidden_size(self) -> int:
        return self.d_model

    @property
    def num_hidden_layers(self) -> int:
        return self.n_layers

    @property
    def parameters(self) -> int:
        d, wide, narrow = self.d_model, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        indexer = d * self.indexer_heads * self.indexer_dim + d * self.indexer_dim + (d + 2) * self.indexer_heads
        layer = 2 * d * wide + 2 * d * narrow + (d + 1) * (wide + narrow) + indexer + 2 * d + 3 * d * self.d_ffn
        return self.n_layers * layer + (1 if self.tie_word_embeddings else 2) * self.vocab_size * d + d


GSA_512M: dict[str, Any] = {
    "d_model": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 2, "d_ffn": 1536, "vocab_size": 151936,
    "max_position_embeddings": 8192, "k_base": 512, "k_min": 64, "k_max": 1024,
}  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class RotaryPositions(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, longest: int, theta: float) -> None:
        super().__init__()
        self.width, self.longest, self.theta = width, longest, theta
        self.register_buffer("cos", torch.empty(longest, width), persistent=False)
        self.register_buffer("sin", torch.empty(longest, width), persistent=False)
        self.fill()

    def fill(self) -> None:
        """The tables are in no checkpoint: a model that was loaded from one makes them anew."""
        frequencies = self.theta ** -(torch.arange(0, self.width, 2, device=self.cos.device).float() / self.width)
        positions = torch.arange(self.longest, device=self.cos.device).float()
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """On [batch, length, heads, width]; the tables are fp32, and so is what comes out."""
        length = x.shape[1]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[:length, None, :] + turned * self.sin[:length, None, :]


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
        self.positions = RotaryPositions(config.head_dim, config.max_position_embeddings, config.rope_theta)

    def forward(self, x: Tensor) -> Tensor:
        heads, kv_heads, width = self.config.n_heads, self.config.n_kv_heads, self.config.head_dim
        q = self.positions(self.q_proj(x).unflatten(-1, (heads, width)))
        k = self.positions(self.k_proj(x).unflatten(-1, (kv_heads, width)))
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
    spread = scores.masked_fill(scores == float("-inf"), 0.0).var(-1)
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


class Block(GradientCheckpointingLayer):  # type: ignore[misc,unused-ignore]
    def __init__(self, config: GsaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = SparseAttention(config)
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class GsaForCausalLM(PreTrainedModel):  # type: ignore[misc,unused-ignore]
    config_class = GsaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
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
        elif isinstance(module, RotaryPositions):
            module.fill()


class GsaDecoder(nn.Module):
    def __init__(self, config: GsaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]

"""Fewer and larger kernels on a GPU, where the mathematics is the same, and which attention kernel a run takes.

On the CPU the model's own modules run as they are.

RMSNorm     transformers takes six element-wise steps through fp32; torch has one kernel, which rounds once at the end
            where transformers rounds before it multiplies by the weight: in 16 bits the last bit may differ
gated MLP   the product of the two halves is written over the first one: the same numbers in less memory
rotary      ten passes over queries and keys, many of them slow for their strides, become one, in place; rounded once
            where transformers rounds three times: in 16 bits the last bit may differ
silu        one pass with that product instead of two; likewise

The last two are Triton kernels. They are compiled on first use (two seconds, then kept on disk by Triton), so they are
used only where they save about as much in one run. Whether a module is what it is taken for, and whether a kernel says
what the formula says, is tried on numbers.

cuDNN's attention is the fastest, but it plans for 0.9 s before its first call in a process
(H200, cuDNN 9.19: 879 ms against 17 ms for flash attention, and then 0.39 ms a call against 0.45). So it is left to
runs with so much attention that they win that back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm
from torch.nn.functional import silu as plain_silu

ROTARY = "apply_rotary_pos_emb"
PAYS_FROM_BYTES = 1.5e12
"""Bytes that rotary embeddings move in a run when written out, from which a second or more is saved."""
STEPS_OF_ROTARY = 10
WRITTEN_OUT = (
    "Triton's kernels do not work here: rotary embeddings are written out, with more time and memory than planned"
)


def fuse(blocks: Iterable[nn.Module], device: torch.device) -> None:
    if device.type == "cpu":
        return
    for block in blocks:
        for module in block.modules():
            kind: Any = type(module)
            if kind.__name__.endswith("RMSNorm") and _is_plain_norm(kind):
                module.forward = MethodType(_norm, module)
            elif kind.__name__.endswith("MLP") and _is_gated(kind, getattr(module, "act_fn", None)):
                module.forward = MethodType(_gated, module)


def _norm(module: Any, hidden: Tensor) -> Tensor:
    return rms_norm(hidden, (hidden.shape[-1],), module.weight, module.variance_epsilon)


def _gated(module: Any, x: Tensor) -> Tensor:
    gate = module.gate_proj(x)
    if torch.is_grad_enabled():  # what is written over would be missed in backward
        made = module.act_fn(gate) * module.up_proj(x)
    elif getattr(module, "fused_silu", False):
        made = silu_times_(gate, module.up_proj(x))
    else:
        gate = module.act_fn(gate)
        made = gate.mul_(module.up_proj(x))
    del gate
    out: Tensor = module.down_proj(made)
    return out


@cache
def _is_plain_norm(kind: Any) -> bool:
    """Gemma's RMSNorm, for one, multiplies by one more than its weight."""
    try:
        with torch.device("cpu"), torch.no_grad():
            module: Any = kind(8, eps=1e-3)
            module.weight.copy_(torch.linspace(-1, 2, 8))
            x = torch.linspace(-3, 1, 24).view(3, 8)
            return bool(torch.allclose(module(x), rms_norm(x, (8,), module.weight, 1e-3), atol=1e-6))
    except (TypeError, AttributeError, RuntimeError):
        return False


_GATED: dict[tuple[Any, Any], bool] = {}


def _is_gated(kind: Any, act: Any) -> bool:
    """down(act(gate(x)) * up(x)), and nothing else."""
    key = (kind, type(act))
    if key not in _GATED:
        _GATED[key] = act is not None and _tried_gated(kind, act)
    return _GATED[key]


def _tried_gated(kind: Any, act: Any) -> bool:
    try:
        with torch.device("cpu"), torch.no_grad():
            probe: Any = kind.__new__(kind)
            nn.Module.__init__(probe)
            probe.gate_proj, probe.up_proj, probe.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
            probe.act_fn = act
            x = torch.linspace(-2, 2, 12).view(3, 4)
            plain = probe.down_proj(act(probe.gate_proj(x)) * probe.up_proj(x))
            return bool(torch.equal(probe(x), plain))
    except (TypeError, AttributeError, RuntimeError):
        return False


# -- compiled kernels --------------------------------------------------------------------------------------------------


@contextmanager
def compiled(blocks: list[nn.Module], config: Any, device: torch.device, tokens: int) -> Iterator[tuple[str, ...]]:
    """Rotary embeddings and gated products by kernels of our own, where that pays for so many tokens, counted once for
    each block that they go through. What a user should know of it is given back."""
    if not _pays(config, device, tokens):
        yield ()
        return
    if not _work(blocks, config, device):
        yield (WRITTEN_OUT,)
        return
    # The Python module whose rotary embedding the blocks' attention calls, if it is the usual one.
    home = sys.modules.get(type(blocks[0]).__module__)
    is_usual = (found := getattr(home, ROTARY, None)) is not None and _is_usual_rotary(found)
    gated: list[Any] = [m for block in blocks for m in block.modules() if _has_silu(m)]
    for module in gated:
        module.fused_silu = True
    try:
        with mock.patch.object(home, ROTARY, rotate_) if is_usual else nullcontext():
            yield ()
    finally:
        for module in gated:
            del module.fused_silu


def _pays(config: Any, device: torch.device, tokens: int) -> bool:
    heads = getattr(config, "num_attention_heads", 0)
    if device.type == "cpu" or not heads:
        return False
    both = heads + (getattr(config, "num_key_value_heads", None) or heads)
    return 2 * tokens * both * _head_width(config) * 2 * STEPS_OF_ROTARY > PAYS_FROM_BYTES


def _work(blocks: list[nn.Module], config: Any, device: torch.device) -> bool:
    """Whether the kernels can be compiled here and say what the formulas say; without them a run is only slower."""
    if device.type != "cuda":
        return True
    if find_spec("triton") is None:
        return False
    dtype = next(p.dtype for p in blocks[0].parameters())
    head = _head_width(config)
    try:
        with torch.no_grad():
            q = torch.linspace(-1, 1, 24 * head, device=device, dtype=dtype).view(1, 3, 8, head).transpose(1, 2)
            table = torch.linspace(-1, 1, 3 * head, device=device, dtype=dtype).view(1, 3, head)
            gate, up = q.reshape(-1).clone(), q.reshape(-1).flip(0)
            plain = (*_rotated(q, q + 1, table, table.flip(1)), plain_silu(gate) * up)
            made = (*rotate_(q.clone(), q + 1, table, table.flip(1).contiguous()), silu_times_(gate, up))
            return all(_same_but_for_rounding(x, y) for x, y in zip(made, plain, strict=True))
    except Exception:  # no compiler, another version of Triton: whatever it is, torch's own kernels are there
        return False


def _same_but_for_rounding(one: Tensor, other: Tensor) -> bool:
    """Sums of two products that were rounded here and there on the way: a few times the distance of two numbers of the
    size of the largest."""
    allowed = 4 * torch.finfo(other.dtype).eps * float(other.abs().max())
    return bool((one.float() - other.float()).abs().max() <= allowed)


@cache
def _is_usual_rotary(apply: Callable[..., Any]) -> bool:
    try:
        q = torch.linspace(-1, 1, 48).view(1, 2, 3, 8)
        cos, sin = torch.linspace(0, 1, 24).view(1, 3, 8), torch.linspace(1, -1, 24).view(1, 3, 8)
        made = apply(q, q * 2, cos, sin)
        return all(bool(torch.equal(x, y)) for x, y in zip(made, _rotated(q, q * 2, cos, sin), strict=True))
    except (TypeError, AttributeError, RuntimeError):
        return False


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None]

    return turned(q), turned(k)


def rotate_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Queries and keys [batch, heads, length, size] turned in place."""
    if torch.is_grad_enabled():
        return _rotated(q, k, cos, sin)
    if q.is_meta:
        return q, k
    plain = unsqueeze_dim == 1 and cos.is_contiguous() and sin.is_contiguous() and cos.shape[-1] == q.shape[-1]
    power_of_two = q.shape[-1] & (q.shape[-1] - 1) == 0
    if not (q.is_cuda and plain and power_of_two and q.stride(-1) == k.stride(-1) == 1):
        return _rotated(q, k, cos, sin)
    from memfit.jobs.pruning import triton_kernels

    return triton_kernels.rotate_(q, cos, sin), triton_kernels.rotate_(k, cos, sin)


def _has_silu(module: nn.Module) -> bool:
    act = getattr(module, "act_fn", None)
    return "forward" in vars(module) and act is not None and "silu" in type(act).__name__.lower()


def silu_times_(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the place of gate."""
    if gate.is_meta:
        return gate
    if not (gate.is_cuda and gate.is_contiguous() and up.is_contiguous()):
        return plain_silu(gate, inplace=True).mul_(up)
    from memfit.jobs.pruning import triton_kernels

    return triton_kernels.silu_times_(gate, up)


PAYS_FROM_FLOPS = 7e14
WITHOUT_PLANNING = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_kernels(config: Any, device: torch.device, tokens: int, length: int) -> AbstractContextManager[None]:
    """`tokens` in windows of `length`, counted once for each block that they go through."""
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * _head_width(config) if heads else 0
    # Of both passes: two products of a query with half of the keys of its window.
    flops = 2 * 2 * float(tokens) * length * width
    return nullcontext() if device.type == "cpu" or flops > PAYS_FROM_FLOPS else sdpa_kernel(WITHOUT_PLANNING)


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

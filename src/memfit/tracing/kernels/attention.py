"""Scaled dot-product attention as CUDA would choose and run it.

Which kernel runs depends on dtype, head size, mask, grouped heads and architecture; each keeps and allocates other
things (facts with sources beside each function; every shape checked is in `tests/data/h200-ops.json`). The fused ops
are torch's own, with torch's own backward formulas: what autograd keeps is therefore right by construction, and only
their outputs and workspaces are made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memfit.platform import Platform
from memfit.tracing.kernels.layouts import added, aligned, is_dense, power_of_two_below

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
Tensor = torch.Tensor


ENABLED: dict[str, Callable[[], bool]] = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
}
"""What `torch.nn.attention.sdpa_kernel` switches."""


# -- which kernel (native/transformers/cuda/sdp_utils.cpp) -----------------------------------------------------------


def choose_backend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool, platform: Platform
) -> str:
    if q.dim() != 4 or not _fusable(q, k, v, mask, gqa):
        return "math"
    grouped = gqa and q.shape[1] != k.shape[1]
    checks = {
        "cudnn": lambda: platform.prefers_cudnn_attention and _cudnn_can(q, k, v, mask, dropout, platform),
        "flash": lambda: _flash_can(q, k, v, mask, dropout, causal, platform),
        "efficient": lambda: _efficient_can(q, k, v, grouped, platform),
    }
    return next((name for name, can in checks.items() if ENABLED[name]() and can()), "math")


def _fusable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> bool:
    """sdp_utils_cpp.h, what all fused kernels ask: the last dimension in steps of 1, of the mask too, and nothing to be
    repeated but heads."""
    in_steps = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (q, k, v)) and (mask is None or mask.stride(-1) == 1)
    same_batch = q.shape[0] == k.shape[0] == v.shape[0]
    return in_steps and same_batch and (gqa or q.shape[1] == k.shape[1] == v.shape[1])


def _cudnn_can(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, platform: Platform) -> bool:
    if mask is not None and not _cudnn_takes_mask(mask, (*q.shape[:3], k.shape[2])):
        return False
    widest = 256 if platform.arch == (9, 0) and platform.cudnn >= 91000 else 128
    sizes = (q.shape[-1], v.shape[-1])
    drops = (dropout > 0 and 91100 <= platform.cudnn < 91400) or torch.are_deterministic_algorithms_enabled()
    return q.dtype in HALF and all(d % 8 == 0 and d <= widest for d in sizes) and k.shape[-2] > 1 and not drops


def _cudnn_takes_mask(mask: Tensor, scores: tuple[int, ...]) -> bool:
    """sdp_utils_cpp.h, `check_attn_mask_shape`: no gradient, 2 or 4 dimensions, each whole or to be repeated."""
    fits = all(n in (1, whole) for n, whole in zip(mask.shape, scores[-mask.dim() :], strict=True))
    return not mask.requires_grad and mask.dim() in (2, 4) and fits


def _flash_can(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, platform: Platform
) -> bool:
    head = q.shape[-1]
    trains = any(t.requires_grad for t in (q, k, v)) and torch.is_grad_enabled()
    small_cards = platform.arch in {(8, 6), (8, 9), (12, 0)}
    too_wide = small_cards and trains and (192 < head <= 224 or (head > 224 and dropout > 0))
    square = not causal or q.shape[-2] == k.shape[-2]
    shapes = head <= 256 and head == k.shape[-1] == v.shape[-1]
    return q.dtype in HALF and mask is None and platform.arch >= (8, 0) and shapes and square and not too_wide


def _efficient_can(q: Tensor, k: Tensor, v: Tensor, grouped: bool, platform: Platform) -> bool:
    if q.dtype == torch.bfloat16 and platform.arch < (8, 0):
        return False
    step = 8 if q.dtype in HALF else 4
    aligned = q.shape[-1] % step == 0 and v.shape[-1] % step == 0
    last = all(t.stride(-1) == 1 for t in (q, k, v))
    return q.dtype in (*HALF, torch.float32) and not grouped and aligned and last


# -- the composite op (native/transformers/attention.cpp) ------------------------------------------------------------


def attention(
    platform: Platform,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    backend = choose_backend(q, k, v, mask, dropout, causal, gqa, platform)
    if mask is not None and mask.dtype == torch.bool:
        mask = _additive(mask, q.dtype)
    if backend == "math":
        return _math(q, k, v, mask, dropout, causal, scale, gqa)
    needs_lse = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if backend == "cudnn":
        made = aten._scaled_dot_product_cudnn_attention(q, k, v, mask, needs_lse, dropout, causal, False, scale=scale)
    elif backend == "efficient":
        if mask is not None:
            mask = _aligned_mask(mask, q, k)
        made = aten._scaled_dot_product_efficient_attention(q, k, v, mask, needs_lse, dropout, causal, scale=scale)
    else:
        return _flash(q, k, v, dropout, causal, scale)
    results = list(made)
    del made
    return _first(results)


def _first(results: list[Any]) -> Tensor:
    """The others go in their order, as out of a C++ tuple: a Python one lets go of its last member first."""
    out: Tensor
    out, *_ = results
    del _
    while results:
        del results[0]
    return out


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    """The head is padded to a multiple of 8 outside the op, so that the padded copies are what autograd keeps."""
    head = q.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(head)
    if pad := -head % 8:
        q, k, v = (torch.constant_pad_nd(t, [0, pad]) for t in (q, k, v))
    out = _first(list(aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)))
    return out[..., :head] if pad else out


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    never = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    added = torch.where(mask, zero, never)
    del never, zero  # before the mask, which the caller made first
    return added


def _aligned_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """mem-efficient wants rows that start at multiples of 16 bytes: a ragged mask is padded to a multiple of 8."""
    if pad := -mask.shape[-1] % 8:
        mask = torch.constant_pad_nd(mask, [0, pad])[..., : mask.shape[-1]]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    """torch's own composite, but for the mask, which is added in place on a GPU."""
    kind = q.dtype
    wide = [t.float() if kind in HALF else t for t in (q, k, v)]  # held to the end, as the variables of a C++ function
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    query, key, value = wide[0] * root, wide[1], wide[2]
    if causal:
        mask = _additive(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(), query.dtype)
    if gqa:
        groups = q.shape[-3] // k.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query.matmul(key.transpose(-2, -1) * root)
    if mask is not None:
        scores = added(scores, mask)
    weights = torch._safe_softmax(scores, -1)
    del scores
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    second = weights.to(kind)  # a second result, made first and taken by nobody
    result = weights.matmul(value).to(kind)
    del second, weights, key, value, query, wide, mask  # the variables of a C++ function go last made first
    return result


# -- what the fused ops allocate -------------------------------------------------------------------------------------


def _like(t: Tensor, *shape: int) -> Tensor:
    """Laid out as `t` is, whichever of heads, rows and batch lies inside the others (native/cudnn/MHA.cpp,
    `alloc_with_matching_layout`)."""
    if t.shape == shape and is_dense(t):
        return torch.empty_strided(shape, t.stride(), dtype=t.dtype, device=t.device)
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=t.stride().__getitem__):
        strides[dim], step = step, step * shape[dim]
    return torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device)


def _empty(t: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=t.device)


def cudnn_forward(
    tracer: Tracer, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: bool, *_: Any, **__: Any
) -> Any:
    """native/cudnn/MHA.cpp: seed, offset, output, statistics, then the graph's workspace for the length of the call."""
    b, h, s, _d = q.shape
    seed, offset = (_empty(q, dtype=torch.int64) for _ in range(2))
    tracer.loads_fused_attention = True
    out = _like(q, b, h, s, v.shape[-1])
    stats = _empty(q, b, h, s, 1) if lse else None
    if workspace := _cudnn_workspace(q, k, tracer.platform):
        tracer.temporary(workspace, "cudnn attention workspace")
    nothing = torch.empty(0, device=q.device)
    return out, stats if stats is not None else nothing, nothing, nothing, s, k.shape[2], seed, offset, nothing


def _cudnn_workspace(q: Tensor, k: Tensor, platform: Platform) -> int:
    """256 bytes, but for a single query, whose keys are split over the card: partial outputs, two statistics a row."""
    b, h, s, d = q.shape
    if s > 1:
        return 256
    rows = 4 * b * h * _cudnn_splits(k.shape[2], b * k.shape[1], platform)
    return aligned(rows * d, 128) + 2 * aligned(rows, 128) + 128 if rows > 4 * b * h else 0


def _cudnn_splits(keys: int, groups: int, platform: Platform) -> int:
    """As measured: a power of two up to 64, of parts with 128 keys or more, while there are fewer than two blocks for
    each multiprocessor; not where one part each would keep more than half of them busy, nor for 512 keys or fewer."""
    if keys <= 512 or 2 * groups > platform.sm_count:
        return 1
    return min(64, power_of_two_below((keys - 1) // 127), power_of_two_below((2 * platform.sm_count - 1) // groups))


def cudnn_backward(tracer: Tracer, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
    """Workspace, as measured for every head size, length and group: dq in fp32, a row sum, and with grouped heads dk
    and dv once more for each query head."""
    b, h, s, d = q.shape
    grads = tuple(_like(t, *t.shape) for t in (q, k, v))
    workspace = 4 * b * h * s * (d + 1) + 256
    if h != k.shape[1]:
        workspace += q.element_size() * b * h * k.shape[2] * (d + v.shape[-1])
    tracer.temporary(workspace, "cudnn attention backward workspace")
    return grads


def flash_forward(tracer: Tracer, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, *_: Any, **__: Any) -> Any:
    """flash_attn/flash_api.cpp `mha_fwd`; few thread blocks split the keys and meet in fp32 buffers. Dropout does not
    split, and makes its random state anew."""
    tracer.loads_fused_attention = True
    b, h, s, d = q.shape
    out = _like(q, b, h, s, d)
    lse = _empty(q, b, h, s)
    splits = _flash_splits(b, h, s, k.shape[2], d, tracer.platform.sm_count) if dropout == 0 else 1
    with tracer.temporaries() as hold:
        if splits > 1:
            hold(4 * splits * b * h * s, "flash attention split statistics")
            hold(4 * splits * b * h * s * _rounded_head(d), "flash attention split output")
        rng, unused = _empty(q, 2, dtype=torch.int64), _empty(q, dtype=torch.int64)
    if dropout > 0:
        rng = _empty(q, 2, dtype=torch.int64)
    nothing = torch.empty(0, device=q.device)
    return out, lse, nothing, nothing, s, k.shape[2], rng, unused, nothing


def _flash_splits(b: int, h: int, rows: int, keys: int, d: int, sm_count: int) -> int:
    """`num_splits_heuristic`: split keys until the card is filled, preferring the fewest splits near the best fill."""
    block_n = 256 if d <= 64 else 128 if d <= 128 else 64
    key_blocks, row_blocks = -(-keys // block_n), -(-rows // 64)
    work, slots = b * h * row_blocks, sm_count * 2
    if work >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    eligible = [n for n in range(1, most + 1) if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))]
    fill = {n: (work * n / slots) / math.ceil(work * n / slots) for n in eligible}
    best = max(fill.values())
    return next(n for n in eligible if fill[n] >= 0.85 * best)


def _rounded_head(d: int) -> int:
    return -(-d // 32) * 32 if d <= 192 else 256


def flash_backward(
    tracer: Tracer, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *_: Any, **__: Any
) -> Any:
    """`mha_bwd`: dq accumulates in fp32 over rows rounded to 128, once, or for each part of the keys where the order of
    the sums is fixed; with grouped heads dk and dv exist once more."""
    b, h, s, d = q.shape
    rows = -(-s // 128) * 128
    parts = -(-tracer.platform.sm_count // (b * h)) if _order_is_fixed() else 1
    with tracer.temporaries() as hold:
        for t in (grad, out):
            if not t.transpose(1, 2).is_contiguous():
                hold(t.numel() * t.element_size(), "flash attention backward contiguous copy")
        grads = tuple(_like(t, *t.shape) for t in (q, k, v))
        hold(4 * b * h * rows, "flash attention backward row sums")
        hold(4 * parts * b * rows * h * _rounded_head(d), "flash attention backward dq accumulator")
        if h != k.shape[1]:
            hold(q.element_size() * b * h * k.shape[2] * d, "flash attention backward dk per query head")
            hold(q.element_size() * b * h * k.shape[2] * d, "flash attention backward dv per query head")
    return grads


def _order_is_fixed() -> bool:
    """With warn_only the kernels stay as they are (attention_backward.cu)."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def efficient_forward(
    tracer: Tracer, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: bool, *_: Any, **__: Any
) -> Any:
    """attention.cu: the output is always [B, S, H, D]; statistics rows rounded to 32; half types wider than the
    registers accumulate in an fp32 copy of the output."""
    b, h, s, _d = q.shape
    width = v.shape[-1]
    out = torch.empty(b, s, h, width, dtype=q.dtype, device=q.device).transpose(1, 2)
    stats = _empty(q, b, h, -(-s // 32) * 32) if lse else torch.empty(0, device=q.device)
    if q.dtype in HALF and max(q.shape[-1], width) > 128:
        tracer.temporary(4 * b * h * s * width, "mem-efficient attention accumulator")
    state = torch.empty((), dtype=torch.int64)  # the generator's state stays on the host
    return out, stats, state, torch.empty((), dtype=torch.int64)


def efficient_backward(
    tracer: Tracer, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, **__: Any
) -> Any:
    """attention_backward.cu: a copy of the gradient unless it lies as [B, S, H, D], gradients, the row sums of grad x
    out, then tiles of dq with a 16-byte lock each."""
    b, h, s, d = q.shape
    wants = rest[5]
    half = q.dtype in HALF
    copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.numel() * grad.element_size()
    with tracer.temporaries() as hold:
        hold(copied, "mem-efficient backward gradient, as the kernel reads it")
        grads = [
            torch.empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3], dtype=t.dtype, device=t.device).transpose(1, 2)
            for t in (q, k, v)
        ]
        grad_bias = None
        if bias is not None and wants[3]:
            whole = torch.empty(*bias.shape[:-1], -(-bias.shape[-1] // 16) * 16, dtype=bias.dtype, device=bias.device)
            grad_bias = whole[..., : bias.shape[-1]]
        if not half:  # else the kernel itself computes them
            with tracer.temporaries() as inner:
                inner(4 * grad.numel(), "mem-efficient backward grad x out")
                inner(4 * b * h * s, "mem-efficient backward row sums")
                hold(4 * b * h * s, "mem-efficient backward delta")
        else:
            hold(4 * b * h * s, "mem-efficient backward delta")
        hold(b * h * _efficient_workspace(s, k.shape[2], d, v.shape[-1], half), "mem-efficient backward workspace")
    return (*grads, grad_bias)


def _efficient_workspace(rows: int, keys: int, d: int, width: int, half: bool) -> int:
    """mem_eff_attention/kernel_backward.h: tiles of dq in fp32 with a 16-byte lock each; half types whose head is wider
    than the registers also accumulate dk and dv there."""
    widest = max(d, width)
    tile_rows = 64 if widest <= 64 else 128
    tile_columns = 128 if half and 64 < widest <= 128 else 64
    tiles = -(-rows // tile_rows) * -(-d // tile_columns)
    accumulated = -(-keys // 64) * 64 * (-(-d // 128) + -(-width // 128)) * 128 if half and widest > 128 else 0
    return tiles * (4 * tile_rows * tile_columns + 16) + 4 * accumulated


REPLACED: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_cudnn_attention.default: cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    aten._scaled_dot_product_flash_attention.default: flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}

"""The ops of `tests/data/h200-ops.json`, to be run again on the traced device.

The file was recorded on an H200 (torch 2.11.0+cu130, cuDNN 9.19): for each op its arguments and the allocator's
events while it ran forward and backward, as `+bytes` and `-number of the allocation freed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from memfit.core.events import Action, Trace
from memfit.tracing.tracer import trace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICE = "cuda"


def traced_events(run: Callable[[], Any]) -> str:
    """Events of the second run: the first one makes the workspaces, as it did when the file was recorded."""
    start = 0

    def job(tracer: Any) -> None:
        nonlocal start
        make = run()
        make()
        start = len(tracer.trace)
        make()
        tracer.trace.mark("end")

    return as_text(trace(job), start)


def as_text(trace: Trace, start: int) -> str:
    numbers: dict[int, int] = {}
    words = []
    for action, subject in list(trace.events())[start:]:
        if action == Action.ALLOC:
            numbers[subject] = len(numbers)
            words.append(f"+{trace.requested[subject]}")
        elif action == Action.FREE:
            words.append(f"-{numbers.get(subject, '?')}")
        elif action == Action.MARK:
            break
    return " ".join(words)


def canonical(events: str) -> str:
    """Frees in a row leave the allocator in the same state in any order, so their order is not compared."""
    words, run = [], []
    for word in [*events.split(), "+end"]:
        if word[0] == "-":
            run.append(word)
        else:
            words += [*sorted(run), word]
            run = []
    return " ".join(words[:-1])


def leaf(*shape: int, dt: str) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPES[dt]).requires_grad_()


def forward_backward(f: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        o = f()
        g = torch.empty_like(o)
        torch.autograd.grad(o, inputs, g)

    return run


def sdpa(b: int, h: int, hkv: int, sq: int, sk: int, d: int, dv: int | None, dt: str, mask: str | None, causal: bool,
         drop: float, grad: bool, layout: str) -> Callable[[], None]:  # fmt: skip
    def make(heads: int, rows: int, width: int) -> torch.Tensor:
        shape = (b, rows, heads, width) if layout == "bshd" else (b, heads, rows, width)
        x = torch.randn(*shape, device=DEVICE, dtype=DTYPES[dt])
        return (x.transpose(1, 2) if layout == "bshd" else x).requires_grad_(grad)

    q, k, v = make(h, sq, d), make(hkv, sk, d), make(hkv, sk, dv or d)
    m = None
    if mask in ("bool", "bool11"):
        m = torch.ones(b if mask == "bool" else 1, 1, sq, sk, device=DEVICE, dtype=torch.bool).tril()
    elif mask == "float":
        m = torch.zeros(b, 1, sq, sk, device=DEVICE, dtype=DTYPES[dt])

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=m, is_causal=causal and m is None, dropout_p=drop, enable_gqa=h != hkv
        )

    def forward() -> None:
        call()

    return forward_backward(call, q, k, v) if grad else forward


def _norm(f: Callable[..., torch.Tensor], bias: bool) -> Callable[..., Callable[[], None]]:
    def build(m: int, n: int, dt: str) -> Callable[[], None]:
        x, w, b = leaf(m, n, dt=dt), leaf(n, dt=dt), leaf(n, dt=dt)
        inputs = (x, w, b) if bias else (x, w)
        return forward_backward(lambda: f(x, (n,), *inputs[1:]), *inputs)

    return build


def _embedding(t: int, h: int, v: int, pad: int | None, dt: str) -> Callable[[], None]:
    w, index = leaf(v, h, dt=dt), torch.randint(2, v, (t,), device=DEVICE)
    return forward_backward(lambda: F.embedding(index, w, padding_idx=pad), w)


def _plain(f: Callable[[torch.Tensor], Any]) -> Callable[..., Callable[[], None]]:
    def build(m: int, n: int, dt: str) -> Callable[[], None]:
        x = torch.randn(m, n, device=DEVICE, dtype=DTYPES[dt])

        def run() -> None:
            f(x)

        return run

    return build


def _loss(reduction: str = "mean", smoothing: float = 0.0) -> Callable[..., Callable[[], None]]:
    def build(t: int, v: int, dt: str) -> Callable[[], None]:
        x, y = leaf(t, v, dt=dt), torch.randint(0, v, (t,), device=DEVICE)
        return forward_backward(lambda: F.cross_entropy(x, y, reduction=reduction), x)

    return build


def _shaped(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Callable[[], None]]:
    def build(shape: list[int], dt: str) -> Callable[[], None]:
        x = leaf(*shape, dt=dt)
        return forward_backward(lambda: f(x), x)

    return build


def _product(kind: str) -> Callable[..., Callable[[], None]]:
    def build(m: int, k: int, n: int, dt: str) -> Callable[[], None]:
        x, w, b, c = leaf(2, m, k, dt=dt), leaf(n, k, dt=dt), leaf(n, dt=dt), leaf(k, n, dt=dt)
        calls: dict[str, tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]] = {
            "linear_bias": (lambda: F.linear(x, w, b), (x, w, b)),
            "linear": (lambda: F.linear(x, w), (x, w)),
            "conv1d": (lambda: torch.addmm(b, x.view(-1, k), c), (x, c, b)),
            "matmul": (lambda: x @ c, (x, c)),
        }
        return forward_backward(calls[kind][0], *calls[kind][1])

    return build


def _heads(kind: str) -> Callable[..., Callable[[], None]]:
    def build(dt: str) -> Callable[[], None]:
        q, k = leaf(2, 8, 512, 64, dt=dt), leaf(2, 8, 512, 64, dt=dt)
        t = torch.randn(2, 512, 8, 64, device=DEVICE, dtype=DTYPES[dt]).transpose(1, 2).requires_grad_()
        if kind == "bmm_qk":
            return forward_backward(lambda: q @ k.transpose(-1, -2), q, k)
        if kind == "bmm_qk_t":
            return forward_backward(lambda: t @ t.transpose(-1, -2), t)
        return forward_backward(lambda: torch.einsum("bhqd,bhkd->bhqk", q, k), q, k)

    return build


def _parameters(count: int, size: int, dt: str) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(size, device=DEVICE, dtype=DTYPES[dt])) for _ in range(count)]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


def _foreach_norm(count: int, size: int, dt: str) -> Callable[[], None]:
    tensors = [torch.randn(size, device=DEVICE, dtype=DTYPES[dt]) for _ in range(count)]

    def run() -> None:
        torch._foreach_norm(tensors)

    return run


def _clip(count: int, size: int, dt: str) -> Callable[[], None]:
    parameters = _parameters(count, size, dt)

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    return run


def _optimizer(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Callable[..., Callable[[], None]]:
    def build(count: int, size: int, dt: str) -> Callable[[], None]:
        optimizer = make(_parameters(count, size, dt))

        def run() -> None:
            optimizer.step()

        return run

    return build


def _small(f: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Callable[[], None]]:
    def build(dt: str) -> Callable[[], None]:
        x = leaf(64, 4096, dt=dt)
        wide, rows = torch.randint(0, 4096, (64, 100), device=DEVICE), torch.randint(0, 64, (3000,), device=DEVICE)
        return forward_backward(lambda: f(x, wide, rows), x)

    return build


BUILDERS: dict[str, Callable[..., Callable[[], None]]] = {
    "sdpa": sdpa,
    "layer_norm": _norm(F.layer_norm, bias=True),
    "rms_norm": _norm(F.rms_norm, bias=False),
    "embedding": _embedding,
    "sum0": _plain(lambda x: x.sum(0)),
    "sum0_keep3": _plain(lambda x: x.view(1, *x.shape).sum((0, 1))),
    "mean-1": _plain(lambda x: x.float().mean(-1, keepdim=True)),
    "sumall": _plain(lambda x: x.sum()),
    "norm": _plain(torch.linalg.vector_norm),
    "max-1": _plain(lambda x: x.max(-1)),
    "all": _plain(lambda x: (x > 0).all()),
    "argmax": _plain(lambda x: x.argmax(-1)),
    "amax-1": _plain(lambda x: x.amax(-1)),
    "sum-1": _plain(lambda x: x.sum(-1)),
    "cross_entropy": _loss(),
    "cross_entropy_sum": _loss("sum"),
    "softmax32": _shaped(lambda x: F.softmax(x, dim=-1, dtype=torch.float32)),
    "softmax": _shaped(lambda x: F.softmax(x, dim=-1)),
    "dropout": _shaped(lambda x: F.dropout(x, 0.1)),
    "log_softmax": _shaped(lambda x: F.log_softmax(x, dim=-1)),
    **{kind: _product(kind) for kind in ("linear_bias", "linear", "conv1d", "matmul")},
    **{kind: _heads(kind) for kind in ("bmm_qk", "bmm_qk_t", "einsum_qk")},
    "foreach_norm": _foreach_norm,
    "clip": _clip,
    "adamw_foreach": _optimizer(lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True)),
    "adamw_fused": _optimizer(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)),
    "adamw_single": _optimizer(lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False)),
    "sgd": _optimizer(lambda p: torch.optim.SGD(p, lr=1e-4)),
    "sgd_mom": _optimizer(lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9)),
    "gather": _small(lambda x, wide, rows: x.gather(1, wide)),
    "index": _small(lambda x, wide, rows: x[rows]),
    "index_select": _small(lambda x, wide, rows: x.index_select(0, rows)),
    "cumsum": _small(lambda x, wide, rows: x.cumsum(-1)),
    "gelu": _small(lambda x, wide, rows: F.gelu(x)),
    "silu": _small(lambda x, wide, rows: F.silu(x)),
    "gelu_tanh": _small(lambda x, wide, rows: F.gelu(x, approximate="tanh")),
    "pow2": _small(lambda x, wide, rows: x.pow(2)),
    "repeat_interleave": _small(lambda x, wide, rows: x.repeat_interleave(4, 0)),
    "cat": _small(lambda x, wide, rows: torch.cat((x, x), -1)),
    "tanh": _small(lambda x, wide, rows: x.tanh()),
}

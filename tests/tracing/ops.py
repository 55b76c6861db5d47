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
from memfit.errors import TraceError
from memfit.tracing.answers import Answers, Site
from memfit.tracing.tracer import trace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICE = "cuda"


WARMED = {"adamw_first_foreach": 0, "adamw_first_fused": 0, "adamw_first_single": 0}
"""Runs before the recorded one: one, which makes the workspaces, but for what only a first run does."""


def traced_events(builds: list[tuple[str, list[Any]]]) -> list[str]:
    """Events of each op, all traced in one job; what cannot be traced gives its error in place of events."""
    spans: list[tuple[int, str]] = []

    def job(tracer: Any) -> None:
        for kind, spec in builds:
            try:
                run = BUILDERS[kind](*spec)
                for _ in range(WARMED.get(kind, 1)):
                    run()
                spans.append((len(tracer.trace), ""))
                run()
            except TraceError as error:
                spans.append((0, str(error)))
            tracer.trace.mark("end")

    made = trace(job, answers=Answers({Site("tests/tracing/ops.py", "ask_for_value"): 4.0}))
    return [error or as_text(made, start) for start, error in spans]


def workspace_events() -> dict[str, str]:
    """The first products of a thread, in the order in which they were recorded: each finds what the others left."""
    starts: dict[str, int] = {}

    def job(tracer: Any) -> None:
        a = torch.randn(256, 256, device=DEVICE, requires_grad=True)
        linear = torch.nn.Linear(256, 256, device=DEVICE)
        half = torch.nn.Linear(256, 256, device=DEVICE, dtype=torch.bfloat16)
        tokens = torch.randn(4, 64, 256, device=DEVICE, dtype=torch.bfloat16)
        runs: dict[str, Callable[[], Any]] = {
            "ws_first_mm": lambda: a @ a,
            "ws_first_biased": lambda: linear(a),
            "ws_first_backward": lambda: linear(a).sum().backward(),
            "ws_second_backward": lambda: linear(a).sum().backward(),
            "ws_biased_bf16": lambda: half(tokens),
        }
        for name, run in runs.items():
            starts[name] = len(tracer.trace)
            run()
            tracer.trace.mark("end")

    made = trace(job)
    return {name: as_text(made, start) for name, start in starts.items()}


def as_text(trace: Trace, start: int) -> str:
    numbers: dict[int, int] = {}
    words = []
    for at in range(start, len(trace)):
        action, subject = trace.actions[at], trace.subjects[at]
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


def attention(
    b: int, h: int, hkv: int, sq: int, sk: int, d: int, dv: int | None, dt: str, mask: str | None, causal: bool,
    drop: float, grad: bool, layout: str,
) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:  # fmt: skip
    """The call, and those of its inputs that ask for gradients."""

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

    return call, (q, k, v) if grad else ()


def sdpa(*spec: Any) -> Callable[[], None]:
    call, inputs = attention(*spec)

    def forward() -> None:
        call()

    return forward_backward(call, *inputs) if inputs else forward


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


def _loss(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Callable[[], None]]:
    def build(t: int, v: int, dt: str) -> Callable[[], None]:
        x, y = leaf(t, v, dt=dt), torch.randint(0, v, (t,), device=DEVICE)
        return forward_backward(lambda: f(x, y), x)

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
        if kind == "baddbmm":
            return forward_backward(lambda: torch.baddbmm(
                torch.zeros(1, device=DEVICE, dtype=DTYPES[dt]).expand(16, 512, 512),
                q.view(16, 512, 64), k.view(16, 512, 64).transpose(1, 2), beta=1, alpha=0.1,
            ), q, k)  # fmt: skip
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


def _adamw(**variant: bool) -> Callable[..., Callable[[], None]]:
    return _optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, **variant))


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


def _square(f: Callable[[torch.Tensor], Any]) -> Callable[..., Callable[[], None]]:
    def build(n: int) -> Callable[[], None]:
        x = torch.eye(n, device=DEVICE) * 2

        def run() -> None:
            f(x)

        return run

    return build


def _fixed(f: Callable[[torch.Tensor], Any]) -> Callable[..., Callable[[], None]]:
    """No arguments; what it is given is a bool mask of 2 x 2,048."""

    def build() -> Callable[[], None]:
        mask = torch.rand(2, 2048, device=DEVICE) > 0.1

        def run() -> None:
            f(mask)

        return run

    return build


def ask_for_value(_: torch.Tensor) -> None:
    torch.ones(4, device=DEVICE).sum().item()


def _grouped_mm() -> Callable[[], None]:
    x = torch.randn(4096, 512, device=DEVICE, dtype=torch.bfloat16)
    experts = torch.randn(8, 512, 256, device=DEVICE, dtype=torch.bfloat16)
    offsets = torch.tensor([512 * (i + 1) for i in range(8)], device=DEVICE, dtype=torch.int32)

    def run() -> None:
        torch._grouped_mm(x, experts, offs=offsets)

    return run


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
    "cross_entropy": _loss(F.cross_entropy),
    "cross_entropy_sum": _loss(lambda x, y: F.cross_entropy(x, y, reduction="sum")),
    "cross_entropy_ls": _loss(lambda x, y: F.cross_entropy(x.float(), y, label_smoothing=0.1)),
    "softmax32": _shaped(lambda x: F.softmax(x, dim=-1, dtype=torch.float32)),
    "softmax": _shaped(lambda x: F.softmax(x, dim=-1)),
    "dropout": _shaped(lambda x: F.dropout(x, 0.1)),
    "log_softmax": _shaped(lambda x: F.log_softmax(x, dim=-1)),
    **{kind: _product(kind) for kind in ("linear_bias", "linear", "conv1d", "matmul")},
    **{kind: _heads(kind) for kind in ("bmm_qk", "bmm_qk_t", "einsum_qk", "baddbmm")},
    "foreach_norm": _foreach_norm,
    "clip": _clip,
    **dict.fromkeys(("adamw_foreach", "adamw_first_foreach"), _adamw(foreach=True)),
    **dict.fromkeys(("adamw_fused", "adamw_first_fused"), _adamw(fused=True)),
    **dict.fromkeys(("adamw_single", "adamw_first_single"), _adamw(foreach=False)),
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
    "sort": _plain(lambda x: x.sort(-1)),
    "argsort": _plain(lambda x: x.argsort(-1)),
    "topk50": _plain(lambda x: x.topk(50, -1)),
    "topk_half": _plain(lambda x: x.topk(x.shape[-1] // 2, -1)),
    "kth": _plain(lambda x: x.kthvalue(x.shape[-1] // 2, -1)),
    "multinomial": _plain(lambda x: torch.multinomial(x.float().softmax(-1), 1)),
    "cumsum_f": _plain(lambda x: x.cumsum(-1)),
    "cholesky": _square(torch.linalg.cholesky),
    "chol_upper": _square(lambda x: torch.linalg.cholesky(x, upper=True)),
    "cholesky_inverse": _square(torch.cholesky_inverse),
    "nonzero": _fixed(lambda mask: mask.nonzero()),
    "masked_fill": _fixed(lambda mask: mask.masked_fill(mask, 0)),
    "triu": _fixed(lambda _: torch.ones(512, 512, device=DEVICE).triu(1)),
    "arange_cmp": _fixed(lambda _: torch.arange(512, device=DEVICE)[:, None] >= torch.arange(512, device=DEVICE)[None]),
    "randint": _fixed(lambda _: torch.randint(0, 100, (4, 512), device=DEVICE)),
    "cumsum_i64": _fixed(lambda _: torch.ones(4, 512, device=DEVICE, dtype=torch.long).cumsum(-1)),
    "item": _fixed(ask_for_value),
    "grouped_mm": _grouped_mm,
}

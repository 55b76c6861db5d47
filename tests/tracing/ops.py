"""The ops of `tests/data/h200-ops.json`, to be run again on the traced device.

The file was recorded on an H200 (torch 2.11.0+cu130, cuDNN 9.19): for each op its arguments and the allocator's
events while it ran forward and backward, as `+bytes` and `-number of the allocation freed`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from memfit.errors import TraceError
from memfit.events import Action, Trace
from memfit.tracing.answers import Answers, Site
from memfit.tracing.tracer import trace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DEVICE = "cuda"


WARMED = {"adamw_first_foreach": 0, "adamw_first_fused": 0, "adamw_first_single": 0}
"""Runs before the recorded one: one, which makes the workspaces, but for what only a first run does."""


def _half_of(mask: torch.Tensor) -> int:
    return mask.numel() // 2


HERE = "tests/tracing/ops.py"
ANSWERS: dict[Site, Any] = {
    Site(HERE, "ask_for_value"): 4.0,
    Site(HERE, "<lambda>"): _half_of,
    Site(HERE, "assign"): _half_of,
    Site(HERE, "find_nothing"): 0,
    Site(HERE, "find_recorded"): 3678,
    Site(HERE, "assign_diagonal"): torch.Tensor.numel,
}


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

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")  # torch's own, rightly
        made = trace(job, answers=Answers(ANSWERS))
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


def as_text(trace: Trace, start: int, to_the_end: bool = False) -> str:
    numbers: dict[int, int] = {}
    words = []
    for at in range(start, len(trace)):
        action, subject = trace.actions[at], trace.subjects[at]
        if action == Action.ALLOC:
            numbers[subject] = len(numbers)
            words.append(f"+{trace.requested[subject]}")
        elif action == Action.FREE:
            words.append(f"-{numbers.get(subject, '?')}")
        elif action == Action.MARK and not to_the_end:
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


def without_last_frees(events: str) -> str:
    """What goes when all is over is in no recording."""
    words = canonical(events).split()
    while words and words[-1][0] == "-":
        words.pop()
    return " ".join(words)


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


def _norm_of_parts(f: Callable[..., torch.Tensor], bias: bool) -> Callable[..., Callable[[], None]]:
    """Of one of three tensors that lie in turns, as the queries of a fused projection do."""

    def build(b: int, s: int, h: int, d: int, dt: str) -> Callable[[], None]:
        x, w, c = leaf(b, s, h, 3, d, dt=dt), leaf(d, dt=dt), leaf(d, dt=dt)
        inputs = (x, w, c) if bias else (x, w)
        return forward_backward(lambda: f(x[..., 0, :], (d,), *inputs[1:]), *inputs)

    return build


def _norm_then_turned(f: Callable[..., torch.Tensor]) -> Callable[..., Callable[[], None]]:
    """Its gradient comes back in another order."""

    def build(b: int, s: int, h: int, d: int, dt: str) -> Callable[[], None]:
        x, w = leaf(b, s, h, d, dt=dt), leaf(d, dt=dt)
        return forward_backward(lambda: f(x, (d,), w).transpose(1, 2).contiguous(), x, w)

    return build


def _embedding_of_columns(b: int, t: int, h: int, v: int, dt: str) -> Callable[[], None]:
    w, index = leaf(v, h, dt=dt), torch.randint(2, v, (b, t + 1), device=DEVICE)
    return forward_backward(lambda: F.embedding(index[:, :-1], w), w)


def _loss_by_position(b: int, t: int, v: int, dt: str) -> Callable[[], None]:
    """As loops written by hand have it: words in the second dimension."""
    x, y = leaf(b, t, v, dt=dt), torch.randint(0, v, (b, t + 1), device=DEVICE)
    return forward_backward(lambda: F.cross_entropy(x.transpose(1, 2), y[:, 1:]), x)


OF_PARTS: dict[str, Callable[..., Callable[[], None]]] = {
    "layer_norm_of_parts": _norm_of_parts(F.layer_norm, bias=True),
    "rms_norm_of_parts": _norm_of_parts(F.rms_norm, bias=False),
    "layer_norm_then_turned": _norm_then_turned(F.layer_norm),
    "rms_norm_then_turned": _norm_then_turned(F.rms_norm),
    "embedding_of_columns": _embedding_of_columns,
    "loss_by_position": _loss_by_position,
    "softmax_of_turned": _shaped(lambda x: F.softmax(x.transpose(1, 2), dim=-1)),
    "softmax32_of_turned": _shaped(lambda x: F.softmax(x.transpose(1, 2), dim=-1, dtype=torch.float32)),
    "softmax_then_turned": _shaped(lambda x: F.softmax(x, dim=-1).transpose(1, 2).contiguous()),
    "softmax_of_columns": _shaped(lambda x: F.softmax(x, dim=1)),
    "log_softmax_of_turned": _shaped(lambda x: F.log_softmax(x.transpose(1, 2), dim=-1)),
    "log_softmax_then_turned": _shaped(lambda x: F.log_softmax(x, dim=-1).transpose(1, 2).contiguous()),
    "cumsum_of_turned": _shaped(lambda x: x.transpose(1, 2).cumsum(-1)),
    "gelu_of_parts": _shaped(lambda x: F.gelu(x[..., ::2])),
    "gate_of_halves": _shaped(lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1]),
    "dropout_of_parts": _shaped(lambda x: F.dropout(x[..., ::2], 0.1)),
    "glu": _shaped(lambda x: F.glu(x)),
    "argmax_of_turned": _shaped(lambda x: x.transpose(1, 2).max(-1)[0]),
    "sum_of_parts": _shaped(lambda x: x[..., ::2].sum((0, 1))),
    "product_of_turned": _shaped(lambda x: x.transpose(1, 2) @ x.transpose(1, 2).transpose(-1, -2)),
    "padded_and_rolled": _shaped(lambda x: F.pad(x, (1, 0)).roll(1, 1)),
}
"""Kernels whose input does not lie row by row."""


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
    def build(n: int, batch: int | None = None, dt: str = "fp32") -> Callable[[], None]:
        x = (torch.eye(n, device=DEVICE) * 2).to(DTYPES[dt])
        x = x.expand(batch, n, n).contiguous() if batch else x

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


def find_recorded(mask: torch.Tensor) -> torch.Tensor:
    """3,678 were true on the GPU."""
    return mask.nonzero()


def ask_for_value(_: torch.Tensor) -> None:
    torch.ones(4, device=DEVICE).sum().item()


def _grouped(
    tokens: int, groups: int, k: int, n: int, dt: str, transposed: bool, trains: bool, autocast: str | None
) -> Callable[[], None]:
    """A product of tokens with the experts that they were sorted by, as transformers calls it; half of the experts get
    no token."""
    x = torch.randn(tokens, k, device=DEVICE, dtype=DTYPES[dt])
    experts = torch.randn(groups, *((n, k) if transposed else (k, n)), device=DEVICE, dtype=DTYPES[dt])
    offsets = torch.tensor([tokens * (i // 2 * 2 + 1) // groups for i in range(groups - 1)] + [tokens], device=DEVICE)
    ends = offsets.to(torch.int32)

    def call() -> torch.Tensor:
        with torch.autocast("cuda", dtype=DTYPES[autocast or "bf16"], enabled=autocast is not None):
            return F.grouped_mm(x, experts.transpose(-2, -1) if transposed else experts, offs=ends)

    def forward() -> None:
        call()

    if not trains:
        return forward
    x.requires_grad_()
    experts.requires_grad_()
    return forward_backward(call, x, experts)


def _attention_of_rank(
    q: list[int], k: list[int], dt: str, mask: str | None, causal: bool, grad: bool, gqa: bool
) -> Callable[[], None]:
    """Attention over inputs of any number of dimensions."""
    made = [torch.randn(*shape, device=DEVICE, dtype=DTYPES[dt]).requires_grad_(grad) for shape in (q, k, k)]
    rows, keys = q[-2], k[-2]
    m = None
    if mask == "bool":
        m = torch.ones(rows, keys, device=DEVICE, dtype=torch.bool).tril()
    elif mask == "float":
        m = torch.zeros(rows, keys, device=DEVICE, dtype=DTYPES[dt])

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(*made, attn_mask=m, is_causal=causal, enable_gqa=gqa)

    def forward() -> None:
        call()

    return forward_backward(call, *made) if grad else forward


def _learned_mask(
    b: int, h: int, hkv: int, s: int, keys: int, d: int, dt: str, shape: list[int], qkv_grad: bool, layout: str
) -> Callable[[], None]:
    """Attention with a mask that wants a gradient."""

    def make(heads: int, rows: int) -> torch.Tensor:
        sizes = (b, rows, heads, d) if layout == "bshd" else (b, heads, rows, d)
        x = torch.randn(*sizes, device=DEVICE, dtype=DTYPES[dt])
        return (x.transpose(1, 2) if layout == "bshd" else x).requires_grad_(qkv_grad)

    q, k, v = make(h, s), make(hkv, keys), make(hkv, keys)
    mask = torch.zeros(*shape, device=DEVICE, dtype=DTYPES[dt]).requires_grad_()
    inputs = (q, k, v, mask) if qkv_grad else (mask,)
    return forward_backward(
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=h != hkv), *inputs
    )


def _depthwise(b: int, c: int, length: int, k: int, dt: str, transposed: bool, bias: bool) -> Callable[[], None]:
    """A short convolution along the sequence; its channels lie inside, as a linear layer leaves them, or outside."""
    x = leaf(b, length, c, dt=dt).transpose(1, 2) if transposed else leaf(b, c, length, dt=dt)
    x = x.detach().requires_grad_()
    w, extra = leaf(c, 1, k, dt=dt), leaf(c, dt=dt)
    inputs = (x, w, extra) if bias else (x, w)
    return forward_backward(lambda: F.conv1d(x, w, extra if bias else None, padding=k - 1, groups=c), *inputs)


def _with_kernel(
    kernel: str, b: int, h: int, s: int, keys: int, d: int, width: int, dt: str, mask: str | None, causal: bool,
    drop: float,
) -> Callable[[], None]:  # fmt: skip
    """Attention by a kernel that is asked for, forward and backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call, inputs = attention(b, h, h, s, keys, d, width, dt, mask, causal, drop, True, "bshd")

    def asked_for() -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return call()

    return forward_backward(asked_for, *inputs)


def _in_autocast(make: Callable[[str], tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]]) -> Any:
    """Forward inside a region, backward after it."""

    def build(dt: str, target: str = "bf16") -> Callable[[], None]:
        f, inputs = make(dt)

        def call() -> torch.Tensor:
            with torch.autocast("cuda", dtype=DTYPES[target]):
                return f()

        return forward_backward(call, *inputs)

    return build


def _one(f: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Any:
    def make(dt: str) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
        x = leaf(*(shape or (64, 1000)), dt=dt)
        return lambda: f(x), (x,)

    return _in_autocast(make)


def _module(module: Callable[[], torch.nn.Module], call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    def make(dt: str) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
        built = module().to(DEVICE)
        x = leaf(16, 32, 256, dt=dt)
        return lambda: call(built, x), (x, *built.parameters())

    return _in_autocast(make)


def _matrix(f: Callable[[torch.Tensor], Any]) -> Callable[..., Callable[[], None]]:
    """In place or not; what it returns is dropped."""

    def build(*spec: Any) -> Callable[[], None]:
        *shape, dt = spec
        x = torch.randn(*shape, device=DEVICE).to(DTYPES[dt])

        def run() -> None:
            f(x)

        return run

    return build


def _with_mask(f: Callable[[torch.Tensor, torch.Tensor], Any], count: Callable[[int], int]) -> Any:
    """A mask of which the first so many elements, row by row, are true; the answer to how many there are."""

    def build(*spec: Any) -> Callable[[], None]:
        *shape, dt = spec
        x = torch.randn(*shape, device=DEVICE).to(DTYPES[dt])
        mask = torch.zeros(x.numel(), device=DEVICE, dtype=torch.bool)
        mask[: count(x.numel())] = True
        mask = mask.view(*shape)

        def run() -> None:
            f(x, mask)

        return run

    return build


def none(_: int) -> int:
    return 0


def half(n: int) -> int:
    return n // 2


def find_nothing(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero()


def assign(x: torch.Tensor, at: Any, value: Any) -> None:
    x[at] = value


def assign_diagonal(x: torch.Tensor, dead: torch.Tensor) -> None:
    x[dead, dead] = 1


def damp_diagonal(x: torch.Tensor) -> None:
    at = torch.arange(x.shape[0], device=DEVICE)
    x[at, at] += 0.1


def smallest_two_of_four(x: torch.Tensor) -> None:
    mask = torch.zeros_like(x, dtype=torch.bool)
    for column in range(0, 16, 4):
        some = x[:, column : column + 4].float()
        mask.scatter_(1, column + torch.topk(some, 2, dim=1, largest=False)[1], True)


def running_mean(x: torch.Tensor) -> None:
    kept = torch.zeros(x.shape[-1], device=DEVICE)
    kept *= 0.5
    kept += torch.norm(x.t().float(), p=2, dim=1) ** 2 / 4


def gram(x: torch.Tensor) -> None:
    kept = torch.zeros(x.shape[-1], x.shape[-1], device=DEVICE)
    rows = x.t().float() * 0.5
    kept += rows.matmul(rows.t())


def gram_in_place(x: torch.Tensor) -> None:
    kept = torch.zeros(x.shape[-1], x.shape[-1], device=DEVICE)
    rows = x.float()
    kept.addmm_(rows.t(), rows, beta=0.5, alpha=2.0)


def expanded_product(x: torch.Tensor) -> None:
    one = torch.ones((), device=DEVICE, dtype=x.dtype)
    torch.mm(one.expand(x.shape[1], x.shape[0]), x)
    torch.mm(x.t(), one.expand(x.shape[0], 8))
    torch.bmm(one.expand(2, 8, x.shape[0]), x.expand(2, *x.shape))
    torch.mv(x, one.expand(x.shape[1]))
    torch.mm(x[:, ::2], x[:, ::2].t())


PRUNING: dict[str, Callable[..., Callable[[], None]]] = {
    "stable_sort": _matrix(lambda x: torch.sort(x, dim=-1, stable=True)),
    "sort_columns": _matrix(lambda x: torch.sort(x, dim=0)),
    "sort_flat": _matrix(lambda x: torch.sort(x.abs().flatten())),
    "topk_smallest": _matrix(lambda x: torch.topk(x, x.shape[-1] // 2, dim=-1, largest=False)),
    "topk_unsorted": _matrix(lambda x: torch.topk(x, x.shape[-1] // 2, dim=-1, sorted=False)),
    "topk_columns": _matrix(lambda x: torch.topk(x, 64, dim=0)),
    "topk_of_four": _matrix(lambda x: torch.topk(x.view(-1, 4), 2, dim=1, largest=False)),
    "kth_flat": _matrix(lambda x: x.abs().flatten().kthvalue(x.numel() // 2)),
    "kth_columns": _matrix(lambda x: x.kthvalue(x.shape[0] // 2, dim=0)),
    "median": _matrix(lambda x: (x.median(), x.median(-1))),
    "quantile": _matrix(lambda x: torch.quantile(x.float(), 0.5, dim=-1)),
    "scatter_true": _matrix(
        lambda x: torch.zeros_like(x, dtype=torch.bool).scatter_(1, x.argsort(-1)[:, : x.shape[1] // 2], True)
    ),
    "scatter_values": _matrix(lambda x: torch.zeros_like(x).scatter_(1, x.argsort(-1), x)),
    "gather_sorted": _matrix(lambda x: torch.gather(x, 1, x.argsort(-1))),
    "cumsum_columns": _matrix(lambda x: x.cumsum(0)),
    "cumsum_rows": _matrix(lambda x: x.cumsum(1)),
    "cumsum_of_mask": _matrix(lambda x: (x > 0).cumsum(-1)),
    "square_sum_0": _matrix(lambda x: x.pow(2).sum(0)),
    "square_sum_1": _matrix(lambda x: x.pow(2).sum(1)),
    "square_mean_all": _matrix(lambda x: x.float().pow(2).mean()),
    "norm_of_columns": _matrix(lambda x: torch.norm(x.float(), p=2, dim=0)),
    "running_mean": _matrix(running_mean),
    "gram": _matrix(gram),
    "gram_in_place": _matrix(gram_in_place),
    "mm_to_fp32": _matrix(lambda x: torch.mm(x.t(), x, out_dtype=torch.float32)),
    "addmm_to_fp32": _matrix(
        lambda x: torch.addmm(torch.zeros(x.shape[1], x.shape[1], device=DEVICE), x.t(), x, out_dtype=torch.float32)
    ),
    "norm_of_windows": _matrix(lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float32) ** 2),
    "wanda_score": _matrix(lambda x: x.abs() * torch.sqrt(torch.ones(1, x.shape[1], device=DEVICE))),
    "outer": _matrix(lambda x: torch.outer(x[:, 0], x[0])),
    "outer_in_place": _matrix(lambda x: x.addr_(x[:, 0].clone(), x[0].clone(), alpha=-1)),
    "column_product": _matrix(lambda x: x.sub_(x[:, :1].matmul(x[:1]))),
    "baddbmm_matrix": _matrix(
        lambda x: torch.baddbmm(x.unsqueeze(0), x[:, :64].unsqueeze(0), x[:64].unsqueeze(0), beta=0.5, alpha=2.0)
    ),
    "baddbmm_in_place": _matrix(lambda x: x.unsqueeze(0).baddbmm_(x[:, :64].unsqueeze(0), x[:64].unsqueeze(0))),
    "addmm_in_place": _matrix(lambda x: x.addmm_(x[:, :64].contiguous(), x[:64].contiguous())),
    "copy_to_fp32": _matrix(lambda x: torch.empty_like(x, dtype=torch.float32).copy_(x)),
    "copy_to_bf16": _matrix(lambda x: torch.empty_like(x, dtype=torch.bfloat16).copy_(x)),
    "copy_transposed": _matrix(lambda x: torch.empty(x.shape[1], x.shape[0], device=DEVICE).copy_(x.t())),
    "where": _matrix(lambda x: torch.where(x.abs() < 0.5, torch.zeros((), device=DEVICE, dtype=x.dtype), x)),
    "assign_column": _matrix(lambda x: assign(x, (slice(None), 2), 0)),
    "assign_rows": _matrix(lambda x: assign(x, slice(2, 4), x[4:6])),
    "assign_by_number": _matrix(lambda x: assign(x, torch.arange(8, device=DEVICE), 0.5)),
    "damp_diagonal": _matrix(damp_diagonal),
    "by_rows_and_columns": _matrix(
        lambda x: x[torch.arange(50, device=DEVICE)[:, None], torch.arange(40, device=DEVICE)]
    ),
    "assign_by_rows_and_columns": _matrix(
        lambda x: assign(x, (torch.arange(50, device=DEVICE)[:, None], torch.arange(40, device=DEVICE)), 0.5)
    ),
    "cumsum_of_few": _matrix(lambda x: torch.cumsum(x[0, :32].int(), 0, dtype=torch.int32)),
    "is_in_few": _matrix(lambda x: torch.isin(torch.arange(x.shape[1], device=DEVICE), torch.arange(3, device=DEVICE))),
    "is_infinite": _matrix(lambda x: (torch.isinf(x).any(), torch.isnan(x).any(), torch.isfinite(x).all())),
    "diagonal": _matrix(lambda x: (torch.diag(x) == 0, torch.mean(torch.diag(x)))),
    "two_of_four": _matrix(smallest_two_of_four),
    "expanded_product": _matrix(expanded_product),
    "var": _matrix(lambda x: (x.var(0), x.std(-1))),
    "unique_counts": _matrix(lambda x: torch.histc(x.float(), 100)),
    "histc_int": _matrix(lambda x: torch.histc(x.argsort(-1)[0].int(), bins=64, min=0, max=63)),
    "mask_assign": _with_mask(lambda x, mask: assign(x, mask, 0), half),
    "mask_assign_columns": _with_mask(lambda x, mask: assign(x, (slice(None), mask[0]), 0), half),
    "mask_assign_scalar": _with_mask(lambda x, mask: assign(x, mask, torch.ones((), device=DEVICE).to(x.dtype)), half),
    "mask_fill": _with_mask(lambda x, mask: x.masked_fill_(mask, 0), half),
    "mask_times": _with_mask(lambda x, mask: x.mul_(mask), half),
    "mask_select": _with_mask(lambda x, mask: x[mask], half),
    "masked_select": _with_mask(lambda x, mask: torch.masked_select(x, mask), half),
    "mask_assign_values": _with_mask(
        lambda x, mask: assign(x, mask, torch.zeros(x.numel() // 2, device=DEVICE, dtype=x.dtype)), half
    ),
    "dead_columns": _with_mask(lambda x, mask: assign_diagonal(x, mask[0]), half),
    "nonzero_of": _with_mask(lambda x, mask: mask.nonzero(), half),
    "nonzero_of_none": _with_mask(lambda x, mask: find_nothing(mask), none),
    "nonzero_as_tuple": _with_mask(lambda x, mask: mask.nonzero(as_tuple=True), half),
    "where_of": _with_mask(lambda x, mask: torch.where(mask.view(-1)), half),
}
"""What a pruning engine calls, on matrices; the last entry of a spec is the dtype."""

AUTOCAST: dict[str, Any] = {
    "amp_norm": _one(lambda x: x.norm()),
    "amp_norm_of_rows": _one(lambda x: torch.norm(x, dim=-1)),
    "amp_normalize": _one(F.normalize),
    "amp_inverse": _one(lambda x: 1 / x),
    "amp_smoothed": _one(
        lambda x: F.cross_entropy(x, torch.zeros(64, device=DEVICE, dtype=torch.long), label_smoothing=0.1)
    ),
    "amp_soft_targets": _one(lambda x: F.cross_entropy(x, x.detach().softmax(-1))),
    "amp_cosine": _one(lambda x: F.cosine_similarity(x, x * 2)),
    "amp_kl": _one(lambda x: F.kl_div(x, x.detach(), reduction="batchmean")),
    "amp_logits_loss": _one(lambda x: F.binary_cross_entropy_with_logits(x, x.detach())),
    "amp_einsum": _one(lambda x: torch.einsum("ij,kj->ik", x, x)),
    "amp_power": _one(lambda x: (x**2).mean() + (2**x).mean()),
    "amp_mean_square": _one(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "amp_sum_of_mean": _one(lambda x: x.sum(-1).mean() + x.std() + x.var(-1).mean()),
    "amp_rms_norm": _module(lambda: torch.nn.RMSNorm(256), lambda m, x: m(x)),
    "amp_layer_norm": _module(lambda: torch.nn.LayerNorm(256), lambda m, x: m(x)),
    "amp_linear_of_columns": _module(lambda: torch.nn.Linear(256, 64), lambda m, x: m(x.transpose(0, 1))),
    "amp_linear_of_four": _module(
        lambda: torch.nn.Linear(64, 96), lambda m, x: m(x.view(16, 32, 4, 64).transpose(1, 2))
    ),
    "amp_attention": _module(
        lambda: torch.nn.MultiheadAttention(256, 4, batch_first=True), lambda m, x: m(x, x, x, need_weights=False)[0]
    ),
    "amp_attention_weights": _module(
        lambda: torch.nn.MultiheadAttention(256, 4, batch_first=True), lambda m, x: m(x, x, x)[0]
    ),
    "amp_encoder": _module(
        lambda: torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True), lambda m, x: m(x)
    ),
}
"""Functions and modules that torch writes in Python, inside a region; the spec is the dtype of what they are given."""


def _grouped_mm() -> Callable[[], None]:
    x = torch.randn(4096, 512, device=DEVICE, dtype=torch.bfloat16)
    experts = torch.randn(8, 512, 256, device=DEVICE, dtype=torch.bfloat16)
    offsets = torch.tensor([512 * (i + 1) for i in range(8)], device=DEVICE, dtype=torch.int32)

    def run() -> None:
        torch._grouped_mm(x, experts, offs=offsets)

    return run


BUILDERS: dict[str, Callable[..., Callable[[], None]]] = {
    **dict.fromkeys(("sdpa", "sdpa_one_query"), sdpa),
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
    "cholesky_inverse_upper": _square(lambda x: torch.cholesky_inverse(x, upper=True)),
    "cholesky_solve": _square(lambda x: torch.cholesky_solve(x, x)),
    "solve_triangular": _square(lambda x: torch.linalg.solve_triangular(x, x, upper=False)),
    "inv": _square(torch.linalg.inv),
    "solve": _square(lambda x: torch.linalg.solve(x, x)),
    "nonzero": _fixed(find_recorded),
    "masked_fill": _fixed(lambda mask: mask.masked_fill(mask, 0)),
    "triu": _fixed(lambda _: torch.ones(512, 512, device=DEVICE).triu(1)),
    "arange_cmp": _fixed(lambda _: torch.arange(512, device=DEVICE)[:, None] >= torch.arange(512, device=DEVICE)[None]),
    "randint": _fixed(lambda _: torch.randint(0, 100, (4, 512), device=DEVICE)),
    "cumsum_i64": _fixed(lambda _: torch.ones(4, 512, device=DEVICE, dtype=torch.long).cumsum(-1)),
    "item": _fixed(ask_for_value),
    "grouped_mm": _grouped_mm,
    "grouped": _grouped,
    "sdpa_rank": _attention_of_rank,
    **dict.fromkeys(("depthwise", "depthwise_in_cudnn"), _depthwise),
    "logsumexp": _shaped(lambda x: torch.logsumexp(x, -1)),
    "log_sigmoid": _shaped(F.logsigmoid),
    "sdpa_by": _with_kernel,
    "learned_mask": _learned_mask,
    **OF_PARTS,
    **PRUNING,
    **AUTOCAST,
}

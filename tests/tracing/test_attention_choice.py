"""Which attention kernel CUDA runs, by dtype, head size, mask, grouped heads, dropout and card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops import DTYPES, attention

import memfit
from memfit.platform import H200, Platform
from memfit.tracing.kernels.attention import choose_backend
from memfit.tracing.tracer import Tracer, trace

RECORDED = Path(__file__).parents[1] / "data" / "h200-ops.json"
BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # torch.nn.attention.SDPBackend

A100 = Platform(arch=(8, 0), sm_count=108)
RTX4090 = Platform(arch=(8, 9), sm_count=128, max_threads_per_sm=1536)
RTX5090 = Platform(arch=(12, 0), sm_count=170, max_threads_per_sm=1536)
B200 = Platform(arch=(10, 0), sm_count=148)
T4 = Platform(arch=(7, 5), sm_count=40, max_threads_per_sm=1024)


def chosen(
    platform: Platform, dtype: str = "bf16", *, heads: int = 8, kv_heads: int | None = None, rows: int = 128,
    keys: int | None = None, head: int = 64, value_head: int | None = None, mask: bool = False, dropout: float = 0.0,
    causal: bool = True, train: bool = True, gqa: bool = True,
) -> str:  # fmt: skip
    kv, columns, kind = kv_heads or heads, keys or rows, DTYPES[dtype]

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(2, *shape, dtype=kind, device="meta", requires_grad=train)

    q, k, v = made(heads, rows, head), made(kv, columns, head), made(kv, columns, value_head or head)
    bias = torch.empty(2, 1, rows, columns, dtype=kind, device="meta") if mask else None
    return choose_backend(q, k, v, bias, dropout, causal and not mask, gqa and kv != heads, platform)


def recorded() -> list[dict[str, Any]]:
    return [p for p in json.loads(RECORDED.read_text())["probes"] if p["name"] == "sdpa"]


# -- as recorded -------------------------------------------------------------------------------------------------------


def test_every_choice_recorded_on_the_h200_is_made_again() -> None:
    wrong = []
    for probe in recorded():
        _, h, hkv, sq, sk, d, dv, dt, mask, causal, drop, grad, _ = probe["spec"]
        backend = chosen(
            H200, dt, heads=h, kv_heads=hkv, rows=sq, keys=sk, head=d, value_head=dv, mask=mask is not None,
            dropout=drop, causal=causal, train=grad,
        )  # fmt: skip
        if backend != BACKENDS[probe["choice"]]:
            wrong.append((probe["spec"], BACKENDS[probe["choice"]], backend))
    assert wrong == []


def test_output_and_gradients_have_the_strides_that_the_h200_gave_them() -> None:
    """The layout decides whether the reshape after attention is a view or a copy."""
    probes = recorded()
    strides: list[list[list[int]]] = []

    def job(_: Tracer) -> None:
        for probe in probes:
            call, inputs = attention(*probe["spec"])
            found = [call()]
            if inputs:
                found += torch.autograd.grad(found[0], inputs, torch.empty_like(found[0]))[:2]
            strides.append([list(tensor.stride()) for tensor in found])

    trace(job)
    wrong = [(p["spec"], p["strides"], s) for p, s in zip(probes, strides, strict=True) if p["strides"] != s]
    assert wrong == []


# -- the table: H200 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("mask", [False, True])
def test_hopper_runs_cudnn_for_16_bits_with_or_without_mask_and_groups(dtype: str, kv_heads: int, mask: bool) -> None:
    assert chosen(H200, dtype, kv_heads=kv_heads, mask=mask) == "cudnn"


@pytest.mark.parametrize("platform", [H200, A100, RTX4090, RTX5090, B200, T4])
@pytest.mark.parametrize(
    ("kv_heads", "backend"), [(8, "efficient"), (2, "math")], ids=["all heads: mem-efficient", "grouped heads: math"]
)
@pytest.mark.parametrize("mask", [False, True])
def test_fp32_runs_mem_efficient_unless_heads_are_grouped(
    platform: Platform, kv_heads: int, backend: str, mask: bool
) -> None:
    assert chosen(platform, "fp32", kv_heads=kv_heads, mask=mask) == backend


def test_expanded_heads_are_not_grouped() -> None:
    assert chosen(H200, "fp32", kv_heads=8, gqa=False) == "efficient"


@pytest.mark.parametrize(
    ("head", "backend"),
    [(64, "cudnn"), (128, "cudnn"), (256, "cudnn"), (65, "flash"), (264, "efficient"), (268, "math")],
)
def test_the_head_size_decides_on_hopper(head: int, backend: str) -> None:
    assert chosen(H200, head=head) == backend


@pytest.mark.parametrize(("head", "backend"), [(64, "efficient"), (68, "efficient"), (66, "math"), (512, "efficient")])
def test_fp32_wants_head_sizes_that_are_multiples_of_four(head: int, backend: str) -> None:
    assert chosen(H200, "fp32", head=head) == backend


def test_cudnn_takes_values_of_another_width_and_flash_does_not() -> None:
    assert chosen(H200, head=192, value_head=128) == "cudnn"
    assert chosen(A100, head=192, value_head=128) == "efficient"


def test_a_single_key_is_not_for_cudnn() -> None:
    assert chosen(H200, rows=1, keys=1, causal=False, train=False) == "flash"


def test_one_query_over_many_keys_stays_with_cudnn() -> None:
    assert chosen(H200, rows=1, keys=500, causal=False, train=False) == "cudnn"


@pytest.mark.parametrize(("cudnn", "backend"), [(90700, "flash"), (91500, "flash"), (91501, "cudnn"), (91900, "cudnn")])
def test_cudnn_goes_first_when_it_is_newer_than_9_15_0(cudnn: int, backend: str) -> None:
    assert chosen(Platform(cudnn=cudnn)) == backend


@pytest.mark.parametrize(("version", "backend"), [((2, 8), "flash"), ((2, 9), "cudnn"), ((2, 10), "cudnn")])
def test_before_2_11_the_torch_version_decides_whether_cudnn_goes_first(version: tuple[int, int], backend: str) -> None:
    assert chosen(Platform(torch=version, cudnn=91002)) == backend


@pytest.mark.parametrize(("cudnn", "backend"), [(91002, "cudnn"), (91100, "flash"), (91301, "flash"), (91400, "cudnn")])
def test_cudnn_9_11_to_9_13_does_not_do_dropout(cudnn: int, backend: str) -> None:
    assert chosen(Platform(torch=(2, 10), cudnn=cudnn), dropout=0.1) == backend


def test_older_cudnn_takes_heads_of_128_at_most() -> None:
    assert chosen(Platform(torch=(2, 9), cudnn=90900), head=160) == "flash"


def test_cudnn_is_not_for_deterministic_work() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(H200) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


# -- the table: other cards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", [A100, RTX4090, RTX5090])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_ampere_ada_and_consumer_blackwell_run_flash_for_16_bits(platform: Platform, dtype: str, kv_heads: int) -> None:
    assert chosen(platform, dtype, kv_heads=kv_heads) == "flash"


def test_a_mask_sends_ampere_to_mem_efficient_or_with_grouped_heads_to_math() -> None:
    assert chosen(A100, mask=True) == "efficient"
    assert chosen(A100, mask=True, kv_heads=2) == "math"


def test_flash_wants_a_square_for_causal_attention() -> None:
    assert chosen(A100, rows=64, keys=128, causal=True) == "efficient"
    assert chosen(A100, rows=64, keys=128, causal=False) == "flash"


@pytest.mark.parametrize("platform", [RTX4090, RTX5090, Platform(arch=(8, 6), sm_count=82, max_threads_per_sm=1536)])
def test_small_cards_do_not_train_wide_heads_with_flash(platform: Platform) -> None:
    assert chosen(platform, head=192) == "flash"
    assert chosen(platform, head=224) == "efficient"
    assert chosen(platform, head=224, train=False) == "flash"
    assert chosen(platform, head=256) == "flash"
    assert chosen(platform, head=256, dropout=0.1) == "efficient"
    assert chosen(A100, head=224) == "flash"
    assert chosen(A100, head=256, dropout=0.1) == "flash"


def test_no_gradients_are_asked_for_under_no_grad() -> None:
    with torch.no_grad():
        assert chosen(RTX4090, head=224, train=True) == "flash"


def test_turing_runs_mem_efficient_for_fp16_and_math_for_bf16() -> None:
    assert chosen(T4, "fp16") == "efficient"
    assert chosen(T4, "fp16", mask=True) == "efficient"
    assert chosen(T4, "fp16", kv_heads=2) == "math"
    assert chosen(T4, "bf16") == "math"


def test_data_centre_blackwell_runs_cudnn_up_to_heads_of_128() -> None:
    assert chosen(B200) == "cudnn"
    assert chosen(B200, head=256) == "flash"


def test_attention_without_a_batch_of_heads_is_math() -> None:
    q = torch.empty(2, 16, 64, dtype=torch.bfloat16, device="meta")
    assert choose_backend(q, q, q, None, 0.0, True, False, H200) == "math"


def test_fp64_is_math() -> None:
    q = torch.empty(2, 4, 16, 64, dtype=torch.float64, device="meta")
    assert choose_backend(q, q, q, None, 0.0, True, False, H200) == "math"


# -- what the choice costs ---------------------------------------------------------------------------------------------


def peak_of(dtype: str, kv_heads: int, platform: Platform = H200) -> int:
    """Bytes alive after a forward of 16 heads of 64 over 512 rows, inputs left out."""
    live = 0

    def job(tracer: Tracer) -> None:
        nonlocal live

        def make(heads: int) -> torch.Tensor:
            made = torch.empty(1, 512, heads, 64, dtype=DTYPES[dtype], device="cuda")
            return made.transpose(1, 2).requires_grad_()

        q, k, v = make(16), make(kv_heads), make(kv_heads)
        before = len(tracer.trace.requested)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 16)
        freed = {s for a, s in tracer.trace.events() if a == 1}
        kept = [b for b in range(before, len(tracer.trace.requested)) if b not in freed]
        live = sum(tracer.trace.requested[b] for b in kept if "workspace (" not in tracer.trace.op(b))
        del out

    trace(job, platform=platform)
    return live


def test_fused_kernels_keep_output_and_row_statistics() -> None:
    output, statistics = 16 * 512 * 64, 16 * 512
    assert peak_of("bf16", 16) == 2 * output + 4 * statistics + 16  # cuDNN: seed and offset
    assert peak_of("bf16", 16, A100) == 2 * output + 4 * statistics + 24  # flash: a pair and a number
    assert peak_of("fp32", 16) == 4 * output + 4 * statistics


def test_math_keeps_scaled_queries_expanded_keys_and_values_and_the_softmax() -> None:
    rows, scores = 16 * 512 * 64, 16 * 512 * 512
    assert peak_of("fp32", 4) == 4 * (rows + rows + rows + scores + rows)  # q, k, v, softmax, output


@pytest.mark.parametrize(("order", "copies"), [((0, 2, 1, 3), 0), ((1, 2, 0, 3), 1)])
def test_mem_efficient_attention_copies_a_gradient_that_does_not_lie_as_its_result(order: Any, copies: int) -> None:
    """nn.MultiheadAttention asks for [S, B, H, D]: what comes back lies so."""
    shape = {(0, 2, 1, 3): (2, 64, 8, 64), (1, 2, 0, 3): (64, 2, 8, 64)}[order]

    def step() -> None:
        q = torch.randn(2, 8, 64, 64, device="cuda", requires_grad=True)
        out = F.scaled_dot_product_attention(q, q, q)
        out.backward(torch.ones(shape, device="cuda").permute(order))

    made = memfit.trace(step).trace
    labels = [made.op(block) for block in range(len(made.requested))]
    assert labels.count("mem-efficient backward gradient, as the kernel reads it") == copies

"""Autocast on the traced device does what it does on CUDA: which ops are cast, which casts are kept, and how long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reading import cases, sizes_in
from torch import nn
from torch.amp import autocast_mode
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.events import Action, Trace
from memfit.platform import Platform
from memfit.tracing.tracer import Tracer, trace

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Tensor = torch.Tensor
attention = F.scaled_dot_product_attention


def region(dtype: torch.dtype = BF16, **options: Any) -> AbstractContextManager[None]:
    return torch.autocast("cuda", dtype=dtype, **options)


def wide(*shape: int) -> Tensor:
    return torch.empty(*shape, device="cuda")


def narrow(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def classes(count: int) -> Tensor:
    return torch.zeros(count, device="cuda", dtype=torch.long)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(wide(*shape))


def dtype_of(make: Callable[[], Any], dtype: torch.dtype = BF16) -> torch.dtype:
    """Of what a function returns inside a region."""
    found: list[torch.dtype] = []

    def job(_: Tracer) -> None:
        with region(dtype):
            found.append(make().dtype)

    trace(job)
    return found[0]


# -- lists of ops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@cases(
    "op",
    linear=lambda: F.linear(wide(2, 4), wide(3, 4), wide(3)),
    linear_by_name=lambda: F.linear(input=wide(2, 4), weight=wide(3, 4)),
    linear_module=lambda: nn.Linear(4, 3, device="cuda")(wide(2, 4)),
    matmul=lambda: torch.matmul(wide(2, 4), wide(4, 3)),
    operator=lambda: wide(2, 4) @ wide(4, 3),
    method=lambda: wide(2, 4).matmul(wide(4, 3)),
    mm=lambda: torch.mm(wide(2, 4), wide(4, 3)),
    bmm=lambda: torch.bmm(wide(1, 2, 4), wide(1, 4, 3)),
    addmm=lambda: torch.addmm(wide(3), wide(2, 4), wide(4, 3)),
    baddbmm=lambda: torch.baddbmm(wide(1, 2, 3), wide(1, 2, 4), wide(1, 4, 3)),
    einsum=lambda: torch.einsum("ij,kj->ik", wide(2, 4), wide(3, 4)),
    conv1d=lambda: F.conv1d(wide(1, 2, 8), wide(3, 2, 2)),
    conv2d=lambda: nn.Conv2d(2, 3, 2, device="cuda")(wide(1, 2, 8, 8)),
    attention=lambda: attention(wide(1, 2, 8, 64), wide(1, 2, 8, 64), wide(1, 2, 8, 64)),
)
def test_products_and_attention_run_in_the_lower_precision(op: Callable[[], Tensor], dtype: torch.dtype) -> None:
    assert dtype_of(op, dtype) == dtype


@cases(
    "op",
    layer_norm=lambda: F.layer_norm(narrow(2, 8), (8,), wide(8), wide(8)),
    layer_norm_module=lambda: nn.LayerNorm(8, device="cuda")(narrow(2, 8)),
    group_norm=lambda: F.group_norm(narrow(2, 8), 2),
    exp=lambda: narrow(2, 8).exp(),
    log=lambda: torch.log(narrow(2, 8)),
    power=lambda: narrow(2, 8).pow(2),
    power_by_operator=lambda: narrow(2, 8) ** 2,
    power_of_a_number=lambda: 2 ** narrow(2, 8),
    rsqrt=lambda: torch.rsqrt(narrow(2, 8)),
    softplus=lambda: F.softplus(narrow(2, 8)),
    mse_loss=lambda: F.mse_loss(narrow(2, 8), narrow(2, 8)),
    nll_loss=lambda: F.nll_loss(narrow(2, 8), classes(2)),
    cross_entropy=lambda: F.cross_entropy(narrow(2, 8), classes(2)),
    cross_entropy_module=lambda: nn.CrossEntropyLoss(ignore_index=-1)(narrow(2, 8), classes(2)),
    cosine_similarity=lambda: F.cosine_similarity(narrow(2, 8), narrow(2, 8)),
    logsumexp=lambda: torch.logsumexp(narrow(2, 8), -1),
)
def test_norms_losses_and_powers_run_in_fp32(op: Callable[[], Tensor]) -> None:
    assert dtype_of(op) == FP32


@pytest.mark.parametrize(("version", "dtype"), [((2, 11), BF16), ((2, 12), FP32)])
def test_rms_norm_is_on_the_list_from_torch_2_12_on(version: tuple[int, int], dtype: torch.dtype) -> None:
    def job(_: Tracer) -> None:
        with region():
            assert F.rms_norm(narrow(2, 8), (8,), narrow(8)).dtype == dtype

    trace(job, platform=Platform(torch=version))


def test_a_loss_that_is_unsafe_in_half_precision_is_refused_as_on_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        dtype_of(lambda: F.binary_cross_entropy(narrow(2, 8), narrow(2, 8)))


@cases(
    "op",
    softmax=lambda: F.softmax(narrow(2, 8), -1),
    softmax_of_torch=lambda: torch.softmax(narrow(2, 8), -1),
    softmax_method=lambda: narrow(2, 8).softmax(-1),
    log_softmax=lambda: F.log_softmax(narrow(2, 8), -1),
    sum=lambda: narrow(2, 8).sum(),
    sum_of_rows=lambda: torch.sum(narrow(2, 8), -1),
    cumsum=lambda: narrow(2, 8).cumsum(-1),
    prod=lambda: narrow(2, 8).prod(),
)
def test_softmax_and_sums_have_fp32_results(op: Callable[[], Tensor]) -> None:
    assert dtype_of(op) == FP32


@cases(
    "op",
    softmax=lambda: F.softmax(wide(2, 8), -1, dtype=BF16),
    softmax_of_torch=lambda: torch.softmax(wide(2, 8), -1, BF16),
    sum=lambda: narrow(2, 8).sum(dtype=BF16),
)
def test_a_dtype_that_is_asked_for_is_kept(op: Callable[[], Tensor]) -> None:
    assert dtype_of(op) == BF16


@cases(
    "op",
    addcmul=lambda: torch.addcmul(wide(8), narrow(8), narrow(8)),
    atan2=lambda: torch.atan2(narrow(8), wide(8)),
    dot=lambda: torch.dot(narrow(8), wide(8)),
    index_put=lambda: narrow(8).index_put((classes(1),), wide(1)),
    scatter_add=lambda: narrow(8).scatter_add(0, classes(8), wide(8)),
)
def test_some_ops_take_the_widest_of_their_inputs(op: Callable[[], Tensor]) -> None:
    assert dtype_of(op) == FP32


def test_ops_of_the_widest_input_stay_narrow_where_all_are() -> None:
    assert dtype_of(lambda: torch.addcmul(narrow(8), narrow(8), narrow(8))) == BF16


@cases(
    "op",
    add=lambda: narrow(8) + narrow(8),
    gelu=lambda: F.gelu(narrow(8)),
    silu=lambda: F.silu(narrow(8)),
    mean=lambda: narrow(8).mean(),
    sqrt=lambda: narrow(8).sqrt(),
    dropout=lambda: F.dropout(narrow(8), 0.5),
    copy=lambda: narrow(8).clone(),
)
def test_other_ops_run_in_the_dtype_of_their_inputs(op: Callable[[], Tensor]) -> None:
    assert dtype_of(op) == BF16


@cases(
    "op",
    embedding=lambda: F.embedding(classes(4), wide(10, 8)),
    gelu=lambda: F.gelu(wide(8)),
    sum_of_two_dtypes=lambda: narrow(8) + wide(8),
    joined=lambda: torch.cat([narrow(8), wide(8)]),
)
def test_what_is_wide_stays_wide_in_other_ops(op: Callable[[], Tensor]) -> None:
    assert dtype_of(op) == FP32


@cases(
    "op",
    doubles=(lambda: F.linear(wide(2, 4).double(), wide(3, 4).double()), torch.float64),
    whole_numbers=(lambda: classes(8).sum(), torch.int64),
    of_the_host=(lambda: F.linear(torch.zeros(2, 4), torch.zeros(3, 4)), FP32),
)
def test_doubles_whole_numbers_and_the_host_s_tensors_are_left_alone(
    op: tuple[Callable[[], Tensor], torch.dtype],
) -> None:
    assert dtype_of(op[0]) == op[1]


def test_outside_of_a_region_nothing_is_cast() -> None:
    def job(_: Tracer) -> None:
        with region():
            pass
        assert F.linear(wide(2, 4), wide(3, 4)).dtype == FP32
        assert narrow(2, 8).softmax(-1).dtype == BF16

    trace(job)


def test_cross_entropy_has_its_log_softmax_in_the_lower_precision_and_a_copy_in_fp32() -> None:
    """The composite tells log_softmax its dtype; only the loss itself is on the list."""

    def job(tracer: Tracer) -> None:
        logits, target = narrow(4, 100), classes(4)
        with torch.no_grad(), region():
            tracer.trace.mark("loss")
            loss = F.cross_entropy(logits, target)
            tracer.trace.mark("end")
            assert loss.dtype == FP32

    assert sizes_in(trace(job), "loss")[:2] == [800, 1600]


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (lambda: torch.linalg.vector_norm(narrow(2, 8)), FP32),
        (lambda: torch.linalg.vecdot(wide(2, 8), wide(2, 8)), BF16),
        (lambda: torch.linalg.multi_dot([wide(4, 4)] * 3), BF16),
        (lambda: narrow(2, 8).norm(), FP32),
        (lambda: F.normalize(narrow(2, 8)), FP32),
        (lambda: 1 / narrow(8), FP32),
        (lambda: F.cross_entropy(narrow(2, 8), classes(2), label_smoothing=0.1), FP32),
        (lambda: nn.MultiheadAttention(8, 2, device="cuda")(*[wide(3, 1, 8)] * 3)[0], BF16),
        (lambda: torch.softmax(input=narrow(2, 8), dim=-1), FP32),
    ],
    ids=["vector_norm", "vecdot", "multi_dot", "norm", "normalize", "1/x", "smoothed", "attention", "softmax"],
)
def test_other_ways_to_call_ops_of_the_lists_are_known(op: Callable[[], Tensor], dtype: torch.dtype) -> None:
    assert dtype_of(op) == dtype


# -- casts and their lives ---------------------------------------------------------------------------------------------


CASTS = ("aten._to_copy", "aten.to.")  # in inference mode the dispatcher does not take `to` apart


def casts(made: Trace) -> list[tuple[int, str, str]]:
    """Every cast: its bytes, the phase in which it is born, and the one in which it dies."""
    phase, born, died = "", {}, {}
    for action, subject in made.events():
        if action == Action.MARK:
            phase = made.marks[subject].phase
        elif action == Action.ALLOC and made.op(subject).startswith(CASTS):
            born[subject] = phase
        elif action == Action.FREE and subject in born:
            died[subject] = phase
    return [(made.requested[block], phase, died.get(block, "never")) for block, phase in born.items()]


def casts_of(job: Callable[[Callable[[str], None]], object]) -> list[tuple[int, str, str]]:
    """Of a job that is given a function to mark its phases with. It ends in a phase of its own."""

    def run(tracer: Tracer) -> None:
        job(lambda name: tracer.trace.mark(name))
        tracer.trace.mark("end")

    return casts(trace(run))


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
def test_the_cast_of_a_weight_is_made_once_a_region_and_dropped_at_its_end(grad: Callable[[], Any]) -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = weight(4, 8), narrow(2, 8)
        with grad():
            for name in ("first", "second"):
                with region():
                    mark(f"{name} use")
                    F.linear(x, w)
                    mark(f"{name} reuse")
                    F.linear(x, w)
                    torch.mm(x, w.t())  # a view is another tensor
                    mark(f"{name} exit")

    assert casts_of(job) == [
        (64, "first use", "first exit"), (64, "first reuse", "first reuse"),
        (64, "second use", "second exit"), (64, "second reuse", "second reuse"),
    ]  # fmt: skip


def test_a_cast_that_was_made_without_gradients_serves_a_pass_with_them() -> None:
    """As torch 2.13 does it; older ones left the weight without a gradient."""

    def passes(device: str) -> list[bool]:
        layer, x = nn.Linear(8, 8, bias=False).to(device), torch.ones(4, 8, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            with torch.no_grad():
                first = layer(x)
            second = layer(x)
        second.sum().backward()
        return [first.requires_grad, second.requires_grad, layer.weight.grad is not None]

    planned: list[bool] = []
    memfit.trace(lambda: planned.extend(passes("cuda")))
    assert planned == passes("cpu") == [False, True, True]


def test_inference_mode_keeps_no_casts() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = weight(4, 8), narrow(2, 8)
        with torch.inference_mode(), region():
            for name in ("first", "second"):
                mark(name)
                F.linear(x, w)
            mark("exit")

    assert casts_of(job) == [(64, "first", "first"), (64, "second", "second")]


@cases(
    "tensor",
    frozen=lambda: wide(4, 8),
    computed=lambda: weight(4, 8) * 1,
    view=lambda: weight(4, 8).view(4, 8),
    input_that_wants_a_gradient_in_fp16=lambda: narrow(4, 8, dtype=FP16).requires_grad_(),
)
def test_only_fp32_leaves_that_want_gradients_have_their_cast_kept(tensor: Callable[[], Tensor]) -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = tensor(), narrow(2, 8)
        with torch.no_grad(), region():
            for name in ("first", "second"):
                mark(name)
                F.linear(x, w)
            mark("exit")

    assert casts_of(job) == [(64, "first", "first"), (64, "second", "second")]


def test_without_its_cache_a_region_keeps_no_casts() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = weight(4, 8), narrow(2, 8)
        with torch.no_grad(), region(cache_enabled=False):
            for name in ("first", "second"):
                mark(name)
                F.linear(x, w)

    assert casts_of(job) == [(64, "first", "first"), (64, "second", "second")]


def test_a_cast_to_fp32_is_not_kept() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w = narrow(8).requires_grad_()
        with torch.no_grad(), region():
            for name in ("first", "second"):
                mark(name)
                F.layer_norm(wide(2, 8), (8,), w)

    assert casts_of(job) == [(32, "first", "first"), (32, "second", "second")]


def test_a_frozen_weight_s_cast_is_held_by_autograd_once_for_each_use() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = wide(4, 8), narrow(2, 8).requires_grad_()
        with region():
            mark("forward")
            loss = F.linear(x, w).mean() + F.linear(x, w).mean()
        mark("backward")
        loss.backward()

    assert casts_of(job) == [(64, "forward", "backward"), (64, "forward", "backward")]


def test_in_training_a_weight_s_cast_lives_on_until_backward_has_used_it() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = weight(4, 8), narrow(2, 8).requires_grad_()
        with region():
            mark("forward")
            loss = F.linear(x, w).mean()
        mark("outside")
        mark("backward")
        loss.backward()
        mark("end")

    found = casts_of(job)
    assert found[0] == (64, "forward", "backward")
    assert found[1:] == [(128, "backward", "end")]  # the gradient, cast to the weight's fp32, is its .grad


def test_where_the_input_wants_no_gradient_the_cast_dies_with_the_region() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = weight(4, 8), narrow(2, 8)
        with region():
            mark("forward")
            loss = F.linear(x, w).mean()
            mark("exit")
        mark("backward")
        loss.backward()

    assert casts_of(job)[0] == (64, "forward", "exit")


def test_attention_in_inference_mode_is_cast_before_its_kernel_is_chosen() -> None:
    def job(_: Tracer) -> None:
        with torch.inference_mode(), region():
            assert attention(*[wide(1, 2, 8, 64)] * 3).dtype == BF16
            assert wide(2, 8).softmax(-1).dtype == FP32

    made = trace(job)
    assert any("cudnn" in made.op(block) for block in range(len(made.requested)))


# -- regions in regions ------------------------------------------------------------------------------------------------


def test_only_the_outermost_region_s_end_drops_casts() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = weight(4, 8), narrow(2, 8)
        with torch.no_grad(), region():
            with region():
                mark("inner")
                F.linear(x, w)
            mark("outer")
            F.linear(x, w)
            mark("exit")

    assert casts_of(job) == [(64, "inner", "exit")]


def test_in_a_disabled_region_nothing_is_cast_and_what_was_kept_stays() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w = weight(4, 8)
        with torch.no_grad(), region():
            mark("before")
            F.linear(narrow(2, 8), w)
            with region(enabled=False):
                mark("disabled")
                assert F.linear(wide(2, 8), w).dtype == FP32
                assert not torch.is_autocast_enabled("cuda")
            mark("after")
            assert F.linear(narrow(2, 8), w).dtype == BF16
            mark("exit")

    assert casts_of(job) == [(64, "before", "exit")]


def test_an_enabled_region_inside_a_disabled_one_casts() -> None:
    def job(_: Tracer) -> None:
        with region(enabled=False), region(FP16):
            assert F.linear(wide(2, 4), wide(3, 4)).dtype == FP16

    trace(job)


def test_a_region_of_the_host_leaves_the_gpu_alone_and_the_other_way_round() -> None:
    def job(_: Tracer) -> None:
        with torch.autocast("cpu", dtype=BF16):
            assert F.linear(wide(2, 4), wide(3, 4)).dtype == FP32
            assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == BF16
        with region():
            assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == FP32

    trace(job)


def test_a_region_may_be_a_decorator() -> None:
    def job(_: Tracer) -> None:
        @torch.autocast("cuda", dtype=BF16)
        def product(x: Tensor) -> Tensor:
            return x @ x

        assert product(wide(4, 4)).dtype == BF16

    trace(job)


# -- order -------------------------------------------------------------------------------------------------------------


@cases(
    "op",
    linear=(lambda: F.linear(wide(2, 8), wide(4, 8), wide(4)), [8, 64, 32]),
    addmm=(lambda: torch.addmm(wide(4), wide(2, 8), wide(8, 4)), [64, 32, 8]),
    matmul=(lambda: wide(2, 8) @ wide(8, 4), [64, 32]),
    layer_norm=(lambda: F.layer_norm(narrow(2, 8), (8,), narrow(8), wide(8)), [32, 64]),
    attention=(lambda: attention(wide(1, 8, 64), wide(1, 16, 64), wide(1, 16, 64)), [2048, 2048, 1024]),
)  # fmt: skip
def test_arguments_are_cast_from_the_last_to_the_first(op: tuple[Callable[[], Tensor], list[int]]) -> None:
    def job(mark: Callable[[str], None]) -> None:
        with torch.no_grad(), region():
            op[0]()

    assert [size for size, *_ in casts_of(job)][: len(op[1])] == op[1]


# -- checkpointing -----------------------------------------------------------------------------------------------------


def two_blocks(mark: Callable[[str], None], run: Callable[..., Tensor]) -> None:
    """Two layers whose weights are told apart by their size; the input is a whole batch in fp32."""
    first, second = weight(32, 16), weight(64, 32)
    x = wide(2, 16).requires_grad_()
    with region():
        mark("forward")
        hidden = run(lambda h: F.linear(h, first).relu(), x)
        hidden = run(lambda h: F.linear(h, second).relu(), hidden)
        loss = hidden.mean()
        del hidden
    mark("backward")
    loss.backward()


def recompute(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


FIRST, SECOND = 2 * 32 * 16, 2 * 64 * 32


def weight_casts(found: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    return [cast for cast in found if cast[0] in (FIRST, SECOND)]


def test_plain_blocks_hold_their_casts_through_backward() -> None:
    found = weight_casts(casts_of(lambda mark: two_blocks(mark, lambda block, x: block(x))))
    assert found == [(FIRST, "forward", "backward"), (SECOND, "forward", "backward")]


def test_checkpointed_blocks_cast_again_in_backward_the_last_one_first() -> None:
    found = weight_casts(casts_of(lambda mark: two_blocks(mark, recompute)))
    assert [size for size, born, _ in found if born == "forward"] == [FIRST, SECOND]
    assert [size for size, born, _ in found if born == "backward"] == [SECOND, FIRST]


def test_a_checkpointed_block_s_casts_are_gone_before_the_next_one_s_are_made() -> None:
    made = trace(lambda tracer: two_blocks(lambda name: tracer.trace.mark(name), recompute))
    backward = next(i for i, mark in enumerate(made.marks) if mark.phase == "backward")
    start = next(i for i, (a, s) in enumerate(made.events()) if a == Action.MARK and s == backward)
    words = [
        ("made" if action == Action.ALLOC else "gone", made.requested[subject])
        for action, subject in list(made.events())[start:]
        if action in (Action.ALLOC, Action.FREE) and made.op(subject).startswith(CASTS)
    ]
    assert [word for word in words if word[1] in (FIRST, SECOND)] == [
        ("made", SECOND), ("gone", SECOND), ("made", FIRST), ("gone", FIRST),
    ]  # fmt: skip


def test_the_casts_of_checkpointed_blocks_die_with_the_forward_region() -> None:
    def job(mark: Callable[[str], None]) -> None:
        w, x = weight(4, 8), narrow(2, 8).requires_grad_()
        with region():
            mark("forward")
            loss = recompute(lambda h: F.linear(h, w), x).mean()
            mark("exit")
        mark("backward")
        loss.backward()

    assert [cast[1:] for cast in casts_of(job) if cast[0] == 64] == [("forward", "exit"), ("backward", "backward")]


# -- what code asks of torch -------------------------------------------------------------------------------------------


def test_torch_answers_for_cuda_inside_a_region_and_out_of_it() -> None:
    def job(tracer: Tracer) -> None:
        assert not torch.is_autocast_enabled("cuda")
        assert torch.amp.is_autocast_available("cuda")
        for dtype in (BF16, FP16):
            with region(dtype):
                assert torch.is_autocast_enabled("cuda")
                assert torch.is_autocast_enabled()
                assert torch.is_autocast_enabled(tracer.device.type)
                assert not torch.is_autocast_enabled("cpu")
                assert torch.get_autocast_dtype("cuda") == dtype
                assert torch.get_autocast_dtype(tracer.device.type) == dtype
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == FP16  # torch's default

    trace(job)


def test_without_a_dtype_a_region_is_in_fp16() -> None:
    def job(_: Tracer) -> None:
        with torch.autocast("cuda"):
            assert F.linear(wide(2, 4), wide(3, 4)).dtype == FP16

    trace(job)


def test_a_region_may_name_the_device_s_own_type() -> None:
    def job(tracer: Tracer) -> None:
        with torch.autocast(wide(1).device.type, dtype=BF16):
            assert F.linear(wide(2, 4), wide(3, 4)).dtype == BF16

    trace(job)


def test_the_state_is_as_before_after_an_exception_inside_a_region() -> None:
    def job(_: Tracer) -> None:
        with pytest.raises(ZeroDivisionError), region():
            raise ZeroDivisionError
        assert not torch.is_autocast_enabled("cuda")
        assert F.linear(wide(2, 4), wide(3, 4)).dtype == FP32

    trace(job)


@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype")
def test_the_older_name_of_the_dtype_answers_too() -> None:
    def job(_: Tracer) -> None:
        with region():
            assert torch.get_autocast_gpu_dtype() == BF16

    trace(job)


NAMES = [
    (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype"), (torch, "set_autocast_enabled"),
    (torch, "set_autocast_dtype"), (torch, "clear_autocast_cache"), (torch.amp, "is_autocast_available"),
    (autocast_mode, "is_autocast_available"), (torch.cuda, "is_bf16_supported"),
]  # fmt: skip


class Stop(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_torch_and_transformers_are_as_they_were_after_a_trace(fails: bool) -> None:
    from transformers.utils import generic

    before = [getattr(owner, name) for owner, name in NAMES], generic.maybe_autocast.__code__
    inside: list[bool] = []

    def job(_: Tracer) -> None:
        inside.append(torch.is_autocast_enabled is not before[0][0])
        with region():
            F.linear(narrow(2, 8), weight(4, 8))
            if fails:
                raise Stop

    with pytest.raises(Stop) if fails else nullcontext():
        trace(job)
    assert inside == [True]
    assert ([getattr(owner, name) for owner, name in NAMES], generic.maybe_autocast.__code__) == before
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") == FP16
    assert F.linear(torch.zeros(2, 4, device="meta"), torch.zeros(3, 4, device="meta")).dtype == FP32


def test_a_trace_inside_a_region_of_the_host_leaves_that_region_as_it_was() -> None:
    with torch.autocast("cpu", dtype=BF16):
        trace(lambda _: F.linear(wide(2, 4), wide(3, 4)))
        assert torch.is_autocast_enabled("cpu")
        assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == BF16


def test_a_region_that_transformers_switches_off_is_off() -> None:
    """Rotary tables and the like are computed in fp32 whatever the region around them says."""
    from transformers.utils.generic import maybe_autocast

    def job(_: Tracer) -> None:
        with region():
            with maybe_autocast(device_type="meta", enabled=False):
                assert (wide(2, 4) @ wide(4, 3)).dtype == FP32
            assert (wide(2, 4) @ wide(4, 3)).dtype == BF16

    trace(job)


def test_casts_of_einsum_s_operands_end_in_the_order_of_the_operands() -> None:
    """As recorded on an H200: torch keeps them in a vector, which lets go of the first one first."""

    def job(_: Tracer) -> None:
        first, second = wide(3, 1024), wide(1024, 7)
        with region():
            torch.einsum("ik,kj->ij", first, second)

    made = trace(job)

    casts = [made.requested.index(size) for size in (2 * 3 * 1024, 2 * 1024 * 7)]
    assert [block for action, block in made.events() if action == Action.FREE and block in casts] == casts

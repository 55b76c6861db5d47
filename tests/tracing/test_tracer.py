"""What a trace of any callable writes down: storages, from their birth to their death."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops import canonical
from reading import as_story, born_in, by_op, cases, sizes_in, story
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import TraceError
from memfit.events import Action, Trace
from memfit.platform import Platform
from memfit.tracing.kernels.products import cublas_bytes, cublaslt_bytes
from memfit.tracing.tracer import Tracer, trace
from memfit.units import MiB

CUDA = "cuda"
Job = Callable[[Tracer], object]


# -- storages ----------------------------------------------------------------------------------------------------------


def test_a_tensor_is_allocated_with_the_bytes_it_asks_for_and_freed_when_it_dies() -> None:
    assert story(lambda _: torch.empty(3, 5, device=CUDA)) == "+60"

    def job(_: Tracer) -> None:
        x = torch.empty(3, 5, device=CUDA)
        del x

    assert story(job) == "+60 -0"


@cases(
    "view",
    flat=lambda x: x.view(-1),
    transposed=lambda x: x.t(),
    slice=lambda x: x[1:, ::2],
    expanded=lambda x: x.unsqueeze(0).expand(9, -1, -1),
    chunks=lambda x: x.chunk(2),
    detached=lambda x: x.detach(),
    reshaped=lambda x: x.reshape(4, 2),
    contiguous=lambda x: x.contiguous(),
    same_dtype=lambda x: x.to(torch.float32),
    other_dtype=lambda x: x.view(torch.int32),
)
def test_a_view_allocates_nothing(view: Callable[[torch.Tensor], object]) -> None:
    def job(_: Tracer) -> None:
        x = torch.empty(2, 4, device=CUDA)
        view(x)

    assert story(job) == "+32 -0"


@cases(
    "change",
    add=lambda x: x.add_(1),
    relu=lambda x: x.relu_(),
    zero=lambda x: x.zero_(),
    copy=lambda x: x.copy_(torch.empty(2, 4)),
    item=lambda x: x.__setitem__(0, torch.ones(4)),
    out=lambda x: torch.exp(x, out=x),
    normal=lambda x: x.normal_(),
)
def test_an_op_in_place_allocates_nothing(change: Callable[[torch.Tensor], object]) -> None:
    def job(_: Tracer) -> None:
        x = torch.empty(2, 4, device=CUDA)
        change(x)

    assert story(job) == "+32 -0"


def test_a_storage_lives_as_long_as_any_view_of_it() -> None:
    def job(tracer: Tracer) -> None:
        x = torch.empty(8, device=CUDA)
        row = x[:2]
        del x
        tracer.trace.mark("tensor gone")
        del row
        tracer.trace.mark("view gone")

    assert story(job) == "+32 [tensor gone] -0 [view gone]"


def test_what_backward_needs_lives_until_backward_has_used_it() -> None:
    def job(tracer: Tracer) -> None:
        x = torch.empty(100, device=CUDA, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        del y
        tracer.trace.mark("backward")
        loss.backward()
        tracer.trace.mark("end")

    #                           x    y    loss           1   grad    y      1
    assert canonical(story(job)) == "+400 +400 +4 [backward] +4 +400 -1 -3 [end] -0 -2 -4"


def test_a_result_that_is_returned_is_not_freed_in_the_trace() -> None:
    kept: list[torch.Tensor] = []

    def job(_: Tracer) -> None:
        kept.append(torch.empty(8, device=CUDA))

    made = trace(job)
    kept.clear()
    assert as_story(made) == "+32"


def test_a_tensor_without_elements_allocates_nothing() -> None:
    def job(_: Tracer) -> None:
        torch.empty(0, device=CUDA)
        torch.ones(3, device=CUDA)[3:] * torch.empty(4, 0, device=CUDA)

    assert story(job) == "+12 -0"


def test_tensors_of_the_host_are_not_counted() -> None:
    def job(_: Tracer) -> None:
        x = torch.ones(1000)
        (x * 2).sum()

    assert story(job) == ""


def test_moving_between_dtypes_is_a_new_storage() -> None:
    def job(_: Tracer) -> None:
        x = torch.empty(8, device=CUDA)
        x = x.bfloat16()
        x = x.double()

    assert story(job) == "+32 +16 -0 +64 -1 -2"


def test_the_allocator_s_cache_is_emptied_where_the_code_says_so() -> None:
    def job(_: Tracer) -> None:
        x = torch.empty(8, device=CUDA)
        del x
        torch.cuda.empty_cache()

    assert story(job) == "+32 -0 (empty cache)"


# -- "cuda" ------------------------------------------------------------------------------------------------------------


@cases(
    "make",
    name=lambda: torch.zeros(6, device="cuda"),
    name_and_number=lambda: torch.zeros(6, device="cuda:0"),
    device=lambda: torch.zeros(6, device=torch.device("cuda")),
    randn=lambda: torch.randn(6, device=CUDA),
    full=lambda: torch.full((6,), 1.0, device=CUDA),
    arange=lambda: torch.arange(6, device=CUDA, dtype=torch.float32),
    cuda_method=lambda: torch.ones(6).cuda(),
    cuda_method_with_number=lambda: torch.ones(6).cuda(0),
    to=lambda: torch.ones(6).to("cuda"),
    to_device=lambda: torch.ones(6).to(torch.device("cuda")),
    to_with_dtype=lambda: torch.ones(6, dtype=torch.float64).to("cuda", torch.float32),
    to_by_keywords=lambda: torch.ones(6, dtype=torch.float64).to(device="cuda", dtype=torch.float32),
    to_non_blocking=lambda: torch.ones(6).to("cuda", non_blocking=True),
    as_tensor=lambda: torch.as_tensor(torch.ones(6), device=CUDA),
    parameter=lambda: nn.Parameter(torch.ones(6)).cuda(),
)
def test_cuda_means_the_traced_device(make: Callable[[], torch.Tensor]) -> None:
    assert story(lambda _: make()) == "+24"


def test_a_cuda_device_may_be_made_with_its_number() -> None:
    assert story(lambda _: torch.zeros(6, device=torch.device("cuda", 0))) == "+24"


@cases("make", factory=lambda: torch.zeros(6, device=0), to=lambda: torch.ones(6).to(0))
def test_a_number_is_the_gpu_of_that_number(make: Callable[[], torch.Tensor]) -> None:
    assert story(lambda _: make()) == "+24"


@cases(
    "make",
    tensor=lambda: torch.tensor([1.0, 2.0, 3.0], device=CUDA),
    as_tensor=lambda: torch.as_tensor([1.0, 2.0, 3.0], device=CUDA),
    asarray=lambda: torch.asarray([1.0, 2.0, 3.0], device=CUDA),
)
def test_a_tensor_of_python_numbers_is_allocated(make: Callable[[], torch.Tensor]) -> None:
    assert story(lambda _: make()) == "+12"


def test_the_default_device_may_be_cuda() -> None:
    def job(_: Tracer) -> None:
        with torch.device("cuda"):
            nn.Linear(4, 2)

    assert canonical(story(job)) == "+32 +8 -0 -1"


def test_what_is_on_the_gpu_already_is_not_moved_again() -> None:
    def job(_: Tracer) -> None:
        x = torch.empty(8, device=CUDA)
        assert x.to("cuda") is x
        assert x.cuda() is x

    assert story(job) == "+32 -0"


def test_the_traced_device_is_a_parameter() -> None:
    def job(tracer: Tracer) -> None:
        x = torch.ones(1000, device=CUDA, requires_grad=True)
        assert x.device == tracer.device
        h = x * 2
        loss = (h * 3 + F.dropout(h, 0.1)).sum()
        loss.backward()

    assert canonical(story(job, device="cpu")) == canonical(story(job, device="meta"))


def test_waiting_for_the_gpu_is_no_event() -> None:
    def job(_: Tracer) -> None:
        torch.cuda.synchronize()
        torch.cuda.manual_seed_all(0)
        torch.cuda.reset_peak_memory_stats()

    assert story(job) == ""


# -- models of the host ------------------------------------------------------------------------------------------------


def model_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False))


@cases("move", to=lambda m: m.to("cuda"), cuda=lambda m: m.cuda(), to_device=lambda m: m.to(torch.device("cuda:0")))
def test_a_model_built_on_meta_before_the_trace_is_allocated_when_moved_in_module_order(
    move: Callable[[nn.Module], nn.Module],
) -> None:
    model = model_on_meta()
    assert story(lambda _: move(model)) == "+128 +32 +32 +32 +512"


def test_a_real_model_of_the_host_is_moved_as_one_built_on_meta_is() -> None:
    real = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False))
    assert story(lambda _: real.to("cuda")) == "+128 +32 +32 +32 +512"


def test_moving_a_model_and_its_dtype_at_once_allocates_the_new_dtype_only() -> None:
    model = model_on_meta()
    assert story(lambda _: model.to("cuda", torch.bfloat16)) == "+64 +16 +16 +16 +256"


def test_buffers_are_moved_after_the_parameters_of_their_module() -> None:
    with torch.device("meta"):
        norm = nn.BatchNorm1d(10)
    assert story(lambda _: norm.to("cuda")) == "+40 +40 +40 +40 +8"


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_are_allocated_once_and_stay_tied() -> None:
    with torch.device("meta"):
        model = tied_model()

    def job(_: Tracer) -> None:
        model.to("cuda")
        assert model[0].weight is model[1].weight

    assert story(job) == "+160"


def test_tied_weights_of_a_real_model_are_allocated_once() -> None:
    assert story(lambda _: tied_model().to("cuda")) == "+160"


def test_a_parameter_of_a_real_model_is_the_same_object_after_moving() -> None:
    """So that an optimizer made before the move steps the moved weights, as it does on a GPU."""
    model = nn.Linear(2, 2)
    before = list(model.parameters())
    trace(lambda _: model.to("cuda"))
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))


def test_a_moved_parameter_still_asks_for_its_gradient() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 8)
    model.bias.requires_grad_(False)

    def job(_: Tracer) -> None:
        model.to("cuda")
        assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
        assert model.weight.is_leaf

    trace(job)


# -- gradients that meet -----------------------------------------------------------------------------------------------


def residual(tracer: Tracer, watch: Callable[[torch.Tensor, torch.Tensor], object] = lambda a, b: None) -> None:
    x = torch.ones(1000, device=CUDA, requires_grad=True)
    h = x * 2
    a, b = h * 3, h * 4
    watch(a, b)
    loss = (a + b).sum()
    tracer.trace.mark("backward")
    loss.backward()


def test_two_gradients_that_meet_are_summed_in_place() -> None:
    assert sizes_in(trace(residual), "backward") == [4, 4000, 4000, 4000]  # of the loss, of a and b, of x


def test_a_gradient_that_was_handed_to_backward_is_not_written_to() -> None:
    def job(tracer: Tracer) -> None:
        x = torch.ones(1000, device=CUDA, requires_grad=True)
        h = x * 2
        y = h + h.tanh()
        given = torch.ones(1000, device=CUDA)
        tracer.trace.mark("backward")
        y.backward(given)

    assert sizes_in(trace(job), "backward") == [4000, 4000, 4000]  # of tanh, the sum, of x


def test_a_gradient_that_a_hook_keeps_is_not_written_to() -> None:
    kept: list[torch.Tensor] = []

    def watch(*results: torch.Tensor) -> None:
        for result in results:
            assert result.grad_fn is not None
            result.grad_fn.register_hook(lambda to_inputs, _: kept.append(to_inputs[0]))

    made = trace(lambda tracer: residual(tracer, watch))
    assert sizes_in(made, "backward") == [4, 4000, 4000, 4000, 4000]


def test_gradients_of_two_micro_batches_are_summed_in_place() -> None:
    def job(tracer: Tracer) -> None:
        x = torch.ones(1000, device=CUDA, requires_grad=True)
        for phase in ("first", "second"):
            loss = (x * 2).sum()
            tracer.trace.mark(phase)
            loss.backward()

    made = trace(job)
    assert sizes_in(made, "first") == [4, 4000, 4000, 4]  # the last two are the second forward's
    assert sizes_in(made, "second") == [4, 4000]
    assert [made.category(block) for block in born_in(made, "first")][1] == "gradients"


# -- workspaces --------------------------------------------------------------------------------------------------------


def one_step(tracer: Tracer, *, bias: bool, steps: int = 2) -> None:
    layer = nn.Linear(64, 64, bias=bias, device=CUDA)
    x = torch.ones(8, 64, device=CUDA)
    for _ in range(steps):
        tracer.trace.mark("forward")
        loss = layer(x).exp().sum()
        tracer.trace.mark("backward")
        loss.backward()


def workspaces(made: Trace) -> list[tuple[str, int]]:
    return [(made.op(block), made.requested[block]) for block in by_op(made, "workspace (")]


def test_a_thread_takes_one_workspace_at_its_first_product_and_keeps_it() -> None:
    made = trace(lambda tracer: one_step(tracer, bias=False))
    held = by_op(made, "workspace (")
    assert workspaces(made) == [
        ("cublas workspace (main thread)", 32 * MiB),
        ("cublas workspace (autograd thread)", 32 * MiB),
    ]
    assert not {subject for action, subject in made.events() if action == Action.FREE} & set(held)
    assert {made.category(block) for block in held} == {"workspaces"}


def test_a_stream_takes_a_workspace_of_its_own() -> None:
    def run(tracer: Tracer) -> None:
        x = torch.ones(64, 64, device=CUDA)
        x @ x
        with tracer.streams.within(tracer.streams.kind()):
            x @ x
            x @ x

    assert [size for _, size in workspaces(trace(run))] == [32 * MiB, 32 * MiB]


def test_a_thread_has_a_workspace_of_its_own_and_one_that_has_ended_gives_it_on() -> None:
    def run() -> None:
        x = torch.ones(64, 64, device="cuda")
        x @ x
        for _ in range(2):
            thread = threading.Thread(target=lambda: x @ x)
            thread.start()
            thread.join()

    assert [size for _, size in workspaces(memfit.trace(run).trace)] == [32 * MiB, 32 * MiB]


def test_the_autograd_thread_takes_its_workspace_in_the_first_backward() -> None:
    made = trace(lambda tracer: one_step(tracer, bias=False))
    main, autograd = by_op(made, "workspace (")
    marks = [i for i, action in enumerate(made.actions) if action == Action.MARK]
    born = {subject: i for i, (action, subject) in enumerate(made.events()) if action == Action.ALLOC}
    assert marks[0] < born[main] < marks[1] < born[autograd] < marks[2]


def test_work_without_products_takes_no_workspace() -> None:
    made = trace(lambda _: torch.ones(8, device=CUDA).exp().sum())
    assert workspaces(made) == []


def test_products_of_the_host_take_no_workspace() -> None:
    made = trace(lambda _: torch.ones(4, 4) @ torch.ones(4, 4))
    assert workspaces(made) == []


def test_a_fused_bias_brings_the_workspace_of_cublaslt() -> None:
    assert workspaces(trace(lambda tracer: one_step(tracer, bias=True))) == [
        ("cublas workspace (main thread)", 32 * MiB),
        ("cublaslt workspace (main thread)", 1 * MiB),
        ("cublas workspace (autograd thread)", 32 * MiB),
    ]


def test_a_product_of_8_bit_floats_brings_the_workspace_of_cublaslt() -> None:
    def multiply(_: Tracer) -> object:
        rows = torch.empty(32, 64, dtype=torch.float8_e4m3fn, device=CUDA)
        scale = torch.empty((), device=CUDA)
        return torch._scaled_mm(rows, rows[:16].t(), scale, scale, out_dtype=torch.bfloat16)

    assert ("cublaslt workspace (main thread)", 1 * MiB) in workspaces(trace(multiply))


def test_32_bit_indices_become_64_bit_ones() -> None:
    def look_up(_: Tracer) -> object:
        table = torch.empty(16, dtype=torch.bfloat16, device=CUDA)
        return table[torch.empty(1000, dtype=torch.int32, device=CUDA)]

    assert story(look_up).startswith("+32 +4000 +8000 +2000 -2")


def test_ampere_takes_a_smaller_workspace() -> None:
    made = trace(lambda tracer: one_step(tracer, bias=False), platform=Platform(arch=(8, 0), sm_count=108))
    assert [size for _, size in workspaces(made)] == [8_519_680, 8_519_680]


@pytest.mark.parametrize(
    ("arch", "torch_version", "expected"),
    [
        ((7, 5), (2, 11), 8_519_680),
        ((8, 0), (2, 11), 8_519_680),
        ((8, 9), (2, 12), 8_519_680),
        ((9, 0), (2, 9), 33_554_432),
        ((9, 0), (2, 13), 33_554_432),
        ((10, 0), (2, 11), 8_519_680),
        ((10, 0), (2, 12), 33_554_432),
        ((12, 0), (2, 11), 8_519_680),
        ((12, 0), (2, 12), 33_554_432),
    ],
)
def test_the_workspace_of_cublas_by_architecture_and_torch(
    arch: tuple[int, int], torch_version: tuple[int, int], expected: int
) -> None:
    assert cublas_bytes(Platform(arch=arch, torch=torch_version)) == expected


@pytest.mark.parametrize(
    ("torch_version", "expected"), [((2, 8), 0), ((2, 9), 1 * MiB), ((2, 11), 1 * MiB), ((2, 12), 0), ((2, 13), 0)]
)
def test_the_workspace_of_cublaslt_is_its_own_from_2_9_to_2_11(torch_version: tuple[int, int], expected: int) -> None:
    assert cublaslt_bytes(Platform(torch=torch_version)) == expected


# -- dropout and attention, in forward and in a block that is run again ------------------------------------------------


def block(x: torch.Tensor) -> torch.Tensor:
    """Attention over 96 rows of 2 heads of 32, then dropout: no S x S matrix, a mask of one byte an element."""
    return F.dropout(F.scaled_dot_product_attention(x.sin(), x, x, is_causal=True), 0.1)


ROWS, HEADS, HEAD = 96, 2, 32
ACTIVATION, MASK, SCORES = 2 * ROWS * HEADS * HEAD, ROWS * HEADS * HEAD, ROWS * ROWS * HEADS


def run_block(tracer: Tracer, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(1, HEADS, ROWS, HEAD, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    tracer.trace.mark("forward")
    loss = call(x).sum()
    tracer.trace.mark("backward")
    loss.backward()


def test_dropout_keeps_one_byte_an_element() -> None:
    made = trace(lambda tracer: run_block(tracer, lambda x: F.dropout(x, 0.1)))
    assert sizes_in(made, "forward") == [MASK, ACTIVATION, 2]


def test_dropout_in_evaluation_allocates_nothing() -> None:
    def job(_: Tracer) -> None:
        nn.Dropout(0.5).eval()(torch.ones(8, device=CUDA))

    assert story(job) == "+32 -0"


def test_dropout_of_everything_multiplies_by_zero_and_keeps_no_mask() -> None:
    def job(_: Tracer) -> None:
        F.dropout(torch.ones(8, device=CUDA, requires_grad=True), 1.0)

    assert sorted(int(word) for word in story(job).split() if word[0] == "+") == [4, 32, 32]


def test_fused_attention_makes_no_matrix_of_scores() -> None:
    made = trace(lambda tracer: run_block(tracer, block))
    assert SCORES not in made.requested
    assert 2 * SCORES not in made.requested
    assert 4 * SCORES not in made.requested


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_keeps_only_its_input(reentrant: bool) -> None:
    def job(tracer: Tracer) -> None:
        run_block(tracer, lambda x: checkpoint(block, x, use_reentrant=reentrant))

    made = trace(job)
    first_of_backward = born_in(made, "backward")[0]
    end_of_forward = list(made.events()).index((Action.ALLOC, first_of_backward))
    live: set[int] = set()
    for action, subject in list(made.events())[:end_of_forward]:
        if action == Action.ALLOC:
            live.add(subject)
        elif action == Action.FREE:
            live.discard(subject)
    assert sorted(made.requested[b] for b in live) == [2, ACTIVATION]  # the loss and the input


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_is_run_again_by_the_same_rules(reentrant: bool) -> None:
    """What a plain forward allocates is what backward allocates first."""

    def job(tracer: Tracer) -> None:
        run_block(tracer, lambda x: checkpoint(block, x, use_reentrant=reentrant))

    plain = sizes_in(trace(lambda tracer: run_block(tracer, block)), "forward")[:-1]  # without the loss
    again = sizes_in(trace(job), "backward")[1:]  # without the gradient of the loss
    assert MASK in plain
    assert again[: len(plain)] == plain
    assert not {SCORES, 2 * SCORES, 4 * SCORES} & set(again)


def traced_with_checkpoint() -> Trace:
    """The last of its modules keeps its input, so that all before it are run again."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU())

    def job(tracer: Tracer) -> None:
        layers.to("cuda")
        x = torch.ones(4, 8, device=CUDA, requires_grad=True)
        tracer.trace.mark("forward")
        loss = checkpoint(layers, x, use_reentrant=False).sum()
        tracer.trace.mark("backward")
        loss.backward()

    return trace(job)


def test_products_of_a_block_run_again_belong_to_the_autograd_thread() -> None:
    assert [name for name, _ in workspaces(traced_with_checkpoint())] == [
        "cublas workspace (main thread)",
        "cublaslt workspace (main thread)",
        "cublas workspace (autograd thread)",
        "cublaslt workspace (autograd thread)",
    ]


def test_what_a_block_run_again_makes_is_an_activation() -> None:
    made = traced_with_checkpoint()
    again = [b for b in born_in(made, "backward") if made.op(b).startswith(("aten.addmm", "aten.gelu."))]
    assert [(made.module(b), made.category(b)) for b in again] == [
        ("0", "activations"), ("1", "activations"), ("2", "activations"),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attention_and_softmax_are_cuda_s_own_without_gradients_too(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    def job(tracer: Tracer) -> None:
        x = torch.ones(1, HEADS, ROWS, HEAD, device=CUDA, dtype=torch.float16)
        with mode():
            tracer.trace.mark("attention")
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
            tracer.trace.mark("softmax")
            F.softmax(x, dim=-1, dtype=torch.float32)

    made = trace(job)
    assert sizes_in(made, "attention") == [8, 8, ACTIVATION, 256]  # seed, offset, output, workspace
    assert sizes_in(made, "softmax") == [2 * ACTIVATION]  # no copy of the input in fp32


# -- whose a block is --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.inner = nn.Sequential(nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)).exp()


def traced_net() -> Trace:
    def job(tracer: Tracer) -> None:
        net = Net().to("cuda")
        x = torch.ones(4, 8, device=CUDA)
        tracer.trace.mark("forward")
        loss = net(x).sum()
        tracer.trace.mark("backward")
        loss.backward()

    return trace(job)


def places(made: Trace, phase: str) -> list[tuple[str, str]]:
    return [(made.op(b), made.module(b)) for b in born_in(made, phase) if made.category(b) != "workspaces"]


def test_a_block_knows_the_module_that_made_it_in_forward() -> None:
    assert places(traced_net(), "forward") == [
        ("aten.addmm.default", "first"),
        ("aten.gelu.default", "inner.0"),
        ("aten.addmm.default", "inner.1"),
        ("aten.exp.default", ""),  # the outermost module has no name
        ("aten.sum.default", ""),
    ]


def test_a_block_of_backward_knows_the_module_whose_forward_it_undoes() -> None:
    assert places(traced_net(), "backward") == [
        ("aten.ones_like.default", ""),
        ("aten.mul.Tensor", ""),
        ("aten.mm.default", "inner.1"),
        ("aten.mm.default", "inner.1"),
        ("aten.sum.dim_IntList", "inner.1"),
        ("aten.gelu_backward.default", "inner.0"),
        ("aten.mm.default", "first"),
        ("aten.sum.dim_IntList", "first"),
    ]


def test_gradients_of_parameters_are_known_as_gradients() -> None:
    made = traced_net()
    gradients = [made.requested[b] for b in range(len(made.requested)) if made.category(b) == "gradients"]
    assert sorted(gradients) == sorted(4 * n for n in (8 * 16, 16, 16 * 8, 8))


def test_a_module_that_raises_leaves_the_names_right() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    outer = nn.ModuleDict({"fails": Fails(), "works": nn.GELU()})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = outer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ZeroDivisionError):
                self.parts["fails"](x)
            return self.parts["works"](x.exp())

    def job(tracer: Tracer) -> None:
        x = torch.ones(8, device=CUDA)
        tracer.trace.mark("forward")
        Both()(x)

    assert places(trace(job), "forward") == [("aten.exp.default", ""), ("aten.gelu.default", "parts.works")]


# -- what cannot be traced ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "op"),
    [
        pytest.param(lambda x: x.nonzero(), "selects by a float32 tensor", id="nonzero"),
        pytest.param(lambda x: x[x > 0], "selects by a bool tensor", id="mask as index"),
        pytest.param(lambda x: x.unique(), "which values a float32 tensor has", id="unique"),
        pytest.param(lambda x: torch.equal(x, x + 1), "asks a bool tensor for its value", id="equal"),
        pytest.param(lambda x: torch.allclose(x, x), "asks a bool tensor for its value", id="all close"),
        pytest.param(lambda x: x.cpu(), "asks a float32 tensor for all its values", id="to the host"),
        pytest.param(lambda x: x.tolist(), "asks a float32 tensor for all its values", id="to a list"),
    ],
)
def test_an_op_whose_result_depends_on_data_is_an_error_that_names_it(
    ask: Callable[[torch.Tensor], Any], op: str
) -> None:
    with pytest.raises(TraceError, match=op) as caught:
        trace(lambda _: ask(torch.ones(8, device=CUDA)))
    assert caught.value.hint


def test_a_copy_by_index_into_another_dtype_is_refused_as_on_cuda() -> None:
    def copy(_: Tracer) -> None:
        cache, index = torch.zeros(2, 8, 4, device=CUDA), torch.arange(3, device=CUDA)
        cache.index_copy_(1, index, torch.ones(2, 3, 4, device=CUDA, dtype=torch.bfloat16))

    with pytest.raises(TraceError, match=r"index_copy_\(\) of torch.bfloat16 into torch.float32"):
        trace(copy)


def test_an_error_of_torch_that_has_nothing_to_do_with_data_stays_torch_s_own() -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        trace(lambda _: torch.ones(3, device=CUDA) + torch.ones(4, device=CUDA))


# -- the machine is left as it was found -------------------------------------------------------------------------------


class Stop(Exception):
    pass


def ends_well(job: Job) -> None:
    trace(job)


def ends_in_an_exception(job: Job) -> None:
    def raising(tracer: Tracer) -> None:
        job(tracer)
        raise Stop

    with pytest.raises(Stop):
        trace(raising)


ENDINGS = pytest.mark.parametrize("run", [ends_well, ends_in_an_exception])


def do_a_little(_: Tracer) -> None:
    layer = nn.Linear(4, 4).to("cuda")
    F.dropout(layer(torch.ones(2, 4, device=CUDA)), 0.5).sum().backward()


@ENDINGS
@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_off_in_the_trace_and_as_before_afterwards(
    run: Callable[[Job], None], enabled: bool
) -> None:
    seen: list[bool] = []
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        run(lambda _: seen.append(gc.isenabled()))
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if before else gc.disable)()


@ENDINGS
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dropout_is_torch_s_own_again_afterwards(run: Callable[[Job], None], device: str) -> None:
    def node() -> str:
        made = F.dropout(torch.ones(3, device=device, requires_grad=True), 0.5)
        assert made.grad_fn is not None
        return made.grad_fn.name()

    before = node()
    seen: list[str] = []

    def job(_: Tracer) -> None:
        made = F.dropout(torch.ones(3, device=CUDA, requires_grad=True), 0.5)
        assert made.grad_fn is not None
        seen.append(made.grad_fn.name())

    run(job)
    assert seen == ["NativeDropoutBackward0"]
    assert node() == before != "NativeDropoutBackward0"


@ENDINGS
def test_attention_is_torch_s_own_again_afterwards(run: Callable[[Job], None]) -> None:
    x = torch.randn(1, 2, 5, 8)
    before = F.scaled_dot_product_attention(x, x, x)
    run(do_a_little)
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), before)


def patched_names() -> dict[str, Any]:
    cuda = {name: getattr(torch.cuda, name) for name in dir(torch.cuda) if callable(getattr(torch.cuda, name))}
    modules = (
        "torch",
        "torch.utils._foreach_utils",
        "torch.optim.optimizer",
        "torch.nn.utils.clip_grad",
        "torch.nn.functional",
    )
    found = {f"{m}.{n}": v for m in modules for n, v in vars(import_module(m)).items() if callable(v)}
    return {**cuda, **found, **{f"Tensor.{name}": value for name, value in vars(torch.Tensor).items()}}


@ENDINGS
def test_every_patched_name_is_restored(run: Callable[[Job], None]) -> None:
    before = patched_names()
    seen: list[bool] = []

    def job(tracer: Tracer) -> None:
        do_a_little(tracer)
        seen.append(torch.cuda.synchronize is before["synchronize"])

    run(job)
    assert seen == [False]
    assert {name for name, value in patched_names().items() if value != before[name]} == set()


@ENDINGS
def test_optimizers_choose_their_kernels_as_before(run: Callable[[Job], None]) -> None:
    listed = import_module("torch.utils._foreach_utils")._get_foreach_kernels_supported_devices
    before = list(listed())
    run(do_a_little)
    assert list(import_module("torch.utils._foreach_utils")._get_foreach_kernels_supported_devices()) == before
    assert "meta" not in before


@ENDINGS
def test_no_mode_and_no_hook_stays_behind(run: Callable[[Job], None]) -> None:
    from torch.nn.modules import module
    from torch.overrides import _len_torch_function_stack
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    def state() -> list[Any]:
        hooks = [h for k, h in sorted(vars(module).items()) if k.startswith("_global_") and isinstance(h, dict)]
        return [_len_torch_function_stack(), _len_torch_dispatch_stack(), [len(h) for h in hooks]]

    before = state()
    run(do_a_little)
    assert state() == before


@ENDINGS
def test_a_trace_after_another_is_as_if_it_were_the_first(run: Callable[[Job], None]) -> None:
    def job(tracer: Tracer) -> None:
        run_block(tracer, block)

    first = story(job)
    run(do_a_little)
    assert story(job) == first


def test_a_trace_within_a_trace_is_refused_and_leaves_the_outer_one_right() -> None:
    def refused() -> None:
        with pytest.raises(TraceError, match="a trace inside a trace"):
            trace(do_a_little)

    def job(tracer: Tracer, inner: Callable[[], object]) -> None:
        x = torch.ones(8, device=CUDA, requires_grad=True)
        inner()
        tracer.trace.mark("after")
        F.dropout(x, 0.5).sum().backward()

    assert story(lambda tracer: job(tracer, refused)) == story(lambda tracer: job(tracer, lambda: None))


def test_two_traces_of_the_same_job_are_the_same() -> None:
    assert as_story(traced_net()) == as_story(traced_net())

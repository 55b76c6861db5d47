"""Compiled code in a trace: what torch's compiler plans is what is allocated, and nothing of torch is left changed."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.errors import TraceError, UsageError
from memfit.events import Action, Trace
from memfit.extrapolation.reused import COMPILED, REUSED, frees_in_order, joined
from memfit.extrapolation.steps import last_step
from memfit.fitting.emit import python_of
from memfit.jobs.training.loops import trainer_settings
from memfit.jobs.workload import Workload
from memfit.tracing.compiled.autotuning import FLUSH, tuning_of
from memfit.tracing.compiled.generated import called_by
from memfit.tracing.compiled.hooks import _refuse_nodes
from memfit.tracing.compiled.registers import is_triton_here

pytestmark = pytest.mark.filterwarnings("ignore")
MiB = 1 << 20


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def train(compile: Callable[[nn.Module], Any], rows: int = 32768) -> None:
    model = Parts().cuda()
    called, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        called(torch.randn(rows, 256, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def planned() -> memfit.Plan:
    return memfit.trace(lambda: train(torch.compile), gpu="H200")


def ops(plan: memfit.Plan) -> set[str]:
    return {plan.trace.op(block) for block in range(len(plan.trace.requested))}


def test_the_generated_code_makes_the_buffers(planned: memfit.Plan) -> None:
    eager = memfit.trace(lambda: train(lambda model: model), gpu="H200")
    assert "aten.gelu.default" in ops(eager)
    assert "aten.gelu.default" not in ops(planned)
    assert planned.peak.allocated_bytes < eager.peak.allocated_bytes


def test_buffers_are_named_by_the_module_that_wanted_them(planned: memfit.Plan) -> None:
    wide = [
        planned.trace.module(block)
        for block, size in enumerate(planned.trace.requested)
        if size == 32768 * 1024 * 4 and planned.trace.op(block) == "aten.empty_strided.default"
    ]
    assert {"up", "down"} <= set(wide)


def test_a_kernel_with_two_configurations_is_timed_twice_beside_a_buffer_as_large_as_the_cache(
    planned: memfit.Plan,
) -> None:
    flushed = [size for block, size in enumerate(planned.trace.requested) if planned.trace.op(block) == FLUSH]
    assert flushed
    assert len(flushed) % 2 == 0
    assert set(flushed) == {60 * MiB}


def test_the_same_step_is_planned_the_same_again(planned: memfit.Plan) -> None:
    again = memfit.trace(lambda: train(torch.compile), gpu="H200")
    assert again.trace.requested == planned.trace.requested
    assert again.trace.actions == planned.trace.actions


def test_another_batch_size_in_another_trace_is_no_reason_for_dynamic_shapes(planned: memfit.Plan) -> None:
    other = memfit.trace(lambda: train(torch.compile, rows=65536), gpu="H200")
    assert len(other.trace) == len(planned.trace)


def test_code_that_compiles_nothing_does_not_load_the_compiler() -> None:
    code = (
        "import sys, torch, memfit;"
        "memfit.trace(lambda: torch.nn.Linear(8, 8).cuda()(torch.ones(8, 8, device='cuda')));"
        "sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_torch_is_as_it_was_after_a_trace(planned: memfit.Plan) -> None:
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensor

    def state() -> dict[str, Any]:
        return {
            "frames": CatchErrorsWrapper.__call__, "graphs": GraphLowering._compile_to_module_lines,
            "whole": compile_fx.compile_fx, "partition": compile_fx.partition_fn,
            "forward": compile_fx.compile_fx_forward, "backward": compile_fx.compile_fx_backward,
            "fake": vars(FakeTensor).get("_normalize_fake_device", vars(FakeTensor)["__new__"]),
            "threads": config.compile_threads, "cache": config.fx_graph_cache,
            "made": torch._TorchCompileInductorWrapper.__init__, "call": nn.Module.__call__, "tensor": torch.tensor,
            "available": torch.cuda.is_available, "version": torch.version.cuda,
            "autocast": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
            "collector": gc.isenabled(),
        }  # fmt: skip

    before = state()
    memfit.trace(lambda: train(torch.compile), gpu="H200")
    assert state() == before
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]


def _compiled_with(**options: Any) -> Callable[[], None]:
    return lambda: train(lambda model: torch.compile(model, **options))


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (_compiled_with(mode="reduce-overhead"), "reduce-overhead"),
        (_compiled_with(mode="max-autotune-no-cudagraphs"), "max-autotune"),
        (_compiled_with(backend="aot_eager"), "aot_eager"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(step: Callable[[], None], what: str) -> None:
    with pytest.raises(TraceError, match=f"does not cover torch.compile.*{what}") as refusal:
        memfit.trace(step)
    assert "eager" in str(refusal.value.hint)


def test_an_error_of_the_compiler_is_told_with_a_way_out() -> None:
    @torch.compile(fullgraph=True)
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(TraceError, match="torch's compiler fails on this code") as failure:
        memfit.trace(lambda: breaks(torch.ones(8, device="cuda")))
    assert "plan it without torch.compile" in str(failure.value.hint)


def test_after_a_failing_trace_the_interpreter_runs_frames_as_before() -> None:
    frames = torch._C._dynamo.eval_frame

    def evaluator() -> object:
        found = frames.set_eval_frame(None)
        frames.set_eval_frame(found)
        return found

    before = evaluator()
    with pytest.raises(TraceError):
        memfit.trace(_compiled_with(mode="reduce-overhead"))
    assert evaluator() is before


def _references_of_an_argument(argument: object) -> int:
    return sys.getrefcount(argument)


def test_after_an_error_inside_dynamo_calls_hold_their_arguments_no_longer_than_before() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    before = _references_of_an_argument(object())
    with pytest.raises(TraceError):
        memfit.trace(lambda: torch.compile(flex_attention)(*[torch.randn(1, 2, 128, 64, device="cuda")] * 3))
    after = _references_of_an_argument(object())
    assert after == before


def test_flex_attention_is_refused_by_name() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attend() -> None:
        q = torch.randn(1, 2, 128, 64, device="cuda", requires_grad=True)
        torch.compile(flex_attention)(q, q, q)

    with pytest.raises(TraceError, match=r"does not cover torch\.compile with FlexAttention"):
        memfit.trace(attend, gpu="H200")


def test_a_triton_kernel_of_ones_own_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match="a Triton kernel of the program's own"):
        _refuse_nodes("sin triton_kernel_wrapper_mutation cos")


# -- what runs ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("memfit_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def _compiled_doubling() -> None:
    torch.compile(lambda x: doubled(x.sin()).cos())(torch.randn(MiB, device="cuda"))


def test_an_op_of_ones_own_needs_a_fake_kernel_and_then_makes_its_result() -> None:
    with pytest.raises(TraceError, match="no fake impl registered"):
        memfit.trace(_compiled_doubling)
    doubled.register_fake(torch.empty_like)
    plan = memfit.trace(_compiled_doubling)
    made = [size for block, size in enumerate(plan.trace.requested) if "doubled" in plan.trace.op(block)]
    assert made == [4 * MiB]


def test_a_compiled_optimizer_makes_its_state() -> None:
    def step() -> None:
        model = nn.Linear(1024, 1024, bias=False, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        torch.compile(optimizer.step)()

    plan = memfit.trace(step)
    state = [plan.trace.op(block) for block, size in enumerate(plan.trace.requested) if size == 4 * MiB]
    assert state.count("aten.zeros_like.default") == 2
    assert not any("not modelled" in note for note in plan.notes)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Parts() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_one_code_for_all_blocks_makes_the_buffers_of_the_block_that_runs() -> None:
    def run() -> None:
        model = Two().cuda()
        for block in model.blocks:
            block.compile()
        model(torch.randn(64, 256, device="cuda", requires_grad=True)).sum().backward()

    plan = memfit.trace(run)
    modules = [
        plan.trace.module(block)
        for block in range(len(plan.trace.requested))
        if plan.trace.op(block) == "aten.empty_strided.default"
    ]
    assert {"blocks.0", "blocks.0.up", "blocks.0.down", "blocks.1", "blocks.1.up", "blocks.1.down"} <= set(modules)


def test_a_module_is_called_as_before_when_the_trace_has_ended() -> None:
    model = Parts()

    def run() -> None:
        model.cuda().compile()
        model(torch.randn(64, 256, device="cuda"))

    memfit.trace(run)
    assert "memfit" not in str(getattr(model._compiled_call_impl, "__module__", ""))


@pytest.mark.parametrize(
    ("caller", "module", "found"),
    [
        ("model.layers.3", "model.layers.0.mlp", "model.layers.3.mlp"),
        ("model.layers.3", "model.layers.0", "model.layers.3"),
        ("", "model.layers.0.mlp", "model.layers.0.mlp"),
        ("model", "model.layers.0.mlp", "model.layers.0.mlp"),
        ("model.layers.3", "lm_head", "lm_head"),
        ("model.layers.3", "", "model.layers.3"),
    ],
)
def test_a_buffer_is_of_the_block_that_calls(caller: str, module: str, found: str) -> None:
    assert called_by(caller, module) == found


def test_where_the_card_decides_on_padding_both_are_in_the_document() -> None:
    def run() -> None:
        left, right = (torch.randn(*shape, device="cuda") for shape in ((4096, 4097), (4097, 4099)))
        torch.compile(torch.mm)(left, right)

    plan = memfit.trace(run, gpu="H200")
    ends = plan.to_json()["range"]
    assert max(ends.values()) == plan.peak.allocated_bytes
    assert ends["unpadded_bytes"] < ends["padded_bytes"]


@pytest.mark.skipif(not is_triton_here(), reason="triton compiles the kernel")
def test_a_reduction_that_takes_many_registers_is_timed_with_shorter_rows_too() -> None:
    def run() -> None:
        torch.compile(lambda x: x.float().log_softmax(-1).bfloat16())(
            torch.randn(8192, 32000, device="cuda", dtype=torch.bfloat16)
        )

    plan = memfit.trace(run, gpu="H200")
    assert not any("many registers" in note for note in plan.notes)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"compile_blocks": True}, "both say"),
        ({"loop": "memfit"}, "--loop memfit"),
        ({"loop": "trainer", "compile": False, "compile_blocks": True}, "--loop trainer"),
        ({"world_size": 2}, "--world-size"),
        ({"offload": ["activations"]}, "--offload"),
        ({"loss": "chunked"}, "--loss chunked"),
    ],
)
def test_what_is_not_planned_together_is_an_error(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Workload.from_mapping({"kind": "train", "model": "gpt2", "compile": True, **settings})


def test_generation_is_no_kind_that_is_compiled() -> None:
    with pytest.raises(UsageError, match="runs the model as it is"):
        Workload.from_mapping({"kind": "generate", "model": "gpt2", "compile": True})


def test_the_trainer_is_told_to_compile() -> None:
    work = Workload.from_mapping({"kind": "train", "model": "gpt2", "loop": "trainer", "compile": True})
    assert trainer_settings(work)["torch_compile"] is True
    assert "torch_compile" not in trainer_settings(Workload(kind="train", model="gpt2", loop="trainer"))


def test_a_fitted_job_that_is_compiled_is_written_so() -> None:
    assert "torch_compile=True" in python_of(Workload(kind="train", model="gpt2", compile=True), "fits")
    assert "torch.compile(model.to(" in python_of(Workload(kind="forward", model="gpt2", compile=True), "fits")
    assert "compile_regions(" in python_of(Workload(kind="forward", model="gpt2", compile_blocks=True), "fits")
    with pytest.raises(UsageError, match="no switch for compiled blocks"):
        python_of(Workload(kind="train", model="gpt2", compile_blocks=True), "fits")


# -- buffers used again ------------------------------------------------------------------------------------------------


def test_a_buffer_used_again_is_one_block() -> None:
    trace = Trace()
    first = trace.alloc(1024, op="made", module="a")
    trace.free(first)
    second = trace.alloc(1024, op=REUSED, module="b")
    trace.free(second)
    whole = joined(trace)
    assert list(whole.requested) == [1024]
    assert [Action(action) for action in whole.actions] == [Action.ALLOC, Action.FREE]


def test_of_buffers_of_one_size_the_last_goes_first() -> None:
    trace = Trace()
    blocks = [trace.alloc(1024) for _ in range(3)]
    for block in blocks:
        trace.free(block)
    frees_in_order(trace, [[0, len(trace)]])
    assert list(trace.subjects[3:]) == [2, 1, 0]


def test_a_step_that_is_told_says_where_compiled_code_ran_in_it() -> None:
    trace, ranges = Trace(), []
    for step in (1, 2):
        trace.mark("step", step)
        began = len(trace)
        made = trace.alloc(1024, op="made")
        ranges.append([began, len(trace)])
        trace.mark("zero", step)
        trace.free(made)
    trace.facts[COMPILED] = ranges
    missing = last_step(trace, 3)
    assert missing is not None
    longer = missing.apply(trace)
    found = [longer.actions[start] for start, _ in longer.facts[COMPILED]]
    assert found == [Action.ALLOC] * 3


POINTWISE = """
@triton_heuristics.pointwise(
    size_hints={{'x': {size}}},
    filename=__file__,
    triton_meta={{'signature': {{'in_out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}}, 'device':
        DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32), 'constants': {{}}}},
    inductor_meta={{'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': False, 'autotune_pointwise': True}},
    min_elem_per_thread=0
)
@triton.jit
def triton_poi_fused_0(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
"""


def test_torch_says_how_many_configurations_a_kernel_has() -> None:
    large = tuning_of(POINTWISE.format(size=1 << 24))
    assert large.configurations == 2
    assert large.changed == {"in_out_ptr0"}
    assert large.arguments[0] == "in_out_ptr0"
    assert not large.within_peak
    assert tuning_of("def kernel(): pass").configurations == 1

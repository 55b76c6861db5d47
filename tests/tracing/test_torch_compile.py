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
from memfit.extrapolation.reused import REUSED, frees_in_order, joined
from memfit.jobs.workload import Workload
from memfit.tracing.compiled.autotuning import FLUSH, tuning_of

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
    with pytest.raises(UsageError, match="compile"):
        Workload.from_mapping({"kind": "generate", "model": "gpt2", "compile": True})


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

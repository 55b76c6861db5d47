"""Compiled code in a trace: what torch's compiler plans is what is allocated, and nothing of torch is left changed."""

from __future__ import annotations

import dataclasses
import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_settings

import memfit
from memfit.checking.gate import GatedJob
from memfit.errors import TraceError, UsageError
from memfit.events import Action, FrameRow, Trace
from memfit.extrapolation.reused import COMPILED, COPIES, FLUSH, REUSED, joined, let_the_last_go_first, sort_frees
from memfit.extrapolation.steps import last_step, traced_tokens
from memfit.fitting.emit import python_of
from memfit.gpus import find_gpu
from memfit.jobs.build import Prepared, prepare_without_memory
from memfit.jobs.training.loops import trainer_settings
from memfit.jobs.workload import Workload
from memfit.planning.few import Blocks, _from_few, _tried
from memfit.planning.on_trace import trace_job
from memfit.planning.padded import range_in_words, range_of
from memfit.planning.predict import assess, context_on
from memfit.planning.traced import Provenance
from memfit.platform import H200, platform_of
from memfit.replay.alloc_config import AllocatorConfig
from memfit.replay.replay import replay
from memfit.tracing.compiled.autotuning import COPY, GeneratedKernels, tuning_of
from memfit.tracing.compiled.generated import GeneratedCode, Origin, called_by
from memfit.tracing.compiled.hooks import NOTHING_COMPILED
from memfit.tracing.compiled.numbers import CONSTANT, DECIDES, ONCE, OUT_OF_IT
from memfit.tracing.compiled.padding import OPERAND
from memfit.tracing.compiled.pretended_gpu import flush_bytes
from memfit.tracing.compiled.settings import compiler_is_set_otherwise, graphs_told
from memfit.tracing.compiled.torch_names import is_triton_here
from memfit.tracing.tracer import trace
from memfit.units import MiB, format_bytes, gib

pytestmark = pytest.mark.filterwarnings("ignore")


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


def test_buffers_are_known_by_the_line_of_the_compiled_code(planned: memfit.Plan) -> None:
    own = [(line, name) for file, line, name in planned.trace.frames if file == __file__]
    (line,) = {line for line, name in own if name == "backward of forward"}
    assert (line, "forward") in own
    assert line == Parts.forward.__code__.co_firstlineno + 1
    made = sum(each["allocated_bytes"] for each in planned.to_json()["lines"] if each["line"] == line)
    assert made >= 32768 * 1024 * 4


def test_a_kernel_with_two_configurations_is_timed_twice_beside_a_buffer_as_large_as_the_cache(
    planned: memfit.Plan,
) -> None:
    flushed = [size for block, size in enumerate(planned.trace.requested) if planned.trace.op(block) == FLUSH]
    assert flushed == [60 * MiB] * 4  # two such kernels, and none of them again in the second step


def test_a_trace_warns_of_nothing_that_is_about_speed(recwarn: pytest.WarningsRecorder) -> None:
    from torch._inductor import compile_fx

    compile_fx._warn_tf32_disabled.cache_clear()
    memfit.trace(lambda: train(torch.compile, rows=1024), gpu="H200")
    assert not [each for each in recwarn if "TensorFloat32" in str(each.message)]


def test_bf16_on_a_card_without_it_is_left_as_it_is_and_a_small_card_is_no_matter_for_warnings(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(called: Callable[[Any], Any]) -> Callable[[], None]:
        return lambda: called(lambda x: (x @ x).sin())(torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda"))

    compiled, eager = memfit.trace(run(torch.compile), gpu="T4"), memfit.trace(run(lambda fn: fn), gpu="T4")
    assert compiled.trace.requested == eager.trace.requested
    assert {
        "torch leaves some of what it was to compile as it is on this card: BF16 is not supported",
        NOTHING_COMPILED,
    } <= {*compiled.notes}
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("torch._inductor.utils"), "callHandlers", logged.append)
    memfit.trace(lambda: torch.compile(lambda x: x @ x)(torch.ones(64, 64, device="cuda")), gpu="T4")
    assert not [each for each in recwarn if "bfloat16" in str(each.message)]
    assert logged == []


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


def _among_others() -> None:
    torch.distributed.init_process_group("nccl", rank=0, world_size=2, init_method="tcp://localhost:29500")
    train(lambda model: torch.compile(nn.parallel.DistributedDataParallel(model)))


def _with_compiled_autograd() -> None:
    with torch._dynamo.compiled_autograd._enable(torch.compile()):
        train(torch.compile)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (_compiled_with(mode="reduce-overhead"), "reduce-overhead"),
        (_compiled_with(mode="max-autotune-no-cudagraphs"), 'mode="max-autotune-no-cudagraphs"'),
        (_compiled_with(mode="max-autotune"), 'mode="max-autotune"'),
        (_compiled_with(options={"triton.cudagraphs": True}), "with triton.cudagraphs, whose CUDA graphs"),
        (_compiled_with(backend="aot_eager"), "aot_eager"),
        (_compiled_with(backend="cudagraphs"), "cudagraphs"),
        (_compiled_with(options={"coordinate_descent_tuning": True}), "coordinate_descent_tuning"),
        (_compiled_with(options={"triton.native_matmul": True}), "triton.native_matmul"),
        (_compiled_with(options={"freezing": True}), "freezing"),
        (_with_compiled_autograd, "compiled_autograd"),
        (_among_others, "several processes"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(step: Callable[[], None], what: str) -> None:
    with pytest.raises(TraceError, match=f"does not cover torch.compile.*{what}") as refusal:
        memfit.trace(step)
    assert "eager" in str(refusal.value.hint)


def test_what_transformers_compiles_by_itself_is_refused_as_that_with_its_own_way_out() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=64
    )

    def generate(**settings: Any) -> None:
        model, prompt = LlamaForCausalLM(config).cuda(), torch.ones(1, 4, dtype=torch.long, device="cuda")
        model.generate(prompt, max_new_tokens=3, cache_implementation="static", **settings)

    with pytest.raises(TraceError, match=r"transformers compiles the model by itself .*reduce-overhead") as refusal:
        memfit.trace(generate)
    assert "disable_compile=True" in str(refusal.value.hint)
    assert memfit.trace(lambda: generate(disable_compile=True)).peak.allocated_bytes > 0


def test_a_module_compiled_before_the_trace_brings_no_warning_of_hooks_that_are_memfit_s(
    recwarn: pytest.WarningsRecorder,
) -> None:
    compiled = torch.compile(Parts())
    memfit.trace(lambda: compiled.cuda()(torch.ones(8, 256, device="cuda")))
    assert not [each for each in recwarn if "global hooks on modules" in str(each.message)]


def test_an_error_of_the_compiler_is_told_with_a_way_out() -> None:
    @torch.compile(fullgraph=True)
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(
        TraceError, match=r"torch's compiler fails on this code at .*test_torch_compile.py:\d+"
    ) as failure:
        memfit.trace(lambda: breaks(torch.ones(8, device="cuda")))
    assert "plan it without torch.compile" in str(failure.value.hint)


def test_a_wrong_shape_in_compiled_code_is_the_jobs_failure_at_its_line() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.view(7, 13, -1)

    with pytest.raises(TraceError, match="the job itself fails: RuntimeError: shape") as failure:
        memfit.trace(lambda: torch.compile(wrong)(torch.ones(8, device="cuda")))
    assert str(failure.value.hint).endswith(f"test_torch_compile.py:{wrong.__code__.co_firstlineno + 1}")


@pytest.mark.parametrize("given", [{"backend": "nonesuch"}, {"options": {"nonesuch": 1}}])
def test_a_backend_or_an_option_that_torch_does_not_know_is_the_jobs_failure(given: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r"the job itself fails: .*nonesuch") as failure:
        memfit.trace(_compiled_with(**given))
    assert len(failure.value.message) < 200
    assert "raised at" in str(failure.value.hint)


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
    before = _references_of_an_argument(object())
    with pytest.raises(TraceError):
        memfit.trace(lambda: torch.compile(lambda x: x.view(7), fullgraph=True)(torch.randn(8, device="cuda")))
    after = _references_of_an_argument(object())
    assert after == before


def _caught() -> None:
    with suppress(Exception):
        _small(mode="reduce-overhead")
    _small()


def _suppressed() -> None:
    torch._dynamo.config.suppress_errors = True
    _small(mode="reduce-overhead")


def _small(**options: Any) -> None:
    torch.compile(torch.sin, **options)(torch.ones(1024, device="cuda"))


@pytest.mark.parametrize("step", [_caught, _suppressed])
def test_a_refusal_that_the_code_lets_pass_is_a_refusal(step: Callable[[], None]) -> None:
    with pytest.raises(TraceError, match=r'does not cover torch.compile with mode="reduce-overhead"'):
        memfit.trace(step)


def test_what_the_code_sets_in_the_compiler_holds_for_its_own_trace_alone() -> None:
    from torch._dynamo import config as reading
    from torch._functorch import config as dividing
    from torch._inductor import config as planning

    def settings() -> tuple[Any, ...]:
        chosen = reading.recompile_limit, reading.suppress_errors, planning.epilogue_fusion, planning.triton.cudagraphs
        return *chosen, dividing.activation_memory_budget

    def run() -> None:
        reading.recompile_limit, reading.suppress_errors, planning.epilogue_fusion = 2, True, False
        dividing.activation_memory_budget = 0.3
        _small()
        found.append(settings())
        planning.triton.cudagraphs = True

    before: tuple[Any, ...] = settings()
    found: list[tuple[Any, ...]] = []
    memfit.trace(run)
    assert found == [(2, True, False, False, 0.3)]
    assert settings() == before


def test_a_stance_that_the_code_takes_holds_for_its_own_trace_alone() -> None:
    def run(stance: str) -> None:
        torch.compiler.set_stance(stance)
        _small()

    with pytest.raises(TraceError, match="stance"):
        memfit.trace(lambda: run("no such stance"))
    assert NOTHING_COMPILED in memfit.trace(lambda: run("force_eager")).notes
    assert NOTHING_COMPILED not in memfit.trace(_small).notes


def test_the_caller_s_stance_is_known_to_be_another_and_stays_as_it_is() -> None:
    assert not compiler_is_set_otherwise()
    with torch.compiler.set_stance("force_eager"):
        assert compiler_is_set_otherwise()
        for _ in range(2):
            assert NOTHING_COMPILED in memfit.trace(_small).notes
    assert not compiler_is_set_otherwise()


@pytest.mark.parametrize("compiles", [True, False])
def test_a_plan_whose_torch_compile_compiled_nothing_says_so(compiles: bool) -> None:
    notes = memfit.trace(lambda: _small(disable=not compiles)).notes
    assert (NOTHING_COMPILED in notes) is not compiles
    assert any(note.startswith("torch.compile: buffers as") for note in notes) is compiles


def test_a_compiler_that_begins_anew_makes_the_same_buffers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)

    def twice(between: Callable[[], None]) -> Trace:
        def run() -> None:
            for _ in range(2):
                torch.compiler.cudagraph_mark_step_begin()
                _small()
                between()

        return memfit.trace(run).trace

    assert twice(torch.compiler.reset).requested == twice(lambda: None).requested


def test_who_waits_is_told_which_graph_is_compiled() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    told: list[int] = []
    with graphs_told(told.append):
        memfit.trace(lambda: torch.compile(run)(torch.ones(1024, device="cuda")))
    assert told == [1, 2]


def test_traces_in_two_threads_are_those_of_one(planned: memfit.Plan) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(memfit.trace, lambda: train(torch.compile), gpu="H200") for _ in range(2)]
        peaks = [each.result().peak for each in found]
    assert peaks == [planned.peak] * 2


class Placed(nn.Module):
    """With a `device` of its own, by which it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.device = "host"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if self.device == "host" else torch.cat([x, x, x, x]).sin()


def test_code_that_chooses_by_a_device_attribute_of_its_own_is_compiled_for_each_value() -> None:
    shapes = []

    def run() -> None:
        module = Placed()
        compiled = torch.compile(module)
        for module.device in ("host", "card"):
            shapes.append(tuple(compiled(torch.ones(1024, device="cuda")).shape))

    memfit.trace(run)
    assert shapes == [(1024,), (4096,)]


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


def _made(plan: memfit.Plan, op: str) -> list[int]:
    return [size for block, size in enumerate(plan.trace.requested) if plan.trace.op(block) == op]


@pytest.mark.parametrize("autocast", [False, True])
def test_flex_attention_makes_its_result_and_the_sums_of_its_rows_and_three_gradients(autocast: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend() -> None:
        q, k, v = (
            torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            torch.compile(flex_attention)(q, k, v, block_mask=mask).sum().backward()

    made = _made(memfit.trace(attend, gpu="H200"), "aten.empty_strided.default")
    assert made.count(2 * 8 * 1024 * 64 * 2) == (4 if autocast else 5)  # the result, three gradients, and its own
    assert made.count(2 * 8 * 1024 * 4) >= 2  # of each row: the logarithm of its sum, and what backward needs of it


def test_after_compiled_code_that_enters_modes_of_its_own_cuda_still_means_the_card() -> None:
    from torch.overrides import BaseTorchFunctionMode

    @torch.compile
    def doubled(x: torch.Tensor) -> torch.Tensor:
        with BaseTorchFunctionMode():
            return x * 2

    def run() -> torch.Tensor:
        doubled(torch.ones(256, device="cuda"))
        return torch.ones(MiB, device="cuda")

    assert 4 * MiB in memfit.trace(run, gpu="H200").trace.requested


@pytest.mark.skipif(not is_triton_here(), reason="a Triton kernel needs triton")
def test_a_triton_kernel_of_ones_own_changes_what_it_writes_and_makes_nothing() -> None:
    from accuracy.silu_kernel import silu_times

    run = torch.compile(lambda gate, value: silu_times(gate.sin(), value.cos()).exp())
    plan = memfit.trace(lambda: run(*(torch.randn(MiB, device="cuda") for _ in range(2))), gpu="H200")
    assert _made(plan, "aten.empty_strided.default") == 3 * [4 * MiB]


def test_products_with_an_odd_side_are_timed_with_operands_of_their_own() -> None:
    def step() -> None:
        model = nn.Linear(1024, 5001, device="cuda", dtype=torch.bfloat16)
        torch.compile(model)(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)).sum().backward()

    plan = memfit.trace(step, gpu="H200")
    assert {4096 * 1024 * 2, 1024 * 5001 * 2} <= set(_made(plan, OPERAND))
    assert 1024 * 5008 * 2 in _made(plan, "aten.constant_pad_nd.default")
    assert _made(plan, FLUSH).count(60 * MiB) >= 4
    assert plan.peak.allocated_bytes > 2 * 4096 * 5001 * 2 + 60 * MiB


def test_gradients_that_the_code_asks_for_by_torch_func_are_compiled() -> None:
    def run() -> None:
        weight, x = torch.randn(1024, 512, device="cuda"), torch.randn(2048, 1024, device="cuda")
        torch.compile(torch.func.grad(lambda w: torch.tanh(x @ w).sum()))(weight)

    assert _made(memfit.trace(run), "aten.empty_strided.default") == [2048 * 512 * 4, 1024 * 512 * 4]


def test_a_product_with_zero_in_compiled_code_is_folded() -> None:
    def run() -> None:
        torch.compile(lambda x: torch.stack([x * each for each in range(8)]))(torch.ones(1024, device="cuda"))

    assert _made(memfit.trace(run), "aten.empty_strided.default") == [8 * 1024 * 4]


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


def _products() -> None:
    left, right = (torch.randn(*shape, device="cuda") for shape in ((4096, 4097), (4097, 4099)))
    torch.compile(lambda a, b: [torch.mm(a + i, b) for i in range(10)])(left, right)


@pytest.fixture(scope="module")
def some_padded() -> memfit.Plan:
    return memfit.trace(_products, gpu="H200")


def test_where_the_card_decides_on_padding_both_are_in_the_document(some_padded: memfit.Plan) -> None:
    ends, peak = some_padded.to_json()["range"], some_padded.peak
    assert max(ends["unpadded_bytes"], ends["padded_bytes"]) == peak.allocated_bytes
    assert max(ends["unpadded_reserved_bytes"], ends["padded_reserved_bytes"]) == peak.reserved_bytes
    assert ends["unpadded_bytes"] < ends["padded_bytes"]


def test_what_is_made_to_time_kernels_and_products_is_a_workspace(some_padded: memfit.Plan) -> None:
    made = some_padded.trace
    timing = {made.category(block) for block in range(len(made.requested)) if made.op(block) in (FLUSH, OPERAND, COPY)}
    assert timing == {"workspaces"}
    assert some_padded.report.breakdown["workspaces"] > 0


def test_a_mixture_of_padded_products_may_take_copies_and_a_timing_buffer_above_the_unpadded_ones(
    some_padded: memfit.Plan,
) -> None:
    ends = some_padded.to_json()["range"]
    copies = 4 * (4100 * 4100 + 4096 * 4100 + 4096)  # of both operands; the result has a column more
    assert ends["most_bytes"] >= ends["unpadded_bytes"] + copies


def _sorted_beside_a_product() -> None:
    left, right = (torch.randn(*shape, device="cuda") for shape in ((4096, 4097), (4097, 4099)))
    torch.compile(lambda a, b: (torch.mm(a, b), torch.cat([a] * 8).sort().values))(left, right)


@pytest.fixture(scope="module")
def undecided() -> memfit.Plan:
    """Its peak is where no product is padded, but one may be."""
    return memfit.trace(_sorted_beside_a_product, gpu="H200")


def test_the_verdict_is_of_the_most_that_a_mixture_takes(undecided: memfit.Plan) -> None:
    ends, peak, fit = undecided.to_json()["range"], undecided.peak, undecided.fit
    assert fit is not None
    more, held = ends["most_bytes"] - peak.allocated_bytes, peak.reserved_bytes + peak.context_bytes
    assert more > 0 and more % 512 == 0
    assert fit.device_bytes == peak.device_bytes == undecided.needed_bytes == held + more
    assert undecided.smallest_gpu_bytes >= peak.allocated_bytes + peak.context_bytes + more
    assert f"{gib(more)}  beyond that, if the card pads some products" in str(undecided)


def test_without_a_card_a_limit_is_held_against_the_most_too(undecided: memfit.Plan) -> None:
    bare = undecided.peak.reserved_bytes + undecided.peak.context_bytes
    of_no_card = dataclasses.replace(undecided, gpu=None, fit=None)
    gated = GatedJob(name="", limit_bytes=bare, gpu=None, tolerance=0, baseline_bytes=None, plan=of_no_card)
    assert gated.status == "over limit"


def _compiled_run(*, padded: bool, timed_while_compiled: int) -> Trace:
    """100 MiB of weights, a product that is timed while it is compiled, then code with 50 MiB more."""
    made = Trace(facts={COPIES: [10 * MiB, 10 * MiB]})
    made.alloc(100 * MiB)
    for sizes in ([(timed_while_compiled, OPERAND), (60 * MiB, FLUSH)],
                  [(50 * MiB, ""), *([(8 * MiB, ""), (60 * MiB, FLUSH)] if padded else [])]):  # fmt: skip
        for block in [made.alloc(size, op=op) for size, op in sizes]:
            made.free(block)
    return made


@pytest.mark.parametrize(("timed", "most"), [(40, 220), (500, 660)])
def test_a_product_that_is_timed_is_not_padded_at_the_same_time(timed: int, most: int) -> None:
    ends = range_of(*(_compiled_run(padded=way, timed_while_compiled=timed * MiB) for way in (False, True)))
    assert ends["most_bytes"] == most * MiB  # weights, code, copies and the buffer; or weights and the timing


@pytest.mark.parametrize(
    ("low", "high", "most", "said"),
    [(1, 1, 1, "whether products are padded or not"), (1, 2, 2, "the plan and the verdict are of the larger"),
     (1, 2, 3, "with some of them at most 3.00 MiB")],
)  # fmt: skip
def test_a_range_is_told_in_as_many_numbers_as_it_has(low: int, high: int, most: int, said: str) -> None:
    ends = {"unpadded_bytes": low * MiB, "padded_bytes": high * MiB, "most_bytes": most * MiB}
    assert said in range_in_words(ends)


def test_two_kernels_are_not_timed_at_once() -> None:
    both = [_compiled_run(padded=True, timed_while_compiled=MiB) for _ in range(2)]
    both[1].free(both[1].alloc(60 * MiB, op=FLUSH))
    assert range_of(*both)["most_bytes"] == (100 + 50 + 8 + 60 + 10) * MiB


def test_padding_that_takes_next_to_nothing_is_not_planned_by_itself() -> None:
    def run() -> None:
        weight = torch.randn(4096, 4096, device="cuda")
        torch.compile(torch.mm)(torch.randn(3, 4096, device="cuda"), weight)

    plan = memfit.trace(run, gpu="H200")
    assert "range" not in plan.to_json()
    assert any("would take at most" in note for note in plan.notes)


@pytest.mark.skipif(not is_triton_here(), reason="triton compiles the kernel")
def test_a_reduction_that_takes_many_registers_is_timed_with_shorter_rows_too() -> None:
    def run() -> None:
        torch.compile(lambda x: x.float().log_softmax(-1).bfloat16())(
            torch.randn(8192, 32000, device="cuda", dtype=torch.bfloat16)
        )

    plan = memfit.trace(run, gpu="H200")
    assert not any("many registers" in note for note in plan.notes)


def test_a_compiled_function_has_the_weights_and_phases_of_the_model_that_it_calls() -> None:
    def run() -> None:
        net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
        optimizer = torch.optim.SGD(net.parameters())
        called = torch.compile(lambda x: net(x).pow(2).mean())
        for _ in range(2):
            called(torch.randn(64, 256, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()

    plan = memfit.trace(run, gpu="T4").to_json()
    weights = 2 * 256 * 512 + 512 + 256
    assert plan["model"]["parameters"] == weights
    assert plan["breakdown"]["weights"] == 4 * weights
    assert [phase["name"] for phase in plan["phases"]] == 2 * ["forward", "backward", "step"]


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
    with pytest.raises(UsageError, match=what) as told:
        Workload.from_mapping({"kind": "train", "model": "gpt2", "compile": True, **settings})
    assert any(f"leave {which} out" in str(told.value.hint) for which in ("one", "--compile", "--compile-blocks"))


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"compile": True, "cache": "static"}, "CUDA graphs"), ({"compile_blocks": True}, "limit of 8")],
)
def test_a_generation_is_compiled_whole_and_with_a_cache_that_grows(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Workload.from_mapping({"kind": "generate", "model": "gpt2", **settings})


def _llama(folder: Path, blocks: int) -> Path:
    (folder / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,'
        f' "num_attention_heads": 4, "num_hidden_layers": {blocks}, "num_key_value_heads": 2,'
        ' "tie_word_embeddings": true}'
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _llama(tmp_path_factory.mktemp("model"), blocks=2)


def test_blocks_that_are_not_there_are_not_compiled_in_silence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two blocks or more"):
        memfit.predict(kind="forward", model=str(_llama(tmp_path, 1)), seq_len=8, compile_blocks=True)


@pytest.fixture(scope="module")
def one_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _llama(tmp_path_factory.mktemp("one-block"), blocks=1)


@pytest.fixture(scope="module")
def generation(one_block: Path) -> Trace:
    """Two tokens after a prompt of 24, two rows."""
    sizes = {"batch_size": 2, "seq_len": 24, "new_tokens": 2}
    work = Workload(kind="generate", model=str(one_block), compile=True, **sizes)
    return trace_job(prepare_without_memory(work), H200)


def test_a_compiled_generation_runs_generated_code_once_for_each_token(generation: Trace) -> None:
    assert len(generation.facts[COMPILED]) == 2


def test_the_cache_of_a_compiled_generation_is_named_and_grows_by_a_token(generation: Trace) -> None:
    made = [b for b in range(len(generation.requested)) if generation.category(b) == "kv_cache"]
    assert [generation.requested[b] for b in made] == [2 * 2 * 16 * 2 * n for n in range(24, 26) for _ in range(2)]


@pytest.mark.slow
def test_a_compiled_generation_told_from_its_first_tokens_is_that_of_all(one_block: Path) -> None:
    def prepared() -> Prepared:
        sizes = {"batch_size": 2, "seq_len": 24, "new_tokens": 20}
        return prepare_without_memory(Workload(kind="generate", model=str(one_block), compile=True, **sizes))

    assert traced_tokens(20) < 20
    told, whole = _from_few(prepared(), H200, 20, traced_tokens(20)), trace_job(prepared(), H200)
    events = [[(action, each.requested[block]) for action, block in each.events()] for each in (told, whole)]
    assert events[0] == events[1]
    peaks = [(replay(each).peak_allocated, replay(each).peak_reserved) for each in (told, whole)]
    assert peaks[0] == peaks[1]


def test_numbers_in_compiled_code_break_no_graph() -> None:
    def run() -> None:
        made = torch.compile(lambda x: torch.cat([torch.tensor([], device="cuda"), x.sin()]), fullgraph=True)
        assert made(torch.randn(MiB, device="cuda")).shape == (MiB,)

    assert memfit.trace(run, gpu="H200").peak.allocated_bytes == (4 + 4 + 60) * MiB  # 60 to time the kernel


def _goes_on_with(kind: type, known: Iterator[float] | None) -> None:
    model = nn.Linear(64, 64).cuda()

    @torch._dynamo.disable
    def read(value: torch.Tensor) -> float:
        return value.item() if known is None else next(known)  # as .item() does, it breaks the graph

    @torch.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        print("loss", read(y.detach().sum()))
        number = read(y.detach().abs().amax() if kind is float else (y > 0).sum())
        return (y / number).square().mean()

    for _ in range(3):
        step(torch.randn(128, 64, device="cuda")).backward()


@pytest.mark.parametrize("kind", [float, int])
def test_compiled_code_that_goes_on_with_an_unknown_number_makes_what_it_makes_with_a_known_one(
    kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(known: Iterator[float] | None) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
        plan = memfit.trace(lambda: _goes_on_with(kind, known), gpu="H200")
        blocks = range(len(plan.trace.requested))
        found = [(plan.trace.op(block), plan.trace.requested[block]) for block in blocks]
        return [each for each in found if each[0] != FLUSH], plan.notes

    unknown, notes = made(None)
    assert capsys.readouterr().out == "loss ?\n" * 3
    known, others = made(iter([kind(number) for number in (2.5, 3.5, 4.5, 5.5, 6.5, 7.5)]))
    assert unknown == known and len(known) > 9
    assert ONCE in notes and ONCE not in others


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda y, number: y * 2 if number > 3 else y, DECIDES),
        (lambda y, number: y.clamp(max=number), CONSTANT),
        (lambda y, _: y[: int((y > 0).sum().item())], DECIDES),
    ],
)
def test_compiled_code_that_depends_on_an_unknown_number_is_refused_with_the_line(
    use: Callable[[Any, Any], Any], what: str
) -> None:
    def step() -> None:
        torch.compile(lambda x: use(x * 2, x.sum().item()))(torch.ones(128, 64, device="cuda"))

    with pytest.raises(TraceError) as refusal:
        memfit.trace(step)
    assert str(refusal.value) == f"{__file__}:{use.__code__.co_firstlineno}: {what}"
    assert refusal.value.hint == OUT_OF_IT


def test_a_number_that_a_person_gives_for_its_line_is_decided_by() -> None:
    def grows(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]) if x.sum().item() > 3 else x + 1

    def made(number: float) -> list[int]:
        def step() -> None:
            torch.compile(grows)(torch.ones(128, 64, device="cuda"))

        made = memfit.trace(step, answers={("test_torch_compile.py", "grows"): number}).trace
        return [int(size) for at, size in enumerate(made.requested) if size > 1024 and made.op(at) != FLUSH]

    assert (made(5.0), made(1.0)) == ([32768, 65536], [32768, 32768])


def test_a_value_that_generated_code_asks_for_is_asked_by_the_code_that_was_compiled() -> None:
    @torch.compile
    def largest(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=x.sum().item())

    def step() -> None:
        torch._dynamo.config.capture_scalar_outputs = True
        largest(torch.ones(128, 64, device="cuda"))

    with pytest.raises(TraceError, match=r"test_torch_compile.py:\d+, in largest: the code asks a float32 tensor"):
        memfit.trace(step)
    plan = memfit.trace(step, answers={("test_torch_compile.py", "largest"): 3.0})
    assert plan.trace.requested.tolist().count(128 * 64 * 4) == 2


def test_the_trainer_is_told_to_compile() -> None:
    work = Workload.from_mapping({"kind": "train", "model": "gpt2", "loop": "trainer", "compile": True})
    assert trainer_settings(work)["torch_compile"] is True
    assert "torch_compile" not in trainer_settings(Workload(kind="train", model="gpt2", loop="trainer"))


def test_an_autocast_region_of_the_traced_device_in_compiled_code_is_one_of_the_card() -> None:
    def made(kind: str) -> list[int]:
        def run(tracer: Any) -> None:
            def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                with torch.autocast(kind, torch.bfloat16):  # accelerate names the device so for the Trainer
                    return x @ weight

            x, weight = (torch.randn(n, 512, device=tracer.device, requires_grad=True) for n in (1024, 512))
            torch.compile(forward)(x, weight).sum().backward()

        return trace(run).requested

    assert made("meta") == made("cuda")
    assert 2 * 1024 * 512 in made("meta")


def test_a_fitted_job_that_is_compiled_is_written_so() -> None:
    assert "torch_compile=True" in python_of(Workload(kind="train", model="gpt2", compile=True), "fits")
    assert "torch.compile(model.to(" in python_of(Workload(kind="forward", model="gpt2", compile=True), "fits")
    assert "    model.compile()" in python_of(Workload(kind="generate", model="gpt2", compile=True), "fits")
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


def test_a_compiled_plan_is_found_again_in_the_cache(
    one_block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def planned() -> memfit.Plan:
        return memfit.predict(kind="forward", model=str(one_block), batch_size=2, seq_len=64, compile=True, gpu="H200")

    made = planned()
    monkeypatch.setattr("memfit.planning.few.trace_few_blocks", None)
    assert planned().peak == made.peak


def test_compiled_blocks_are_tried_from_six_and_with_lora_from_twelve_where_six_are_not_alike() -> None:
    def traced(kind: Any) -> list[int]:
        return [
            each.traced for each in _tried(Blocks("layers", 28, 1), Workload(kind=kind, model="gpt2", compile=True))
        ]

    assert traced("train") == [6]
    assert traced("lora") == [6, 12]
    assert not traced("forward") and not traced("generate")


def test_what_is_let_go_at_one_time_goes_by_size() -> None:
    trace = Trace()
    blocks = [trace.alloc(size) for size in (4096, 1024, 2048)]
    for block in blocks:
        trace.free(block)
    sort_frees(trace, [[0, len(trace)]])
    assert [trace.requested[block] for block in trace.subjects[3:]] == [1024, 2048, 4096]


def test_of_buffers_of_one_size_the_last_goes_first() -> None:
    trace = Trace()
    blocks = [trace.alloc(1024) for _ in range(3)]
    for block in blocks:
        trace.free(block)
    sort_frees(trace, [[0, len(trace)]])
    let_the_last_go_first(trace, [[0, len(trace)]])
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


@pytest.mark.parametrize(
    ("gpu", "mib", "how"),
    [("L4", 48, "programs of others"), ("RTX 3060", 2.25, "programs of others"), ("H200", 60, "recorded"),
     ("H20", 60, "the largest that is known"), (None, 60, "recorded")],
)  # fmt: skip
def test_a_plan_says_which_l2_cache_it_takes_and_how_that_is_known(gpu: str | None, mib: float, how: str) -> None:
    platform = platform_of(None if gpu is None else find_gpu(gpu))
    assert platform.l2_bytes == flush_bytes(platform) == mib * MiB
    made = Trace()
    made.free(made.alloc(flush_bytes(platform), op=FLUSH))
    card = None if gpu is None else find_gpu(gpu)
    context = context_on(card, training=False, flash=True)
    plan = assess(made, AllocatorConfig(), card, context, started=0, how=Provenance(), notes=(), workload={"kind": ""},
                  model="", parameters=0, trainable_parameters=0)  # fmt: skip
    assert f"{format_bytes(platform.l2_bytes)} on {gpu or 'H200'}" in plan.notes[-1] and how in plan.notes[-1]


def test_triton_itself_times_beside_a_buffer_of_256_mib() -> None:
    with inductor_settings.patch(use_experimental_benchmarker=False):
        assert flush_bytes(H200) == 256 * MiB


class Watched:
    """A tracer, as far as generated code knows of one."""

    def __init__(self) -> None:
        self.trace, self.platform, self.device, self.maker = Trace(), H200, torch.device("meta"), ""
        self.unmodelled: dict[str, None] = {}
        self.lines: tuple[FrameRow, ...] = ()
        self.passed: list[torch.Tensor] = []
        self.in_backward = False

    def surroundings(self) -> tuple[str, None]:
        return "block", None

    def passed_on(self, tensor: torch.Tensor) -> None:
        self.passed.append(tensor)

    def making(self, category: str) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def temporaries(self) -> Iterator[Callable[[int, str], None]]:
        held: list[int] = []
        yield lambda size, op: held.append(self.trace.alloc(size, op=op))
        for block in reversed(held):
            self.trace.free(block)

    def made(self) -> list[tuple[str, int]]:
        return [(self.trace.op(block), size) for block, size in enumerate(self.trace.requested)]


def launched(source: str, watched: Watched, *, times: int = 1) -> list[tuple[str, int]]:
    kernels = GeneratedKernels(watched)
    for _ in range(times):
        kernels.launch(source, (torch.empty(1024, device="meta"), 1024))
    return watched.made()


def test_what_a_kernel_changes_is_copied_before_each_timing_and_beside_it() -> None:
    each = [(COPY, 4096), (FLUSH, 60 * MiB), (COPY, 4096)]
    assert launched(POINTWISE.format(size=1 << 24), Watched()) == 2 * each


def test_a_kernel_is_timed_once_and_one_of_a_single_configuration_never() -> None:
    assert len(launched(POINTWISE.format(size=1 << 24), Watched(), times=3)) == 6
    assert launched(POINTWISE.format(size=64), Watched()) == []


def test_copies_that_would_raise_the_peak_are_made_on_the_host() -> None:
    """The buffer of the first timing is a peak below which those of the second have room."""
    source = POINTWISE.format(size=1 << 24).replace("'optimize_mem': False", "'optimize_mem': True")
    assert launched(source, Watched()) == [(FLUSH, 60 * MiB), (COPY, 4096), (FLUSH, 60 * MiB), (COPY, 4096)]


REUSING = """
def call(args):
    buf0 = empty_strided_cuda((4, ), (1, ), torch.float32)
    buf1 = buf0; del buf0  # reuse
    return (buf1, )
from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided_cuda
"""


def test_what_a_program_calls_device_itself_is_compiled_anew_when_it_changes() -> None:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.device = "small"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if self.device == "small" else torch.cat([x, x]) + 1

    def run() -> None:
        model, x = Grown(), torch.zeros(1024, device="cuda")
        called = torch.compile(model)
        assert called(x).numel() == 1024
        model.device = "large"
        assert called(x).numel() == 2048

    memfit.trace(run, gpu="H200")


def test_generated_code_says_where_it_ran_and_which_buffers_it_uses_again() -> None:
    watched = Watched()
    (made,) = GeneratedCode(REUSING, {}, GeneratedKernels(watched), {"buf1": Origin("up")}).call([])

    assert [tensor.data_ptr() for tensor in watched.passed] == [made.data_ptr()] and len(watched.passed) == 1
    assert watched.passed[0] is made
    assert watched.trace.facts[COMPILED] == [[0, 0]]


def test_a_library_that_compiles_functions_as_it_is_imported_is_no_program_that_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages" / "decorates.py"
    library.parent.mkdir()
    library.write_text("import torch\n\n\n@torch.compile\ndef twice(x):\n    return (x * 2).relu() + 1\n")
    step = "import decorates, torch\nx = torch.randn(1000, 1000, device='cuda')\n"
    (tmp_path / "eager.py").write_text(f"{step}y = (x * 2).relu()\n")
    (tmp_path / "compiled.py").write_text(f"{step}y = decorates.twice(x)\n")
    (tmp_path / "by_itself.py").write_text(f"{library.read_text()}{step}y = twice(x)\n".replace("decorates, ", ""))
    monkeypatch.syspath_prepend(library.parent)
    eager, compiled, by_itself = (
        memfit.trace_script(str(tmp_path / f"{name}.py")) for name in ("eager", "compiled", "by_itself")
    )
    assert not any("torch.compile" in note for note in eager.notes)
    assert eager.peak.allocated_bytes == 3 * 4_000_256  # the input, twice as much, and relu's
    assert any(note.startswith("torch.compile: buffers as the compiler") for note in compiled.notes)
    assert compiled.peak == by_itself.peak

"""One process of several that train together: DDP's buckets, FSDP2's shards, streams and gathered weights."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import Pair, assert_measured, is_pinned, pair, peak, runs
from miniatures import Miniatures, check_extended
from plans import LLAMA, plan, small_llama
from support.quick import quick

from memfit.errors import UsageError
from memfit.events import Action, Trace
from memfit.jobs.build import prepare_without_memory
from memfit.jobs.training.parallel import one_process_of
from memfit.jobs.workload import Workload
from memfit.planning.on_trace import trace_job
from memfit.planning.predict import Plan, predict


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Miniatures:
    return Miniatures(tmp_path_factory.mktemp("parallel"))


# -- measured on an H200, with a process group that sends nothing ------------------------------------------------------


@cache
def sharded(run_id: str) -> Plan:
    spec = runs()[run_id].spec
    return predict(
        kind="train", model=spec["model"], batch_size=spec["batch"], seq_len=spec["seq"], precision="amp-bf16",
        optimizer="adamw-fused", grad_checkpointing=bool(spec.get("ckpt")), world_size=spec["world"], parallel="fsdp2",
        outputs="dropped", gpu="H200",
    )  # fmt: skip


@pytest.mark.parametrize("run_id", ["d25", "d26"])
def test_each_phase_of_fsdp2_peaks_where_it_was_measured(run_id: str) -> None:
    predicted: dict[tuple[str, int], Pair] = {
        (phase.name, phase.step): pair(phase) for phase in sharded(run_id).report.phases if phase.name != "load"
    }
    measured = runs()[run_id].phases()
    assert predicted.keys() == measured.keys()
    for phase, peaks in predicted.items():
        assert_measured(peaks, measured[phase])


@pytest.mark.parametrize("run_id", ["d25", "d26"])
def test_shards_lie_in_the_segments_that_were_measured(run_id: str) -> None:
    load = next(phase for phase in sharded(run_id).report.phases if phase.name == "load")
    assert load.reserved_bytes == runs()[run_id].loaded[1]


MEASURED = Path(__file__).parents[2] / "accuracy" / "measured" / "parallel.jsonl"
ALSO_MEASURED = ("v01", "v02", "v06", "w08", "w09", "x12", "x15")
"""DDP with gradients beside its buckets and in them, and in the Trainer; uneven shards; FSDP2 in the Trainer and in
`memfit train`; DDP of a model with weights that no gradient reaches."""


@pytest.mark.parametrize("run_id", quick(["v01", "w08", "x12"], ALSO_MEASURED))
def test_the_peak_of_a_process_is_the_measured_one(run_id: str) -> None:
    found = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    run = next(run for run in found if run["id"] == run_id)
    if run["parallel"] == "fsdp2" and run.get("loop", "plain") != "plain" and not is_pinned("accelerate"):
        pytest.skip("another accelerate shards in other groups, and reduces gradients at other times")
    known = {field.name for field in dataclasses.fields(Workload)}
    made = predict(gpu="H200", **{name: value for name, value in run.items() if name in known})
    assert_measured(peak(made), (run["peak_allocated"], run["peak_reserved"]))


# -- what a process holds ----------------------------------------------------------------------------------------------


def at(made: Plan, phase: str, step: int) -> int:
    return next(p.allocated_bytes for p in made.report.phases if (p.name, p.step) == (phase, step))


def trace_of(**settings: Any) -> Trace:
    usual = {"kind": "train", "model": small_llama(), "batch_size": 4, "seq_len": 128}
    return trace_job(prepare_without_memory(Workload(**{**usual, **settings})))


@cache
def weights_of_a_process(world_size: int, parallel: str = "fsdp2", kind: str = "train") -> int:
    """After loading."""
    trace, alive = trace_of(kind=kind, world_size=world_size, parallel=parallel), 0
    for action, subject in trace.events():
        if action == Action.MARK and trace.marks[subject].phase == "data":
            break
        if action in (Action.ALLOC, Action.FREE) and trace.category(subject) == "weights":
            alive += trace.requested[subject] if action == Action.ALLOC else -trace.requested[subject]
    return alive


def test_shards_are_the_weights_divided() -> None:
    whole = weights_of_a_process(1)
    buffers = 2 * 16 * 4  # rotary frequencies, which every process has
    assert [weights_of_a_process(n) - buffers for n in (2, 4, 8)] == [(whole - buffers) // n for n in (2, 4, 8)]


def test_a_shard_that_does_not_divide_evenly_is_rounded_up() -> None:
    """Of 512 rows each of three processes gathers 171."""
    assert weights_of_a_process(3) > weights_of_a_process(1) // 3
    table = -(-LLAMA["vocab_size"] // 3) * LLAMA["hidden_size"] * 2
    assert table in trace_of(world_size=3, parallel="fsdp2").requested


def test_frozen_weights_are_sharded_too() -> None:
    assert weights_of_a_process(8, kind="lora") < weights_of_a_process(1, kind="lora") / 7


def test_ddp_keeps_the_whole_model_in_each_process() -> None:
    assert weights_of_a_process(4, "ddp") == weights_of_a_process(1)


def test_buckets_hold_every_gradient_once_more() -> None:
    """Without bucket views the step finds both; with them only the buckets."""
    alone, copied, viewed = (
        plan(optimizer="adamw-fused", world_size=n, gradient_as_bucket_view=view)
        for n, view in ((1, None), (4, False), (4, True))
    )
    gradients = 2 * alone.parameters
    assert at(copied, "step", 3) - at(viewed, "step", 3) == pytest.approx(gradients, rel=0.02)
    assert at(viewed, "step", 3) == pytest.approx(at(alone, "step", 3), rel=0.02)
    assert at(copied, "forward", 3) - at(alone, "forward", 3) == pytest.approx(gradients, rel=0.02)


def test_ddp_makes_its_buckets_anew_in_the_second_step_and_never_again() -> None:
    trace, made = trace_of(world_size=4), {1: 0, 2: 0, 3: 0}
    step = 0
    for action, subject in trace.events():
        if action == Action.MARK:
            step = trace.marks[subject].step if trace.marks[subject].phase == "forward" else 0
        elif action == Action.ALLOC and step and trace.category(subject) == "gradients":
            made[step] += trace.requested[subject] > 4096  # but for the rotary tables, sent around in each forward
    assert made[1] == made[3] == 0 < made[2]


def test_gradients_of_lora_are_all_that_buckets_hold() -> None:
    alone, four = (plan("lora", world_size=n, optimizer="adamw-fused", rank=8) for n in (1, 4))
    assert 0 < at(four, "forward", 3) - at(alone, "forward", 3) < 4.2 * four.trainable_parameters


def test_accumulated_gradients_of_fsdp2_are_shards() -> None:
    """They are reduced in every micro-step, and so each process keeps only its own."""
    once, twice = (plan(world_size=4, parallel="fsdp2", grad_accum=n, optimizer="sgd") for n in (1, 2))
    assert at(twice, "forward", 2) - at(once, "forward", 2) < 1.1 * 2 * once.parameters / 4


def test_fsdp2_allocates_on_streams_of_its_own() -> None:
    """Weights are gathered on one and gradients reduced on another; all else is on the default one."""
    trace = trace_of(world_size=4, parallel="fsdp2")
    streams: dict[str, set[int]] = {}
    for block, stream in enumerate(trace.streams):
        streams.setdefault(trace.category(block), set()).add(stream)
    gathering, reducing = streams.pop("weights") - {0}, streams.pop("gradients") - {0}
    assert len(gathering) == len(reducing) == 1
    assert gathering != reducing
    assert set().union(*streams.values()) == {0}


# -- the Trainer and memfit's own loop ---------------------------------------------------------------------------------


LOOPS = [("trainer", "ddp"), ("memfit", "fsdp2"), ("memfit", "ddp"), ("trainer", "fsdp2")]


@pytest.mark.parametrize(("loop", "parallel"), quick(LOOPS[:2], LOOPS))
def test_every_loop_is_planned_in_parallel(loop: str, parallel: str) -> None:
    made = plan(loop=loop, parallel=parallel, world_size=4, grad_accum=2, precision="amp-bf16")
    state = made.report.breakdown["optimizer"]
    whole = 8 * made.parameters
    assert state == pytest.approx(whole / (4 if parallel == "fsdp2" else 1), rel=0.05)


# -- a few blocks tell all ---------------------------------------------------------------------------------------------

REPEATING: dict[str, dict[str, Any]] = {
    "train": {"kind": "train"},
    "amp": {"kind": "train", "precision": "amp-bf16", "clip_grad": True, "optimizer": "adamw-fused"},
    "checkpointed": {"kind": "train", "grad_checkpointing": True, "grad_accum": 2},
    "lora": {"kind": "lora", "grad_checkpointing": True, "rank": 4},
    "trainer": {"kind": "train", "loop": "trainer", "precision": "amp-bf16"},
}


@pytest.mark.parametrize("kind", quick(["amp"], REPEATING))
def test_sharded_blocks_repeat(small: Miniatures, kind: str) -> None:
    check_extended(small.work("llama", **REPEATING[kind], world_size=4, parallel="fsdp2"))


@pytest.mark.parametrize("family", quick(["gpt2"], ["gpt2", "gemma2"]))
def test_so_do_those_of_other_families(small: Miniatures, family: str) -> None:
    check_extended(small.work(family, **REPEATING["amp"], world_size=4, parallel="fsdp2"))


def test_blocks_of_adapters_alone_repeat(small: Miniatures) -> None:
    check_extended(small.work("llama", kind="lora", rank=4, world_size=4, parallel="fsdp2"))


@pytest.mark.slow  # the measured run w08 has them too
def test_blocks_of_uneven_shards_repeat(small: Miniatures) -> None:
    check_extended(small.work("llama", kind="train", world_size=3, parallel="fsdp2", precision="fp32"))


# -- around it ---------------------------------------------------------------------------------------------------------


def test_a_single_process_is_not_parallel_and_the_plan_says_so() -> None:
    alone, one = plan(), plan(parallel="fsdp2")
    assert one.peak == alone.peak
    assert "--parallel fsdp2 has no effect: there is a single process" in one.notes


def test_the_plan_says_what_is_not_counted() -> None:
    assert any("NCCL" in note for note in plan(world_size=2).notes)
    assert not any("NCCL" in note for note in plan().notes)


def test_nothing_of_the_processes_is_left_behind() -> None:
    from torch.nn.parallel import DistributedDataParallel

    before = dict(os.environ), DistributedDataParallel.__init__, torch.cuda.Stream, torch.UntypedStorage.resize_
    for parallel in ("ddp", "fsdp2"):
        plan(world_size=2, parallel=parallel)
    assert not torch.distributed.is_initialized()
    after = dict(os.environ), DistributedDataParallel.__init__, torch.cuda.Stream, torch.UntypedStorage.resize_
    assert after == before


def test_a_process_that_trains_with_others_does_not_plan_for_others() -> None:
    with one_process_of(2), pytest.raises(UsageError, match="trains with others"):
        plan(world_size=4)


def test_a_plan_in_parallel_is_kept_and_found_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    first, again = (plan(world_size=4, parallel="fsdp2") for _ in range(2))
    assert again.peak == first.peak
    assert plan(world_size=8, parallel="fsdp2").peak != first.peak


def test_a_plan_leaves_the_way_errors_are_shown_as_it_was() -> None:
    before = sys.excepthook
    with one_process_of(2):
        pass
    assert sys.excepthook is before

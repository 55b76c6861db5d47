"""How long a job takes: a step is counted from its own ops, and an estimate is a range that measured steps lie in."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.quick import quick
from support.rotary import ROTARY_TABLES_ARE_A_PRODUCT

from memfit.cli.main import main
from memfit.errors import UsageError
from memfit.events import OpCost
from memfit.fitting import durations
from memfit.fitting.durations import (
    AS_MEASURED,
    ELSEWHERE,
    PHASE,
    Duration,
    Ops,
    PhaseCost,
    Range,
    StepCost,
    _after,
    count_marks,
    estimate,
    estimate_training,
    last_step,
    seconds,
    step_cost,
    sum_by_phase,
)
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.models.registry import load_config, resolve

BLOCKS = str(Path(__file__).with_name("gpt2_of_two_blocks"))
LEVERS = Path(__file__).parents[2] / "docs" / "levers.md"
TIMED = re.compile(r"\| (?:train|lora) .* \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \| \d+ \| [\d.]+ \| [\d.]+ \|")


def tiny(**changes: object) -> Workload:
    return Workload.from_mapping({"kind": "train", "model": BLOCKS, "batch_size": 2, "seq_len": 64, **changes})


def measured() -> list[tuple[float, float, int]]:
    """(seconds, roofline, kernels) of real steps on the H200, as docs/levers.md lists them."""
    found = TIMED.findall(LEVERS.read_text(encoding="utf-8"))
    return [(float(took), float(bound), int(kernels.replace(",", ""))) for took, bound, kernels in found]


def test_every_step_that_was_measured_lies_in_its_range() -> None:
    rows = measured()
    assert len(rows) == 27
    for took, bound, kernels in rows:
        for pace in (AS_MEASURED, ELSEWHERE):
            found = pace.estimate(bound, kernels)
            assert found.least <= took <= found.most
        assert 0.6 < AS_MEASURED.estimate(bound, kernels).likely / took < 1.4


def test_a_card_that_was_not_measured_has_a_wider_range() -> None:
    here, there = AS_MEASURED.estimate(1.0, 100), ELSEWHERE.estimate(1.0, 100)
    assert there.least < here.least < here.most < there.most


def test_small_kernels_take_as_long_as_the_host_needs_to_launch_them() -> None:
    found = AS_MEASURED.estimate(0.001, 10_000)
    assert (found.least, found.likely, found.most) == pytest.approx((0.24, 0.3, 0.45))


def test_the_whole_follows_from_steps_or_from_tokens() -> None:
    work, card = tiny(grad_accum=4, world_size=2), find_gpu("H200")
    by_steps, by_tokens = estimate(work, card, steps=10), estimate(work, card, tokens=10 * 2 * 64 * 4 * 2 - 5)
    assert by_steps is not None and by_tokens is not None
    assert by_steps.tokens_per_step == 1024
    assert by_steps == by_tokens
    assert by_steps.total == by_steps.step.times(10)
    assert "traffic between GPUs" in by_steps.basis
    with pytest.raises(UsageError, match="both say how long it trains"):
        estimate(work, card, steps=1, tokens=1)


def test_what_is_not_known_has_no_time() -> None:
    assert estimate(tiny(), find_gpu("24GB"), steps=10) is None
    assert estimate(tiny(), find_gpu("RTX 4080 Laptop"), steps=10) is None
    assert estimate(Workload(kind="forward", model="gpt2"), find_gpu("H200")) is None


def test_the_driver_s_name_of_a_card_is_the_card() -> None:
    here = dataclasses.replace(find_gpu("H200"), name="NVIDIA H200")
    assert estimate(tiny(), here) == estimate(tiny(), find_gpu("H200"))


def test_the_document_says_that_it_is_an_estimate_and_by_what() -> None:
    time = Duration(
        gpu="RTX 4090", step=Range(1.0, 1.5, 3.0), roofline_seconds=0.9, kernels=1000, tokens_per_step=6000, steps=2400,
        basis="counting",
    )  # fmt: skip
    document = time.to_json()
    assert (document["origin"], document["basis"]) == ("estimated", "counting")
    assert document["tokens_per_second"] == {"least": 2000, "likely": 4000, "most": 6000}
    assert document["total_seconds"] == {"least": 2400, "likely": 3600, "most": 7200}
    assert time.in_words() == (
        "about 1 h (40 min to 2 h) for 2,400 steps; about 1.5 s (1 s to 3 s) a step, 4,000 tokens a second"
    )


def test_an_operation_that_was_counted_before_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.fitting import durations

    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    durations._step_cost.cache_clear()
    first = durations.step_cost(tiny())
    durations._step_cost.cache_clear()
    monkeypatch.setattr(durations, "_counted_cost", lambda work: pytest.fail("counted again"))
    assert durations.step_cost(tiny()) == first


# -- in the commands ---------------------------------------------------------------------------------------------------

PLAN = ["plan", "train", "--model", BLOCKS, "--seq-len", "64", "--json"]


def test_a_plan_on_a_named_card_tells_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--gpu", "RTX 4090", "--steps", "5,000"]) == 0
    time = json.loads(capsys.readouterr().out)["duration"]
    assert (time["steps"], time["tokens_per_step"]) == (5000, 64)
    assert time["total_seconds"]["likely"] == pytest.approx(5000 * time["step_seconds"]["likely"], rel=1e-3)
    assert "on the RTX 4090 nothing was measured" in time["basis"]
    assert main([*PLAN[:-1], "--gpu", "RTX 4090"]) == 0
    assert re.search(r"time: about .* a step, [\d,]+\s+tokens a second \(estimated\)", capsys.readouterr().out)


def test_a_size_has_no_speed_and_nothing_is_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--gpu", "24GB", "--steps", "10"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["duration"] is None
    assert "no time: a size has no speed, and 24 GB card is no card" in captured.err


@pytest.mark.parametrize(("words", "said"), [
    (["--steps", "10"], "--steps: no card is named"), (["--steps", "0", "--gpu", "H200"], "--steps '0' is not a whole"),
    (["--steps", "1", "--tokens", "1", "--gpu", "H200"], "--steps and --tokens both say how long it trains"),
])  # fmt: skip
def test_how_much_is_trained_must_mean_something(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_fitted_job_tells_the_time_with_its_changes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "train", "--model", BLOCKS, "--seq-len", "64", "--gpu", "RTX 4090", "--tokens", "640"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["duration"]["steps"] == 10
    assert main([*words, "--ladder"]) == 2
    assert "--tokens has no effect with --ladder" in capsys.readouterr().err


def test_a_training_is_timed_by_the_rows_and_steps_that_it_has(tmp_path: Path) -> None:
    from memfit.jobs.training.config_file import config_from
    from memfit.jobs.training.job import prepare_job

    rows = [{"text": "x" * length} for length in (9, 29, 9, 29)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = config_from({
        "model": {"name": BLOCKS, "from_scratch": True, "tokenizer": "bytes"}, "precision": "bf16",
        "data": {"source": str(tmp_path / "rows.jsonl"), "packing": False, "shuffle": False}, "max_seq_len": 64,
        "micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 7, "output_dir": str(tmp_path / "out"),
    })  # fmt: skip
    time = estimate_training(prepare_job(config), find_gpu("H200"))
    assert time is not None
    assert (time.steps, time.tokens_per_step) == (7, 2 * 20)


MODEL = str(Path(__file__).with_name("llama_of_five_blocks"))
"""smollm2-135m, but for how many."""
TOKENS = 256


def workload(**settings: Any) -> Workload:
    return Workload.from_mapping({"kind": "train", "model": MODEL, "seq_len": TOKENS} | settings)


def totals(cost: StepCost) -> tuple[int, int, int]:
    return cost.flops, cost.bytes_moved, cost.host_bytes


def totals_of(counted: dict[str, Ops]) -> tuple[int, int, int]:
    return totals(StepCost(tuple(PhaseCost(name, ops) for name, ops in counted.items())))


class Llama:
    """Its products by hand."""

    def __init__(self) -> None:
        config = load_config(resolve(MODEL))
        self.layers, self.hidden, self.inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        self.head = self.hidden // config.num_attention_heads
        self.keys = config.num_key_value_heads * self.head
        self.vocabulary = config.vocab_size

    @property
    def block(self) -> int:
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.keys + 3 * self.hidden * self.inner

    @property
    def attention(self) -> int:
        """A multiplication and an addition for each pair of tokens that may look at each other, in q k^T and again
        in the product with v."""
        return 4 * self.hidden * (TOKENS * (TOKENS + 1) // 2)

    @property
    def rotary(self) -> int:
        """Positions times frequencies, once for all blocks, where that is a product of matrices."""
        return 2 * TOKENS * self.head // 2 if ROTARY_TABLES_ARE_A_PRODUCT else 0


def test_training_takes_six_operations_for_each_weight_and_token_and_attention() -> None:
    model = Llama()
    weights = model.layers * model.block + model.vocabulary * model.hidden
    attention = model.layers * model.attention * 7 // 2  # forward, and five products in backward for two

    assert step_cost(workload()).flops == 6 * weights * TOKENS + attention + model.rotary


def test_a_forward_pass_takes_a_third_of_a_training_step_but_for_attention() -> None:
    model = Llama()
    weights = model.layers * model.block + model.vocabulary * model.hidden

    assert step_cost(workload(kind="forward")).flops == (
        2 * weights * TOKENS + model.layers * model.attention + model.rotary
    )


def test_checkpointing_adds_one_forward_of_the_blocks_less_their_last_product() -> None:
    model = Llama()
    again = model.layers * (2 * TOKENS * (model.block - model.inner * model.hidden) + model.attention)

    assert step_cost(workload(grad_checkpointing=True)).flops - step_cost(workload()).flops == again


def test_a_chunked_loss_computes_nothing_twice_under_a_frozen_head_and_the_logits_under_one_that_is_trained() -> None:
    model = Llama()

    def added(kind: str) -> int:
        full, chunked = (step_cost(workload(kind=kind, loss=loss)).flops for loss in ("full", "chunked"))
        return chunked - full

    assert added("lora") == 0
    assert added("train") == 2 * TOKENS * model.vocabulary * model.hidden


def test_a_fused_optimizer_moves_less_and_computes_the_same() -> None:
    plain, fused = step_cost(workload(optimizer="adamw")), step_cost(workload(optimizer="adamw-fused"))

    assert fused.flops == plain.flops
    assert fused.bytes_moved < plain.bytes_moved


@pytest.mark.parametrize("kind", quick(["lora"], ["train", "lora"]))
def test_two_small_models_give_the_line_that_all_blocks_lie_on(kind: str) -> None:
    work = workload(kind=kind, clip_grad=True)

    assert totals(step_cost(work)) == totals_of(sum_by_phase(last_step(count_marks(work, None))))


def test_micro_steps_in_the_middle_are_alike() -> None:
    work = workload(grad_accum=5, seq_len=64)

    assert totals(step_cost(work)) == totals_of(sum_by_phase(last_step(count_marks(work, None))))


@pytest.mark.parametrize("loop", ["trainer", "memfit"])
def test_other_loops_compute_what_a_plain_one_does(loop: str) -> None:
    assert step_cost(workload(loop=loop, grad_accum=5)).flops == step_cost(workload(grad_accum=5)).flops


def test_the_optimizer_steps_once_however_many_micro_steps_there_are() -> None:
    def of_step(accum: int) -> int:
        return next(p.bytes_moved for p in step_cost(workload(grad_accum=accum)).phases if p.phase == "step")

    assert of_step(1) == of_step(8)


def test_a_generation_told_from_its_first_tokens_costs_what_all_tokens_cost() -> None:
    work = workload(kind="generate", seq_len=32, new_tokens=12)

    assert totals(step_cost(work)) == totals_of({PHASE: _after(work, None, None)})


def test_pruning_told_from_few_blocks_and_micro_batches_costs_what_all_of_them_cost() -> None:
    work = workload(kind="prune", nsamples=70, seq_len=512)

    counted, windows = durations._count_pruning(work, None, few=1000)

    assert work.nsamples / windows > durations.FEW_MICRO_BATCHES + 1
    assert totals(step_cost(work)) == totals_of(counted)


def test_pruning_moves_every_block_to_the_gpu_and_back() -> None:
    model = Llama()
    norms = 2 * model.hidden
    both_ways = 2 * 2 * model.layers * (model.block + norms)

    assert step_cost(workload(kind="prune", nsamples=8)).host_bytes == pytest.approx(both_ways, rel=0.01)


def test_adapters_in_fp32_are_products_in_fp32() -> None:
    def wide(cost: StepCost) -> int:
        return sum(times * op.flops for phase in cost.phases for op, times in phase.ops.items() if op.wide)

    adapters = wide(step_cost(workload(kind="lora", rank=8)))

    assert adapters > 0
    assert wide(step_cost(workload(kind="lora", rank=8, adapter_dtype="same"))) == Llama().rotary


def test_sums_in_fp32_of_products_in_16_bits_are_products_in_16_bits() -> None:
    """SparseGPT's X^T X."""
    cost = step_cost(workload(kind="prune", method="sparsegpt", nsamples=8, seq_len=128))
    statistics = next(phase for phase in cost.phases if phase.phase == "statistics")

    assert statistics.flops > 0
    assert not any(op.wide for op in statistics.ops)


def test_settings_of_the_allocator_do_not_change_the_cost() -> None:
    assert step_cost(workload(alloc_conf="expandable_segments:True")) is step_cost(workload())


# -- the roofline ------------------------------------------------------------------------------------------------------

CARD = replace(
    find_gpu("RTX 4090"), bandwidth=1000.0, flops_16bit=100.0, flops_fp32=10.0, link_bandwidth=10.0
)  # so many a second


def one_phase(*ops: OpCost) -> StepCost:
    return StepCost((PhaseCost("forward", dict.fromkeys(ops, 1)),))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (OpCost(500, False, 1000, 0), 5.0),  # bound by its arithmetic
        (OpCost(500, True, 1000, 0), 50.0),  # in fp32
        (OpCost(500, False, 9000, 0), 9.0),  # bound by memory
        (OpCost(0, False, 1000, 70), 7.0),  # bound by the link
    ],
)
def test_a_kernel_takes_the_longest_of_arithmetic_memory_and_link(op: OpCost, expected: float) -> None:
    assert seconds(one_phase(op), CARD) == expected


def test_kernels_run_one_after_the_other_and_transfers_beside_them() -> None:
    cost = one_phase(OpCost(500, False, 0, 0), OpCost(0, False, 2000, 30))

    assert seconds(cost, CARD) == 7.0


def test_phases_run_one_after_the_other() -> None:
    cost = StepCost(
        (
            PhaseCost("forward", {OpCost(0, False, 2000, 0): 1}),
            PhaseCost("step", {OpCost(0, False, 1000, 40): 1}),
        )
    )

    assert seconds(cost, CARD) == 6.0


def test_a_card_without_figures_has_no_time() -> None:
    cost = one_phase(OpCost(500, False, 1000, 0))

    assert seconds(cost, replace(CARD, bandwidth=None)) is None
    assert seconds(one_phase(OpCost(0, False, 1, 1)), replace(CARD, link_bandwidth=None)) is None


def test_checkpointing_costs_time_on_every_card() -> None:
    card = find_gpu("RTX 4090")
    plain, again = (
        seconds(step_cost(workload(model="smollm2-135m", grad_checkpointing=on)), card) for on in (False, True)
    )

    assert plain is not None and again is not None
    assert 1.05 < again / plain < 4 / 3


@pytest.mark.parametrize("count", quick([2], [2, 5]))
def test_a_roofline_is_a_bound_and_its_ratios_are_those_of_measured_steps(count: int) -> None:
    """On an H200, a 1B model at 4 x 2048 tokens: kernels there are long enough for the GPU to set the pace."""
    lines = (Path(__file__).parents[2] / "accuracy" / "measured" / "step_times.jsonl").read_text().splitlines()
    measured = [row for row in map(json.loads, lines) if row["group"] == "1B all weights" and row["batch_size"] == 4]
    names = {"group", "step_seconds", "phases", "gpu"}
    bounds = []
    for row in measured[:count]:
        work = Workload.from_mapping({name: value for name, value in row.items() if name not in names})
        bounds.append(seconds(step_cost(work), find_gpu("H200")) or 0.0)

    assert len(measured) == 5
    for row, bound in zip(measured[:count], bounds, strict=True):
        assert bound < row["step_seconds"] < 2 * bound
        assert bound / bounds[0] == pytest.approx(row["step_seconds"] / measured[0]["step_seconds"], rel=0.1)

"""`memfit.trace`: a person's own code, on their own module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import Bigram, PicksByData, small_llama
from torch import nn

import memfit
from memfit.errors import TraceError, UsageError
from memfit.gpus import find_gpu
from memfit.planning.predict import Plan

HERE = "tests/planning/test_own_code.py"


def small_model() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(small_llama())
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def train(model: Any, steps: int = 3) -> None:
    """The loop that `kind="train"` runs, as a person would write it."""
    model = model.to("cuda")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        ids = torch.randint(0, model.config.vocab_size, (4, 128), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.fixture(scope="module")
def by_hand() -> Plan:
    with torch.device("meta"):
        model = small_model()

    def train_by_hand() -> None:
        train(model)

    return memfit.trace(train_by_hand, gpu="H200")


@pytest.fixture(scope="module")
def by_flags() -> Plan:
    job = {"kind": "train", "model": small_llama(), "batch_size": 4, "seq_len": 128, "outputs": "dropped"}
    return memfit.predict(**job, precision="bf16", gpu="H200")


def test_a_loop_written_by_hand_comes_to_the_peak_of_the_planned_job(by_hand: Plan, by_flags: Plan) -> None:
    assert by_hand.peak == by_flags.peak
    assert by_hand.smallest_gpu_bytes == by_flags.smallest_gpu_bytes
    assert (by_hand.verdict, by_hand.fit) == (by_flags.verdict, by_flags.fit)


def test_a_model_with_real_weights_comes_to_the_same(by_hand: Plan) -> None:
    assert memfit.trace(lambda: train(small_model()), gpu="H200").peak == by_hand.peak


def test_a_loop_written_by_hand_allocates_the_same_sizes_in_the_same_order(by_hand: Plan, by_flags: Plan) -> None:
    assert by_hand.trace.requested.tolist() == by_flags.trace.requested.tolist()


def test_weights_gradients_and_state_are_told_apart_by_themselves(by_hand: Plan, by_flags: Plan) -> None:
    for category in ("weights", "gradients", "optimizer", "workspaces"):
        assert by_hand.report.breakdown[category] == by_flags.report.breakdown[category]


def test_parameters_are_counted_when_their_module_runs(by_hand: Plan, by_flags: Plan) -> None:
    assert by_hand.parameters == by_flags.parameters == by_hand.trainable_parameters


def test_phases_are_told_from_what_runs(by_hand: Plan, by_flags: Plan) -> None:
    named = [(p.name, p.step) for p in by_flags.report.phases if p.name != "load"]
    assert [(p.name, p.step) for p in by_hand.report.phases] == named
    step = {(p.name, p.step): p for p in by_flags.report.phases}
    assert [p for p in by_hand.report.phases if p.name == "step"] == [step["step", n] for n in (1, 2, 3)]


def test_the_report_has_the_contract_s_form(by_hand: Plan, by_flags: Plan) -> None:
    document = by_hand.to_json()
    own = ("lines", "advice")  # which a workload has no code for
    assert [key for key in document if key not in own] == list(by_flags.to_json())
    assert document["workload"]["kind"] == "own-code"
    assert document["model"]["name"] == "train_by_hand"
    assert sum(document["breakdown"].values()) == document["peak"]["allocated_bytes"]


def test_a_name_may_be_given() -> None:
    assert memfit.trace(lambda: torch.zeros(3, device="cuda"), name="three zeros").model == "three zeros"


def test_a_model_made_outside_is_moved_when_the_traced_code_moves_it() -> None:
    with torch.device("meta"):
        model = Bigram()

    def step() -> None:
        model.cuda()
        model(torch.zeros(2, 8, dtype=torch.int64, device="cuda")).sum().backward()

    made = memfit.trace(step)
    assert made.parameters == sum(p.numel() for p in model.parameters())
    assert made.report.breakdown["weights"] > 0 < made.report.breakdown["gradients"]


def test_the_settings_of_the_allocator_are_honoured() -> None:
    def fifty() -> None:
        torch.zeros(50 << 20, dtype=torch.uint8, device="cuda")

    assert memfit.trace(fifty).peak.reserved_bytes == 50 << 20
    assert memfit.trace(fifty, alloc_conf="expandable_segments:True").peak.reserved_bytes == 60 << 20


def test_inference_only_needs_a_smaller_context_than_training() -> None:
    def forward() -> None:
        with torch.no_grad():
            Bigram().cuda()(torch.zeros(2, 8, dtype=torch.int64, device="cuda"))

    def backward() -> None:
        Bigram().cuda()(torch.zeros(2, 8, dtype=torch.int64, device="cuda")).sum().backward()

    assert memfit.trace(forward).peak.context_bytes < memfit.trace(backward).peak.context_bytes


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_code_is_traced_where_gradients_are_switched_off(off: Callable[[], AbstractContextManager[None]]) -> None:
    def forward() -> None:
        torch.randn(1 << 20, device="cuda") * 2

    with off():
        there = memfit.trace(forward)
    assert there.peak.allocated_bytes == 8 << 20


@pytest.mark.parametrize(("dtype", "attends", "loads"), [
    (torch.bfloat16, True, True), (torch.float32, True, False), (torch.bfloat16, False, False),
])  # fmt: skip
@pytest.mark.parametrize("gpu", ["H200", "RTX 4090"])
def test_kernels_of_fused_attention_count_where_they_are_loaded(
    gpu: str, dtype: torch.dtype, attends: bool, loads: bool
) -> None:
    def step() -> None:
        q = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
        out = F.scaled_dot_product_attention(q, q, q) if attends else torch.softmax(q @ q.mT, -1) @ q
        out.sum().backward()

    expected = find_gpu(gpu).context_after(training=True, flash=loads).high_bytes
    assert memfit.trace(step, gpu=gpu).peak.context_bytes == expected


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [lambda: None, lambda: torch.ones(100) * 2, lambda: torch.ones(0, device="cuda")])
def test_code_that_puts_nothing_on_the_gpu_is_an_error_that_says_how(idle: Callable[[], object]) -> None:
    with pytest.raises(TraceError, match="nothing on the GPU") as caught:
        memfit.trace(idle)
    assert 'device="cuda"' in str(caught.value.hint)


def test_a_line_that_selects_by_what_is_not_known_is_named() -> None:
    def step() -> None:
        scores = torch.randn(2, 8, device="cuda")
        PicksByData().cuda()((scores > 0).long())

    with pytest.raises(TraceError, match="selects by an int64 tensor"):
        memfit.trace(step)


LIBRARY = torch.library.Library("memfit_test", "FRAGMENT")
LIBRARY.define("without_shapes(Tensor x) -> Tensor")
LIBRARY.impl("without_shapes", lambda x: x.clone(), "CPU")


@torch.library.custom_op("memfit_test::custom_without_shapes", mutates_args=())
def custom_without_shapes(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("memfit_test::custom_with_shapes", mutates_args=())
def custom_with_shapes(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@custom_with_shapes.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_that_torch_cannot_run_without_memory_is_named() -> None:
    with pytest.raises(TraceError, match=r"memfit_test\.without_shapes") as caught:
        memfit.trace(lambda: torch.ops.memfit_test.without_shapes(torch.ones(3, device="cuda")))
    assert "register_fake" in str(caught.value.hint)


def test_a_custom_op_without_shapes_is_named() -> None:
    with pytest.raises(TraceError, match="custom_without_shapes"):
        memfit.trace(lambda: custom_without_shapes(torch.ones(3, device="cuda")))


def test_a_custom_op_with_shapes_is_traced() -> None:
    made = memfit.trace(lambda: custom_with_shapes(torch.ones(3, device="cuda")))
    assert made.trace.requested.tolist() == [12, 12]


def stops_early() -> None:
    loss = torch.randn(1, device="cuda").sum()
    if loss.sum() > 3:
        return
    torch.zeros(100, device="cuda")


def test_a_question_is_an_error_unless_the_caller_answers_it() -> None:
    with pytest.raises(TraceError, match=rf"{HERE}:\d+, in stops_early"):
        memfit.trace(stops_early)
    made = memfit.trace(stops_early, answers={(HERE, "stops_early"): False})
    assert 400 in made.trace.requested


def fails() -> None:
    torch.zeros(3, device="cuda")
    raise KeyError("mine")


def test_what_the_traced_code_raises_is_told_in_one_line_with_its_place_and_the_exception_behind_it() -> None:
    with pytest.raises(TraceError, match="the job itself fails: KeyError: 'mine'") as caught:
        memfit.trace(fails)
    assert f"{__file__}:{fails.__code__.co_firstlineno + 2}, in fails" in str(caught.value.hint)
    assert isinstance(caught.value.__cause__, KeyError)


def adds_what_does_not_match() -> None:
    torch.ones(3, device="cuda") + torch.ones(4, device="cuda")


def multiplies_what_does_not_match() -> None:
    torch.ones(3, 4, device="cuda") @ torch.ones(3, 4, device="cuda")


def views_what_does_not_match() -> None:
    torch.ones(3, 4, device="cuda").view(5)


@pytest.mark.parametrize("job", [adds_what_does_not_match, multiplies_what_does_not_match, views_what_does_not_match])
def test_an_error_of_torch_is_told_with_the_line_of_the_traced_code_that_met_it(job: Callable[[], None]) -> None:
    with pytest.raises(TraceError, match="the job itself fails: RuntimeError") as caught:
        memfit.trace(job)
    line = job.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}, in {job.__name__}" in str(caught.value.hint)


def test_a_person_s_folder_may_be_called_memfit() -> None:
    names: dict[str, Any] = {}
    exec(compile("def step():\n    raise ValueError('mine')\n", "/home/me/memfit/train.py", "exec"), names)
    with pytest.raises(TraceError, match="ValueError: mine"):
        memfit.trace(names["step"])


def test_a_card_and_settings_are_checked_before_anything_runs() -> None:
    ran: list[Any] = []
    with pytest.raises(UsageError):
        memfit.trace(lambda: ran.append(1), gpu="no such card")
    with pytest.raises(memfit.MemfitError):
        memfit.trace(lambda: ran.append(1), alloc_conf="no_such_setting:1")
    assert ran == []


def test_code_that_takes_the_gpu_if_there_is_one_takes_it() -> None:
    def step() -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        nn.Linear(4, 4).to(device)(torch.ones(2, 4, device=device))

    assert memfit.trace(step).parameters == 20

"""Forward and backward passes that are told from the ones before: the trace is the one in which every pass ran."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.quick import quick
from torch import nn

import memfit
from memfit.tracing.repeated import passes
from memfit.tracing.repeated.passes import ALIKE, SKIPPED, RepeatedPasses

PASSES, STEPS = 6, 2
TOLD = STEPS * (PASSES - 1) - ALIKE
"""The first pass of each step makes the gradients."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(1000, 64), nn.Linear(64, 64), nn.Linear(64, 1000)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.middle(self.words(ids)))
        if mask is not None and not bool(mask.all()):
            hidden = hidden * mask[..., None]
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.view(-1, 1000), ids.view(-1)), logits


def accumulating(model: Callable[[], nn.Module], once: Callable[[nn.Module, int], Any]) -> Callable[[], None]:
    def run() -> None:
        made = model().cuda().train()
        optimizer = torch.optim.AdamW(made.parameters())
        for _ in range(STEPS):
            for number in range(PASSES):
                once(made, number)
            optimizer.step()
            optimizer.zero_grad()

    return run


def ids() -> torch.Tensor:
    return torch.randint(0, 1000, (4, 16)).cuda()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    count, repeat = [0], RepeatedPasses._repeat

    def counted(self: RepeatedPasses, *args: Any) -> Any:
        count[0] += 1
        return repeat(self, *args)

    monkeypatch.setattr(RepeatedPasses, "_repeat", counted)
    yield count


def check_alike(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> memfit.Plan:
    plan = memfit.trace(run)
    monkeypatch.setattr(passes, "repeated_calls_skipped", lambda *_: nullcontext())
    ran = memfit.trace(run)
    for column in ("actions", "requested", "streams", "op_of", "module_of", "category_of"):
        assert getattr(plan.trace, column) == getattr(ran.trace, column)
    last = plan.trace.marks[-1]
    assert last == ran.trace.marks[-1] and plan.trace.facts == ran.trace.facts
    assert plan.peak == ran.peak and plan.advice == ran.advice
    return plan


def kept(model: nn.Module, number: int) -> None:
    loss, _logits = model(ids())
    (loss / PASSES).backward()


def dropped(model: nn.Module, number: int) -> None:
    loss = model(ids())[0] / PASSES
    loss.backward()


def in_bf16(model: nn.Module, number: int) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, _logits = model(ids())
    loss.backward()


def by_own_loss(model: nn.Module, number: int) -> None:
    labels = ids()
    logits = model(labels)
    nn.functional.cross_entropy(logits.view(-1, 1000), labels.view(-1)).backward()


def plain() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1000))


@pytest.mark.parametrize(("model", "once"), [(Model, kept), (Model, dropped), (Model, in_bf16), (plain, by_own_loss)])
def test_passes_that_are_told_leave_the_events_of_passes_that_ran(
    model: Callable[[], nn.Module],
    once: Callable[[nn.Module, int], Any],
    told: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = check_alike(accumulating(model, once), monkeypatch)
    assert told[0] == TOLD and SKIPPED in plan.notes


def test_passes_are_told_in_an_interpreter_that_dynamo_has_changed(
    told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamo = pytest.importorskip("torch._C._dynamo.eval_frame")
    before = dynamo.set_eval_frame(False)  # as Dynamo leaves it: calls of Python hold their arguments twice
    try:
        check_alike(accumulating(plain, by_own_loss), monkeypatch)
    finally:
        dynamo.set_eval_frame(before)
    assert told[0] == TOLD


def llama(frozen: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000, use_cache=False))
    model.model.embed_tokens.requires_grad_(not frozen)  # then what it makes is a leaf that gets a gradient
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()  # a hook, but transformers' own
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("frozen", quick([True], [False, True]))
def test_a_checkpointed_model_of_transformers_is_told_with_its_mask(
    frozen: bool, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(model: nn.Module, number: int) -> None:
        batch = {"input_ids": ids(), "attention_mask": torch.ones(4, 16, dtype=torch.long).cuda()}
        batch["labels"] = batch["input_ids"]
        outputs = model(**batch)
        del batch
        (outputs.loss / PASSES).backward()

    check_alike(accumulating(lambda: llama(frozen), once), monkeypatch)
    assert told[0] == TOLD


def test_a_pass_that_decides_by_other_values_is_run(told: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def once(model: nn.Module, number: int) -> None:
        mask = torch.ones(4, 16, dtype=torch.long)
        mask[:, 12:] = number != PASSES - 2  # the last but one has padding
        model(ids(), mask.cuda())[0].backward()

    check_alike(accumulating(Model, once), monkeypatch)
    assert told[0] == TOLD - STEPS


def test_where_a_told_pass_is_used_in_another_way_every_pass_is_run(
    told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(model: nn.Module, number: int) -> None:
        loss, logits = model(ids())
        (loss if number < PASSES - 1 else loss + logits.float().mean()).backward()

    plan = check_alike(accumulating(Model, once), monkeypatch)
    assert told[0] > 0 and SKIPPED not in plan.notes


def test_models_with_hooks_of_ones_own_are_run(told: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def hooked() -> nn.Module:
        model = Model()
        model.middle.register_forward_hook(lambda *_: None)
        return model

    check_alike(accumulating(hooked, kept), monkeypatch)
    assert told[0] == 0


def test_models_with_hooks_on_gradients_are_run(told: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def hooked() -> nn.Module:
        model = Model()
        model.head.weight.register_hook(lambda gradient: gradient)
        return model

    check_alike(accumulating(hooked, kept), monkeypatch)
    assert told[0] == 0


def test_an_evaluator_that_an_error_left_in_the_interpreter_changes_no_plan() -> None:
    dynamo = pytest.importorskip("torch._C._dynamo.eval_frame")
    asked = {"kind": "train", "model": "gpt2", "seq_len": 16, "grad_checkpointing": True, "trace_cache": False}
    plan = memfit.predict(**asked)
    python = ctypes.pythonapi
    here, now, put = (
        getattr(python, name)
        for name in (
            "PyInterpreterState_Get",
            "_PyInterpreterState_GetEvalFrameFunc",
            "_PyInterpreterState_SetEvalFrameFunc",
        )
    )
    here.restype, now.argtypes, now.restype = ctypes.c_void_p, [ctypes.c_void_p], ctypes.c_void_p
    put.argtypes, put.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    usual = now(here())
    before = dynamo.set_eval_frame(False)
    dynamos = now(here())
    dynamo.set_eval_frame(before)
    assert dynamos != usual
    put(here(), dynamos)
    try:
        again = memfit.predict(**asked)
        assert now(here()) == usual
    finally:
        put(here(), usual)
    assert again.trace.requested == plan.trace.requested and again.trace.subjects == plan.trace.subjects


def test_gradients_that_are_dropped_between_a_forward_pass_and_its_backward_pass_are_made_anew_in_every_step(
    told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        model = plain().cuda().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(PASSES):
            labels = ids()
            loss = nn.functional.cross_entropy(model(labels).view(-1, 1000), labels.view(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    check_alike(run, monkeypatch)
    assert told == [0]


def test_a_pass_that_was_told_is_run_after_all_where_its_gradients_are_dropped_before_its_backward_pass(
    told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drops_some(model: nn.Module, number: int) -> None:
        labels = ids()
        loss = nn.functional.cross_entropy(model(labels).view(-1, 1000), labels.view(-1))
        if number == PASSES - 1:
            model.zero_grad()
        loss.backward()

    check_alike(accumulating(plain, drops_some), monkeypatch)
    assert told[0] > 0


KEPT: list[torch.Tensor] = []


class Keeping(Model):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.own = how, KEPT if how == "its own" else []

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = super().forward(ids)
        if self.how == "selects":
            loss = loss + logits[mask].sum()
        elif self.how == "its own":
            self.own.append(logits.detach() * 1)
        else:
            KEPT.append(logits.detach() * 1 if self.how == "a copy" else logits.detach())
        return loss, logits


@pytest.mark.parametrize("how", ["its own", "a copy", "what it returns", "selects"])
def test_a_pass_that_keeps_something_until_the_step_or_selects_by_a_mask_is_run(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        KEPT.clear()
        model = Keeping(how).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            for number in range(8):
                mask = torch.arange(64).reshape(4, 16) % (number + 2) == 0
                model(ids(), mask.cuda())[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            KEPT.clear()

    check_alike(run, monkeypatch)

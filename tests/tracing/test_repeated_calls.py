"""Calls of an evaluation that are told from the ones before: the trace is the one in which every call ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import pytest
import torch
from torch import nn

import memfit
from memfit.tracing.repeated import calls, passes
from memfit.tracing.repeated.calls import ALIKE, RepeatedCalls


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
        self.kept: list[torch.Tensor] = []

    def forward(self, ids: torch.Tensor, *, keeps: bool = False, decides: bool = False) -> tuple[torch.Tensor, ...]:
        hidden = torch.relu(self.words(ids))
        if keeps:
            self.kept.append(hidden)
        if decides and bool((ids > 98).any()):
            hidden = hidden * torch.ones(1 << 20, 1, device="cuda")[:1]
        logits = self.head(hidden)
        return logits, nn.functional.cross_entropy(logits.view(-1, 1000), ids.view(-1))


def evaluate(autocast: bool = False, calls: int = 12, **how: bool) -> Callable[[], None]:
    def run() -> None:
        model = Model().cuda().eval()
        with torch.no_grad():
            for i in range(calls):
                with torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext():
                    logits, loss = model(torch.full((4, 8), i + 90, device="cuda") % 100, **how)
                print(loss.item(), logits.argmax(-1).shape)

    return run


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    skipped = [0]
    repeat = RepeatedCalls._repeat

    def count(self: RepeatedCalls, call: object) -> object:
        skipped[0] += 1
        return repeat(self, call)  # type: ignore[arg-type]

    monkeypatch.setattr(RepeatedCalls, "_repeat", count)
    yield skipped


def both(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> tuple[int, memfit.Plan, memfit.Plan]:
    with counted(monkeypatch) as skipped:
        told = memfit.trace(run)
    monkeypatch.setattr(passes, "repeated_calls_skipped", lambda *_: nullcontext())
    return skipped[0], told, memfit.trace(run)


@pytest.mark.parametrize("autocast", [False, True])
def test_calls_that_are_told_leave_the_events_of_calls_that_ran(
    autocast: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped, told, ran = both(evaluate(autocast), monkeypatch)
    assert skipped == 12 - ALIKE - 1  # the first begins the phase and makes the workspace
    for column in ("actions", "subjects", "requested", "streams", "stack_of"):
        assert getattr(told.trace, column) == getattr(ran.trace, column)
    assert [told.trace.op(b) for b in range(len(told.trace.requested))] == [
        ran.trace.op(b) for b in range(len(ran.trace.requested))
    ]
    assert told.peak == ran.peak


@pytest.mark.parametrize("how", ["keeps", "decides"])
def test_a_call_that_keeps_something_or_decides_by_values_is_run(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped, told, ran = both(evaluate(**{how: True}), monkeypatch)
    assert skipped == 0 and told.peak == ran.peak and told.trace.actions == ran.trace.actions


def test_calls_with_gradients_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None:
        model = Model().cuda().eval()
        for _ in range(8):
            model(torch.zeros(4, 8, dtype=torch.long, device="cuda"))[1].backward()

    with counted(monkeypatch) as skipped:
        memfit.trace(train)
    assert skipped[0] == 0


class Sampler(nn.Module):
    """Calls another module again and again, in training mode: one with buffers runs, its parts without are told."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), norm, nn.ReLU(), nn.Linear(64, 16))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            noise = noise - 0.1 * self.model(noise)
        return noise


@pytest.mark.parametrize(
    ("norm", "told_of"), [(nn.LayerNorm(64), 40 - 2 * ALIKE), (nn.BatchNorm1d(64), 3 * (40 - 2 * ALIKE))]
)
def test_a_module_that_another_calls_again_and_again_is_told(
    norm: nn.Module, told_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample() -> None:
        sampler = Sampler(norm).cuda()
        with torch.no_grad():
            sampler(torch.randn(4, 16, device="cuda"))

    skipped, told, ran = both(sample, monkeypatch)
    assert skipped == told_of
    assert told.trace.actions == ran.trace.actions and told.trace.requested == ran.trace.requested
    assert told.peak == ran.peak


class Routed(nn.Module):
    """Experts that a router chooses, each for the tokens that are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(1000, 64), nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids).view(-1, 64)
        chosen = self.router(hidden).topk(2, dim=-1)[1]
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero((chosen == number).any(-1)).squeeze(-1)
            if rows.numel() > 0:
                hidden = hidden.index_add(0, rows, expert(hidden[rows]))
        total: torch.Tensor = hidden.sum()
        return total


def test_an_evaluation_of_experts_that_are_chosen_evenly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        model = Routed().cuda().eval()
        with torch.no_grad():
            for _ in range(12):
                model(torch.randint(0, 100, (4, 8)).cuda())

    answers: dict[tuple[str, str], Literal["even"]] = {("test_repeated_calls.py", "forward"): "even"}
    with counted(monkeypatch) as skipped:
        told = memfit.trace(run, answers=answers)
    monkeypatch.setattr(passes, "repeated_calls_skipped", lambda *_: nullcontext())
    ran = memfit.trace(run, answers=answers)
    assert skipped[0] == 12 - ALIKE - 1
    assert told.trace.actions == ran.trace.actions and told.trace.requested == ran.trace.requested


class Padded(nn.Module):
    """Looks only at what its mask leaves, or at none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        looked_at: torch.Tensor = self.head(hidden[mask]) if bool(mask.any()) else hidden
        return looked_at.sum()


def test_calls_that_decide_by_their_arguments_are_told_only_for_the_same_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def evaluate(kept: list[int]) -> Callable[[], None]:
        def run() -> None:
            model = Padded().cuda().eval()
            with torch.no_grad():
                for rows in kept:
                    model(torch.randn(8, 16, device="cuda"), (torch.arange(8) < rows).cuda())

        return run

    alike = [5] * (ALIKE + 1)
    skipped, told, ran = both(evaluate([*alike, 5, 5, 6, 0, 5]), monkeypatch)
    assert skipped == 3
    assert told.trace.actions == ran.trace.actions and told.trace.requested == ran.trace.requested


def test_a_call_that_decides_by_what_the_model_counts_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Padded):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1, dtype=torch.long))
            self.calls: torch.Tensor

        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(hidden, mask) if int(self.calls) < 11 else hidden.sum()

    def run() -> None:
        model = Counting().cuda().eval()
        with torch.no_grad():
            for _ in range(14):
                model(torch.randn(8, 16, device="cuda"), torch.ones(8, dtype=torch.bool, device="cuda"))

    skipped, told, ran = both(run, monkeypatch)
    assert skipped == 0 and told.trace.actions == ran.trace.actions


def test_of_long_calls_fewer_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calls, "LONG", 4)
    skipped, told, ran = both(evaluate(), monkeypatch)
    assert skipped == 12 - calls.LONG_ALIKE - 1 and told.trace.actions == ran.trace.actions


MAPS: list[torch.Tensor] = []
SETTINGS = {"wide": False}
COUNT = [0]


class Options:
    wide = False


class Reading(nn.Module):
    switched = False

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.how == "shared":
            MAPS.append(x.detach())
        if self.how == "counts":
            COUNT[0] += 1
        if is_wide() or COUNT[0] > 30 or self.switched:
            x = torch.cat([x] * 100)[: len(x)]
        return x


def is_wide() -> bool:
    return SETTINGS["wide"] or Options.wide


@pytest.mark.parametrize("how", ["shared", "counts", "setting", "options", "class", "closure"])
def test_a_call_that_depends_on_what_lies_outside_of_the_model_or_keeps_what_it_returns_is_run(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        monkeypatch.setattr(Reading, "switched", False)
        monkeypatch.setattr(Options, "wide", False)
        MAPS.clear()
        SETTINGS["wide"], COUNT[0] = False, 0
        model, keeps = Reading(how).cuda().eval(), False
        forward = model.forward

        def patched(x: torch.Tensor) -> torch.Tensor:
            x = forward(x)
            if keeps:
                MAPS.append(x)
            return x * 1

        if how == "closure":
            model.forward = patched  # type: ignore[method-assign]
        with torch.no_grad():
            for i in range(40):
                if i == 30:
                    Options.wide = how == "options"
                    SETTINGS["wide"], Reading.switched, keeps = how == "setting", how == "class", how == "closure"
                model(torch.ones(1024, 64, device="cuda"))

    _, told, ran = both(run, monkeypatch)
    assert told.peak == ran.peak and told.trace.actions == ran.trace.actions
    MAPS.clear()

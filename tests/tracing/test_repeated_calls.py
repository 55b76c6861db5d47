"""Calls of an evaluation that are told from the ones before: the trace is the one in which every call ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import memfit
from memfit.tracing.repeated import passes
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

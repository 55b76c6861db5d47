"""Host memory in a trace is there to copy from and to, and is no block of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.events import Action, Trace
from memfit.tracing import stored
from memfit.tracing.tracer import Tracer, trace


def made(made: Trace) -> list[int]:
    return [made.requested[subject] for action, subject in made.events() if action == Action.ALLOC]


def test_a_host_buffer_and_its_views_are_not_counted() -> None:
    def job(tracer: Tracer) -> None:
        host = tracer.host_empty((4, 256), torch.float32)
        device = torch.empty(2, 256, device=tracer.device)
        device.copy_(host[1:3])
        host[:2].copy_(device)

    assert made(trace(job)) == [2 * 256 * 4]


def test_what_is_computed_from_a_host_buffer_is_counted() -> None:
    def job(tracer: Tracer) -> torch.Tensor:
        return tracer.host_empty((256,), torch.float32) + torch.empty(256, device=tracer.device)

    assert made(trace(job)) == [1024, 1024]


def test_a_module_that_is_entered_by_itself_has_the_name_it_was_given() -> None:
    with torch.device("meta"):
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def job(tracer: Tracer) -> None:
        tracer.modules.know(block, "model.layers.3")
        block(torch.empty(2, 8, device=tracer.device))

    traced = trace(job)
    assert "model.layers.3.1" in {traced.module(block) for block in range(len(traced.requested))}


def test_a_large_model_of_small_weights_takes_no_host_memory_once_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    make = stored.without_memory

    def counted(tracer: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(shape.numel())
        return make(tracer, shape, dtype)

    monkeypatch.setattr(stored, "MANY_WEIGHTS", 3 << 16)
    monkeypatch.setattr(stored, "without_memory", counted)

    def build() -> nn.Module:
        heads = [nn.Linear(256, 256, bias=size) for size in (False, True, False, True, False)]
        return nn.Sequential(*heads).cuda()

    plan = memfit.trace(build)
    # Three weights are as many as are drawn; the biases of 256 numbers are drawn whatever comes before.
    assert sizes == [1 << 16] * 2 and plan.peak.allocated_bytes == 5 * (4 << 16) + 2 * 1024

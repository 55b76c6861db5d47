"""Streams of the traced device: each has its own pool, and nothing ever has to wait."""

from __future__ import annotations

import torch

from memfit.events import Action
from memfit.tracing.tracer import Tracer, trace


def test_what_is_made_inside_a_stream_is_of_that_stream() -> None:
    def run(tracer: Tracer) -> list[torch.Tensor]:
        first, second = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
        made = [torch.empty(128, device="cuda")]
        with torch.cuda.stream(first):
            made.append(torch.empty(128, device="cuda"))
            with torch.cuda.stream(second):
                made.append(torch.empty(128, device="cuda"))
            made.append(torch.empty(128, device="cuda"))
        with torch.cuda.stream(None):
            made.append(torch.empty(128, device="cuda"))
        return made

    assert list(trace(run).streams) == [0, 1, 2, 1, 0]


def test_a_current_stream_can_be_set_and_asked_for() -> None:
    def run(tracer: Tracer) -> torch.Tensor:
        side = torch.cuda.Stream()
        torch.cuda.set_stream(side)
        assert torch.cuda.current_stream() is torch.accelerator.current_stream() is side
        assert torch.cuda.default_stream() is not side
        return torch.empty(128, device="cuda")

    assert list(trace(run).streams) == [1]


def test_waiting_takes_no_memory() -> None:
    def run(tracer: Tracer) -> None:
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        event.record()
        side.wait_stream(torch.cuda.current_stream())
        side.wait_event(side.record_event())
        event.synchronize()
        assert event.query() and side.query()
        side.synchronize()

    assert len(trace(run)) == 0


def test_torch_s_own_streams_are_back_afterwards() -> None:
    before = torch.cuda.Stream, torch.cuda.stream, torch.cuda.Event, torch.cuda.current_stream
    trace(lambda tracer: None)
    assert (torch.cuda.Stream, torch.cuda.stream, torch.cuda.Event, torch.cuda.current_stream) == before
    assert not hasattr(torch, "meta")


def test_a_resized_storage_has_another_block_in_the_stream_that_resized_it() -> None:
    def run(tracer: Tracer) -> torch.Tensor:
        x = torch.empty(256, device="cuda")
        x.untyped_storage().resize_(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            x.untyped_storage().resize_(1024)
        return x

    made = trace(run)
    assert [action for action, _ in made.events()] == [Action.ALLOC, Action.FREE, Action.ALLOC]
    assert list(made.requested) == [1024, 1024]
    assert list(made.streams) == [0, 1]


def test_growing_takes_the_new_block_before_the_old_one_goes() -> None:
    def run(tracer: Tracer) -> torch.Tensor:
        x = torch.empty(256, device="cuda")
        x.untyped_storage().resize_(4096)
        return x

    made = trace(run)
    assert [(action, subject) for action, subject in made.events()] == [
        (Action.ALLOC, 0), (Action.ALLOC, 1), (Action.FREE, 0)
    ]  # fmt: skip


def test_a_view_of_what_was_there_before_is_not_on_the_device() -> None:
    before = torch.empty(512, device="meta")
    made = trace(lambda tracer: before.view(8, 64)[2:].detach())
    assert len(made) == 0

"""Notes on tensors become categories of the allocations that held their addresses at the time."""

from __future__ import annotations

from typing import Any

import torch

from memfit.recording.recorder import CategoryNotes


def event(action: str, address: int, at: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": 512, "time_us": at}


def labelled(notes: list[tuple[int, int, str]], events: list[dict[str, Any]]) -> list[str]:
    labels = CategoryNotes(torch.nn.Linear(1, 1))
    labels.notes = notes
    labels.write_into({"device_traces": [events]}, 0)
    return [each["category"] for each in events if each["action"] == "alloc"]


def test_an_address_that_is_used_twice_names_the_allocation_of_that_time() -> None:
    events = [event("alloc", 64, 10), event("free_completed", 64, 20), event("alloc", 64, 30)]
    assert labelled([(15, 64, "activations"), (35, 64, "gradients")], events) == ["activations", "gradients"]


def test_a_weight_that_is_saved_for_backward_is_still_a_weight() -> None:
    notes = [(11, 64, "weights"), (12, 64, "activations")]
    assert labelled(notes, [event("alloc", 64, 10)]) == ["weights"]


def test_what_no_note_fits_stays_unknown() -> None:
    assert labelled([(5, 64, "weights"), (50, 99, "weights")], [event("alloc", 64, 10)]) == ["unknown"]


def test_hooks_are_gone_after_the_recording() -> None:
    model = torch.nn.Linear(2, 2)
    with CategoryNotes(model, torch.optim.SGD(model.parameters())):
        pass
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

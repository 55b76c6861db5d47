"""Where hidden states go, and how large micro-batches are."""

from __future__ import annotations

import pytest
import torch

from memfit.errors import InputError
from memfit.jobs.host import HostMemory, Lane
from memfit.jobs.pruning.placement import (
    SELECTION,
    WORKSPACES,
    DeviceNeeds,
    HiddenStates,
    Placement,
    Where,
    choose,
    deal,
    usual_micro_batch,
)

CPU = torch.device("cpu")
NEEDS = DeviceNeeds(hidden_per_window=10, activations_per_window=100, block=1000, fixed=500)
ALWAYS = 500 + WORKSPACES + SELECTION


def placed(budget: int) -> Placement:
    return choose(NEEDS, 128, 4, budget)


def test_about_eight_thousand_tokens_make_a_micro_batch() -> None:
    assert [usual_micro_batch(128, length) for length in (512, 2048, 4096, 131072)] == [16, 4, 2, 1]
    assert usual_micro_batch(3, 512) == 3


def test_with_room_everything_is_on_the_device() -> None:
    assert placed(ALWAYS + 2000 + 1280 + 400) == Placement(micro_batch=4, where="device", blocks=2)


def test_the_second_place_for_a_block_goes_first() -> None:
    assert placed(ALWAYS + 2000 + 1280 + 399) == Placement(micro_batch=4, where="device", blocks=1)


def test_then_the_hidden_states_go_to_the_host_and_the_micro_batch_stays() -> None:
    assert placed(ALWAYS + 1000 + 1280 + 399) == Placement(micro_batch=4, where="host", blocks=2)


def test_only_then_micro_batches_shrink() -> None:
    assert placed(ALWAYS + 1000 + 80 + 399) == Placement(micro_batch=2, where="host", blocks=1)


def test_what_fits_in_no_way_is_told() -> None:
    with pytest.raises(InputError, match="a block of this model needs about"):
        placed(ALWAYS + 1000)


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_buffer_is_read_and_written_over_in_turn(where: Where) -> None:
    batches = deal(5, 2)
    states = HiddenStates(batches, (3, 4), torch.float32, where, HostMemory(CPU), (Lane(CPU), Lane(CPU)))
    for batch in batches:
        states.put(batch, torch.full((batch.count, 3, 4), float(batch.first)))
    for _ in range(2):
        for batch, hidden in states.batches():
            states.put(batch, hidden + 1)
    found = torch.cat([hidden.clone() for _, hidden in states.batches()])
    assert found[:, 0, 0].tolist() == [2, 2, 4, 4, 6]


def test_host_memory_is_counted_until_it_is_let_go() -> None:
    host = HostMemory(CPU)
    states = HiddenStates(deal(5, 2), (3, 4), torch.float32, "host", host, (Lane(CPU), Lane(CPU)))
    assert host.held_bytes == 5 * 3 * 4 * 4
    states.release()
    assert (host.held_bytes, host.peak_bytes) == (0, 5 * 3 * 4 * 4)


def test_pinned_memory_is_counted_as_torch_rounds_it() -> None:
    host = HostMemory(CPU)
    host.pinned = True
    assert [host.taken(n) for n in (0, 1, 5, 8, 9)] == [0, 1, 8, 8, 16]

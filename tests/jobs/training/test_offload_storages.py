"""Storages and weights on the host: each as it was when it was saved, and the next one that is needed fetched ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_lane import LateLane
from test_offload import BLOCKS, Silent, prepared
from tiny_run import LLAMA
from torch.autograd.graph import saved_tensors_hooks

from memfit.jobs.run import run_job
from memfit.jobs.training import offload
from memfit.jobs.training.chunked_loss import chunked_cross_entropy
from memfit.jobs.training.offload import AdamWOnHost, FrozenWeightsOnHost


@pytest.fixture(autouse=True)
def _whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 1)
    monkeypatch.setitem(LLAMA, "num_hidden_layers", BLOCKS)


def test_a_storage_that_is_changed_in_place_and_saved_again_is_saved_as_it_is_then() -> None:
    on_host = offload.ActivationsOnHost()
    x = torch.randn(32)
    before, (first, second) = x.clone(), (torch.ones(32, requires_grad=True) for _ in range(2))
    with saved_tensors_hooks(on_host.pack, on_host.unpack):
        loss = (x * first).sum()
        x.mul_(3)
        loss = loss + (x * second).sum()
    loss.backward()
    assert torch.equal(first.grad, before)  # type: ignore[arg-type]
    assert torch.equal(second.grad, 3 * before)  # type: ignore[arg-type]


def test_a_part_of_a_storage_comes_back_from_where_it_lay() -> None:
    on_host = offload.ActivationsOnHost()
    x, w = torch.arange(12.0).view(3, 4), torch.ones(4, requires_grad=True)
    with saved_tensors_hooks(on_host.pack, on_host.unpack):
        loss = (x[2] * w).sum()
    loss.backward()
    assert torch.equal(w.grad, torch.tensor([8.0, 9.0, 10.0, 11.0]))  # type: ignore[arg-type]


def noted(carrier: type[offload._Carrier], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked for, and what begins to come on the way; storages are known by their length."""
    seen: list[str] = []
    fetch, come = carrier.fetch, carrier._come

    def fetched(self: offload._Carrier, kept: offload._HostCopy) -> torch.Tensor:
        seen.append(f"asked {len(kept.piece) // 4}")
        return fetch(self, kept)

    def comes(self: offload._Carrier, kept: offload._HostCopy) -> torch.Tensor:
        if kept.here is None:
            seen.append(f"comes {len(kept.piece) // 4}")
        return come(self, kept)

    monkeypatch.setattr(carrier, "fetch", fetched)
    monkeypatch.setattr(carrier, "_come", comes)
    return seen


def test_whoever_asks_for_a_storage_makes_the_one_before_it_come(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(offload._Carrier, monkeypatch)
    on_host = offload.ActivationsOnHost()
    weights = [torch.ones(size, requires_grad=True) for size in (1, 2, 3, 4)]
    with saved_tensors_hooks(on_host.pack, on_host.unpack):
        sums = [(torch.randn(len(w)) * w).sum() for w in weights]
    for each in reversed(sums):
        each.backward()
    assert seen == ["asked 4", "comes 3", "asked 3", "comes 2", "asked 2", "comes 1", "asked 1"]


def test_what_was_asked_for_the_last_time_is_on_the_device_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = offload.ActivationsOnHost()
    w = torch.ones(8, requires_grad=True)
    with saved_tensors_hooks(on_host.pack, on_host.unpack):
        loss = (torch.randn(8) * w).sum()
    carrier = on_host._carrier
    assert carrier is not None
    (kept,) = [ref() for _, ref in carrier._known.values() if ref() is not None] or [carrier._last()]
    assert kept is not None and kept.here is not None
    loss.backward()
    assert kept.here is None and kept.uses == 0


def fetched_by(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which block's weights come, and when a block's backward begins."""
    order: list[str] = []
    fetches, goes_back = FrozenWeightsOnHost._fetch, FrozenWeightsOnHost._goes_back

    def fetch(self: FrozenWeightsOnHost, index: int) -> None:
        order.append(f"{index} comes")
        fetches(self, index)

    def back(self: FrozenWeightsOnHost, index: int) -> None:
        order.append(f"back to {index}")
        goes_back(self, index)

    monkeypatch.setattr(FrozenWeightsOnHost, "_fetch", fetch)
    monkeypatch.setattr(FrozenWeightsOnHost, "_goes_back", back)
    run()
    return order


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_block_s_weights_come_once_each_way_and_one_block_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    settings: dict[str, Any] = {"grad_checkpointing": True} if checkpointing else {}
    job = prepared(tmp_path, offload=("weights",), **settings)
    order = fetched_by(lambda: run_job(job, "cpu", Silent(), steps=1), monkeypatch)
    there = ["0 comes", "1 comes", "2 comes", "3 comes", "4 comes"]
    assert order == [
        *there, "back to 4", "back to 3", "2 comes", "back to 2", "1 comes", "back to 1", "0 comes", "back to 0",
    ]  # fmt: skip


def test_a_weight_that_somebody_else_wrote_and_a_new_learning_rate_reach_the_optimizer_on_the_host() -> None:
    def trained(make: Callable[..., torch.optim.Optimizer]) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = make([weight], lr=0.1, weight_decay=0.0)
        for step in range(3):
            weight.grad = torch.full((4,), 0.5)
            if step == 1:
                optimizer.param_groups[0]["lr"] = 0.01
                with torch.no_grad():
                    weight.add_(1)
            optimizer.step()
        return weight.detach()

    assert torch.equal(trained(AdamWOnHost), trained(torch.optim.AdamW))


# -- sums in 16 bits ---------------------------------------------------------------------------------------------------


def test_fp16_gradients_of_a_trained_head_are_finite_over_many_more_tokens_than_1024() -> None:
    """Every token has the same wrong word: its gradient is a sum over all, 131,072 where fp16 ends at 65,504."""
    tokens = 16 * 1024
    hidden = torch.full((tokens, 2), 8.0, dtype=torch.float16)
    weight = torch.zeros(4, 2, dtype=torch.float16, requires_grad=True)
    chunked_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long), chunk=4096).backward()
    assert weight.grad is not None and weight.grad.isfinite().all()
    assert torch.allclose(weight.grad[:, 0].float(), torch.tensor([-6.0, 2.0, 2.0, 2.0]), rtol=1e-2)


# -- copies that come as late as they may ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_gradients_are_the_same_however_late_a_storage_leaves_and_comes(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    if late:
        monkeypatch.setattr(offload, "Lane", LateLane)
    on_host = offload.ActivationsOnHost()
    weights = [torch.full((size,), 0.5, requires_grad=True) for size in (5, 6, 7)]
    inputs = [torch.arange(float(len(w))) + 1 for w in weights]
    with saved_tensors_hooks(on_host.pack, on_host.unpack):
        loss = torch.stack([((x * 1) * w).sum() for x, w in zip(inputs, weights, strict=True)]).sum()
    loss.backward()
    assert all(torch.equal(w.grad, x) for x, w in zip(inputs, weights, strict=True))  # type: ignore[arg-type]


def test_what_nobody_will_ask_for_again_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(offload._Carrier, monkeypatch)
    on_host = offload.ActivationsOnHost()
    weights = [torch.ones(size, requires_grad=True) for size in (1, 2, 3)]
    with saved_tensors_hooks(on_host.pack, on_host.unpack):
        sums = [(torch.randn(len(w)) * w).sum() for w in weights]
    for number in (1, 2, 0):  # the middle one is done with when the last asks
        sums[number].backward(retain_graph=True)
    assert seen == ["asked 2", "comes 2", "comes 1", "asked 3", "asked 1"]


def test_a_block_waits_for_its_weights_however_late_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)

    def gradients(**settings: Any) -> list[torch.Tensor]:
        job = prepared(tmp_path, **settings)
        run_job(job, "cpu", Silent(), steps=1)
        return [each.detach().clone() for each in job.model.parameters() if each.requires_grad]

    whole = gradients()
    monkeypatch.setattr(offload, "Lane", LateLane)
    assert all(map(torch.equal, gradients(offload=("weights",)), whole))

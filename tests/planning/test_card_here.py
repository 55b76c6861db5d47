"""The GPU that is there, as a card to plan for: told by the driver, which is played here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfit.gpus import find_gpu, is_size
from memfit.planning.card_here import card_for, card_here
from memfit.units import GiB, MiB

H200 = {
    "name": "NVIDIA H200", "total_memory": 140 * GiB, "major": 9, "minor": 0, "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048,
}  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    idle = 140 * GiB - find_gpu("H200").context_start_bytes
    said: dict[str, Any] = {"properties": dict(H200), "free": idle, "share": 1.0, "asked": []}

    def properties(index: int) -> SimpleNamespace:
        said["asked"].append(index)
        return SimpleNamespace(**said["properties"])

    answers = {
        "is_available": lambda: True, "device_count": lambda: 4, "get_device_properties": properties,
        "mem_get_info": lambda index: (said["free"], said["properties"]["total_memory"]),
        "memory_reserved": lambda index: 0, "get_per_process_memory_fraction": lambda index: said["share"],
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return said


def test_an_idle_card_is_there_as_a_whole(driver: dict[str, Any]) -> None:
    card = card_here()
    assert card is not None
    assert (card.name, card.capacity_bytes, card.arch, card.notes) == ("NVIDIA H200", 140 * GiB, (9, 0), ())
    assert card.context_bytes == find_gpu("H200").context_bytes


def test_what_other_processes_hold_is_not_there(driver: dict[str, Any]) -> None:
    driver["free"] = 100 * GiB
    card = card_here()
    assert card is not None
    assert card.capacity_bytes == 100 * GiB + find_gpu("H200").context_start_bytes
    assert "other processes hold" in card.notes[0]


def test_a_process_that_may_reserve_only_a_share_has_that_share(driver: dict[str, Any]) -> None:
    driver["share"] = 0.1
    card = card_here()
    assert card is not None
    assert card.capacity_bytes - card.context_bytes == 14 * GiB


def test_under_torchrun_each_process_looks_at_its_own(driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    card_here()
    assert driver["asked"] == [3]


def test_an_unknown_card_is_planned_by_what_the_driver_says(driver: dict[str, Any]) -> None:
    driver["properties"] |= {"name": "NVIDIA X9000", "total_memory": 30 * GiB, "major": 8, "minor": 9}
    driver["free"] = 30 * GiB
    card = card_here()
    assert card is not None
    assert (card.name, card.capacity_bytes, card.arch) == ("NVIDIA X9000", 30 * GiB, (8, 9))


def test_a_size_takes_its_kernels_from_the_card_that_is_there_and_a_name_does_not(driver: dict[str, Any]) -> None:
    by_size, by_name = card_for("24GB"), card_for("RTX 4090")
    assert by_size is not None and by_name is not None
    assert (by_size.arch, by_name.arch) == ((9, 0), (8, 9))
    assert by_size.capacity_bytes == find_gpu("24GB").capacity_bytes
    assert "kernels and context as on the NVIDIA H200 that is here" in by_size.notes
    assert by_size.context_bytes == find_gpu("H200").context_bytes


@pytest.mark.parametrize(("text", "size"), [
    ("24GB", True), ("23.5GiB", True), ("80", True), ("RTX 4090", False), ("4090", False), ("A100 80GB", False),
])  # fmt: skip
def test_a_size_names_no_card(text: str, size: bool) -> None:
    assert is_size(text) is size


def test_a_card_that_is_not_in_the_catalogue_has_a_context_by_the_size_of_its_chip(driver: dict[str, Any]) -> None:
    driver["properties"] |= {"name": "NVIDIA Something New", "multi_processor_count": 40}
    card = card_here()
    assert card is not None
    assert card.context_basis == "estimated"
    assert card.context_start_bytes == 24 * MiB + 40 * 2048 * 2307
    assert any("is estimated, and the upper end counts" in note for note in card.notes)

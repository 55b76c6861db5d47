"""Indexing with tensors: what is found is asked for, and what is assigned may come from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reading import cases, story

import memfit
from memfit.errors import TraceError
from memfit.tracing.answers import ALL_TRUE, Answers, Site
from memfit.tracing.tracer import Tracer, trace

CUDA = "cuda"
Tensor = torch.Tensor


def matrix() -> Tensor:
    return torch.empty(8, 16, device=CUDA)


def ask(x: Tensor, select: Callable[[Tensor, Tensor], Any]) -> Any:
    return select(x, torch.empty(8, 16, device=CUDA, dtype=torch.bool))


def found(count: int) -> Answers:
    return Answers({Site("test_masks.py", "<lambda>"): count})


@cases(
    "select",
    index=lambda x, mask: x[mask],
    masked_select=lambda x, mask: torch.masked_select(x, mask),
)
def test_what_a_mask_selects_has_as_many_elements_as_it_was_told(select: Callable[[Tensor, Tensor], Tensor]) -> None:
    trace(lambda _: check(ask(matrix(), select).shape == (5,)), answers=found(5))


def check(holds: bool) -> None:
    assert holds


def test_positions_of_true_elements_are_one_list_for_each_dimension() -> None:
    def job(_: Tracer) -> None:
        rows, columns = ask(matrix(), lambda x, mask: torch.where(mask))
        assert (rows.shape, columns.shape) == ((3,), (3,))

    trace(job, answers=found(3))


def test_without_an_answer_the_error_names_the_line_that_selects() -> None:
    with pytest.raises(TraceError, match=r"test_masks.py:\d+, in <lambda>: the code selects by a bool tensor"):
        trace(lambda _: ask(matrix(), lambda x, mask: x[mask]))


def test_a_list_as_index_is_on_the_device_while_it_is_used() -> None:
    def job(_: Tracer) -> None:
        x = matrix()
        rows = x[[1, 2]]
        del x, rows

    assert story(job) == "+512 +16 +128 -1 -0 -2"


def test_an_index_in_host_memory_moves_to_the_device() -> None:
    def job(_: Tracer) -> None:
        x, rows = matrix(), torch.tensor([1, 2], device="cpu")
        found = x[rows]
        del x, found

    assert story(job) == "+512 +16 +128 -1 -0 -2"


def assign(at: Any, value: Any) -> str:
    """Events of an assignment to a matrix of 512 bytes."""

    def job(_: Tracer) -> None:
        x = matrix()
        x[at() if callable(at) else at] = value() if callable(value) else value

    return story(job)


@cases("at", row=1, column=(slice(None), 2), everything=slice(None), element=(1, 2))
def test_a_number_that_is_assigned_stays_in_host_memory(at: Any) -> None:
    assert assign(at, 0.5) == "+512 -0"


def test_filling_through_a_mask_needs_neither_the_number_nor_positions() -> None:
    assert assign(lambda: torch.empty(8, 16, device=CUDA, dtype=torch.bool), 0) == "+512 +128 -1 -0"


def test_assigning_by_positions_moves_the_number_to_the_device() -> None:
    assert assign(lambda: torch.empty(3, device=CUDA, dtype=torch.int64), 0) == "+512 +24 +4 -2 -1 -0"


def test_values_tell_how_many_elements_a_mask_has() -> None:
    words = assign(
        lambda: torch.empty(8, 16, device=CUDA, dtype=torch.bool), lambda: torch.empty(5, device=CUDA)
    ).split()
    assert f"+{5 * 2 * 8}" in words


def written_where(mask: Callable[[Tensor], Tensor]) -> memfit.Plan:
    def job() -> None:
        x = torch.randn(16, 64, device=CUDA)
        x[mask(x), mask(x)] = 1

    return memfit.trace(job)


def test_a_mask_that_nobody_knows_may_say_where_numbers_are_written_and_is_true_everywhere() -> None:
    known = written_where(lambda _: torch.ones(16, dtype=torch.bool).cuda())
    unknown = written_where(lambda x: x.sum(1) == 0)
    positions = 16 * 8
    assert unknown.trace.requested.count(positions) == known.trace.requested.count(positions) == 2
    assert ALL_TRUE in unknown.notes and ALL_TRUE not in known.notes


def test_positions_that_lie_differently_are_copied_for_the_kernel() -> None:
    def job(_: Tracer) -> None:
        rows, columns = (torch.empty(n, device=CUDA, dtype=torch.int64) for n in (4, 6))
        matrix()[rows[:, None], columns]

    assert "+192 +192 +96" in story(job)

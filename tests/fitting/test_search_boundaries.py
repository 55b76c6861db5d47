"""The search's own rules, each where it just holds and where it just does not."""

from __future__ import annotations

import dataclasses

import pytest
from test_fit_levers import at_peak, lever
from test_fit_search import JOB, Parts, Written, by_rows, names

from memfit.analysis.verdict import judge
from memfit.fitting.forecast import with_few_micro_steps
from memfit.fitting.levers import apply, levers_for
from memfit.fitting.search import Search, can_lower
from memfit.jobs.workload import Workload
from memfit.units import GiB, MiB


def search_of(parts: object, capacity: int, work: Workload = JOB) -> Search:
    return Search(work, levers_for(work), Written(parts, capacity))  # type: ignore[arg-type]


def test_a_lever_of_one_phase_helps_in_that_phase_alone() -> None:
    fused = lever(Workload(kind="train", model="gpt2"), "fused optimizer")

    assert can_lower(fused, at_peak("step", temporaries=1 << 28))
    assert not can_lower(fused, at_peak("backward", temporaries=1 << 28))


def test_exactly_16_mib_are_worth_a_change_and_less_are_not() -> None:
    chunked = lever(Workload(kind="train", model="gpt2"), "chunked loss")

    assert can_lower(chunked, at_peak("loss", loss=16 * MiB))
    assert not can_lower(chunked, at_peak("loss", loss=16 * MiB - 1))


def test_a_lever_that_saves_nothing_is_not_in_what_comes_nearest() -> None:
    def chunks_save_nothing(work: Workload) -> Parts:
        return {**by_rows(work), "loss": 4}

    nearest = search_of(chunks_save_nothing, 9).nearest()

    assert "chunked loss" not in names(nearest)
    assert {"micro-batch 1", "checkpointing"} <= set(names(nearest))


def test_what_comes_nearest_takes_the_least() -> None:
    work = Workload(kind="train", model="gpt2", world_size=2, loss="chunked", gradient_as_bucket_view=True)

    def shards_or_host(work: Workload) -> Parts:
        from memfit.errors import UsageError

        if work.parallel == "fsdp2" and "optimizer" in (work.offload or ()):
            raise UsageError("these do not go together")
        state = 2 if "optimizer" in (work.offload or ()) else 10 if work.parallel == "fsdp2" else 20
        return {"weights": 5, "optimizer": state}

    assert search_of(shards_or_host, 6, work).nearest().forecast.device_bytes == 7 * GiB


def test_a_group_that_is_banned_is_not_used() -> None:
    found = search_of(by_rows, 10 + 20 + 4).smallest(without={"micro-batch"})

    assert found is not None
    assert names(found) == ["checkpointing"]


def test_a_set_has_no_change_too_many() -> None:
    for capacity in (10 + 64 + 1, 10 + 16 + 4, 10 + 5 + 1, 10 + 2 + 1):
        search = search_of(by_rows, capacity)
        found = search.smallest()
        assert found is not None
        assert search.fits(found.levers)
        for each in found.levers:
            others = [other for other in found.levers if other is not each]
            assert not search.fits(others), (capacity, each.name)


def test_of_a_group_the_weakest_that_will_do_is_taken() -> None:
    search = search_of(lambda work: {"activations": work.batch_size}, 3)

    assert names(search.smallest()) == ["micro-batch 2"]
    back = search.one_step_back(search.smallest().levers)  # type: ignore[union-attr]
    assert back is not None and back[0].name == "micro-batch 4"


# -- forecasts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("margin", "use", "verdict"), [
    (0.1, 90, "safe"), (0.1, 91, "tight"), (0.0, 100, "safe"), (0.25, 75, "safe"), (0.25, 76, "tight"),
    (0.1, None, "fails"),
])  # fmt: skip
def test_safe_is_what_leaves_the_margin(margin: float, use: int | None, verdict: str) -> None:
    assert judge(use, 100, margin) == verdict


def test_of_many_micro_steps_the_first_two_are_looked_at() -> None:
    work = Workload(kind="train", model="gpt2", grad_accum=64)

    assert with_few_micro_steps(work).grad_accum == 2
    assert with_few_micro_steps(dataclasses.replace(work, grad_accum=1)).grad_accum == 1


def test_a_process_alone_bounds_one_of_ddp_only_by_more_than_its_buckets_may_round() -> None:
    """Gradients in a bucket are not rounded up each, so a process of DDP may take up to 16 MiB less of them."""
    work = Workload(kind="train", model="gpt2", batch_size=2, world_size=2)
    forecasts = Written(lambda _: {"weights": 10}, 24)

    assert forecasts.bound(work, 10 * GiB - 16 * MiB) is None
    bound = forecasts.bound(work, 10 * GiB - 16 * MiB - 1)
    assert bound is not None and bound.is_bound and bound.workload == work
    assert forecasts.bound(dataclasses.replace(work, world_size=1), 1) is None


def test_what_lies_on_the_host_stays_there_when_more_goes() -> None:
    work = Workload(kind="lora", model="gpt2", offload=("weights",))

    assert apply(work, [lever(work, "activations on the host")]).offload == ("activations", "weights")


def test_checkpointing_that_is_on_is_no_lever() -> None:
    on = Workload(kind="train", model="gpt2", grad_checkpointing=True)

    assert {each.group for each in levers_for(on)} & {"checkpointing"} == set()


# -- how few questions -------------------------------------------------------------------------------------------------


def test_where_the_last_step_of_a_group_is_not_enough_the_weaker_ones_are_not_asked_about() -> None:
    many = Workload(kind="train", model="gpt2", batch_size=1024)
    asked: list[int] = []

    def never(work: Workload) -> Parts:
        asked.append(work.batch_size)
        return {"activations": 10 + work.batch_size}

    assert search_of(never, 5, many).smallest() is None
    assert set(asked) == {1024, 1}


def test_what_has_raised_a_peak_is_asked_about_once() -> None:
    asked: list[Workload] = []

    def raised_by_chunks(work: Workload) -> Parts:
        asked.append(work)
        return {"activations": 8 * work.batch_size, "loss": 9 if work.loss == "chunked" else 1}

    assert names(search_of(raised_by_chunks, 40).smallest()) == ["micro-batch 4"]
    assert [work.batch_size for work in asked if work.loss == "chunked"] == [8]

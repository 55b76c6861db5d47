"""The search by itself, on jobs whose memory is written down here: which sets it finds, and with how few questions."""

from __future__ import annotations

from collections.abc import Callable

from forecasts import forecast

from memfit.errors import UsageError
from memfit.fitting.forecast import Forecast, Forecasts
from memfit.fitting.levers import levers_for
from memfit.fitting.search import Search, Solution
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.units import GiB

JOB = Workload(kind="train", model="gpt2", batch_size=8, loss="full")
Parts = dict[str, int]


class Written(Forecasts):
    """In place of a prediction: what is alive at the peak, in GiB, as a function of the settings."""

    def __init__(self, parts: Callable[[Workload], Parts], capacity: int) -> None:
        super().__init__(find_gpu(f"{capacity}GiB"), 0.0)
        self.parts = parts

    def _predicted(self, work: Workload) -> Forecast:
        alive = {name: size * GiB for name, size in self.parts(work).items()}
        total = sum(alive.values())
        capacity = self.gpu.capacity_bytes
        return forecast(work, "safe" if total <= capacity else "fails", total, capacity, alive)


def searched(parts: Callable[[Workload], Parts], capacity: int, work: Workload = JOB) -> tuple[Search, Solution | None]:
    search = Search(work, levers_for(work), Written(parts, capacity))
    return search, search.smallest()


def names(found: Solution | None) -> list[str]:
    assert found is not None
    return [lever.name for lever in found.levers]


def by_rows(work: Workload) -> Parts:
    """10 of weights, 8 a row of activations that checkpointing makes 2, 4 of loss that chunks make 1."""
    each = 2 if work.grad_checkpointing else 5 if work.selective_checkpointing else 8
    return {"weights": 10, "activations": each * work.batch_size, "loss": 1 if work.loss == "chunked" else 4}


def test_a_free_change_is_taken_before_one_that_costs() -> None:
    _, found = searched(by_rows, 10 + 64 + 1)

    assert names(found) == ["chunked loss"]


def test_the_micro_batch_goes_down_no_further_than_it_must() -> None:
    _, found = searched(by_rows, 10 + 16 + 4)

    assert names(found) == ["micro-batch 2"]


def test_the_weakest_checkpointing_that_will_do_is_taken() -> None:
    _, found = searched(by_rows, 10 + 5 + 1)

    assert names(found) == ["chunked loss", "micro-batch 1", "selective checkpointing"]


def test_what_did_not_lower_the_peak_by_itself_still_spares_a_dearer_change() -> None:
    def higher_of_two(work: Workload) -> Parts:
        """The peak is the larger of two moments, and the loss is alive at both."""
        rows = work.batch_size
        loss = 1 if work.loss == "chunked" else 6
        return {"activations": 4 * rows, "loss": 1} if 4 * rows > 8 + loss else {"weights": 8, "loss": loss}

    _, found = searched(higher_of_two, 9)

    assert names(found) == ["chunked loss", "micro-batch 2"]


def test_a_change_that_cannot_be_planned_is_passed_over_and_named() -> None:
    def no_chunks(work: Workload) -> Parts:
        if work.loss == "chunked":
            raise UsageError("no chunks here")
        return by_rows(work)

    search, found = searched(no_chunks, 10 + 64 + 1)

    assert names(found) == ["micro-batch 4"]
    assert search.refused == {"chunked loss": "no chunks here"}


def test_where_two_changes_do_not_go_together_the_one_that_is_enough_is_taken() -> None:
    work = Workload(kind="train", model="gpt2", world_size=2, loss="chunked", gradient_as_bucket_view=True)

    def shards_or_host(work: Workload) -> Parts:
        if work.parallel == "fsdp2" and "optimizer" in (work.offload or ()):
            raise UsageError("these do not go together")
        state = 0 if "optimizer" in (work.offload or ()) else 10 if work.parallel == "fsdp2" else 20
        return {"weights": 5, "optimizer": state}

    search, found = searched(shards_or_host, 6, work)

    assert names(found) == ["optimizer on the host"]
    assert search.refused == {}


def test_where_nothing_is_enough_there_is_no_set_and_the_nearest_is_known() -> None:
    search, found = searched(by_rows, 9)

    assert found is None
    assert search.nearest().forecast.device_bytes < by_rows(JOB)["activations"] * GiB


def test_nothing_is_asked_twice_and_a_ladder_of_many_rungs_costs_few_questions() -> None:
    many = Workload(kind="train", model="gpt2", batch_size=1024)

    search, found = searched(lambda work: {"activations": work.batch_size}, 100, many)

    assert names(found) == ["micro-batch 64"]
    assert search.forecasts.made <= 14


def test_a_lever_that_cannot_lower_the_peak_is_not_asked_about() -> None:
    asked: list[Workload] = []

    def only_state(work: Workload) -> Parts:
        asked.append(work)
        return {"optimizer": 2 if "optimizer" in (work.offload or ()) else 20}

    _, found = searched(only_state, 5)

    assert names(found) == ["optimizer on the host"]
    grown = asked[1]
    assert not grown.grad_checkpointing
    assert grown.batch_size == 8


def test_no_set_holds_two_levers_of_one_kind() -> None:
    _, found = searched(by_rows, 10 + 2 + 1)

    assert found is not None
    groups = [lever.group for lever in found.levers]
    assert len(groups) == len(set(groups))


def test_a_change_is_left_out_even_where_its_weaker_form_does_not_go_with_the_others() -> None:
    work = Workload(kind="train", model="gpt2", loss="chunked")

    def not_both(work: Workload) -> Parts:
        on_host = "activations" in (work.offload or ())
        if on_host and work.selective_checkpointing:
            raise UsageError("these do not go together")
        each = 1 if on_host else 2 if work.grad_checkpointing else 4 if work.selective_checkpointing else 8
        return {"weights": 10, "activations": each}

    _, found = searched(not_both, 11, work)

    assert names(found) == ["activations on the host"]


def test_one_change_that_goes_further_does_what_two_do() -> None:
    search, found = searched(by_rows, 10 + 32 + 1)

    assert names(found) == ["chunked loss", "micro-batch 4"]
    assert found is not None
    assert names(search.fewer(found)) == ["micro-batch 2"]


def test_a_change_that_costs_nothing_is_not_saved_by_one_that_goes_further() -> None:
    work = Workload(kind="lora", model="gpt2", batch_size=8)
    search, found = searched(by_rows, 10 + 32 + 1, work)

    assert names(found) == ["chunked loss", "micro-batch 4"]
    assert found is not None
    assert search.fewer(found) is None


def test_what_is_too_much_for_a_process_alone_is_not_asked_of_one_of_ddp() -> None:
    asked: list[Workload] = []

    def noted(work: Workload) -> Parts:
        asked.append(work)
        return {**by_rows(work), "other": 1 if work.world_size > 1 else 0}

    work = Workload(kind="train", model="gpt2", batch_size=8, world_size=2, loss="chunked")
    keeps = ("parallel", "offload", "precision", "seq_len", "optimizer", "alloc_conf", "gradient_as_bucket_view")
    search = Search(work, levers_for(work, keep=keeps), Written(noted, 9))

    assert search.smallest() is None
    assert {each.world_size for each in asked} == {1}


def test_what_a_process_alone_has_room_for_is_still_asked_of_one_of_ddp() -> None:
    work = Workload(kind="train", model="gpt2", batch_size=2, world_size=2, loss="chunked")

    def with_buckets(work: Workload) -> Parts:
        return {"activations": 8 * work.batch_size, "other": 4 if work.world_size > 1 else 0}

    _, found = searched(with_buckets, 18, work)

    assert names(found) == ["micro-batch 1"]


def test_what_has_raised_a_peak_is_not_looked_at_to_spare_a_dearer_change() -> None:
    def raised_by_chunks(work: Workload) -> Parts:
        return {"activations": 8 * work.batch_size, "loss": 9 if work.loss == "chunked" else 1}

    search, found = searched(raised_by_chunks, 40)

    assert names(found) == ["micro-batch 4"]
    assert search.raising == {"chunked loss"}

"""Whether the job fits: its plan on the card that it is meant for, and on what is free of the one here.

Memory beside the training step, too: evaluation that gathers logits, and saving that copies weights.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.checking.model import checkpoint_bytes, loading_bytes
from memfit.checking.situation import NO_CARD, CannotTell, Finding, Line, Situation, output_folder
from memfit.environment import exported
from memfit.errors import MemfitError
from memfit.gpus import Gpu
from memfit.jobs.training.config import DataConfig
from memfit.jobs.workload import Workload
from memfit.planning.card_here import fit_command
from memfit.recording.machine import host_memory
from memfit.units import gib, in_mib

if TYPE_CHECKING:
    from memfit.jobs.training.job import TrainJob
    from memfit.planning.predict import Plan


@dataclass(frozen=True)
class CardPlan:
    workload: Workload
    plan: Plan
    where: str | None
    """The card, in words; None where there is none."""


def plan_on_cards(situation: Situation) -> list[CardPlan]:
    from memfit.planning.predict import predict

    cards: list[tuple[Gpu | None, str | None]] = [*_cards(situation)] or [(None, None)]
    try:
        workload = workload_of(situation)
        return [CardPlan(workload, predict(workload, gpu=card), where) for card, where in cards]
    except MemfitError as error:
        if situation.asked.workload is not None and _can_be_built(situation):
            raise  # `memfit plan` refuses it too, and nothing else has said so
        raise CannotTell(f"cannot be predicted: {error.message}") from error


def _can_be_built(situation: Situation) -> bool:
    if not situation.asked.trains:
        return True
    try:
        situation.shapes.needed()
    except CannotTell:
        return False
    return True


def workload_of(situation: Situation) -> Workload:
    """The job as the predictor takes it, with the longest rows that the data have, or may have."""
    if situation.asked.workload is not None:
        return _with_exported_settings(situation.asked.workload)
    from memfit.planning.training import workload_of as of_job

    try:
        job = situation.job.needed()
    except CannotTell:
        job = _with_full_rows(situation)
    return of_job(_as_chosen(job, situation))


def _with_exported_settings(workload: Workload) -> Workload:
    """Of the allocator: what is exported here is what a run from here would have."""
    said = workload.alloc_conf or next(iter(exported(os.environ).values()), "")
    return dataclasses.replace(workload, alloc_conf=said)


def _as_chosen(job: TrainJob, situation: Situation) -> TrainJob:
    """With the micro-batch that `memory: auto` would take."""
    cards = [card for card, _ in _cards(situation)]
    if not job.config.memory.auto or not cards:
        return job
    from memfit.planning.training import plan_training

    memory = dataclasses.replace(job.config.memory, gpu=f"{cards[0].capacity_bytes}B")
    chosen = plan_training(dataclasses.replace(job, config=dataclasses.replace(job.config, memory=memory)))
    return dataclasses.replace(job, batch=chosen.job.batch)


def _with_full_rows(situation: Situation) -> TrainJob:
    """Where the data cannot be read here: every row as long as they may be."""
    from memfit.jobs.training.data import rows_of_full_length
    from memfit.jobs.training.job import TrainJob
    from memfit.models.files import Source

    config = situation.config
    try:
        source = Source(folder=situation.folder.needed())
    except CannotTell:
        source = None
    return TrainJob(
        config=config,
        batch=situation.batch.needed(),
        data=rows_of_full_length(config.data),
        tokenizer=None,
        pad_id=0,
        source=source,
        shape=None,
        output_dir=output_folder(config),
        resume_from=None,
        data_read=False,
    )


def _cards(situation: Situation) -> Iterator[tuple[Gpu, str]]:
    if situation.named is not None:
        yield situation.named, f"the {situation.named.name}"
    if situation.here is not None:
        free = situation.here.with_what_is_free
        yield free, f"what is free of the {free.name} here"


FITS = Line("plan", "fits")


def check_fit(situation: Situation) -> Iterator[Finding]:
    for each in situation.plans.get():
        yield of_plan(each.plan, each.where, _search(each, situation))


def _search(planned: CardPlan, situation: Situation) -> str | None:
    if planned.plan.gpu is None:
        return None
    named, trains = situation.named_as, situation.asked.trains
    rows = situation.batch.needed().global_batch_size if trains else None
    gpu = named if named and planned.plan.gpu == situation.named else in_mib(planned.plan.gpu.capacity_bytes)
    return fit_command(planned.workload, gpu, global_batch=rows)


def _steps(workload: dict[str, Any]) -> str:
    """The first step of the optimizer makes its state, the later ones run beside it."""
    if "grad_accum" not in workload:
        return ""
    several = ", gradients accumulated" if workload["grad_accum"] > 1 else ""
    return f" through three optimizer steps{several}"


def of_plan(plan: Plan, where: str | None, search: str | None) -> Finding:
    """`search` is the command that looks for what fits."""
    peak, work = plan.peak, plan.workload
    rows = f"{work.get('batch_size', 1)} x {work['seq_len']:,} tokens"
    sizes = f"{gib(peak.allocated_bytes)} allocated, {gib(peak.reserved_bytes)} reserved, {gib(peak.device_bytes)}"
    more = peak.device_bytes - peak.reserved_bytes - peak.context_bytes
    padding = f" ({gib(more)} of it only if the card pads some products)" if more else ""
    found = f"predicted for {rows}{_steps(work)}: {sizes} on the device{padding}"
    details: dict[str, Any] = {
        "verdict": plan.verdict, "peak": plan.to_json()["peak"], "workload": work,
        "smallest_gpu_bytes": plan.smallest_gpu_bytes,
        "card": None if plan.gpu is None else {"name": plan.gpu.name, "capacity_bytes": plan.gpu.capacity_bytes},
    }  # fmt: skip
    if plan.fit is None or plan.gpu is None or plan.headroom_bytes is None:
        return FITS.skipped(f"{found}; {NO_CARD}", **details)
    limited = plan.fit.capacity_bytes < plan.gpu.capacity_bytes
    room = f"{'what per_process_memory_fraction allows of ' if limited else ''}{where}, {gib(plan.fit.capacity_bytes)}"
    if plan.verdict == "fails":
        short = gib(-plan.headroom_bytes)
        found += f": {short} more than {room}; stops at {plan.fit.failed_at}"
        return FITS.failed(found, f"the smallest change that fits: {search}", **details)
    if plan.fit.retries:
        found += f", of which torch gives back what is idle: it runs with {gib(plan.needed_bytes)}"
    left = f"{found}: {plan.verdict} on {room}, {gib(plan.headroom_bytes)} left"
    if plan.verdict == "tight":
        return FITS.warning(left, f"what leaves more: {search}", **details)
    return FITS.ok(left, **details)


EVALUATION, SAVING = Line("config", "evaluation peak"), Line("config", "saving peak")
EVALUATED_ROWS = 100
FP32_BYTES = 4


def check_evaluation(situation: Situation) -> Finding:
    words = getattr(getattr(situation.shapes.needed(), "config", None), "vocab_size", None)
    if not isinstance(words, int):
        raise CannotTell("the model does not say how many words it knows")
    workload = situation.asked.workload
    data: DataConfig = situation.config.data
    length = data.max_seq_len if workload is None else workload.seq_len
    size = EVALUATED_ROWS * length * words * FP32_BYTES
    gathered = f"the fp32 logits of {EVALUATED_ROWS} rows of {length:,} tokens are {gib(size)}"
    details: dict[str, Any] = {"rows": EVALUATED_ROWS, "logits_bytes": size}
    if workload is not None and workload.loop == "trainer":
        then = f"the Trainer gathers logits only for compute_metrics; then {gathered}, unless"
        return EVALUATION.ok(f"{then} eval_accumulation_steps=1 moves them to the host", **details)
    return EVALUATION.ok(f"nothing is evaluated during the run; {gathered}, which nobody gathers here", **details)


def check_saving(situation: Situation) -> Finding:
    model, config = situation.shapes.needed(), situation.config
    written = checkpoint_bytes(model, config)
    if config.workload.parallel == "fsdp2" and situation.asked.world_size > 1:
        whole, host = loading_bytes(model), host_memory()
        unused = host["total_bytes"] - host["used_bytes"]
        found = f"fsdp2 gathers the weights for a checkpoint, {gib(whole)} on the host of the first process, which has"
        found += f" {gib(unused)} free here"
        details: dict[str, Any] = {"gathered_bytes": whole, "free_bytes": unused}
        if whole > unused:
            return SAVING.warning(found, "a host with more memory", **details)
        return SAVING.ok(found, **details)
    return SAVING.ok(f"{gib(written)} are copied to the host and written from there: no copy on the GPU", bytes=written)

"""Whether a config is read as it is meant: keys, settings, batch, types, attention, processes, checkpoint.

Attention keeps its scores whole or not by the kernel that the plan of this very job found for this card: torch chooses
by type, head size, mask, grouped heads and card, and the plain one, which takes anything, makes a tensor of every pair
of tokens for each head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.checking.machine import BF16_SINCE, FLASH_SINCE
from memfit.checking.model import Flow, bytes_of, trained
from memfit.checking.situation import CannotTell, Finding, Line, Situation, output_folder
from memfit.jobs.training.batch import processes
from memfit.jobs.training.checkpoints import check_checkpoint, check_whole, processes_of, steps_done
from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.config_file import SECTIONS, canonical, find_config, load_config, parse_yaml
from memfit.jobs.training.config_names import LOOSE, SECTION_ALIASES
from memfit.jobs.training.refusals import check_engine, missing_gpu, missing_packages
from memfit.units import format_bytes, gib

if TYPE_CHECKING:
    from memfit.planning.predict import Plan


KEYS = Line("config", "keys")
SHOWN_KEYS = 6


@dataclass(frozen=True)
class Read:
    """A key of the file, and memfit's own name of what it sets."""

    key: str
    setting: str

    @property
    def elsewhere(self) -> bool:
        """It stands in a section that is not its setting's."""
        *sections, _ = self.key.split(".")
        own = [SECTION_ALIASES.get(each, each) for each in sections if each not in LOOSE]
        return bool(own) and own[0] in SECTIONS and self.setting.split(".")[0] != own[0]


def load(said: str, sets: Iterable[str]) -> tuple[TrainConfig, tuple[Read, ...]]:
    config = load_config(said, sets=sets)
    _, text, where = find_config(said)
    given = canonical(parse_yaml(text, where))
    return config, tuple(Read(each.key, setting) for setting, each in given.items())


def check_keys(situation: Situation) -> Iterator[Finding]:
    config, read = situation.config, situation.asked.keys
    for remark in config.remarks:
        yield KEYS.warning(remark, "take it out of the file")
    moved = [each for each in read if each.elsewhere]
    said = "; ".join(f"{each.key} is read as {each.setting}" for each in moved[:SHOWN_KEYS])
    found = f"{len(read)} settings, each is read" + (f"; {said}" if moved else "")
    yield KEYS.ok(found, elsewhere={each.key: each.setting for each in moved})


SERVED = Line("config", "settings")


def check_served(situation: Situation) -> Iterator[Finding]:
    """Where there is no GPU, what needs one is meant for another machine: it is said, and no failure."""
    config, processes = situation.config, situation.asked.world_size
    notes = [*config.notes(), *check_engine(config, world_size=processes), *_of_data(situation)]
    told = [SERVED.warning(note) for note in notes if note not in config.remarks]  # those stand on the line of keys
    here = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="sdpa"))  # it has its own line
    stops = SERVED.failed if situation.runs_here else SERVED.warning
    told += [stops(each.message, each.hint) for each in missing_packages(here)]
    if situation.runs_here:
        lacks = missing_gpu(here, world_size=processes)
        told += [SERVED.warning(f"to run it here: {each.message}", each.hint) for each in lacks]
    yield from told
    if not told:
        yield SERVED.ok("each is served by the engine")


def _of_data(situation: Situation) -> list[str]:
    try:
        batch, data = situation.batch.needed(), situation.data.needed()
    except CannotTell:
        return []
    from memfit.jobs.training.job import notes_on_data

    return notes_on_data(situation.config, batch, data)


BATCH = Line("config", "global batch")
SHOWN_SIZES = 8


def check_global_batch(situation: Situation) -> Finding:
    sizes, config = situation.batch.get(), situation.config.batch
    more = ["..."] if len(sizes.rungs) > SHOWN_SIZES else []
    rungs = ", ".join([*map(str, sizes.rungs[:SHOWN_SIZES]), *more])
    details: dict[str, Any] = {**sizes.to_json(), "rungs": list(sizes.rungs)}
    if situation.asked.workload is not None:
        return BATCH.ok(f"{sizes.in_words()}; micro-batches that keep it: {rungs}", **details)
    if config.global_batch_size is None:
        found = f"{sizes.in_words()}; not stated, so it changes with the number of GPUs"
        return BATCH.ok(found, f"global_batch_size: {sizes.global_batch_size} keeps it", **details)
    start = f"start it under torchrun --nproc_per_node={sizes.world_size}" if sizes.world_size > processes() else None
    return BATCH.ok(f"{sizes.in_words()}, as stated; micro-batches that keep it: {rungs}", start, **details)


PRECISION = Line("config", "precision")


def check_precision(situation: Situation) -> Finding:
    job = situation.asked.job
    said = "fp32" if job is None else job.precision
    if said == "fp16" and situation.asked.trains:
        return PRECISION.warning(
            "fp16 weights without a gradient scaler: numbers above 65,504 become inf, and the loss NaN",
            "precision: bf16; or amp-fp16, which keeps fp32 weights and scales the gradients",
        )
    card = situation.card
    major, minor = card.arch
    if job is not None and job.is_quantised and job.has_bf16 and card.arch < BF16_SINCE:
        refusal = job.refusal_without_bf16(card.name)
        return PRECISION.warning(f"{refusal.message}: `memfit train` refuses, torch alone emulates it", refusal.hint)
    if "bf16" in said and card.arch < BF16_SINCE:
        return PRECISION.warning(
            f"{said} on the {card.name} (compute capability {major}.{minor}): only by emulation, many times slower",
            "precision: amp-fp16, which this card computes itself and which scales the gradients",
        )
    return PRECISION.ok(f"{said}, which the {card.name} computes itself")


ATTENTION = Line("config", "attention")
FLASH = "flash_attention_2"
PLAIN_SOFTMAX = "aten._safe_softmax.default"
"""Only the plain kernel of torch's attention calls it."""
MUCH = 0.1
"""Of the peak, from which on whole scores are worth a warning."""


def check_attention(situation: Situation) -> Finding:
    config, workload = situation.asked.config, situation.asked.workload
    said = config.model.attention if config else workload.attention if workload else "sdpa"
    if said == "eager":
        found = "eager: the scores of every pair of tokens are whole tensors, for each head and layer"
        return ATTENTION.warning(found, "attention: sdpa")
    return _of_flash(situation) if said == FLASH else _of_sdpa(situation)


def _of_flash(situation: Situation) -> Finding:
    if find_spec("flash_attn") is None:
        return ATTENTION.failed(f"{FLASH} needs the package flash-attn", "attention: sdpa has flash kernels of its own")
    card = situation.card
    if card.arch < FLASH_SINCE:
        older = f"the {card.name} (compute capability {card.arch[0]}.{card.arch[1]}) is older than Ampere"
        return ATTENTION.failed(f"{FLASH}: {older}, and it stops there", "attention: sdpa")
    return ATTENTION.ok(f"{FLASH} on the {card.name}")


def _of_sdpa(situation: Situation) -> Finding:
    card, first = situation.card, situation.plans.needed()[0]
    largest, at_peak = scores_bytes(first.plan)
    details: dict[str, Any] = {"scores_bytes": largest, "at_peak_bytes": at_peak}
    if not largest:
        return ATTENTION.ok(f"sdpa, by a fused kernel on the {card.name}: scores are never whole", **details)
    found = f"sdpa, by its plain kernel on the {card.name}: scores are whole, {format_bytes(largest)} a layer"
    if at_peak is None or at_peak < MUCH * first.plan.peak.allocated_bytes:
        return ATTENTION.ok(found, **details)
    found += f", {format_bytes(at_peak)} at the peak"
    precision = first.workload.precision
    advice = "a smaller micro-batch, or shorter rows"
    if "bf16" in precision and card.arch < BF16_SINCE:
        advice = "precision amp-fp16: before Ampere no fused kernel takes bf16"
    elif precision == "fp32" and card.arch >= FLASH_SINCE:
        advice = "precision bf16 or amp-bf16: no fused kernel takes grouped heads in fp32"
    return ATTENTION.warning(found, advice, **details)


def scores_bytes(plan: Plan) -> tuple[int, int | None]:
    """Of the largest layer, 0 where a fused kernel runs; and of all layers at the peak, None where they are not among
    what is largest there."""
    trace = plan.trace
    if PLAIN_SOFTMAX not in trace.names:
        return 0, None
    wanted = trace.names.index(PLAIN_SOFTMAX)
    largest = max(size for size, op in zip(trace.requested, trace.op_of, strict=True) if op == wanted)
    at_peak = sum(each.allocated_bytes for each in plan.report.largest if each.op == PLAIN_SOFTMAX)
    return largest, at_peak or None


REDUCED, UNUSED = Line("config", "no_sync"), Line("config", "unused parameters")


def check_reductions(situation: Situation) -> Finding:
    """Once a step, or once in every micro-step."""
    sizes = situation.batch.needed()
    steps = sizes.gradient_accumulation_steps
    size = bytes_of(trained(situation.shapes.needed()))
    loop = "memfit" if situation.asked.workload is None else situation.asked.workload.loop
    details: dict[str, Any] = {"micro_steps": steps, "gradient_bytes": size, "loop": loop}
    if loop == "plain" and steps > 1:
        return REDUCED.warning(
            f"a loop of your own under DDP: {steps} all-reduces of {gib(size)} in each step, where one would do",
            f"run the first {steps - 1} micro-steps under `with model.no_sync():`",
            **details,
        )
    found = f"{gib(size)} of gradients are reduced once a step, not in each of {steps} micro-steps"
    return REDUCED.ok(found, **details)


def check_unused_parameters(situation: Situation, followed: list[Flow]) -> Finding:
    """`followed` is what was seen of the gradients, if anything was."""
    config = situation.config
    if not followed:
        raise CannotTell("gradients could not be followed")
    flow = followed[0]
    said = config.parallel.find_unused_parameters
    if not flow.without:
        found = "every trained tensor has a gradient"
        if said:
            return UNUSED.warning(f"{found}, and find_unused_parameters walks the graph in each step", "leave it out")
        return UNUSED.ok(found)
    count = f"{len(flow.without)} trained tensors get no gradient, such as {flow.without[0]}"
    if said is False and not config.memory.oom_recovery:
        stops = f"{count}: DDP stops with 'Expected to have finished reduction in the prior iteration'"
        advice = "parallel.find_unused_parameters: true, or freeze them"
        return UNUSED.failed(stops, advice, tensors=list(flow.without))
    return UNUSED.ok(f"{count}; the reduction of gradients passes over them", tensors=list(flow.without))


RESUME = Line("config", "resume")


def check_resume(situation: Situation) -> Iterator[Finding]:
    from memfit.jobs.training.job import find_beginning, note_on_weights

    config = situation.config
    if config.saving.resume_from is None:
        yield RESUME.ok("a new run; checkpoints go on exactly, in data order and random numbers too")
        return

    folder, weights = find_beginning(config, output_folder(config))
    if folder is None:
        assert weights is not None
        yield RESUME.warning(note_on_weights(situation.job.needed(), weights), folder=str(weights.folder))
        return
    check_whole(folder, config, world_size=situation.asked.world_size)
    yield from _belongs(folder, situation)


def _belongs(folder: Path, situation: Situation) -> Iterator[Finding]:
    job = situation.job.needed()
    notes, done = check_checkpoint(folder, job), steps_done(folder)
    details: dict[str, Any] = {"folder": str(folder), "steps_done": done, "total_steps": job.total_steps}
    if done >= job.total_steps:
        over = f"'{folder}' has {done:,} steps, and this config ends at step {job.total_steps:,}"
        yield RESUME.failed(over, "a larger max_steps or epochs goes on from there", **details)
        return
    for note in notes:
        yield RESUME.warning(note, "resume with the config of that run", **details)
    wrote, now = processes_of(folder), situation.asked.world_size
    if wrote != now:
        yield RESUME.warning(
            f"'{folder}' holds the random numbers of {_processes(wrote)}, and {_processes(now)} would train: the data"
            " go on where they stopped, dropout draws anew",
            f"the very same run goes on with --nproc_per_node={wrote}" if wrote else None,
            **details,
        )
    elif not notes:
        yield RESUME.ok(
            f"step {done:,} of {job.total_steps:,}: whole, and of the same model, method, optimizer and data; each"
            " process reads it to the host first, and the data go on where they stopped",
            **details,
        )


def _processes(count: int) -> str:
    return "no process" if count == 0 else "1 process" if count == 1 else f"{count} processes"

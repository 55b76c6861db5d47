"""Predict every lever on three real jobs and write docs/levers.md: what each saves, costs, and how to switch it on.

    python -m accuracy.levers           # rewrites docs/levers.md, in a few minutes

A lever is predicted by itself on the plain job, and once more on top of checkpointing: savings do not add up, for the
peak moves elsewhere. Times are ratios of rooflines (`memfit/fitting/durations.py`); how far those are from measured
ratios stands at the end, from accuracy/measured/step_times.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError
from memfit.fitting.durations import StepCost, seconds, step_cost
from memfit.fitting.forecast import Forecast, Forecasts
from memfit.fitting.levers import Lever, apply, levers_for
from memfit.gpus import Gpu, find_gpu
from memfit.jobs.workload import Workload
from memfit.units import GiB

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "levers.md"
TIMES = HERE / "measured" / "step_times.jsonl"
CHECKPOINTING = "checkpointing"
MARGIN = 0.1
HALVED = {"sequence": "seq_len", "rank": "rank", "micro-batch": "batch_size"}
"""Groups with many rungs: the one that halves the setting stands for all."""


@dataclass(frozen=True)
class Job:
    title: str
    gpu: str
    workload: Workload


JOBS = (
    Job(
        "Qwen2.5-7B, LoRA of rank 128, 2048 tokens, 16 rows a step, on a card of 24 GB",
        "RTX 4090",
        Workload(kind="lora", model="qwen2.5-7b", rank=128, seq_len=2048, batch_size=2, grad_accum=8),
    ),
    Job(
        "Llama-3.1-8B, all weights in bf16, 2048 tokens, 16 rows a step, on a card of 80 GB",
        "H100",
        Workload(kind="train", model="llama-3.1-8b", seq_len=2048, batch_size=2, grad_accum=8),
    ),
    Job(
        "GSA-512M from scratch, 1024 tokens, 256 rows a step on four cards of 48 GB, as its guide has it",
        "L40S",
        Workload(
            kind="train", model="gsa-512m-gather", precision="amp-bf16", seq_len=1024, batch_size=2, grad_accum=32,
            world_size=4,
        ),
    ),
)  # fmt: skip

REPORTED = {
    "checkpointing": "torchtune's README: -41.9 % memory, -21 % tokens a second; Hugging Face: about 20 % slower",
    "chunked loss": "torchtune: -15.8 % memory, +2 % tokens a second; trl#5575: -30 to -50 %; Cut Cross-Entropy"
    " (arXiv 2411.09009): 24 GB of a Gemma-2-2B's loss to 1 MB",
    "8-bit AdamW": "torchtune: -19.6 %; torchao: a Llama-2-7B in bf16 51.6 to 39.3 GB",
    "optimizer on the host": "torchao: 9.82 to 5.24 GB, 1.27 to 1.52 s a step",
    "activations on the host": "torchtune: -5.5 % on top of checkpointing, -0.1 % tokens a second",
    "expandable segments": "prime-rl#2154: 11.4 GB that loading had left behind",
    "FSDP2": "torchtitan: 7 % below FSDP1",
}
"""What others say of the same lever on jobs of their own; none of it is used here."""


# -- one job -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    lever: Lever
    alone: Forecast | None
    on_top: Forecast | None
    """On top of checkpointing; None where it replaces that, or cannot be planned."""
    cost: StepCost | None


@dataclass(frozen=True)
class Looked:
    """A job as it is, with checkpointing, and with each lever."""

    job: Job
    before: Forecast
    checkpointed: Forecast
    effects: list[Effect]


def look_at(job: Job) -> Looked:
    """Levers in the order of their own preference."""
    forecasts = Forecasts(find_gpu(job.gpu), MARGIN)
    chosen = chosen_levers(job.workload)
    again = next(lever for lever in chosen if lever.name == CHECKPOINTING)

    def forecast(*levers: Lever) -> Forecast | None:
        if any(lever.missing for lever in levers):
            return None
        try:
            return forecasts.ask(apply(job.workload, levers))
        except MemfitError:
            return None

    effects = [
        Effect(each, forecast(each), forecast(again, each) if each.group != again.group else None, _cost(job, each))
        for each in chosen
    ]
    return Looked(job, forecasts.ask(job.workload), forecasts.ask(apply(job.workload, [again])), effects)


def chosen_levers(work: Workload) -> list[Lever]:
    return [lever for lever in levers_for(work) if _stands_for_its_group(lever, work)]


def _stands_for_its_group(lever: Lever, work: Workload) -> bool:
    name = HALVED.get(lever.group)
    return name is None or 2 * int(str(lever.settings[name])) == getattr(work, name)


def _cost(job: Job, lever: Lever) -> StepCost | None:
    try:
        return step_cost(apply(job.workload, [lever])) if lever.missing is None else None
    except MemfitError:
        return None


def _job_lines(looked: Looked, pace: float) -> Iterator[str]:
    job, before, checkpointed = looked.job, looked.before, looked.checkpointed
    card, plain = find_gpu(job.gpu), step_cost(job.workload)
    bound = seconds(plain, card)
    assert bound is not None
    yield f"## {job.title}"
    yield ""
    yield f"`{_command(job)}`"
    yield ""
    yield (
        f"As it is it takes {_gib(before.device_bytes)} GiB of {_gib(card.capacity_bytes)} ({before.verdict}), with "
        f"checkpointing {_gib(checkpointed.device_bytes)} GiB ({checkpointed.verdict}). A step is "
        f"{plain.flops / 1e12:,.0f} TFLOP and {plain.bytes_moved / 1e9:,.0f} GB of GPU memory moved by "
        f"{plain.kernels:,} kernels, at the least {bound:.2f} s on a {card.name}."
    )
    yield ""
    yield "| lever | costs | peak alone | saves alone | on top of checkpointing | step time | FLOPs | GB over PCIe |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for each in looked.effects:
        cells = (
            each.lever.name, each.lever.cost, _after(each.alone), _saved(before, each.alone),
            _saved(checkpointed, each.on_top), *_times(each, plain, card, pace),
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    yield ""


def _times(effect: Effect, plain: StepCost, card: Gpu, pace: float) -> tuple[str, str, str]:
    if effect.cost is None:
        return "n/a", "n/a", "n/a"
    before, after = seconds(plain, card), seconds(effect.cost, card)
    assert before is not None and after is not None
    paced = " *" if after / effect.cost.kernels < pace else ""
    more = f"{effect.cost.flops / plain.flops - 1:+.0%}"
    return f"x {after / before:.2f}{paced}", more, f"{effect.cost.host_bytes / 1e9:.1f}"


def _command(job: Job) -> str:
    work, default = job.workload.settings(), Workload(kind=job.workload.kind, model="-").settings()
    flags = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in work.items()
        if name not in ("kind", "gradient_as_bucket_view") and value != default.get(name)
    ]
    return f"memfit fit {work['kind']} {' '.join(flags)} --gpu '{job.gpu}'"


def _gib(size: int) -> str:
    return f"{size / GiB:.2f}"


def _after(forecast: Forecast | None) -> str:
    return "n/a" if forecast is None else f"{_gib(forecast.device_bytes)} {forecast.verdict}"


def _saved(before: Forecast, after: Forecast | None) -> str:
    return "n/a" if after is None else _gib(before.device_bytes - after.device_bytes)


# -- all of them -------------------------------------------------------------------------------------------------------


def document() -> str:
    lines: list[str] = list(_head())
    known: dict[str, Lever] = {}
    timed = measured_times()
    for job in JOBS:
        print(f"{job.title} ...", file=sys.stderr, flush=True)
        looked = look_at(job)
        lines += _job_lines(looked, host_pace(timed))
        for each in looked.effects:
            known.setdefault(each.lever.name, each.lever)
    lines += [*_how(known.values()), *_reported(), *_measured_lines(timed)]
    return "\n".join(lines).rstrip() + "\n"


def _head() -> Iterator[str]:
    yield "# Levers: what each saves, what it costs, how to switch it on"
    yield ""
    yield "Written by `make levers`; nothing here is typed by hand but the words. Every saving is the difference of two"
    yield "predictions of that very job, in GiB of what `nvidia-smi` shows. Another job has others: ask `memfit fit`."
    yield "Savings do not add up. The peak moves from the blocks to the loss and to the optimizer's step as levers come"
    yield "on, so each is predicted alone and once more on top of checkpointing; 0.00 there means that the peak is"
    yield "elsewhere. n/a: it replaces checkpointing, or cannot be planned here. safe: a tenth of the card is left."
    yield "A peak above the card that is tight, not failing, fits because torch gives back what it only caches."
    yield "torch.compile is left out, as each set with it takes a compilation: [compile.md](compile.md)."
    yield ""
    yield "Step time is the ratio of two rooflines: kernel by kernel the longer of arithmetic and memory at the card's"
    yield "peak, transfers to the host beside them. It is a bound of what must be done: without launches, without what"
    yield "the host itself computes, and without traffic between GPUs. The last section says how far such ratios are"
    yield "from measured ones; * marks steps whose kernels are so short that the host sets the pace, not the GPU."
    yield ""


def _how(levers: Any) -> Iterator[str]:
    yield "## What they do, and how to switch them on"
    yield ""
    yield "| lever | what it does | what it costs | memfit | Hugging Face Trainer | accelerate |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for lever in levers:
        risk = "" if lever.risk.startswith("same results") else f"; {lever.risk}"
        cells = (
            lever.name, lever.says, f"{lever.cost}: {lever.price}{risk}",
            *(f"`{lever.how[tool]}`" for tool in ("memfit", "trainer", "accelerate")),
        )  # fmt: skip
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _reported() -> Iterator[str]:
    yield "## What others report"
    yield ""
    yield "On jobs of their own, each on top of others: not to be added, and not used here."
    yield ""
    yield "| lever | reported |"
    yield "| --- | --- |"
    for name, said in REPORTED.items():
        yield f"| {name} | {said} |"
    yield ""


# -- measured step times -----------------------------------------------------------------------------------------------

NOT_SETTINGS = ("group", "step_seconds", "phases", "gpu", "error")


@dataclass(frozen=True)
class Timed:
    """A step of a real job on the H200, beside its roofline."""

    group: str
    said: str
    measured: float
    bound: float
    kernels: int


def measured_times() -> list[Timed]:
    card, found = find_gpu("H200"), []
    for row in (json.loads(line) for line in TIMES.read_text(encoding="utf-8").splitlines()):
        if "step_seconds" in row:
            settings = {name: value for name, value in row.items() if name not in NOT_SETTINGS}
            cost = step_cost(Workload.from_mapping(settings))
            bound = seconds(cost, card)
            assert bound is not None
            found.append(Timed(row["group"], _words(settings), row["step_seconds"], bound, cost.kernels))
    return found


def host_pace(timed: list[Timed]) -> float:
    """The least time for a kernel that was seen: no faster can the host launch them, whatever the card."""
    return min(each.measured / each.kernels for each in timed)


def _measured_lines(timed: list[Timed]) -> Iterator[str]:
    yield "## How far ratios of rooflines are from measured ones"
    yield ""
    pace = host_pace(timed)
    yield "Steps of real jobs with random weights on an H200 (medians of whole steps) beside their rooflines. Each"
    yield "ratio is to the first job of its group. No kernel reaches its peak, so a time is a bound; and where kernels"
    yield f"are shorter than the host takes to launch them (about {1e6 * pace:.0f} us each on that machine), the host"
    yield "sets the pace and the roofline says little: those are marked *."
    yield ""
    yield "| job | measured s | roofline s | kernels | us a kernel | measured ratio | roofline ratio | off by |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    first: dict[str, Timed] = {}
    bound_by_gpu: list[float] = []
    for each in timed:
        base = first.setdefault(each.group, each)
        measured, roofline = each.measured / base.measured, each.bound / base.bound
        off, paced = roofline / measured - 1, any(job.bound / job.kernels < pace for job in (each, base))
        if each is not base and not paced:
            bound_by_gpu.append(abs(off))
        yield (
            f"| {each.said}{' *' if paced else ''} | {each.measured:.4f} | {each.bound:.4f} | {each.kernels:,} | "
            f"{1e6 * each.measured / each.kernels:.0f} | {measured:.2f} | {roofline:.2f} | {off:+.0%} |"
        )
    yield ""
    if bound_by_gpu:
        middle, most = statistics.median(bound_by_gpu), max(bound_by_gpu)
        reached = [each.bound / each.measured for each in timed]
        yield f"Of {len(bound_by_gpu)} that are not marked: off by {middle:.0%} at the median, {most:.0%} at the most."
        yield f"The steps took {1 / max(reached):.2f} to {1 / min(reached):.0f} times their roofline."


def _words(settings: dict[str, Any]) -> str:
    said = [
        name.replace("_", "-") if value is True else f"{name.replace('_', '-')} {_plain(value)}"
        for name, value in settings.items()
        if name not in ("kind", "model", "seq_len")
    ]
    return f"{settings['kind']} {settings['model']}: {', '.join(said)}"


def _plain(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=TARGET, help="another file than docs/levers.md")
    asked = parser.parse_args()
    asked.output.write_text(document())
    print(f"wrote {asked.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

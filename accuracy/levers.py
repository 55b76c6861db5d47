"""Predict every lever on three real jobs and write docs/levers.md: what each saves, costs, and how to switch it on.

    python -m accuracy.levers           # rewrites docs/levers.md, in a few minutes

A lever is predicted by itself on the plain job, and once more on top of checkpointing: savings do not add up, for the
peak moves elsewhere. Times are ratios of rooflines (`memfit/advice/step_cost.py`); how far those are from measured
ratios stands at the end, from accuracy/measured/step_times.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.advice.fit import Option, options
from memfit.advice.levers import Lever, apply, levers_for
from memfit.advice.step_cost import StepCost, seconds, step_cost
from memfit.errors import MemfitError
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.planning.predict import Plan
from memfit.units import GiB

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "levers.md"
TIMES = HERE / "measured" / "step_times.jsonl"
CHECKPOINTING = "checkpointing"
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
        "GSA-512M from scratch, 1024 tokens, 256 rows a step on four cards of 48 GB, as its guide had it",
        "L40S",
        Workload(
            kind="train", model="gsa-512m-gather", precision="amp-bf16", seq_len=1024, batch_size=8, grad_accum=8,
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
    alone: Option | None
    on_top: Option | None
    """On top of checkpointing; None where it says the same, or cannot be planned."""
    cost: StepCost | None


def effects(job: Job) -> tuple[Plan, list[Effect]]:
    """In the order of the levers' own preference."""
    chosen = [lever for lever in levers_for(job.workload) if stands_for_its_group(lever, job.workload)]
    alone = _by_name(options(job.workload, gpu=job.gpu))
    again = next(lever for lever in chosen if lever.name == CHECKPOINTING)
    on_top = _by_name(options(apply(job.workload, [again]), gpu=job.gpu))
    found = [Effect(each, alone.get(each.name), on_top.get(each.name), _cost(job, each)) for each in chosen]
    return next(iter(alone.values())).before, found


def stands_for_its_group(lever: Lever, work: Workload) -> bool:
    name = HALVED.get(lever.group)
    return name is None or 2 * int(str(lever.settings[name])) == getattr(work, name)


def _by_name(found: Sequence[Option]) -> dict[str, Option]:
    return {option.lever.name: option for option in found}


def _cost(job: Job, lever: Lever) -> StepCost | None:
    try:
        return step_cost(apply(job.workload, [lever])) if lever.missing is None else None
    except MemfitError:
        return None


def _job_lines(job: Job, before: Plan, found: Sequence[Effect]) -> Iterator[str]:
    card, plain = find_gpu(job.gpu), step_cost(job.workload)
    with_checkpointing = next((each.on_top.before for each in found if each.on_top), None)
    yield f"## {job.title}"
    yield ""
    yield f"`{_command(job)}`"
    yield ""
    said = f"As it is it takes {_gib(before.peak.device_bytes)} GiB of {_gib(card.capacity_bytes)} ({before.verdict})"
    if with_checkpointing is not None:
        said += f", with checkpointing {_gib(with_checkpointing.peak.device_bytes)} GiB ({with_checkpointing.verdict})"
    bound = seconds(plain, card)
    yield (
        f"{said}. A step is {plain.flops / 1e12:,.0f} TFLOP, {plain.bytes_moved / 1e9:,.0f} GB of GPU memory moved"
        + (f", and at the least {bound:.2f} s on a {card.name}." if bound is not None else ".")
    )
    yield ""
    yield "| lever | costs | peak alone | saves alone | saves on top of checkpointing | step time | FLOPs | GB over PCIe |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for each in found:
        times = _times(each, plain, card)
        yield f"| {each.lever.name} | {each.lever.cost} | {_after(each.alone)} | {_saved(each.alone)} | " + (
            f"{_saved(each.on_top)} | {' | '.join(times)} |"
        )
    yield ""


def _times(effect: Effect, plain: StepCost, card: Any) -> tuple[str, str, str]:
    if effect.cost is None:
        return "n/a", "n/a", "n/a"
    before, after = seconds(plain, card), seconds(effect.cost, card)
    ratio = "n/a" if before is None or after is None else f"x {after / before:.2f}"
    return ratio, f"{effect.cost.flops / plain.flops - 1:+.0%}", f"{effect.cost.host_bytes / 1e9:.1f}"


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


def _after(option: Option | None) -> str:
    return "n/a" if option is None else f"{_gib(option.after.peak.device_bytes)} {option.after.verdict}"


def _saved(option: Option | None) -> str:
    return "n/a" if option is None else _gib(option.saved_bytes)


# -- all of them -------------------------------------------------------------------------------------------------------


def document() -> str:
    lines: list[str] = list(_head())
    known: dict[str, Lever] = {}
    for job in JOBS:
        print(f"{job.title} ...", file=sys.stderr, flush=True)
        before, found = effects(job)
        lines += _job_lines(job, before, found)
        for each in found:
            known.setdefault(each.lever.name, each.lever)
    lines += [*_how(known.values()), *_reported(), *_measured_times()]
    return "\n".join(lines).rstrip() + "\n"


def _head() -> Iterator[str]:
    yield "# Levers: what each saves, what it costs, how to switch it on"
    yield ""
    yield "Written by `make levers`; nothing here is typed by hand but the words. Every saving is the difference of two"
    yield "predictions of that very job, in GiB of what `nvidia-smi` shows, and another job has others: ask `memfit fit`."
    yield "Savings do not add up. The peak moves from the blocks to the loss and to the optimizer's step as levers come"
    yield "on, so each is predicted alone and once more on top of checkpointing; 0.00 there means that the peak is"
    yield "elsewhere. n/a: it replaces checkpointing, or cannot be planned here."
    yield ""
    yield "Step time is the ratio of two rooflines: kernel by kernel the longer of arithmetic and memory at the card's"
    yield "peak, transfers to the host beside them. It is a bound of what must be done, without launch times, and without"
    yield "what the host itself computes; the last section says how far such ratios are from measured ones. Traffic"
    yield "between GPUs is not in it."
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

NOT_SETTINGS = ("step_seconds", "phases", "gpu", "error")


def _measured_times() -> Iterator[str]:
    if not TIMES.is_file():
        return
    rows = [json.loads(line) for line in TIMES.read_text().splitlines()]
    timed = [row for row in rows if "step_seconds" in row]
    yield "## How far ratios of rooflines are from measured ones"
    yield ""
    yield "Steps of real jobs with random weights, timed on an H200 (median of four steps), beside their rooflines. Each"
    yield "ratio is to the first job of its group; no kernel reaches its peak, so times themselves are only bounds."
    yield ""
    yield "| job | measured s | roofline s | roofline / measured | measured ratio | roofline ratio | off by |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    card, first, errors = find_gpu("H200"), {}, []
    for row in timed:
        work = Workload.from_mapping({name: value for name, value in row.items() if name not in NOT_SETTINGS})
        bound = seconds(step_cost(work), card)
        assert bound is not None
        measured = row["step_seconds"]
        base = first.setdefault((work.kind, work.model), (measured, bound))
        ratios = measured / base[0], bound / base[1]
        off = ratios[1] / ratios[0] - 1
        if base != (measured, bound):
            errors.append(abs(off))
        yield (
            f"| {_words(row)} | {measured:.4f} | {bound:.4f} | {bound / measured:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f}"
            f" | {off:+.0%} |"
        )
    yield ""
    yield (
        f"Over {len(errors)} ratios: off by {statistics.median(errors):.0%} at the median, {max(errors):.0%} at the most."
    )


def _words(row: dict[str, Any]) -> str:
    names = [name for name in row if name not in NOT_SETTINGS and name not in ("kind", "model", "seq_len")]
    said = [
        f"{name.replace('_', '-')} {row[name]}" if row[name] is not True else name.replace("_", "-") for name in names
    ]
    return f"{row['kind']} {row['model']}: {', '.join(said)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=TARGET, help="another file than docs/levers.md")
    asked = parser.parse_args()
    asked.output.write_text(document())
    print(f"wrote {asked.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

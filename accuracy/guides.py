"""Write docs/guides.md: the five documents that memfit answers, the command for each of their steps, and each claim
beside what is predicted of it.

    python -m accuracy.guides           # rewrites docs/guides.md, in a few minutes

The documents' own words and numbers are `memfit/guides/`; everything beside them is predicted here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import memfit
from accuracy.guide_claims import GSA_CLAIMS, LORA_BUDGET, LORA_CLAIMS, Tip, TrainingClaims
from accuracy.guide_steps import STEPS
from memfit.fitting.forecast import Forecast, Forecasts
from memfit.fitting.ladder import guide_ladder
from memfit.gpus import find_gpu
from memfit.guides.claims import DEBUGGING, DOCUMENTS, GSA_512M, LORA_7B, PROFILING, REQUIREMENTS, Document
from memfit.jobs.profile import ProfileSettings
from memfit.jobs.workload import Workload
from memfit.models.presets import SIZES
from memfit.planning.predict import Plan, predict
from memfit.planning.profile import predict_profile
from memfit.planning.training import budget_of
from memfit.units import GiB, MiB

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "guides.md"
MEASURED = HERE / "measured" / "allocator.jsonl"
SETTINGS = {each.name for each in fields(Workload)}


def page() -> str:
    lines = [
        "# The five guides: what they ask, what they claim, what is so",
        "",
        "Written by `make guides` from `src/memfit/guides/` and `accuracy/guide_*.py`; every figure beside a claim is",
        "predicted. Five documents that people wrote about the memory of their own jobs are what memfit was built to",
        "answer: whatever they have their reader run is one command here, and whatever they estimate is computed.",
        "",
        *(f"{number}. [{each.title}](#{anchor(each)}): {each.about}" for number, each in enumerate(DOCUMENTS, start=1)),
        "",
    ]
    for document in DOCUMENTS:
        print(f"{document.title} ...", file=sys.stderr, flush=True)
        lines += [f"## {document.title}", "", document.about, "", *steps_of(document), *CLAIMS[document.name]()]
    return "\n".join(lines).rstrip() + "\n"


def anchor(document: Document) -> str:
    """As GitHub makes it of a heading."""
    kept = (c for c in document.title.lower() if c.isalnum() or c in " -")
    return "".join(kept).replace(" ", "-")


def steps_of(document: Document) -> Iterator[str]:
    yield "| it asks for | with memfit |"
    yield "| --- | --- |"
    for step in STEPS[document.name]:
        typed = step.memfit if "`" in step.memfit else f"`{step.memfit}`"
        yield f"| {step.asks} | {typed} |"
    yield ""


# -- pruning -----------------------------------------------------------------------------------------------------------

_TABLE: dict[str, Any] = {}


def pruning_table() -> dict[str, Any]:
    if not _TABLE:
        _TABLE.update(memfit.table(workloads="prune").to_json())
    return _TABLE


def debugging() -> Iterator[str]:
    yield "Its GB are GiB. The failed buffer is 128 x 131,072 x 2048 x 2 bytes, which is 64.00 GiB as the error says"
    yield "(68.7 GB); with 2048 tokens 1.00 GiB, where it writes 1.07 GB. The public code has two such buffers."
    yield ""
    yield from claims_of(DEBUGGING, pruning_table())
    yield "`torch.cuda.empty_cache()` after each layer lowers what `nvidia-smi` shows between layers, and no peak; the"
    yield "dataset changes nothing on the GPU."
    yield ""


def requirements() -> Iterator[str]:
    yield "Its GB are 10^9 bytes. Its table, and the public code's way predicted (total as `nvidia-smi` shows it):"
    yield ""
    yield "| model | weights: says, is | activations | total | smallest card | memfit's own way takes |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    rows = pruning_table()["rows"]
    streamed = {row["model"]: row for row in rows if row["way"] == "streamed"}
    for row in (row for row in rows if row["guide"]):
        said = row["guide"]
        cells = (
            said["said"], f"{gb(said['weights_bytes'])}, {gb(row['weights_bytes'])}",
            f"{span(said['activations_bytes'])}, {gb(row['activations_bytes'])}",
            f"{span(said['total_bytes'])}, {gb(row['total_bytes'])}",
            f"{said['smallest_gpu']}, {row['smallest_gpu'] or 'none of them'}",
            f"{gb(streamed[row['model']]['total_bytes'])}",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from claims_of(REQUIREMENTS, pruning_table())
    yield "| it says | of the activations, predicted |"
    yield "| --- | --- |"
    for saving in pruning_table()["guide_savings"]:
        before, after = saving["activations_before_bytes"], saving["activations_after_bytes"]
        yield f"| {saving['said']} | {gb(before)} become {gb(after)} GB: {saving['share']:.0%} less |"
    yield ""


def claims_of(document: Document, table: Mapping[str, Any]) -> Iterator[str]:
    yield "| it says | memfit says | its way takes | memfit's own way |"
    yield "| --- | --- | ---: | --- |"
    for claim in (*table["guide_matrix"], *table["guide_examples"]):
        if claim["guide"] == document.name:
            unit = GiB if document is DEBUGGING else 10**9
            note = f" ({claim['note']})" if claim["note"] else ""
            streamed = (
                f"{claim['streamed_bytes'] / unit:.1f} GB on {claim['streamed_gpu']}: {claim['streamed_verdict']}"
            )
            whole = f"{claim['whole_bytes'] / unit:.1f} GB"
            yield f"| {claim['said']}{note} | {claim['answer']} | {whole} | {streamed} |"
    yield ""


def gb(size: int) -> str:
    return f"{size / 1e9:.1f}"


def span(sizes: list[int]) -> str:
    return "-".join(f"{size / 1e9:.0f}" for size in sizes)


# -- profiling ---------------------------------------------------------------------------------------------------------


def profiling() -> Iterator[str]:
    yield "Its MB are MiB. Batch 4, the 2.7B model; peak of what is allocated, as its summaries have it:"
    yield ""
    yield "| it asks | predicted |"
    yield "| --- | --- |"
    yield from (f"| {question} | {answer} |" for question, answer in profile_answers())
    yield ""
    yield "[recording.md](recording.md#the-guides-own-figures-explained) has the published answers beside these."
    yield ""


def profile_answers() -> Iterator[tuple[str, str]]:
    size = SIZES["2.7B"]
    for kind in ("forward", "training"):
        peaks = [f"{allocated(kind, context) / MiB:,.0f} at {context}" for context in (128, 256, 512)]
        yield (
            f"(b) peak of {'a forward pass' if kind == 'forward' else 'a full step'} by context length",
            ", ".join(peaks),
        )
    for kind in ("forward", "training"):
        plain, mixed = allocated(kind, 512), allocated(kind, 512, "bf16")
        change = f"{plain / MiB:,.0f} become {mixed / MiB:,.0f}: {mixed / plain - 1:+.1%}"
        yield f"(c) does mixed precision save memory: {kind}", change
    residual = 4 * 512 * size.d_model * 4
    yield "(d) one activation of the residual stream in fp32", f"4 x 512 x {size.d_model} x 4 B = {residual / MiB:.2f}"
    needed = profiled("training", 512)
    forward = profiled("forward", 512)
    yield (
        "a GPU with ~40 GB is enough for the 2.7B model",
        f"a forward pass needs {gib(forward.smallest_gpu_bytes)} GiB, a training step {gib(needed.smallest_gpu_bytes)}",
    )


def allocated(kind: str, context: int, dtype: str | None = None) -> int:
    """As `memfit profile suite` has it."""
    asked = ProfileSettings.asked("2.7B", profile_type=kind, context_length=context, dtype=dtype)
    return predict_profile(asked).peak_allocated_bytes


def profiled(kind: str, context: int) -> Plan:
    return predict(ProfileSettings.asked("2.7B", profile_type=kind, context_length=context).workload)


# -- training ----------------------------------------------------------------------------------------------------------


def lora() -> Iterator[str]:
    plans = [predict(job(LORA_CLAIMS, total.settings), gpu=LORA_CLAIMS.gpu) for total in LORA_CLAIMS.totals]
    budgets = [budget_of(plan) for plan in plans]
    trained = plans[0].trainable_parameters / 1e6
    yield "Its GB are compared with a card of 24 GiB. Its budget, and the same jobs predicted. It calls 239 million"
    yield f"parameters trainable at rank 128; adapters of all linear layers have {trained:.0f} million."
    yield ""
    yield "| GiB | before: says, is | after: says, is |"
    yield "| --- | ---: | ---: |"
    for name, (label, said) in LORA_BUDGET.items():
        cells = [f"{said[at] if said else '-'}, {gib(each[f'{name}_bytes'])}" for at, each in enumerate(budgets)]
        yield f"| {label} | {' | '.join(cells)} |"
    yield ""
    yield from training(LORA_CLAIMS)
    yield from allocator_measured()


def gsa() -> Iterator[str]:
    yield from training(GSA_CLAIMS)
    rungs = guide_ladder(job(GSA_CLAIMS, {}), Forecasts(find_gpu(GSA_CLAIMS.gpu), margin=0.1))
    yield "| its ladder | micro-batch | it says | predicted | |"
    yield "| --- | --- | --- | ---: | --- |"
    for rung in (each.to_json() for each in rungs):
        what = f"{rung['micro_batch']} x {rung['grad_accum']}, {rung['seq_len']} tokens"
        wrong = "".join(f"; {each}" for each in rung["wrong"])
        yield f"| {rung['name']} | {what} | {rung['claims']} | {gib(rung['device_bytes'])} | {rung['verdict']}{wrong} |"
    yield ""


def training(claims: TrainingClaims) -> Iterator[str]:
    """Each piece of advice on the document's own job, with checkpointing as there; GiB of what `nvidia-smi` shows."""
    card = find_gpu(claims.gpu)
    forecasts = Forecasts(card, margin=0.1)
    yield f"| job, on {gib(card.capacity_bytes)} GiB | it says | predicted, on a card without limit | |"
    yield "| --- | ---: | ---: | --- |"
    for total in claims.totals:
        found = forecast(claims, forecasts, total.settings)
        gives_back = "; what torch caches beyond the card, it gives back there"
        verdict = found.verdict + (
            gives_back if found.verdict != "fails" and found.device_bytes > card.capacity_bytes else ""
        )
        yield f"| {total.said} | {total.takes} GB | {gib(found.device_bytes)} | {verdict} |"
    yield ""
    yield "| advice | it says this saves | predicted: before | after | saves |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    yield from (advice_row(claims, forecasts, each) for each in claims.advice)
    yield ""
    yield from (f"- {why}" for why in claims.no_prediction)
    yield ""


def advice_row(claims: TrainingClaims, forecasts: Forecasts, advice: Tip) -> str:
    before = forecast(claims, forecasts, advice.on).device_bytes
    after = forecast(claims, forecasts, {**advice.on, **advice.changes}).device_bytes
    saves = f"{advice.saves} GB" if advice.saves[0].isdigit() else advice.saves
    return f"| {advice.said} | {saves} | {gib(before)} | {gib(after)} | {gib(before - after)} |"


def forecast(claims: TrainingClaims, forecasts: Forecasts, settings: Mapping[str, Any]) -> Forecast:
    return forecasts.ask(job(claims, settings))


def job(claims: TrainingClaims, settings: Mapping[str, Any]) -> Workload:
    return Workload.from_mapping({**claims.settings, **settings})


def allocator_measured() -> Iterator[str]:
    yield "**Both allocator settings together, measured on an H200.** A free range of an expandable segment that is"
    yield "larger than the limit is not used for what is smaller than it, so ever more is reserved. GiB at the peak:"
    yield ""
    yield "| job | settings | allocated: predicted, measured | reserved: predicted, measured |"
    yield "| --- | --- | ---: | ---: |"
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        work = Workload.from_mapping({name: run[name] for name in run if name in SETTINGS})
        peak = predict(work).peak
        yield (
            f"| {work.kind} of {work.model}, {work.batch_size} x {work.seq_len} | {work.alloc_conf or 'none'} "
            f"| {gib(peak.allocated_bytes)}, {gib(run['peak_allocated'])} "
            f"| {gib(peak.reserved_bytes)}, {gib(run['peak_reserved'])} |"
        )
    yield ""


def gib(size: int) -> str:
    return f"{size / GiB:.2f}"


CLAIMS = {
    DEBUGGING.name: debugging, REQUIREMENTS.name: requirements, PROFILING.name: profiling, LORA_7B.name: lora,
    GSA_512M.name: gsa,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=TARGET, help="another file than docs/guides.md")
    asked = parser.parse_args()
    asked.output.write_text(page(), encoding="utf-8")
    print(f"wrote {asked.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

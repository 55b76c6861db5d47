"""Advice that people get for this error and that cannot help here, each with the reason.

Every line is decided by this message's numbers, this job and this moment; what could help is not in the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.explaining.account import Account
from memfit.explaining.cause import SIGNIFICANT, Cause
from memfit.explaining.clues import Clues
from memfit.explaining.message import Oom
from memfit.explaining.place import RECOMPUTING, FailurePlace
from memfit.explaining.tensor import Readings
from memfit.jobs.settings import WITHOUT_BACKWARD
from memfit.units import format_bytes

LEVERS = {
    "expandable_segments:True": "expandable segments", "a smaller batch": "micro-batch",
    "bf16 autocast": "bf16 autocast",
    "gradient checkpointing": "checkpointing", "gradient checkpointing alone": "checkpointing",
    "an 8-bit or paged optimizer": "8-bit AdamW", "flash attention": "fused attention",
}  # fmt: skip
"""What the same advice is called as a lever: where a prediction says that it saves something, that is believed."""
INFERENCE = ("evaluation", "generation", "calibration")
FUSED = ("sdpa_attention", "flash_attn", "flash_attention", "scaled_dot_product_attention", "xformers")


@dataclass(frozen=True, slots=True)
class Withheld:
    advice: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that the table looks at."""

    oom: Oom
    account: Account
    cause: Cause
    clues: Clues
    place: FailurePlace
    readings: Readings
    kind: str | None = None
    """Of the job: forward, train, lora, generate or prune."""
    batch_size: int | None = None
    precision: str | None = None
    grad_checkpointing: bool = False
    at_peak: str | None = None
    """The category that most of the predicted peak is, where the job is known."""
    growth: str | None = None
    """Which kind of growth a run's record shows; `none` where it shows none."""
    predicted: tuple[str, ...] = ()
    """Levers that are predicted to save something on this job."""


def withheld(case: Evidence) -> list[Withheld]:
    if case.cause.kind == "host-memory":
        sure = case.cause.certainty == "certain"
        why = "the GPU's memory is not what ran out" if sure else "a GPU that is full raises an error and kills nothing"
        return [Withheld("anything about the GPU", why)]
    if case.cause.kind == "none" or case.oom.form == "mps":
        return []
    made = (
        _empty_cache, _expandable, _split_size, _smaller_batch, _checkpointing, _small_optimizer, _autocast,
        _other_processes, _leak, _flash,
    )  # fmt: skip
    rows = [found for each in made for found in each(case)]
    return [row for row in rows if not any(name.startswith(LEVERS.get(row.advice, "?")) for name in case.predicted)]


def _empty_cache(case: Evidence) -> Iterator[Withheld]:
    if case.cause.kind == "library":
        return  # there it gives memory to the library
    backend = case.oom.form if case.oom.form in ("xpu", "npu", "musa", "mlu") else "cuda"
    why = "torch has already given back all that it could before it raised this error"
    yield Withheld(f"torch.{backend}.empty_cache()", why)


def _expandable(case: Evidence) -> Iterator[Withheld]:
    name, fragmentation = "expandable_segments:True", case.cause.fragmentation
    if case.clues.expandable:
        yield Withheld(name, "it is on already; the message suggests it regardless")
    elif case.clues.windows:
        yield Withheld(name, "it does not exist on Windows and WSL")
    elif case.cause.kind in ("impossible-request", "corrupt-size"):
        yield Withheld(name, "no arrangement of memory makes room for a request of that size")
    elif fragmentation is not None and fragmentation.verdict == "no":
        yield Withheld(name, f"fragmentation is not the cause: {fragmentation.why}")
    elif case.clues.split_size:
        yield Withheld(
            name, "not beside max_split_size_mb, which keeps its free memory from being used again: drop that"
        )


def _split_size(case: Evidence) -> Iterator[Withheld]:
    fragmentation = case.cause.fragmentation
    if fragmentation is None or fragmentation.verdict == "yes":
        return
    why = (
        "it is for large blocks in pieces" if fragmentation.verdict == "no" else "that memory is in pieces is not shown"
    )
    yield Withheld("max_split_size_mb", f"{why}, and it can raise what is reserved")


def _smaller_batch(case: Evidence) -> Iterator[Withheld]:
    if case.place.phase == "loading":
        yield Withheld("a smaller batch", "it failed while loading: no batch was there yet")
    elif case.place.phase == "saving":
        yield Withheld("a smaller batch", "it failed while saving, which has no batch")
    elif case.place.phase == "optimizer step":
        yield Withheld("a smaller batch", "it failed in the optimizer step, which is as large as the weights")
    elif case.place.phase is None and "weights" in case.place.hints:
        yield Withheld("a smaller batch", "it failed where weights are copied: no batch is in that")
    elif case.batch_size == 1 and case.kind != "prune":
        yield Withheld("a smaller batch", "it is 1 already; what can shrink is the sequence")


def _checkpointing(case: Evidence) -> Iterator[Withheld]:
    name = "gradient checkpointing"
    likeliest = case.readings.likeliest
    if case.kind in WITHOUT_BACKWARD or case.place.phase in INFERENCE:
        yield Withheld(name, "nothing is kept for a backward pass here")
    elif case.grad_checkpointing or case.place.at(RECOMPUTING):
        yield Withheld(name, "it is on already")
    elif case.place.phase in ("loading", "optimizer step", "saving"):
        yield Withheld(name, f"it failed {_when(case.place.phase)}, where no activations are made")
    elif likeliest is not None and likeliest.kind == "logits" and case.at_peak in (None, "loss"):
        yield Withheld(f"{name} alone", "the tensor that failed is made of logits, which it does not touch")


def _when(phase: str | None) -> str:
    return f"while {phase}" if phase in ("loading", "saving") else f"in the {phase}"


def _small_optimizer(case: Evidence) -> Iterator[Withheld]:
    name = "an 8-bit or paged optimizer"
    if case.kind in WITHOUT_BACKWARD or case.place.phase in INFERENCE:
        yield Withheld(name, "there is no optimizer here")
    elif case.kind == "lora":
        yield Withheld(name, "with LoRA only the adapters have optimizer states, and those are small")
    elif case.at_peak in ("activations", "loss", "temporaries"):
        yield Withheld(name, f"the peak is {case.at_peak}, not optimizer states")


def _autocast(case: Evidence) -> Iterator[Withheld]:
    if (case.kind in ("forward", "generate") or case.place.phase in INFERENCE) and case.precision in (
        "fp32",
        "amp-bf16",
    ):
        yield Withheld(
            "bf16 autocast", "in inference with fp32 weights it adds a 16-bit copy of them; load them as bf16"
        )


def _other_processes(case: Evidence) -> Iterator[Withheld]:
    name = "ending other processes"
    others = case.account.others_bytes
    if case.oom.form not in ("cuda", "hip") or not case.oom.processes or case.cause.kind == "limit":
        if case.cause.kind == "limit":
            yield Withheld(name, "the limit is this process's own")
        return
    if not case.account.other_pids:
        alone = case.account.own_by_size is not None
        yield Withheld(name, "the one that is listed most likely is this one" if alone else "the message lists none")
    elif 0 < others < SIGNIFICANT:
        yield Withheld(name, f"they hold {format_bytes(others)} in all, a display or a bare context")


def _leak(case: Evidence) -> Iterator[Withheld]:
    if case.growth == "none":
        yield Withheld("looking for a memory leak", "the run's own record shows no growth between steps")
    elif case.growth == "long-batches":
        yield Withheld("looking for a memory leak", "the peak follows the length of the batch; nothing else grows")


def _flash(case: Evidence) -> Iterator[Withheld]:
    likeliest, name = case.readings.likeliest, "flash attention"
    first = next(iter(case.readings.candidates), None)
    if first is not None and first.kind == "attention":
        return
    if by_fused_attention(case) and not case.clues.eager:
        yield Withheld(name, "attention is fused already, as the traceback shows")
    elif case.precision == "fp32":
        yield Withheld(name, "it takes 16-bit inputs only, and this job is fp32")
    elif (
        likeliest is not None
        and likeliest.kind != "attention"
        and case.place.phase in ("loading", "optimizer step", "loss")
    ):
        yield Withheld(name, f"it failed {_when(case.place.phase)}, not in attention")


def by_fused_attention(case: Evidence) -> bool:
    """Whether the failing line is in an attention that can be fused."""
    frames = " ".join(f"{frame.path} {frame.function} {frame.code}" for frame in case.place.frames)
    return any(word in frames for word in FUSED)

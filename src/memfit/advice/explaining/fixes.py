"""What to do, best first: predicted on this very job where it is known, otherwise what the numbers allow, in words.

A saving is quoted only if it was predicted. What follows from the message alone (a process that holds so much, a tensor
that is smaller at another length) is arithmetic on its numbers, and called that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from memfit.advice.explaining.withheld import INFERENCE, Situation
from memfit.advice.tensor_names import Reading
from memfit.gpus import Gpu
from memfit.jobs.workload import Workload
from memfit.units import MiB, format_bytes

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

Basis = Literal["predicted", "message", "arithmetic", "words"]
WORTH = 16 * MiB
"""Levers that save less are left out."""
MOST_OF_A_GROUP = 1
USUAL_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class Fix:
    name: str
    says: str
    basis: Basis
    cost: str | None = None
    price: str | None = None
    saved_bytes: int | None = None
    after_bytes: int | None = None
    """What the device would hold at the peak."""
    verdict: str | None = None
    """Whether the job then fits on this card."""
    how: Mapping[str, str] = field(default_factory=dict)


# -- predicted -----------------------------------------------------------------------------------------------------


def predicted_fixes(workload: Workload, gpu: Gpu | None) -> tuple[Plan | None, list[Fix]]:
    """The job as it is, and every lever on it: the best saving first, of levers that replace each other the best."""
    from memfit.advice.fit import options
    from memfit.planning.predict import predict

    found = options(workload, gpu=gpu)
    before = found[0].before if found else predict(workload, gpu=gpu)
    made: list[Fix] = []
    seen: dict[str, int] = {}
    for option in found:
        lever = option.lever
        if option.saved_bytes < WORTH or seen.get(lever.group, 0) >= MOST_OF_A_GROUP:
            continue
        seen[lever.group] = seen.get(lever.group, 0) + 1
        made.append(
            Fix(name=lever.name, says=lever.says, basis="predicted", cost=lever.cost, price=lever.price,
                saved_bytes=option.saved_bytes, after_bytes=option.after.peak.device_bytes,
                verdict=option.after.verdict, how=dict(lever.how))
        )  # fmt: skip
    return before, made


# -- from the message ----------------------------------------------------------------------------------------------


def fixes_in_words(case: Situation, *, predicted: bool) -> list[Fix]:
    """`predicted`: levers of the job are told elsewhere, with figures."""
    made = list(_of_the_cause(case))
    if not predicted and case.cause.kind in ("shortage", "other-processes", "limit", "impossible-request", "no-numbers"):
        made += _of_the_moment(case)
    return made


def _of_the_cause(case: Situation) -> Iterator[Fix]:
    oom, account = case.oom, case.account
    match case.cause.kind:
        case "other-processes":
            pids = ", ".join(map(str, account.other_pids[:6])) + (" ..." if len(account.other_pids) > 6 else "")
            yield Fix(name="free the card of the others", basis="message", how={"shell": f"ps -p {pids.split(' ')[0].strip(',')}"},
                      says=f"processes {pids} hold {format_bytes(account.others_bytes)}: end them, or take another GPU "
                      "with CUDA_VISIBLE_DEVICES")  # fmt: skip
        case "limit" if oom.form == "mps":
            yield Fix(name="close other programs", basis="words",
                      says="MPS shares the machine's memory with everything else that runs")  # fmt: skip
        case "limit":
            allowed = oom.allowed.text if oom.allowed else "n/a"
            yield Fix(name="raise the memory fraction", basis="message",
                      says=f"torch.cuda.set_per_process_memory_fraction allows {allowed}, and the card has more")  # fmt: skip
        case "fragmentation":
            yield Fix(name="expandable segments", basis="message", says="pieces that lie apart can then serve one request",
                      how={"shell": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before Python starts"})  # fmt: skip
        case "private-pools":
            yield Fix(name="fewer CUDA graphs", basis="words",
                      says="capture fewer shapes, or let graphs share one pool (torch.cuda.graph(..., pool=...))")  # fmt: skip
        case "refused":
            yield Fix(name="look for a limit", basis="words", says="torch.cuda.get_per_process_memory_fraction(); on "
                      "Windows the page file, which has to be as large as the memory; `free -g` on the host")  # fmt: skip
        case "corrupt-size":
            yield Fix(name="look at the shape", basis="words",
                      says="print the sizes that go into the failing line: one is negative or was never set")  # fmt: skip
        case "host-memory" | "library" | "no-numbers" if oom.remedy:
            yield Fix(name="leave room" if case.cause.kind == "library" else "what to do", basis="words", says=oom.remedy)
        case "host-memory":
            yield Fix(name="less on the host", basis="words", says="fewer data loader workers, memory-mapped data, weights "
                      "loaded straight to the GPU (device_map, safetensors)")  # fmt: skip


def _of_the_moment(case: Situation) -> Iterator[Fix]:
    reading = case.readings.likeliest or (case.readings.candidates[0] if case.readings.candidates else None)
    kinds = {each.kind for each in case.readings.candidates[:2]}
    phase = case.place.phase
    if phase == "loading":
        yield Fix(name="smaller weights", basis="words", says="load them as bf16 (dtype=torch.bfloat16), or in parts: "
                  "device_map='auto', FSDP2, a streaming engine such as `memfit prune`")  # fmt: skip
        return
    if phase == "optimizer step":
        yield Fix(name="smaller optimizer states", basis="words", says="a fused or 8-bit optimizer, LoRA, or states on "
                  "the host or sharded (FSDP2)")  # fmt: skip
        return
    if reading is not None:
        yield from _of_the_tensor(case, reading, kinds)
    if phase == "evaluation":
        yield Fix(name="evaluate in smaller pieces", basis="words", says="per_device_eval_batch_size 1, "
                  "eval_accumulation_steps 1, prediction_loss_only=True where only the loss is wanted")  # fmt: skip
    training = phase in ("forward", "loss", "backward") and case.kind not in ("forward", "generate", "prune")
    if training and not case.grad_checkpointing and phase != "loss" and not _on(case):
        yield Fix(name="gradient checkpointing", basis="words",
                  says="keeps a block's input only and computes the rest again, about a third more time")  # fmt: skip
    if case.batch_size != 1 and phase not in ("loading", "saving"):
        yield Fix(name="fewer rows at a time", basis="words", says="half the micro-batch and twice the accumulation: the "
                  "global batch stays" if phase not in INFERENCE else "a smaller batch")  # fmt: skip
    yield Fix(name="shorter sequences", basis="words", says="fewer tokens in a row: this changes the experiment")


def _on(case: Situation) -> bool:
    from memfit.advice.explaining.place import checkpointed

    return checkpointed(case.place)


def _of_the_tensor(case: Situation, reading: Reading, kinds: set[str]) -> Iterator[Fix]:
    if "logits" in kinds and case.place.phase == "generation":
        yield Fix(name="logits of the last token only", basis="words", says="logits_to_keep=1: the prompt's are not needed")
    elif "logits" in kinds:
        yield Fix(name="the loss in chunks", basis="words", says="the same loss and gradients, the logits never whole",
                  how={"memfit": "loss: chunked", "trainer": "use_liger_kernel=True"})  # fmt: skip
    if reading.kind == "attention" and reading.tensor.startswith("attention scores"):
        yield Fix(name="fused attention", basis="words", says="no scores of length x length are made",
                  how={"transformers": 'attn_implementation="sdpa"'})  # fmt: skip
    if reading.kind == "calibration":
        length = next((factor.value for factor in reading.factors if factor.symbol == "tokens"), 0)
        if length > USUAL_LENGTH:
            after = reading.nbytes // length * USUAL_LENGTH
            yield Fix(name=f"cap the length at {USUAL_LENGTH:,}", basis="arithmetic", says=f"this tensor then has "
                      f"{format_bytes(after)}; {length:,} is the model's largest position, not a length to calibrate at",
                      how={"memfit": f"memfit prune --seqlen {USUAL_LENGTH}"})  # fmt: skip

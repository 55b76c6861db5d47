"""What to do where the job is not known: what the message's numbers, the tensor and the phase allow, in words.

No saving is quoted here. What follows from the message alone (a process that holds so much, a tensor that is smaller at
another length) is a fact or arithmetic on its numbers, and called that.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.advice.explaining.fix import Basis, Fix
from memfit.advice.explaining.place import checkpointed
from memfit.advice.explaining.withheld import INFERENCE, Situation
from memfit.advice.tensor_names import Reading
from memfit.units import format_bytes

USUAL_LENGTH = 2048
MOST_PIDS = 6
OF_THE_GPU = ("shortage", "other-processes", "limit", "refused", "impossible-request", "no-numbers")
"""Causes for which a smaller job is a cure."""


def fixes_in_words(case: Situation, *, predicted: bool) -> list[Fix]:
    """`predicted`: levers of the job are told elsewhere, with figures."""
    made = list(_of_the_cause(case))
    if predicted and case.cause.kind == "impossible-request":
        made += _of_the_tensor(case)
    if not predicted and case.cause.kind in OF_THE_GPU:
        made += _of_the_phase(case)
    return made


def _fix(name: str, says: str, *, basis: Basis = "words", **how: str) -> Fix:
    return Fix(name=name, says=says, basis=basis, how=how)


# -- by cause ------------------------------------------------------------------------------------------------------


def _of_the_cause(case: Situation) -> Iterator[Fix]:
    oom, kind = case.oom, case.cause.kind
    if kind == "other-processes":
        yield _others(case)
    elif kind == "fragmentation":
        yield from _of_fragmentation(case)
    elif kind == "limit" and oom.form == "mps":
        yield _fix("close other programs", "MPS shares the machine's memory with everything else that runs")
    elif kind == "limit" and oom.allowed is not None:
        said = f"torch.cuda.set_per_process_memory_fraction allows {oom.allowed.text}, and the card has more"
        yield _fix("raise the memory fraction", said, basis="message")
    elif kind == "private-pools":
        yield _fix(
            "fewer CUDA graphs", "capture fewer shapes, or let graphs share a pool: torch.cuda.graph(g, pool=...)"
        )
    elif kind == "refused":
        said = (
            "torch.cuda.get_per_process_memory_fraction(); on Windows the size of the page file; on the host `free -g`"
        )
        yield _fix("look for a limit", said)
    elif kind == "corrupt-size":
        yield _fix(
            "look at the shape", "print the sizes that go into the failing line: one is negative or was never set"
        )
    elif oom.remedy:
        yield _fix(oom.cure, oom.remedy)
    elif kind == "host-memory":
        said = "fewer data loader workers, memory-mapped data, weights loaded straight to the GPU (device_map)"
        yield _fix("less on the host", said)


def _others(case: Situation) -> Fix:
    pids = case.account.other_pids
    named = ", ".join(map(str, pids[:MOST_PIDS])) + (" ..." if len(pids) > MOST_PIDS else "")
    who, end = (f"process {named} holds", "it") if len(pids) == 1 else (f"processes {named} hold", "them")
    said = f"{who} {format_bytes(case.account.others_bytes)}: end {end}"
    return _fix("free the card of the others", f"{said}, or choose another GPU by CUDA_VISIBLE_DEVICES",
                basis="message")  # fmt: skip


def _of_fragmentation(case: Situation) -> Iterator[Fix]:
    cached, held = case.account.cached_bytes or 0, case.account.held_bytes or 0
    said = "pieces that lie apart can then serve one request"
    if held > 4 * cached:
        said += f"; but only {format_bytes(cached)} of {format_bytes(held)} is in pieces, the rest is in use"
    yield _fix("expandable segments", said, basis="message",
               shell="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before Python starts")  # fmt: skip
    free, requested = case.oom.free, case.oom.requested
    if free is not None and requested is not None and free.low >= requested.high:
        said = f"{free.text} of the card was free: torch.cuda.set_per_process_memory_fraction is in the way"
        yield _fix("raise the memory fraction", said, basis="message")


# -- by phase and tensor -------------------------------------------------------------------------------------------


def _of_the_phase(case: Situation) -> Iterator[Fix]:
    phase = case.place.phase
    if phase == "loading":
        said = "load them as bf16 (dtype=torch.bfloat16), or in parts: device_map='auto', FSDP2, or block by block"
        yield _fix("smaller weights", said)
        return
    if phase == "optimizer step":
        said = "a fused or 8-bit optimizer, LoRA, or states on the host or sharded (FSDP2)"
        yield _fix("smaller optimizer states", said)
        return
    yield from _of_the_tensor(case)
    if phase == "evaluation":
        said = "per_device_eval_batch_size 1, eval_accumulation_steps 1, prediction_loss_only=True if that is enough"
        yield _fix("evaluate in smaller pieces", said)
    if _could_checkpoint(case):
        yield _fix("gradient checkpointing", "keeps a block's input only and computes the rest again, which takes time")
    if case.batch_size != 1 and phase in INFERENCE:
        yield _fix("a smaller batch", "fewer rows at a time")
    elif case.batch_size != 1 and phase != "saving":
        yield _fix("fewer rows at a time", "half the micro-batch and twice the accumulation: the global batch stays")
    yield _fix("shorter sequences", "fewer tokens in a row: this changes the experiment")


def _could_checkpoint(case: Situation) -> bool:
    trains = case.place.phase in ("forward", "backward") and case.kind not in ("forward", "generate", "prune")
    return trains and not case.grad_checkpointing and not checkpointed(case.place)


def _of_the_tensor(case: Situation) -> Iterator[Fix]:
    """By what the tensor most likely is; where two are as likely, both count."""
    found = case.readings.candidates[:2]
    kinds = {reading.kind for reading in found}
    if "logits" in kinds and case.place.phase == "generation":
        yield _fix("logits of the last token only", "logits_to_keep=1: the prompt's are not needed")
    elif "logits" in kinds:
        yield _fix("the loss in chunks", "the same loss and gradients, the logits never whole",
                   memfit="loss: chunked", trainer="use_liger_kernel=True")  # fmt: skip
    if found and found[0].tensor == "attention scores":
        yield _fix("fused attention", "no scores of length x length are made",
                   transformers='attn_implementation="sdpa"')  # fmt: skip
    if found and found[0].kind == "calibration":
        yield from _cap(found[0])


def _cap(reading: Reading) -> Iterator[Fix]:
    length = next((factor.value for factor in reading.factors if factor.symbol == "tokens"), 0)
    if length <= USUAL_LENGTH:
        return
    after = format_bytes(reading.nbytes // length * USUAL_LENGTH)
    said = f"this tensor then has {after}; {length:,} is a model's largest position, not a length to calibrate at"
    yield _fix(f"cap the length at {USUAL_LENGTH:,}", said, basis="arithmetic", memfit=f"--seqlen {USUAL_LENGTH}")

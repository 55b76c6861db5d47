"""What to do where the job is not known: what the message's numbers, the tensor and the phase allow, in words.

No saving is quoted here. What follows from the message alone (a process that holds so much, a tensor that is smaller at
another length) is a fact or arithmetic on its numbers, and called that.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.advice.explaining.fix import Basis, Fix
from memfit.advice.explaining.place import checkpointed, of_another_engine
from memfit.advice.explaining.signs import Sign
from memfit.advice.explaining.withheld import Situation, by_fused_attention
from memfit.advice.request_size import request_intervals
from memfit.advice.tensor_names import AHEAD, Reading
from memfit.units import MiB, format_bytes

WHOLE_ANYWAY = Sign("no chunks", paths=("/lm_eval/", "/trainer_pt_utils.py", "chunk"), functions=("*chunk*",), code=())
"""Where the loss is in chunks already, or the logits themselves are wanted."""
USUAL_LENGTH = 2048
MOST_PIDS = 6
CACHES = "cache_implementation='offloaded' or 'quantized' in generate"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before Python starts"
OF_THE_GPU = ("shortage", "other-processes", "limit", "refused", "impossible-request", "no-numbers")
"""Causes for which a smaller job is a cure."""


def fixes_in_words(case: Situation, *, predicted: bool) -> list[Fix]:
    """`predicted`: levers of the job are told elsewhere, with figures."""
    made = [*_of_the_cause(case), *_of_pieces(case)]
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
    elif kind in ("limit", "impossible-request") and oom.allowed is not None and _has_more(case):
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


def _has_more(case: Situation) -> bool:
    """Whether the card had what was asked for."""
    free, requested = case.oom.free, case.oom.requested
    return requested is not None and (free is None or requested.low <= free.high)


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
               shell=EXPANDABLE)  # fmt: skip
    free, requested = case.oom.free, case.oom.requested
    if free is not None and requested is not None and free.low >= requested.high:
        said = f"{free.text} of the card was free: torch.cuda.set_per_process_memory_fraction is in the way"
        yield _fix("raise the memory fraction", said, basis="message")


def _of_pieces(case: Situation) -> Iterator[Fix]:
    """Where more was cached than was asked for: that it lies in pieces is likely, and to try costs nothing."""
    cached, asked = case.account.cached_bytes or 0, request_intervals(case.oom)
    untold = case.cause.fragmentation is not None and case.cause.fragmentation.verdict == "cannot tell"
    if not untold or case.cause.kind not in ("shortage", "limit") or len(asked) != 1 or not MiB < asked[0][1] <= cached:
        return
    told = any(name.startswith("expandable") for name in case.predicted)
    if not (told or case.clues.expandable or case.clues.windows or case.clues.split_size or case.oom.form != "cuda"):
        said = f"{format_bytes(cached)} was cached, enough for it: if that lay in pieces, this makes them one"
        yield _fix("expandable segments", said, basis="message", shell=EXPANDABLE)


# -- by phase and tensor -------------------------------------------------------------------------------------------


def _of_the_phase(case: Situation) -> Iterator[Fix]:
    phase = case.place.phase
    if of_another_engine(case.place):
        yield from _of_the_engine(case)
        return
    if phase == "loading":
        said = "in bf16 (dtype=torch.bfloat16), to the host first (map_location='cpu'), or in parts (device_map, FSDP2)"
        yield _fix("smaller weights", said)
        return
    if phase == "optimizer step":
        yield from _of_the_optimizer(case)
        return
    if phase is None and "weights" in case.place.hints:
        yield _fix("on the host", "weights are copied here: do it on the CPU, or one matrix at a time")
        return
    yield from _of_the_tensor(case)
    if phase == "evaluation":
        said = "a batch of 1 (per_device_eval_batch_size, lm_eval --batch_size); where logits are collected, "
        said += "preprocess_logits_for_metrics, eval_accumulation_steps or prediction_loss_only=True"
        yield _fix("evaluate in smaller pieces", said)
    if "kv-cache" in case.place.hints:
        yield _fix("a smaller cache", "it has one entry for each token of each row", transformers=CACHES)
    if _could_checkpoint(case):
        yield _fix("gradient checkpointing", "keeps a block's input only and computes the rest again, which takes time")
    if phase == "calibration" or case.kind == "prune":
        yield _fix("fewer samples", "fewer windows of text are kept: this changes the experiment", memfit="--nsamples")
    elif case.batch_size != 1 and (phase == "generation" or case.kind in ("forward", "generate")):
        yield _fix("a smaller batch", "fewer rows at a time")
    elif case.batch_size != 1 and phase not in ("evaluation", "saving"):
        yield _fix("fewer rows at a time", "half the micro-batch and twice the accumulation: the global batch stays")
    yield _fix("shorter sequences", "fewer tokens in a row: this changes the experiment")


def _of_the_optimizer(case: Situation) -> Iterator[Fix]:
    if any(frame.function.startswith("_multi_tensor_") for frame in case.place.frames):
        said = "no second copy of the states while they are changed"
        yield _fix("a fused optimizer", said, torch="AdamW(..., fused=True)", trainer="optim='adamw_torch_fused'")
    said = "an 8-bit optimizer, LoRA, or states on the host or sharded (FSDP2)"
    yield _fix("smaller optimizer states", said)


def _of_the_engine(case: Situation) -> Iterator[Fix]:
    if any("/vllm/" in f"/{frame.path}" for frame in case.place.frames):
        said = "a smaller max_model_len, max_num_seqs or max_num_batched_tokens; no CUDA graphs (enforce_eager=True)"
        yield _fix("a smaller engine", f"{said}; quantised weights, or more cards (tensor_parallel_size)")
        said = "vLLM takes gpu_memory_utilization of the whole card, whoever else is on it: lower it where others are"
        yield _fix("vLLM's share of the card", said)
    else:
        yield _fix("need less", "a smaller picture, batch or model, or the program's own low-memory mode")


def _could_checkpoint(case: Situation) -> bool:
    trains = case.place.phase in ("forward", "backward") and case.kind not in ("forward", "generate", "prune")
    likeliest = case.readings.likeliest
    if likeliest is not None and likeliest.kind == "logits":
        return False
    return trains and not case.grad_checkpointing and not checkpointed(case.place)


def _of_the_tensor(case: Situation) -> Iterator[Fix]:
    """By what the tensor most likely is; where two are as likely, both count. A size alone is not evidence enough."""
    found = [each for each in case.readings.candidates[:2] if _is_evident(each, case)]
    kinds = {reading.kind for reading in found}
    if "logits" in kinds and case.place.phase == "generation":
        yield _fix("logits of the last token only", "logits_to_keep=1: the prompt's are not needed")
    elif "logits" in kinds and not any(WHOLE_ANYWAY.at(frame) for frame in case.place.frames):
        yield _fix("the loss in chunks", "the same loss and gradients, the logits never whole",
                   memfit="loss: chunked", trainer="use_liger_kernel=True")  # fmt: skip
    if found and found[0].tensor == "attention scores":
        yield _of_scores(case)
    if found and found[0].kind == "calibration":
        yield from _cap(found[0])


def _is_evident(reading: Reading, case: Situation) -> bool:
    """The failing line works on such a tensor, or, where no line tells, the model and the run speak for it."""
    hints = case.place.hints
    return reading.kind in hints if hints else case.readings.grounded and reading.points >= AHEAD


def _of_scores(case: Situation) -> Fix:
    if by_fused_attention(case):
        said = "sdpa made the scores all the same: a mask, fp32 or a head size keeps its fused kernels out"
        how = "with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION): its warnings say which"
        return _fix("fused attention", said, torch=how)
    return _fix("fused attention", "no scores of length x length are made", transformers='attn_implementation="sdpa"')


def _cap(reading: Reading) -> Iterator[Fix]:
    length = next((factor.value for factor in reading.factors if factor.symbol == "tokens"), 0)
    if length <= USUAL_LENGTH:
        return
    after = format_bytes(reading.nbytes // length * USUAL_LENGTH)
    said = f"this tensor then has {after}; {length:,} is a model's largest position, not a length to calibrate at"
    yield _fix(f"cap the length at {USUAL_LENGTH:,}", said, basis="arithmetic", memfit=f"--seqlen {USUAL_LENGTH}")

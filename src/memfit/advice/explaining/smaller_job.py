"""A smaller job, in words: what the engine, the phase and the tensor that failed allow."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.advice.explaining.fix import Fix, in_words
from memfit.advice.explaining.place import checkpointed, of_another_engine
from memfit.advice.explaining.signs import Sign
from memfit.advice.explaining.withheld import Situation, by_fused_attention
from memfit.advice.tensor_names import AHEAD, MOST_USUAL_LENGTH, Reading
from memfit.units import format_bytes

WHOLE_ANYWAY = Sign("no chunks", paths=("/lm_eval/", "/trainer_pt_utils.py", "chunk"), functions=("*chunk*",), code=())
"""Where the loss is in chunks already, or the logits themselves are wanted."""
USUAL_LENGTH = 2048
CACHES = "cache_implementation='offloaded' or 'quantized' in generate"


def smaller_job(case: Situation) -> Iterator[Fix]:
    """By what was going on: a pass of the model has rows and lengths, nothing else has."""
    phase = case.place.phase
    if of_another_engine(case.place):
        yield from _of_the_engine(case)
    elif phase == "loading":
        said = "in bf16 (dtype=torch.bfloat16), to the host first (map_location='cpu'), or in parts (device_map, FSDP2)"
        yield in_words("smaller weights", said)
    elif phase == "optimizer step":
        yield from _of_the_optimizer(case)
    elif phase == "saving":
        said = "copy the weights to the CPU before they are joined: cpu_offload=True, or a sharded state dict"
        yield in_words("save from the host", said)
    elif phase is None and "weights" in case.place.hints:
        yield in_words("on the host", "weights are copied here: do it on the CPU, or one matrix at a time")
    else:
        yield from of_the_tensor(case)
        if phase != "calibration" or not _is_far_too_long(case):
            yield from _of_the_pass(case)


def _of_the_pass(case: Situation) -> Iterator[Fix]:
    phase = case.place.phase
    if phase == "evaluation":
        said = "a batch of 1 (per_device_eval_batch_size, lm_eval --batch_size); where logits are collected, "
        said += "preprocess_logits_for_metrics, eval_accumulation_steps or prediction_loss_only=True"
        yield in_words("evaluate in smaller pieces", said)
    if "kv-cache" in case.place.hints:
        yield in_words("a smaller cache", "it has one entry for each token of each row", transformers=CACHES)
    if _could_checkpoint(case):
        yield in_words(
            "gradient checkpointing", "keeps a block's input only and computes the rest again, which takes time"
        )
    if phase == "calibration" or case.kind == "prune":
        yield in_words(
            "fewer samples", "fewer windows of text are kept: this changes the experiment", memfit="--nsamples"
        )
    elif case.batch_size != 1 and (phase == "generation" or case.kind in ("forward", "generate")):
        yield in_words("a smaller batch", "fewer rows at a time")
    elif case.batch_size != 1 and phase != "evaluation":
        yield in_words(
            "fewer rows at a time", "half the micro-batch and twice the accumulation: the global batch stays"
        )
    if "convolution" in case.place.hints:
        yield in_words("smaller inputs", "fewer pixels or samples: this changes the experiment")
    else:
        yield in_words("shorter sequences", "fewer tokens in a row: this changes the experiment")


def _of_the_optimizer(case: Situation) -> Iterator[Fix]:
    if any(frame.function.startswith("_multi_tensor_") for frame in case.place.frames):
        said = "no second copy of the states while they are changed"
        yield in_words("a fused optimizer", said, torch="AdamW(..., fused=True)", trainer="optim='adamw_torch_fused'")
    said = "an 8-bit optimizer, LoRA, or states on the host or sharded (FSDP2)"
    yield in_words("smaller optimizer states", said)


def _of_the_engine(case: Situation) -> Iterator[Fix]:
    if any("/vllm/" in frame.inside for frame in case.place.frames):
        said = "a smaller max_model_len, max_num_seqs or max_num_batched_tokens; no CUDA graphs (enforce_eager=True)"
        yield in_words("a smaller engine", f"{said}; quantised weights, or more cards (tensor_parallel_size)")
        said = "vLLM takes gpu_memory_utilization of the whole card, whoever else is on it: lower it where others are"
        yield in_words("vLLM's share of the card", said)
    else:
        yield in_words("need less", "a smaller picture, batch or model, or the program's own low-memory mode")


def _could_checkpoint(case: Situation) -> bool:
    trains = case.place.phase in ("forward", "backward") and case.kind not in ("forward", "generate", "prune")
    likeliest = case.readings.likeliest
    if likeliest is not None and likeliest.kind == "logits":
        return False
    return trains and not case.grad_checkpointing and not checkpointed(case.place)


def of_the_tensor(case: Situation) -> Iterator[Fix]:
    """By what the tensor most likely is; where two are as likely, both count. A size alone is not evidence enough."""
    found = [each for each in case.readings.candidates[:2] if _is_evident(each, case)]
    kinds = {reading.kind for reading in found}
    if "logits" in kinds and case.place.phase == "generation":
        yield in_words("logits of the last token only", "logits_to_keep=1: the prompt's are not needed")
    elif "logits" in kinds and not any(WHOLE_ANYWAY.at(frame) for frame in case.place.frames):
        yield in_words("the loss in chunks", "the same loss and gradients, the logits never whole",
                   memfit="loss: chunked", trainer="use_liger_kernel=True")  # fmt: skip
    if found and found[0].tensor == "attention scores":
        yield _of_scores(case)
    first = next(iter(case.readings.candidates), None)
    if first is not None and first.kind == "calibration":
        yield from _cap(first, sure=first in found)


def _is_evident(reading: Reading, case: Situation) -> bool:
    """The failing line works on such a tensor, or, where no line tells, the model and the run speak for it."""
    hints = case.place.hints
    return reading.kind in hints if hints else case.readings.grounded and reading.points >= AHEAD


def _of_scores(case: Situation) -> Fix:
    if by_fused_attention(case):
        said = "sdpa made the scores all the same: a mask, fp32 or a head size keeps its fused kernels out"
        how = "with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION): its warnings say which"
        return in_words("fused attention", said, torch=how)
    return in_words(
        "fused attention", "no scores of length x length are made", transformers='attn_implementation="sdpa"'
    )


def _cap(reading: Reading, *, sure: bool) -> Iterator[Fix]:
    length = next((factor.value for factor in reading.factors if factor.symbol == "tokens"), 0)
    if length <= USUAL_LENGTH:
        return
    after = format_bytes(reading.nbytes // length * USUAL_LENGTH)
    why = f"{length:,} is a model's largest position, not a length to calibrate at"
    why = why if length > MOST_USUAL_LENGTH else "as long as windows to calibrate on usually are"
    said = f"this tensor then has {after}; {why}"
    said = said if sure else f"if a model is being pruned, these are its calibration inputs: {said}"
    yield in_words(f"cap the length at {USUAL_LENGTH:,}", said, basis="arithmetic", memfit=f"--seqlen {USUAL_LENGTH}")


def _is_far_too_long(case: Situation) -> bool:
    """Windows to calibrate on that are as long as the model can take them: another number of them is no cure."""
    first = next(iter(case.readings.candidates), None)
    lengths = [factor.value for factor in first.factors if factor.symbol == "tokens"] if first else []
    return first is not None and first.kind == "calibration" and max(lengths, default=0) > MOST_USUAL_LENGTH

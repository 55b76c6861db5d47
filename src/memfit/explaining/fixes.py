"""What to do about an out-of-memory error, predicted on the job that failed or in words; and what will not help.

Words go by the cause, and where the job is not known by the engine, the phase and the tensor. No saving is quoted that
was not predicted; what follows from the message alone (a process that holds so much, a tensor that is smaller at
another length) is a fact or arithmetic on its numbers, and called that. Of the advice that people get for this error,
what cannot help is told with the reason, decided by this message's numbers, this job and this moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from memfit.explaining.cause import SIGNIFICANT, Account, Cause
from memfit.explaining.input import Case
from memfit.explaining.job import Job
from memfit.explaining.message import Oom, request_intervals
from memfit.explaining.place import ENGINES, RECOMPUTING, TIMING, Sign
from memfit.explaining.tensor import AHEAD, MOST_USUAL_LENGTH, Reading, Readings
from memfit.fitting.emit import pruning_command
from memfit.gpus import Gpu
from memfit.jobs.settings import WITHOUT_BACKWARD
from memfit.jobs.workload import Workload
from memfit.units import MiB, format_bytes

if TYPE_CHECKING:
    from memfit.fitting.fit import Option
    from memfit.planning.predict import Plan


Basis = Literal["predicted", "message", "arithmetic", "words"]
"""On this very job; a fact in the message; arithmetic on its numbers; or general, without a figure."""


@dataclass(frozen=True, kw_only=True)
class Evidence(Case):
    """All by which advice is chosen."""

    oom: Oom
    cause: Cause
    account: Account
    readings: Readings
    job: Job
    at_peak: str | None = None
    """The category that most of the predicted peak is, where the job is known."""
    predicted: tuple[str, ...] = ()
    """Levers that are predicted to save something on this job."""

    @property
    def kind(self) -> str | None:
        return self.job.kind

    @property
    def batch_size(self) -> int | None:
        return self.job.number("batch_size")

    @property
    def grad_checkpointing(self) -> bool:
        return bool(self.job.settings.get("grad_checkpointing")) or self.clues.grad_checkpointing


@dataclass(frozen=True, kw_only=True)
class Fix:
    name: str
    says: str
    basis: Basis
    cost: str | None = None
    """free, time, precision or experiment."""
    price: str | None = None
    saved_bytes: int | None = None
    after_bytes: int | None = None
    """What the device would hold at the peak."""
    verdict: str | None = None
    """Whether the job then fits on this card."""
    changes: Mapping[str, object] = field(default_factory=dict)
    """Settings of the job that it changes, and to what; none where it is only words."""
    how: Mapping[str, str] = field(default_factory=dict)


def in_words(name: str, says: str, *, basis: Basis = "words", **how: str) -> Fix:
    return Fix(name=name, says=says, basis=basis, how=how)


WHOLE_ANYWAY = Sign("no chunks", paths=("/lm_eval/", "/trainer_pt_utils.py", "chunk"), functions=("*chunk*",), code=())
"""Where the loss is in chunks already, or the logits themselves are wanted."""
USUAL_LENGTH = 2048
CACHES = "cache_implementation='offloaded' or 'quantized' in generate"


def smaller_job(case: Evidence) -> Iterator[Fix]:
    """By what was going on: a pass of the model has rows and lengths, nothing else has."""
    phase = case.place.phase
    if case.place.within(TIMING):
        said = "kernels are timed once, beside the step: what earlier runs left in TORCHINDUCTOR_CACHE_DIR spares it"
        yield in_words("keep torch's cache of compiled kernels", said)
    if case.place.at(ENGINES):
        yield from _fixes_for_the_engine(case)
    elif phase == "loading":
        said = "in bf16 (dtype=torch.bfloat16), to the host first (map_location='cpu'), or in parts (device_map, FSDP2)"
        yield in_words("smaller weights", said)
    elif phase == "optimizer step":
        yield from _fixes_for_the_optimizer(case)
    elif phase == "saving":
        said = "copy the weights to the CPU before they are joined: cpu_offload=True, or a sharded state dict"
        yield in_words("save from the host", said)
    elif phase is None and "weights" in case.place.hints:
        yield in_words("on the host", "weights are copied here: do it on the CPU, or one matrix at a time")
    else:
        yield from of_the_tensor(case)
        first = case.readings.first
        too_long = first is not None and first.kind == "calibration" and _length_of(first) > MOST_USUAL_LENGTH
        if phase != "calibration" or not too_long:  # then another number of windows is no cure
            yield from _fixes_for_the_pass(case)


def _fixes_for_the_pass(case: Evidence) -> Iterator[Fix]:
    phase = case.place.phase
    if phase == "evaluation":
        said = "a batch of 1 (per_device_eval_batch_size, lm_eval --batch_size); where logits are collected, "
        said += "preprocess_logits_for_metrics, eval_accumulation_steps or prediction_loss_only=True"
        yield in_words("evaluate in smaller pieces", said)
    if "kv-cache" in case.place.hints:
        yield in_words("a smaller cache", "it has one entry for each token of each row", transformers=CACHES)
    if _could_checkpoint(case):
        said = "keeps a block's input only and computes the rest again, which takes time"
        yield in_words("gradient checkpointing", said)
    if phase == "calibration" or case.kind == "prune":
        said = "fewer windows of text are kept: this changes the experiment"
        yield in_words("fewer samples", said, memfit="--nsamples")
    elif case.batch_size != 1 and (phase == "generation" or case.kind in ("forward", "generate")):
        yield in_words("a smaller batch", "fewer rows at a time")
    elif case.batch_size != 1 and phase != "evaluation":
        said = "half the micro-batch and twice the accumulation: the global batch stays"
        yield in_words("fewer rows at a time", said)
    if "convolution" in case.place.hints:
        yield in_words("smaller inputs", "fewer pixels or samples: this changes the experiment")
    else:
        yield in_words("shorter sequences", "fewer tokens in a row: this changes the experiment")


def _fixes_for_the_optimizer(case: Evidence) -> Iterator[Fix]:
    if any(frame.function.startswith("_multi_tensor_") for frame in case.place.frames):
        said = "no second copy of the states while they are changed"
        yield in_words("a fused optimizer", said, torch="AdamW(..., fused=True)", trainer="optim='adamw_torch_fused'")
    said = "an 8-bit optimizer, LoRA, or states on the host or sharded (FSDP2)"
    yield in_words("smaller optimizer states", said)


def _fixes_for_the_engine(case: Evidence) -> Iterator[Fix]:
    if any("/vllm/" in frame.inside for frame in case.place.frames):
        said = "a smaller max_model_len, max_num_seqs or max_num_batched_tokens; no CUDA graphs (enforce_eager=True)"
        yield in_words("a smaller engine", f"{said}; quantised weights, or more cards (tensor_parallel_size)")
        said = "vLLM takes gpu_memory_utilization of the whole card, whoever else is on it: lower it where others are"
        yield in_words("vLLM's share of the card", said)
    else:
        yield in_words("need less", "a smaller picture, batch or model, or the program's own low-memory mode")


def _could_checkpoint(case: Evidence) -> bool:
    trains = case.place.phase in ("forward", "backward") and case.kind not in WITHOUT_BACKWARD
    likeliest = case.readings.likeliest
    if likeliest is not None and likeliest.kind == "logits":
        return False
    return trains and not case.grad_checkpointing and not case.place.at(RECOMPUTING)


def of_the_tensor(case: Evidence) -> Iterator[Fix]:
    """By what the tensor most likely is; where two are as likely, both count. A size alone is not evidence enough."""
    found = [each for each in case.readings.candidates[:2] if _is_evident(each, case)]
    kinds = {reading.kind for reading in found}
    if "logits" in kinds and case.place.phase == "generation":
        yield in_words("logits of the last token only", "logits_to_keep=1: the prompt's are not needed")
    elif "logits" in kinds and not any(WHOLE_ANYWAY.at(frame) for frame in case.place.frames):
        said = "the same loss and gradients, the logits never whole"
        yield in_words("the loss in chunks", said, memfit="loss: chunked", trainer="use_liger_kernel=True")
    if found and found[0].tensor == "attention scores":
        yield _fix_for_scores(case)
    first = case.readings.first
    if first is not None and first.kind == "calibration":
        yield from _cap(first, sure=first in found)


def _is_evident(reading: Reading, case: Evidence) -> bool:
    """The failing line works on such a tensor, or, where no line tells, the model and the run speak for it."""
    hints = case.place.hints
    return reading.kind in hints if hints else case.readings.grounded and reading.points >= AHEAD


def _fix_for_scores(case: Evidence) -> Fix:
    if by_fused_attention(case):
        said = "sdpa made the scores all the same: a mask, fp32 or a head size keeps its fused kernels out"
        how = "with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION): its warnings say which"
        return in_words("fused attention", said, torch=how)
    said, how = "no scores of length x length are made", 'attn_implementation="sdpa"'
    return in_words("fused attention", said, transformers=how)


def _length_of(reading: Reading) -> int:
    return max((factor.value for factor in reading.factors if factor.symbol == "tokens"), default=0)


def _cap(reading: Reading, *, sure: bool) -> Iterator[Fix]:
    length = _length_of(reading)
    if length <= USUAL_LENGTH:
        return
    after = format_bytes(reading.nbytes // length * USUAL_LENGTH)
    why = f"{length:,} is a model's largest position, not a length to calibrate at"
    why = why if length > MOST_USUAL_LENGTH else "as long as windows to calibrate on usually are"
    said = f"this tensor then has {after}; {why}"
    said = said if sure else f"if a model is being pruned, these are its calibration inputs: {said}"
    yield in_words(f"cap the length at {USUAL_LENGTH:,}", said, basis="arithmetic", memfit=f"--seqlen {USUAL_LENGTH}")


MOST_PIDS = 6
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before Python starts"
OF_THE_GPU = ("shortage", "other-processes", "limit", "refused", "impossible-request", "no-numbers")
"""Causes for which a smaller job is a cure."""


def fixes_in_words(case: Evidence) -> list[Fix]:
    """Levers of the job that are predicted are told elsewhere, with figures."""
    made = [*_fixes_for_the_cause(case), *_fixes_for_pieces(case)]
    if case.predicted:
        of_shape = case.cause.kind == "impossible-request"
        made += [fix for fix in of_the_tensor(case) if of_shape or fix.basis == "arithmetic"]
    elif case.cause.kind in OF_THE_GPU:
        made += smaller_job(case)
    return made


def _fixes_for_the_cause(case: Evidence) -> Iterator[Fix]:
    oom, kind = case.oom, case.cause.kind
    card_had_it = oom.requested is not None and (oom.free is None or oom.requested.low <= oom.free.high)
    if kind == "other-processes":
        yield _others(case)
    elif kind == "fragmentation":
        yield from _fixes_for_fragmentation(case)
    elif kind == "limit" and oom.form == "mps":
        yield in_words("close other programs", "MPS shares the machine's memory with everything else that runs")
    elif kind in ("limit", "impossible-request") and oom.allowed is not None and card_had_it:
        said = f"torch.cuda.set_per_process_memory_fraction allows {oom.allowed.text}, and the card has more"
        yield in_words("raise the memory fraction", said, basis="message")
    elif kind == "private-pools":
        said = "capture fewer shapes, or let graphs share a pool: torch.cuda.graph(g, pool=...)"
        yield in_words("fewer CUDA graphs", said)
    elif kind == "refused":
        said = "torch.cuda.get_per_process_memory_fraction(); on Windows the size of the page file; on the host"
        yield in_words("look for a limit", f"{said} `free -g`")
    elif kind == "corrupt-size":
        said = "print the sizes that go into the failing line: one is negative or was never set"
        yield in_words("look at the shape", said)
    elif oom.remedy:
        yield in_words(oom.cure, oom.remedy)
    elif kind == "host-memory":
        said = "fewer data loader workers, memory-mapped data, weights loaded straight to the GPU (device_map)"
        yield in_words("less on the host", said)


def _others(case: Evidence) -> Fix:
    pids = case.account.other_pids
    named = ", ".join(map(str, pids[:MOST_PIDS])) + (" ..." if len(pids) > MOST_PIDS else "")
    who, end = (f"process {named} holds", "it") if len(pids) == 1 else (f"processes {named} hold", "them")
    said = f"{who} {format_bytes(case.account.others_bytes)}: end {end}, or choose another GPU by CUDA_VISIBLE_DEVICES"
    return in_words("free the card of the others", said, basis="message")


def _fixes_for_fragmentation(case: Evidence) -> Iterator[Fix]:
    cached, held = case.account.cached_bytes or 0, case.account.held_bytes or 0
    said = "pieces that lie apart can then serve one request"
    if held > 4 * cached:
        said += f"; but only {format_bytes(cached)} of {format_bytes(held)} is in pieces, the rest is in use"
    yield in_words("expandable segments", said, basis="message", shell=EXPANDABLE)
    free, requested = case.oom.free, case.oom.requested
    if free is not None and requested is not None and free.low >= requested.high:
        said = f"{free.text} of the card was free: torch.cuda.set_per_process_memory_fraction is in the way"
        yield in_words("raise the memory fraction", said, basis="message")


def _fixes_for_pieces(case: Evidence) -> Iterator[Fix]:
    """Where more was cached than was asked for: that it lies in pieces is likely, and to try costs nothing."""
    cached, asked = case.account.cached_bytes or 0, request_intervals(case.oom)
    untold = case.cause.fragmentation is not None and case.cause.fragmentation.verdict == "cannot tell"
    if not untold or case.cause.kind not in ("shortage", "limit") or len(asked) != 1 or not MiB < asked[0][1] <= cached:
        return
    told = any(name.startswith("expandable") for name in case.predicted)
    if not (told or case.clues.expandable or case.clues.windows or case.clues.split_size or case.oom.form != "cuda"):
        said = f"{format_bytes(cached)} was cached, enough for it: if that lay in pieces, this makes them one"
        yield in_words("expandable segments", said, basis="message", shell=EXPANDABLE)


WORTH = 16 * MiB
"""Levers that save less are left out."""


def predicted_fixes(workload: Workload, gpu: Gpu | None) -> tuple[Plan, list[Fix]]:
    """The job as it is, and every lever on it: those that are enough first, the cheapest of them before the others;
    then by what they save."""
    from memfit.fitting.fit import options
    from memfit.fitting.levers import COSTS
    from memfit.planning.predict import predict

    found = options(workload, gpu=gpu)
    before = found[0].before if found else predict(workload, gpu=gpu)
    groups: dict[str, list[Option]] = {}
    for option in found:
        groups.setdefault(option.lever.group, []).append(option)
    fails = before.verdict == "fails"
    chosen = [_mildest(group) if fails else group[0] for group in groups.values()]
    suffices = ("safe", "tight") if fails else ()
    enough = {id(each): COSTS.index(each.lever.cost) for each in chosen if each.after.verdict in suffices}
    chosen.sort(key=lambda option: (id(option) not in enough, enough.get(id(option), 0), -option.saved_bytes))
    return before, [_fix(option) for option in chosen if option.saved_bytes >= WORTH]


def _mildest(group: Sequence[Option]) -> Option:
    """Of levers that replace each other the mildest that is enough, or else the one that saves most."""
    return next((option for option in reversed(group) if option.after.verdict == "safe"), group[0])


def _fix(option: Option) -> Fix:
    lever = option.lever
    return Fix(
        name=lever.name,
        says=lever.says,
        basis="predicted",
        cost=lever.cost,
        price=lever.price,
        saved_bytes=option.saved_bytes,
        after_bytes=_held(option.after),
        verdict=option.after.verdict,
        changes=dict(lever.settings),
        how=dict(lever.how),
    )


def pruning_fixes(workload: Workload, gpu: Gpu | None) -> tuple[Plan | None, list[Fix]]:
    """Of a program that has the whole model and all windows on the GPU, as the public Wanda code does: the same at a
    usual length, and memfit's own way. The plan is that program's; None for a method that is not traced."""
    from memfit.planning.predict import predict
    from memfit.planning.pruning import predict_whole_model_pruning

    shorter = capped(workload)
    length = shorter.seq_len if shorter != workload else None
    before = predict_whole_model_pruning(workload, gpu) if workload.method == "wanda" else None

    def pruned(name: str, says: str, after: Plan, **how: str) -> Fix:
        """At another length than the program's it is another experiment."""
        return Fix(
            name=name,
            says=says,
            basis="predicted",
            cost="experiment" if length else "free",
            saved_bytes=None if before is None else before.peak.device_bytes - after.peak.device_bytes,
            after_bytes=_held(after),
            verdict=after.verdict,
            changes={"seq_len": length} if length else {},
            how=how,
        )

    fixes = []
    if before is not None and length is not None:
        after, how = predict_whole_model_pruning(shorter, gpu), f"--seqlen {USUAL_LENGTH}, in the same program"
        says = "the same program, with windows of a usual length"
        fixes.append(pruned(f"cap the length at {USUAL_LENGTH:,}", says, after, wanda=how))
    says = "one block of the model and its windows on the GPU at a time"
    after = predict(shorter, gpu=gpu)
    fixes.append(pruned("prune it block by block", says, after, memfit=pruning_command(shorter)))
    return before, fixes


def capped(workload: Workload) -> Workload:
    """At a usual length of windows, where they are longer."""
    return replace(workload, seq_len=min(workload.seq_len, USUAL_LENGTH))


def _held(plan: Plan) -> int:
    """Where it fits, with what it then really holds: cached memory is given back before anything fails."""
    return plan.fit.device_bytes if plan.fit and plan.fit.verdict != "fails" else plan.peak.device_bytes


# -- what does not help ------------------------------------------------------------------------------------------------

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
        why = "not beside max_split_size_mb, which keeps its free memory from being used again: drop that"
        yield Withheld(name, why)


def _split_size(case: Evidence) -> Iterator[Withheld]:
    fragmentation = case.cause.fragmentation
    if fragmentation is None or fragmentation.verdict == "yes":
        return
    shown = fragmentation.verdict == "no"
    why = "it is for large blocks in pieces" if shown else "that memory is in pieces is not shown"
    yield Withheld("max_split_size_mb", f"{why}, and it can raise what is reserved")


WITHOUT_A_BATCH = {
    "loading": "while loading: no batch was there yet", "saving": "while saving, which has no batch",
    "optimizer step": "in the optimizer step, which is as large as the weights",
}  # fmt: skip


def _smaller_batch(case: Evidence) -> Iterator[Withheld]:
    if case.place.phase in WITHOUT_A_BATCH:
        yield Withheld("a smaller batch", f"it failed {WITHOUT_A_BATCH[case.place.phase]}")
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
    in_inference = case.kind in ("forward", "generate") or case.place.phase in INFERENCE
    if in_inference and case.job.precision in ("fp32", "amp-bf16"):
        why = "in inference with fp32 weights it adds a 16-bit copy of them; load them as bf16"
        yield Withheld("bf16 autocast", why)


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
    kind = None if case.growth is None else case.growth.get("kind")
    if kind == "none":
        yield Withheld("looking for a memory leak", "the run's own record shows no growth between steps")
    elif kind == "long-batches":
        yield Withheld("looking for a memory leak", "the peak follows the length of the batch; nothing else grows")


def _flash(case: Evidence) -> Iterator[Withheld]:
    first, likeliest, name = case.readings.first, case.readings.likeliest, "flash attention"
    if first is not None and first.kind == "attention":
        return
    if by_fused_attention(case) and not case.clues.eager:
        yield Withheld(name, "attention is fused already, as the traceback shows")
    elif case.job.precision == "fp32":
        yield Withheld(name, "it takes 16-bit inputs only, and this job is fp32")
    elif likeliest is not None and case.place.phase in ("loading", "optimizer step", "loss"):
        yield Withheld(name, f"it failed {_when(case.place.phase)}, not in attention")


def by_fused_attention(case: Evidence) -> bool:
    """Whether the failing line is in an attention that can be fused."""
    frames = " ".join(f"{frame.path} {frame.function} {frame.code}" for frame in case.place.frames)
    return any(word in frames for word in FUSED)

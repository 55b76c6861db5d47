"""What can be changed about a job so that it takes less memory, the cheapest first, and how to switch each on.

    levers = levers_for(workload, keep=("seq_len", "rank"))
    apply(workload, levers[:2])

A lever only says which settings it changes. What it saves is not written anywhere: that is the difference of two
predictions of the very job (`fitting/fit.py`). The global batch is never changed by any of them. Levers that are on
already, or that a job has no use for, are not named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from memfit.errors import UnknownName, UsageError
from memfit.jobs.settings import flag, kinds_that_read, plain_name
from memfit.jobs.together import check_compiled, check_quantised
from memfit.jobs.training.batch import BatchSizes, divisors
from memfit.jobs.workload import Workload
from memfit.models.presets import GATHER, is_gsa

Cost = Literal["free", "time", "precision", "experiment"]
COSTS: tuple[Cost, ...] = ("free", "time", "precision", "experiment")
"""In this order of preference."""

CACHED = "cached"
"""What the allocator holds beyond the tensors that are alive: no category of a breakdown, but a lever lowers it."""
SAME = "same results but for rounding"
COMPILE = "torch.compile"
"""Only where it is asked for: each set with it takes a compilation to predict."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    name: str
    cost: Cost
    settings: Mapping[str, object]
    """Changes to the workload."""
    says: str
    """What it does."""
    price: str
    """What it costs."""
    how: Mapping[str, str]
    """How to switch it on in `memfit`, in the Hugging Face `trainer`, with `accelerate`."""
    risk: str = SAME
    """To the quality of the result."""
    group: str
    """Levers of one group replace each other, and each saves more than the one before it."""
    lowers: tuple[str, ...]
    """Categories of what is alive that it can lower: where the peak has none of these it cannot help."""
    only_in: str | None = None
    """The phase that it changes, where it is a single one."""
    missing: str | None = None
    """A package that it needs and that is not there."""


EXPANDABLE = "expandable_segments:True"
MADE_BY_TOKENS = ("activations", "loss", "kv_cache")
SHORTER = (0.75, 0.5, 0.375, 0.25)
LENGTH_STEP = 64
SHORTEST, LOWEST_RANK, FEWEST_WINDOWS = 128, 8, 16
OWN_ENGINE = "memfit prune only"


def _ways(memfit: str, trainer: str, accelerate: str | None = None) -> dict[str, str]:
    """How to switch a lever on; under accelerate as in the Trainer unless that is said."""
    return {"memfit": memfit, "trainer": trainer, "accelerate": accelerate or trainer}


# -- free --------------------------------------------------------------------------------------------------------------


def _dropped_outputs(work: Workload) -> Iterator[Lever]:
    if work.loop == "plain" and work.outputs == "kept" and (work.loss == "full" or work.use_cache):
        way = "loss = outputs.loss; del outputs"
        yield Lever(
            name="outputs dropped", cost="free", group="outputs", settings={"outputs": "dropped"},
            says="`del outputs` after the loss: logits do not stay through backward and into the next forward pass",
            price="none", risk="same results", lowers=("loss", "kv_cache", "activations", CACHED),
            how=_ways("--outputs dropped (memfit train drops them)", "it drops them", way),
        )  # fmt: skip


def _attention(work: Workload) -> Iterator[Lever]:
    if work.attention == "eager":
        way = 'from_pretrained(..., attn_implementation="sdpa")'
        yield Lever(
            name="fused attention", cost="free", group="attention", settings={"attention": "sdpa"},
            says="the scores of all pairs of tokens are never whole", price="none: it is faster",
            lowers=("activations", "temporaries"),
            how=_ways("--attention sdpa (model.attention: sdpa)", way),
        )  # fmt: skip


def _masked_path(work: Workload) -> Iterator[Lever]:
    if is_gsa(work.model) and work.model.endswith(GATHER):
        name = work.model.removesuffix(GATHER)
        way = 'GsaConfig(path="masked")'
        yield Lever(
            name="masked attention", cost="free", group="gsa path", settings={"model": name},
            says="the chosen keys and values are masked in place, not copied out for every query",
            price="none: it is faster", lowers=("activations", "temporaries", "other"),
            how=_ways(f"--model {name} (gsa.path: masked)", way),
        )  # fmt: skip


def _fused_optimizer(work: Workload) -> Iterator[Lever]:
    if work.optimizer in ("adamw", "adamw-single"):
        yield Lever(
            name="fused optimizer", cost="free", group="fused optimizer", settings={"optimizer": "adamw-fused"},
            says="AdamW in one kernel, without a list of temporaries as large as one of its moments",
            price="none: it is faster", lowers=("temporaries",), only_in="step",
            how=_ways("--optimizer adamw-fused (optimizer: adamw-fused)", 'optim="adamw_torch_fused"',
                      "torch.optim.AdamW(..., fused=True)"),
        )  # fmt: skip


def _chunked_loss(work: Workload, cost: Cost) -> Iterator[Lever]:
    if work.loss == "full" and cost == ("time" if work.kind == "train" else "free"):
        way = "memfit.jobs.training.chunked_loss.use_chunked_loss(model)"
        twice = " and, where the head is trained, computes them twice" if work.kind == "train" else ""
        yield Lever(
            name="chunked loss", cost=cost, group="chunked loss", settings={"loss": "chunked"},
            says=f"logits and their gradients {work.loss_chunk} tokens at a time, never whole",
            price=f"the model returns no logits while it trains{twice}", lowers=("loss",),
            how=_ways("--loss chunked (loss: chunked)", f"{way}, or use_liger_kernel=True", way),
        )  # fmt: skip


def _bucket_view(work: Workload) -> Iterator[Lever]:
    if work.world_size > 1 and work.parallel == "ddp" and not work.gradient_as_bucket_view:
        handler = "DistributedDataParallelKwargs(gradient_as_bucket_view=True)"
        yield Lever(
            name="gradients in DDP's buckets", cost="free", group="bucket view",
            settings={"gradient_as_bucket_view": True}, says="gradients lie in the buckets instead of beside them",
            price="gradients must not be detached in place", lowers=("gradients", "other"),
            how=_ways(
                "--gradient-as-bucket-view (parallel.gradient_as_bucket_view: true)",
                f"trainer.accelerator.ddp_handler = accelerate.utils.{handler}",
                f"Accelerator(kwargs_handlers=[{handler}])",
            ),
        )  # fmt: skip


def _cache(work: Workload) -> Iterator[Lever]:
    if work.kind == "generate" and work.cache == "dynamic":
        way = 'model.generate(..., cache_implementation="static")'
        yield Lever(
            name="static cache", cost="free", group="cache", settings={"cache": "static"},
            says="room for all keys and values at once, instead of a longer copy for each token",
            price="all of it is there from the first token on", lowers=("kv_cache", "temporaries", CACHED),
            how=_ways("--cache static", way),
        )  # fmt: skip


def _allocator(work: Workload) -> Iterator[Lever]:
    said = work.alloc_conf
    if "expandable_segments" in said or "max_split_size_mb" in said or "backend" in said:  # they do not go together
        return
    conf = f"{said},{EXPANDABLE}" if said else EXPANDABLE
    key = " (memory.alloc_conf)" if work.trains else ""
    way = f"PYTORCH_CUDA_ALLOC_CONF={conf} in the environment, before Python starts"
    yield Lever(
        name="expandable segments", cost="free", group="allocator", settings={"alloc_conf": conf},
        says="the allocator's memory grows and shrinks at its ends, so less of it lies idle",
        price="none that is known", risk="same results", lowers=(CACHED,),
        how=_ways(way if work.kind == "prune" else f"--alloc-conf {conf}{key}", way),
    )  # fmt: skip


# -- time --------------------------------------------------------------------------------------------------------------


def _compiled(work: Workload) -> Iterator[Lever]:
    if work.is_compiled or work.kind not in kinds_that_read(["compile"]):
        return
    try:
        check_compiled(dataclasses.replace(work, compile=True))
    except UsageError:  # what is on already does not go with it
        return
    yield Lever(
        name=COMPILE, cost="time", group=COMPILE, settings={"compile": True},
        says="chains of small ops become one kernel, and what lies between them is never stored",
        price="start-up: minutes of compiling, and again for other shapes; steps are faster",
        lowers=("temporaries", "other", *MADE_BY_TOKENS),
        how=_ways("--compile (plans only)", "torch_compile=True",
                  'Accelerator(dynamo_backend="inductor"), or torch.compile(model)'),
    )  # fmt: skip


def _micro_batches(work: Workload) -> Iterator[Lever]:
    sizes = batch_sizes(work)
    for rows in reversed([rung for rung in sizes.rungs if rung < work.batch_size]):
        steps = sizes.with_micro_batch(rows).gradient_accumulation_steps
        yield Lever(
            name=f"micro-batch {rows}", cost="time", group="micro-batch",
            settings={"batch_size": rows, "grad_accum": steps},
            says=f"{rows} at a time, {steps} times: the same {sizes.global_batch_size} rows a step",
            price="smaller kernels, and the weights are read more often", lowers=MADE_BY_TOKENS,
            how=_ways(
                f"--batch-size {rows} --grad-accum {steps} (micro_batch_size, gradient_accumulation_steps)",
                f"per_device_train_batch_size={rows}, gradient_accumulation_steps={steps}",
                f"DataLoader(batch_size={rows}), Accelerator(gradient_accumulation_steps={steps})",
            ),
        )  # fmt: skip


def batch_sizes(work: Workload) -> BatchSizes:
    return BatchSizes(
        micro_batch_size=work.batch_size, gradient_accumulation_steps=work.grad_accum, world_size=work.world_size
    )


def _smaller_batches(work: Workload) -> Iterator[Lever]:
    for rows in reversed(divisors(work.batch_size)[:-1]):
        passes = work.batch_size // rows
        way = f"DataLoader(batch_size={rows})"
        yield Lever(
            name=f"batch {rows}", cost="time", group="micro-batch", settings={"batch_size": rows},
            says=f"{rows} at a time, {passes} times: the same {work.batch_size} rows in all",
            price="smaller kernels, and the weights are read more often", lowers=("temporaries", *MADE_BY_TOKENS),
            how=_ways(f"--batch-size {rows}, {passes} times", way),
        )  # fmt: skip


def _checkpointing(work: Workload) -> Iterator[Lever]:
    if work.grad_checkpointing:
        return
    grads = "; with LoRA also model.enable_input_require_grads()" if work.kind == "lora" else ""
    switch = 'gradient_checkpointing_kwargs={"use_reentrant": False}'
    contexts = "torch.utils.checkpoint with create_selective_checkpoint_contexts around each block"
    if not work.selective_checkpointing:
        yield Lever(
            name="selective checkpointing", cost="time", group="checkpointing",
            settings={"selective_checkpointing": True},
            says="of each block, what is cheap to compute is computed again in the backward pass",
            price="norms and activation functions run twice", lowers=("activations",),
            how=_ways("--selective-checkpointing (memory.gradient_checkpointing: selective)",
                      f"no switch of its own: {contexts}"),
        )  # fmt: skip
    yield Lever(
        name="checkpointing", cost="time", group="checkpointing",
        settings={"grad_checkpointing": True, "selective_checkpointing": False},
        says="each block's activations are computed again in the backward pass",
        price="one more forward pass of the blocks", lowers=("activations",),
        how=_ways("--grad-checkpointing (memory.gradient_checkpointing: full)",
                  f"gradient_checkpointing=True, {switch}{grads}",
                  f"model.gradient_checkpointing_enable({switch}){grads}"),
    )  # fmt: skip


def _sharding(work: Workload) -> Iterator[Lever]:
    if work.world_size > 1 and work.parallel == "ddp":
        yield Lever(
            name="FSDP2", cost="time", group="sharding", settings={"parallel": "fsdp2"},
            says=f"weights, gradients and optimizer state are shared out over {work.world_size} GPUs",
            price="blocks are gathered before use: more traffic between the GPUs",
            lowers=("weights", "gradients", "optimizer", "other"),
            how=_ways(
                "--parallel fsdp2 (parallel: fsdp2)",
                'fsdp=True, fsdp_config={"version": 2, "reshard_after_forward": True}',
                "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))",
            ),
        )  # fmt: skip


def _offloading(work: Workload) -> Iterator[Lever]:
    on_host = work.offload
    if "activations" not in on_host:
        hook = "torch.autograd.graph.save_on_cpu(pin_memory=True) around the forward pass"
        yield _offload(
            "activations", "what the forward pass saves lies in host memory until the backward pass",
            "each saved tensor crosses PCIe twice", ("activations",),
            {"trainer": f"{hook}; TRL has activation_offloading=True", "accelerate": hook},
        )  # fmt: skip
    if "optimizer" not in on_host:
        yield _offload(
            "optimizer", "the optimizer's state lies in host memory, and the step is done there",
            "gradients and new weights cross PCIe once a step; host memory for the state", ("optimizer", "gradients"),
            {"trainer": 'DeepSpeed: "offload_optimizer": {"device": "cpu"}',
             "accelerate": 'DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu")'},
        )  # fmt: skip
    if "weights" not in on_host and work.kind == "lora" and not work.is_quantised:
        none = "no switch of its own: a device_map with a CPU part breaks the backward pass of checkpointing"
        yield _offload(
            "weights", "frozen blocks lie in host memory and come one after the other",
            "all frozen weights cross PCIe in each pass", ("weights",), {"trainer": none, "accelerate": none},
        )  # fmt: skip


def _offload(what: str, says: str, price: str, lowers: tuple[str, ...], how: Mapping[str, str]) -> Lever:
    return Lever(
        name=f"{what} on the host", cost="time", group=f"offload {what}", settings={"offload": (what,)}, says=says,
        price=price, lowers=lowers, how={"memfit": f"--offload {what} (memory.offload: [{what}])", **how},
    )  # fmt: skip


# -- precision ---------------------------------------------------------------------------------------------------------


def _adapters(work: Workload) -> Iterator[Lever]:
    in_fp32 = work.kind == "lora" and work.adapter_dtype == "fp32"
    if in_fp32 and work.weight_precision != "fp32" and work.quant != "int8":
        way = "get_peft_model(model, config, autocast_adapter_dtype=False)"
        yield Lever(
            name=f"{work.weight_precision} adapters", cost="precision", group="adapters",
            settings={"adapter_dtype": "same"}, says="adapters, their gradients and their moments in 16 bits",
            price="nothing in time", risk="small updates round away",
            lowers=("weights", "gradients", "optimizer", "activations", "temporaries"),
            how=_ways("--adapter-dtype same (method.adapter_dtype: same)", way),
        )  # fmt: skip


def _eight_bit(work: Workload) -> Iterator[Lever]:
    if work.optimizer in ("adamw", "adamw-fused", "adamw-single"):
        yield Lever(
            name="8-bit AdamW", cost="precision", group="fused optimizer", settings={"optimizer": "adamw-8bit"},
            says="both moments in blocks of 8 bits", price="a package more", risk="moments are rounded to 8 bits",
            lowers=("optimizer",), missing=None if find_spec("bitsandbytes") else "bitsandbytes",
            how=_ways("--optimizer adamw-8bit (optimizer: adamw-8bit)", 'optim="adamw_bnb_8bit"',
                      "bitsandbytes.optim.AdamW8bit(...)"),
        )  # fmt: skip


def _precision(work: Workload) -> Iterator[Lever]:
    if work.precision == "fp32" and work.kind == "train":
        yield Lever(
            name="bf16 autocast", cost="precision", group="precision", settings={"precision": "amp-bf16"},
            says="matrix products and what they save in bf16, weights and moments in fp32", price="none: it is faster",
            risk="usual practice", lowers=MADE_BY_TOKENS,
            how=_ways(
                "--precision amp-bf16 (precision: amp-bf16)", "bf16=True", 'Accelerator(mixed_precision="bf16")',
            ),
        )  # fmt: skip
    if work.weight_precision == "fp32":
        way = "from_pretrained(..., dtype=torch.bfloat16)"
        own = "--dtype bf16" if work.kind == "prune" else "--precision bf16"
        yield Lever(
            name="bf16 weights", cost="precision", group="precision", settings={"precision": "bf16"},
            says="everything in bf16", price="none: it is faster",
            risk="small updates round away" if work.kind == "train" else "usual practice",
            lowers=("weights", "gradients", "optimizer", "calibration", "other", *MADE_BY_TOKENS),
            how=_ways(f"{own}{' (precision: bf16)' if work.trains else ''}", way),
        )  # fmt: skip


def _quantised(work: Workload) -> Iterator[Lever]:
    """Of a base model that is not trained."""
    if work.is_kbit_prepared:
        way = "do not call prepare_model_for_kbit_training; model.enable_input_require_grads() with checkpointing"
        yield Lever(
            name="no kbit preparation", cost="precision", group="kbit preparation", settings={"kbit_prepare": False},
            says=f"embedding, head, norms and what they make stay in {work.weight_precision}",
            price="none: it is faster", risk="norms and the head round more", lowers=("weights", *MADE_BY_TOKENS),
            how=_ways("--no-kbit-prepare", way),
        )  # fmt: skip
    if work.kind not in kinds_that_read(["quant"]) or work.is_quantised:
        return
    try:
        check_quantised(dataclasses.replace(work, quant="nf4"))
    except UsageError:  # what is on already does not go with it
        return
    missing = None if find_spec("bitsandbytes") else "bitsandbytes"
    made: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("8-bit", {"quant": "int8"}, "load_in_8bit=True"),
        ("4-bit", {"quant": "nf4", "double_quant": True}, 'load_in_4bit=True, bnb_4bit_quant_type="nf4", ...'),
    )
    for name, settings, way in made:
        prepare = {"kbit_prepare": False} if work.kind == "lora" else {}
        flags = " ".join(f"{flag(key)}{'' if value is True else f' {value}'}" for key, value in settings.items())
        load = f"from_pretrained(..., quantization_config=BitsAndBytesConfig({way}))"
        yield Lever(
            name=f"{name} weights", cost="precision", group="quantised", settings={**settings, **prepare},
            says=f"linear layers of the base model in {name[0]} bits, by bitsandbytes",
            price="weights are made whole again in each pass", risk="answers of the base model change a little",
            lowers=("weights",), missing=missing,
            how=_ways(f"{flags}", load),
        )  # fmt: skip


# -- the experiment ----------------------------------------------------------------------------------------------------


def _shorter(work: Workload) -> Iterator[Lever]:
    lengths = dict.fromkeys(int(work.seq_len * share) // LENGTH_STEP * LENGTH_STEP for share in SHORTER)
    for length in lengths:
        if SHORTEST <= length < work.seq_len:
            way = OWN_ENGINE if work.kind == "prune" else f"tokenizer(..., truncation=True, max_length={length})"
            key = " (data.max_seq_len)" if work.trains else ""
            yield Lever(
                name=f"sequence {length}", cost="experiment", group="sequence", settings={"seq_len": length},
                says=f"{length} tokens instead of {work.seq_len}", price="nothing in time",
                risk="longer samples are cut", lowers=(*MADE_BY_TOKENS, "calibration"),
                how=_ways(f"--seq-len {length}{key}", way),
            )  # fmt: skip


def _lower_rank(work: Workload) -> Iterator[Lever]:
    rank = (work.rank or 0) // 2
    while work.kind == "lora" and rank >= LOWEST_RANK:
        way = f"LoraConfig(r={rank})"
        yield Lever(
            name=f"rank {rank}", cost="experiment", group="rank", settings={"rank": rank},
            says=f"adapters of rank {rank} instead of {work.rank}", price="nothing in time",
            risk="less can be learned: another experiment",
            lowers=("weights", "gradients", "optimizer", "activations", "temporaries"),
            how=_ways(f"--rank {rank} (method.rank)", way),
        )  # fmt: skip
        rank //= 2


def _fewer_beams(work: Workload) -> Iterator[Lever]:
    beams = work.num_beams // 2 if work.decoding == "beam" else 0
    while beams >= 2:
        yield _generation("beams", "num_beams", beams, work.num_beams, "other texts are found")
        beams //= 2


def _fewer_tokens(work: Workload) -> Iterator[Lever]:
    tokens = work.new_tokens // 2 if work.kind == "generate" else 0
    while tokens >= max(work.new_tokens // 8, 16):
        yield _generation("new tokens", "new_tokens", tokens, work.new_tokens, "answers end earlier")
        tokens //= 2


def _generation(what: str, setting: str, number: int, before: int, risk: str) -> Lever:
    name = {"new_tokens": "max_new_tokens"}.get(setting, setting)
    way = f"model.generate(..., {name}={number})"
    return Lever(
        name=f"{number} {what}", cost="experiment", group=what, settings={setting: number},
        says=f"{number} {what} instead of {before}", price="nothing in time", risk=risk, lowers=MADE_BY_TOKENS,
        how=_ways(f"{flag(setting)} {number}", way),
    )  # fmt: skip


def _fewer_windows(work: Workload) -> Iterator[Lever]:
    windows = work.nsamples // 2
    while windows >= FEWEST_WINDOWS:
        yield Lever(
            name=f"{windows} windows", cost="experiment", group="windows", settings={"nsamples": windows},
            says=f"{windows} windows of text to calibrate on instead of {work.nsamples}", price="nothing in time",
            risk="weights are chosen by less text", lowers=("calibration", "activations"),
            how=_ways(f"--nsamples {windows}", OWN_ENGINE),
        )  # fmt: skip
        windows //= 2


TRAINING: tuple[Callable[[Workload], Iterator[Lever]], ...] = (
    _dropped_outputs, _attention, _masked_path, _fused_optimizer, partial(_chunked_loss, cost="free"), _bucket_view,
    _allocator, _compiled, partial(_chunked_loss, cost="time"), _micro_batches, _checkpointing, _sharding, _offloading,
    _adapters, _eight_bit, _precision, _quantised, _shorter, _lower_rank,
)  # fmt: skip
INFERENCE = (
    _attention, _masked_path, _cache, _allocator, _compiled, _smaller_batches, _precision, _quantised, _fewer_beams,
    _fewer_tokens, _shorter,
)  # fmt: skip
PRUNING = (_allocator, _precision, _fewer_windows, _shorter)
"""Blocks already come to the card one by one, within what may be used of it."""
CATALOGUE = {"train": TRAINING, "lora": TRAINING, "forward": INFERENCE, "generate": INFERENCE, "prune": PRUNING}


def levers_for(workload: Workload, *, keep: Sequence[str] = (), try_compile: bool = False) -> list[Lever]:
    """Those that apply and are not on, the cheapest first. `keep` names settings that must stay as they are."""
    kept = {checked_setting(name) for name in keep}
    for name in kept:
        if workload.kind not in (kinds := kinds_that_read([name])):
            raise UsageError(f"--keep {name} has no effect: it is a setting of {' and '.join(kinds)}")
    if try_compile and workload.kind in ("generate", "prune"):
        raise UsageError(f"--try-compile has no effect on {workload.kind}: it is a change of forward, train and lora")
    left_out = kept if try_compile else {*kept, "compile"}
    found = (lever for levers in CATALOGUE[workload.kind] for lever in levers(workload))
    return [lever for lever in found if not left_out & set(lever.settings)]


def apply(workload: Workload, levers: Iterable[Lever]) -> Workload:
    changes: dict[str, Any] = {}
    on_host = workload.offload  # what already lies there stays
    for lever in levers:
        changes.update(lever.settings)
        if "offload" in lever.settings:
            on_host = changes["offload"] = (*on_host, *changes["offload"])
    return workload.changed(**changes).without_unused()


def checked_setting(name: str) -> str:
    """A setting by its flag or its name in Python."""
    plain = plain_name(name.strip().removeprefix("--"))
    known = [each.name for each in dataclasses.fields(Workload)]
    if plain not in known:
        flags = [each.replace("_", "-") for each in known]
        raise UnknownName("setting to keep", name, flags, more="such as seq-len, rank or precision")
    return plain

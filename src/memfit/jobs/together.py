"""Settings that do not go together, and settings that change nothing about a job."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memfit.errors import UsageError
from memfit.jobs.settings import LORAS, NO_RANK, NO_TARGETS, PROMPTS, READ_BY, Sparsity, flag

if TYPE_CHECKING:
    from memfit.jobs.workload import Workload

OF_PROCESSES = ("parallel", "gradient_as_bucket_view")


def check_autocast(work: Workload) -> None:
    """What has two ways to be said is said once."""
    if work.autocast is None:
        return
    if work.precision.startswith("amp-") and f"amp-{work.autocast}" != work.precision:
        raise UsageError(
            f"--precision {work.precision} and --autocast {work.autocast} contradict each other",
            hint="--precision fp32, bf16 or fp16 is the type of the weights, --autocast that of the region",
        )
    narrow = work.kind == "lora" and work.adapter_dtype == "same" and work.quant != "int8"
    if (work.kind == "train" or narrow) and work.precision == work.autocast == "fp16":
        raise UsageError(
            "--precision fp16 --autocast fp16: the gradient scaler refuses fp16 gradients",
            hint="--adapter-dtype fp32" if narrow else "--precision amp-fp16 has fp32 weights",
        )


def check_quantised(work: Workload) -> None:
    """What goes together with quantised weights, in a plan as in the libraries."""
    if not work.is_quantised:
        return
    if work.quant == "dequantize" and work.stored is None:
        raise UsageError(f"--quant dequantize: {work.model} is not quantised", hint="leave --quant out")
    if work.quant == "torchao-int4" and (work.kind == "lora" or work.weight_precision != "bf16"):
        what = "has no backward pass" if work.kind == "lora" else "is for bf16 weights alone"
        raise UsageError(f"--quant torchao-int4 {what}", hint="--quant torchao-int8, or nf4")
    clash = {
        "--loop memfit": work.trains and work.loop == "memfit" and not work.runs_in_memfit_train,
        "--world-size": work.trains and work.world_size > 1,
        "--offload weights": work.trains and "weights" in work.offload,
        "--selective-checkpointing": work.trains and work.selective_checkpointing,
        f"--adapter {work.adapter}": work.kind == "lora" and work.adapter != "lora",
        "--adapter-config": work.kind == "lora" and work.adapter_config is not None,
    }
    _refuse_clash(f"--quant {work.quant}" if work.stored is None else work.few_bits, clash)


def check_inputs(work: Workload) -> None:
    """Lengths and pictures that the model has no use for, by its config.json alone."""
    given = [name for name in ("target_len", "images", "image_size", "padding") if getattr(work, name)]
    if work.kind == "prune" or not given:
        return
    head = work.other_head
    reads, name = "text" if head is None else head.reads, work.model
    lacking = {
        "target_len": None if reads == "text to text" else f"{name} is no encoder-decoder",
        "images": None if reads == "pictures and text" else f"{name} does not read pictures beside text",
        "image_size": None if reads.startswith("pictures") else f"{name} reads no pictures",
        "padding": None if reads == "text" else f"rows of {name} are planned of one length",
    }
    for setting in (each for each in given if lacking[each]):
        raise UsageError(f"{flag(setting)} has no effect: {lacking[setting]}", hint=f"leave {flag(setting)} out")


def check_compiled(work: Workload) -> None:
    """What torch.compile is planned together with."""
    if not work.is_compiled:
        return
    said = "--compile" if work.compile else "--compile-blocks"
    if work.compile and work.compile_blocks:
        raise UsageError(
            "--compile and --compile-blocks both say what torch.compile is given",
            hint="leave one out: --compile is the whole model, --compile-blocks each block by itself",
        )
    if work.kind == "generate" and work.compile_blocks:
        raise UsageError(
            "--compile-blocks is not planned for generate: what has a cache is compiled anew for each block, up to"
            " torch's limit of 8, and the other blocks run as they are",
            hint="--compile, or leave --compile-blocks out",
        )
    if work.kind == "generate" and work.cache == "static":
        raise UsageError(
            f"{said} is not planned together with --cache static, which transformers compiles itself: as CUDA graphs,"
            " with pools of memory of their own",
            hint="--cache dynamic, or leave --compile out",
        )
    clash = {
        "--loop memfit": work.trains and work.loop == "memfit",
        "--loop trainer": work.compile_blocks and work.trains and work.loop == "trainer",
        "--world-size": work.trains and work.world_size > 1,
        "--offload": work.trains and bool(work.offload),
        "--selective-checkpointing": work.trains and work.selective_checkpointing,
        "--loss chunked": work.trains and work.loss == "chunked",
        "quantised weights": work.is_quantised,
        f"--adapter {work.adapter}": work.kind == "lora" and work.adapter != "lora",
    }
    _refuse_clash(said, clash)


def _refuse_clash(said: str, clash: Mapping[str, bool]) -> None:
    for setting in (name for name, here in clash.items() if here):
        raise UsageError(
            f"{said} is not planned together with {setting}", hint=f"without {setting}, or leave {said} out"
        )


def unused(work: Workload) -> Iterator[tuple[str, str]]:
    """Settings that change nothing about this job, and why."""
    for name, kinds in READ_BY.items():
        if work.kind not in kinds:
            yield name, f"it is a setting of {' and '.join(kinds)}, not of {work.kind}"
    if work.kind == "lora":
        yield from _unused_by_adapter(work)
    yield from _unused_by_quant(work)
    if work.kind == "generate" and work.decoding != "beam":
        yield "num_beams", f"{work.decoding} decoding has no beams, --decoding beam has"
    if work.trains and work.loss != "chunked":
        yield "loss_chunk", f"a {work.loss} loss has no chunks, --loss chunked has"
    if work.trains and work.optimizer != "sgd":
        yield "momentum", f"it is of sgd, not of {work.optimizer}"
    if work.trains and work.loop != "plain" and work.outputs == "kept":
        yield "outputs", f"{'the Trainer' if work.loop == 'trainer' else 'memfit train'} drops them before backward"
    if work.trains and work.use_cache and (work.loop != "plain" or work.checkpointing != "none"):
        yield "use_cache", f"{'the Trainer' if work.loop != 'plain' else 'checkpointing'} switches it off"
    if work.trains and work.world_size == 1:
        yield "parallel", "there is a single process"
    if work.trains and (work.world_size == 1 or work.parallel != "ddp"):
        alone = work.world_size == 1
        yield "gradient_as_bucket_view", "there is a single process" if alone else f"{work.parallel} has no buckets"


def _unused_by_quant(work: Workload) -> Iterator[tuple[str, str]]:
    if work.kind not in READ_BY["quant"]:
        return
    if work.quant not in ("nf4", "fp4"):
        why = "it is for --quant nf4 or fp4; a checkpoint that is stored so says it in its config.json"
        yield from ((name, why) for name in ("double_quant", "quant_compute"))
    if work.kind == "lora" and not work.is_quantised:
        yield "kbit_prepare", "no weights are quantised, --quant nf4 does it"
    elif work.kind == "lora" and not work.casts_when_prepared and not work.checkpoints_when_prepared:
        yield "kbit_prepare", f"peft casts nothing beside {work.few_bits}, and switches no checkpointing on here"
    if work.kind == "lora" and work.quant == "int8":
        yield "adapter_dtype", "peft makes adapters of 8-bit layers in fp32"


def _unused_by_adapter(work: Workload) -> Iterator[tuple[str, str]]:
    if work.adapter in NO_RANK:
        yield "rank", f"--adapter {work.adapter} has no rank"
    if work.adapter in NO_TARGETS:
        yield "target_modules", f"--adapter {work.adapter} is put into no layers of one's choice"
    if work.adapter in PROMPTS:
        yield "adapter_dtype", f"the tokens of --adapter {work.adapter} have the type that peft gives them"
    if work.adapter not in (*LORAS, "adalora"):
        yield "lora_dropout", f"--adapter {work.adapter} is no LoRA: its own is a key of --adapter-config"


def refuse_unlike_stored(work: Workload, given: Collection[str]) -> None:
    """What bitsandbytes has stored is loaded as its config.json says, whatever is asked."""
    if work.kind not in READ_BY["quant"] or work.quant not in ("nf4", "fp4") or work.stored is None:
        return
    loaded = work.stored.by_bitsandbytes
    for name in ("double_quant", "quant_compute"):
        if name in given and work.quant == loaded.get("quant") and getattr(work, name) != loaded[name]:
            raise UsageError(
                f"{work.said(name)}: {work.model} is stored as {work.stored.as_loaded()}",
                hint=f"leave {flag(name)} out",
            )


def refuse_unused(work: Workload, given: Collection[str]) -> None:
    """How processes work together is no mistake where there is one: a plan notes it."""
    for name, why in unused(work):
        if name in given and name not in OF_PROCESSES:
            raise UsageError(f"{work.said(name)} has no effect: {why}", hint=f"leave {flag(name)} out")


def without_effect(work: Workload) -> Iterator[str]:
    """In words: settings that are not what they would be by themselves, and change nothing all the same."""
    usual = work.usual()
    for name, why in unused(work):
        if getattr(work, name) != usual[name]:
            yield f"{work.said(name)} has no effect: {why}"
    if work.trains and work.weight_decay and work.optimizer != "sgd":
        yield f"{work.said('weight_decay')} does not change the memory of {work.optimizer}"
    if work.autocast == "none" and work.kind in READ_BY["autocast"]:
        yield "--autocast none has no effect: nothing else asks for a region"
    if work.autocast is not None and work.autocast == work.weight_precision and work.kind in READ_BY["autocast"]:
        yield f"--autocast {work.autocast} changes only what is made in fp32: weights are {work.autocast} already"
    if work.kind == "lora" and work.adapter_dtype == "same" and work.weight_precision == "fp32":
        yield f"{work.said('adapter_dtype')} has no effect: the base model is fp32 too"
    if work.kind == "prune":
        yield from _without_effect_on_pruning(work, usual)


def _without_effect_on_pruning(work: Workload, usual: Mapping[str, Any]) -> Iterator[str]:
    """What a run obeys, while its memory stays the same."""
    if not work.looks_at_inputs:
        for name in ("nsamples", "seq_len", "dataset"):
            if getattr(work, name) != usual[name]:
                yield f"{work.said(name)} has no effect: pruning by magnitude reads no text"
    elif work.dataset != usual["dataset"]:
        yield f"{work.said('dataset')} does not change the memory, whatever the text"
    if work.sparsity not in (usual["sparsity"], Sparsity.parse(work.sparsity_type, None).ratio):
        yield f"{work.said('sparsity')} does not change the memory: zeros take as much"

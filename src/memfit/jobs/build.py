"""The model of a job in host memory: built or read, adapters added, levers on; the same for a plan and a run.

Under `torch.device("meta")` this takes no memory, and on the CPU it makes the real thing; the job that follows cannot
tell the difference until it moves the model to its device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.errors import InputError, UsageError
from memfit.jobs.adapters import FLAGS, KEYS, SettingNames, add_adapters, generates, virtual_tokens
from memfit.jobs.loading import note_conversions
from memfit.jobs.quantised import DTYPES, adapt_as_peft_does, quantise
from memfit.jobs.stored import as_stored, check_files
from memfit.jobs.together import check_compiled, check_inputs, check_quantised
from memfit.jobs.training.config import FACTORY, ModelConfig
from memfit.jobs.training.foreign_weights import load_weights
from memfit.jobs.training.job import TrainJob
from memfit.jobs.training.offload import use_block_levers
from memfit.jobs.training.parallel import is_made_without_memory
from memfit.jobs.training.refusals import check_offload
from memfit.jobs.training.shapes import model_config
from memfit.jobs.workload import Workload
from memfit.models.files import first_line
from memfit.models.heads import HEAD_NAMES, Head, as_language_model, picture
from memfit.models.presets import is_basics
from memfit.models.registry import build_from_config, build_model, language_model, parameter_count, source_notes
from memfit.models.stored_weights import refuse_stored

BY_THREADS = "threads bring experts while others are stacked, in no certain order: reserved may be some percent more"


def switch_levers_on(model: Any, work: Workload, named: SettingNames) -> None:
    """The loss in pieces, checkpointing, and what lies on the host; then it can be trained."""
    model.train()
    if work.loss == "chunked":
        from memfit.jobs.training.chunked_loss import use_chunked_loss

        use_chunked_loss(model, chunk=work.loss_chunk)
    setting = named.selective if work.selective_checkpointing else named.full
    lora, checkpointing = work.kind == "lora", work.checkpointing
    if work.loop == "trainer" and work.checkpoints_by_switch:  # the Trainer turns it
        checkpointing = "none"
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise UsageError(f"{setting} needs a transformers model", hint="checkpoint inside your own factory")
        if lora:
            model.enable_input_require_grads()  # the Trainer does not know that the embedding is frozen
    offload = work.offload
    # peft's preparation switches it on, as torch has it; and 8-bit layers hold on to their inputs under the other kind.
    reentrant = (work.is_kbit_prepared and work.loop == "plain") or (work.eight_bit and work.loop == "memfit")
    use_block_levers(
        model, checkpointing=checkpointing, offload=offload, adapters=lora, setting=setting, reentrant=reentrant
    )


Loop = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    workload: Workload
    model: nn.Module
    name: str
    vocab_size: int
    parameters: int
    notes: tuple[str, ...] = ()
    head: Head | None = None
    """None is a language model's."""
    loaded_bytes: int | None = None
    """Of quantised weights: those of the whole model, where this has only some of its blocks."""
    loop: Loop
    """How it runs: `loop(job, device, phases, steps=3)`."""

    @property
    def reads(self) -> str:
        return "text" if self.head is None else self.head.reads

    @property
    def config(self) -> Any:
        """Of a transformers model."""
        return self.model.config

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def prepare(workload: Workload, *, layers: int | None = None) -> Prepared:
    """`layers` keeps only the first so many blocks of the model. One to be sharded gets memory shard by shard."""
    with torch.device("meta") if is_made_without_memory(workload) else nullcontext():
        return _prepared(workload, layers)


def prepare_without_memory(workload: Workload, *, layers: int | None = None) -> Prepared:
    with torch.device("meta"):
        return prepare(workload, layers=layers)


def _prepared(workload: Workload, layers: int | None) -> Prepared:
    from memfit.jobs.run import choose_loop  # which needs what is here

    if workload.trains:
        check_offload(workload, setting="--offload")
    source, model = workload.source, _base_model(workload, layers)
    head = workload.other_head
    workload, given = _with_what_it_reads(workload, head, model)
    _check_positions(model, workload, head)
    _check_head(head, model, workload)
    if workload.kind == "generate" and not generates(model):
        raise UsageError(f"{workload.model} does not generate text", hint="memfit plan forward fits an encoder")
    parameters = parameter_count(model)
    notes = (*source_notes(source), *given)
    if workload.head:
        notes = (f"--head {workload.head}: a {type(model).__name__}", *notes)
    is_eager = getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager"
    if source.kind != "factory" and workload.attention == "sdpa" and is_eager:
        workload = workload.with_found(attention="eager")
        notes = (f"transformers has no fused attention for {source.name}: eager, as it takes by itself", *notes)
    if workload.use_cache and not generates(model):
        notes = (*notes, "--use-cache has no effect: this model has no key-value cache")
    check_compiled(workload)
    if workload.is_quantised:
        workload, known = _quantised(model, workload, head)
        notes = (*known, *notes)
    if workload.kind == "lora":
        task = None if head is None else head.task
        model, found, more = add_adapters(model, workload, FLAGS, task=task)
        workload, notes = workload.with_found(**found), (*notes, *more)
        adapt_as_peft_does(model)
    if workload.trains:
        if workload.loop == "trainer" and head is None and not takes_labels(model):
            raise UsageError(
                f"--loop trainer: {workload.model} computes no loss of its own, which the Trainer expects of it",
                hint="--loop plain works",
            )
        notes = (*notes, *_keep_all_blocks(model))
        switch_levers_on(model, workload, FLAGS)
    else:
        model.eval()
    return Prepared(
        workload=workload, model=model, name=source.name, vocab_size=_vocab_size(model), parameters=parameters,
        notes=notes, head=head, loop=choose_loop(workload)
    )  # fmt: skip


def _base_model(workload: Workload, layers: int | None) -> nn.Module:
    source = workload.source
    if not workload.is_quantised:
        refuse_stored(source.kind, source.target, workload.model)
    model = build_model(
        source,
        dtype=DTYPES[workload.weight_precision],
        attention=workload.attention,
        layers=layers,
        use_cache=workload.kind == "generate" or workload.use_cache,
        head=HEAD_NAMES[workload.head] if workload.head else None,
    )
    model.to(torch.get_default_device())  # `torch.normal`, for one, does not ask which that is
    return model


def _quantised(model: nn.Module, workload: Workload, head: Head | None) -> tuple[Workload, tuple[str, ...]]:
    """The job with what its checkpoint says of quantisation, and what is to be known of that."""
    check_quantised(workload)
    if head is not None and head.reads == "pictures and text":
        raise UsageError(
            f"{workload.model} reads {head.reads}: quantised weights of such a model are not planned yet",
            hint="memfit plan script plans a program that loads it so",
        )
    source, stored = workload.source, workload.stored
    folder = Path(source.target).parent if source.kind in ("folder", "hub") else None
    if stored is None:
        known = quantise(model, workload)
    else:
        workload, known = as_stored(model, workload, stored)
        if folder is not None:
            check_files(model, folder)
    if stored is None or (stored.method in ("bitsandbytes", "torchao", "fp8") and workload.quant != "dequantize"):
        stacks = note_conversions(model, folder)
        known = (*known, BY_THREADS) if stacks and stored is not None else known
    return workload, known


def _with_what_it_reads(workload: Workload, head: Head | None, model: nn.Module) -> tuple[Workload, tuple[str, ...]]:
    """The job with lengths and pictures that its model has a use for, and what is to be known of them."""
    reads = "text" if head is None else head.reads
    check_inputs(workload)
    if reads == "text":
        return workload, ()
    if workload.kind == "generate" or (workload.trains and workload.loop != "plain" and reads == "pictures and text"):
        what = "plan generate" if workload.kind == "generate" else f"--loop {workload.loop}"
        raise UsageError(f"{what}: not for a model that reads {reads} yet", hint="plan forward, train or lora")
    if reads == "text to text":
        return workload.with_found(target_len=workload.target_len or TARGET_LEN), ()
    config: Any = model.config
    one = picture(config, workload.image_size)
    if reads == "pictures":
        return workload, ("--seq-len has no effect: there is no text beside the pictures, one a row",)
    images = 1 if workload.images is None else workload.images
    if images * (one.tokens + 1) > workload.seq_len:
        raise UsageError(
            f"--seq-len {workload.seq_len} has no room for text: {images} pictures are {images * one.tokens} tokens",
            hint=f"--seq-len {images * one.tokens + 256}",
        )
    shape = f"{one.grid[2]}x{one.grid[1]} patches" if one.grid else f"{one.pixels[-1]}x{one.pixels[-2]} pixels"
    said = f"--seq-len counts the tokens of pictures too: {images} a row, each {one.tokens} ({shape})"
    return workload.with_found(images=images), (said,)


TARGET_LEN = 128
"""Where nothing is said: half a page, as summaries and translations have it."""


def _check_head(head: Head | None, model: nn.Module, workload: Workload) -> None:
    if head is None or not workload.trains:
        return
    name = type(model).__name__
    if not head.learns:
        raise UsageError(
            f"{workload.model} is a {name} ('architectures'), which has no head and so no loss to train on",
            hint=f"{as_language_model(name)}, or say --head",
        )
    if workload.loop == "memfit" or workload.loss == "chunked":
        setting = "--loop memfit" if workload.loop == "memfit" else "--loss chunked"
        raise UsageError(
            f"{setting} is for language models, and {workload.model} is a {name} ('architectures')",
            hint=as_language_model(name),
        )


def _keep_all_blocks(model: nn.Module) -> Iterator[str]:
    """Blocks that a model leaves out of a step at random would make every plan another one. None are left out when most
    memory is taken."""
    for name, module in model.named_modules():
        share = getattr(module, "layerdrop", 0)
        if isinstance(share, float) and share > 0:
            module.layerdrop = 0.0
            where = f" of {name}" if name else ""
            yield f"layerdrop {share}{where} leaves blocks out at random: planned with all of them, the most it takes"


def _vocab_size(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if isinstance(getattr(config, "vocab_size", None), int):
        return int(config.vocab_size)  # type: ignore[union-attr]
    if getattr(config, "patch_size", None) or getattr(config, "num_channels", None):
        return 0
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise UsageError("the factory's model has neither config.vocab_size nor an embedding to tell its vocabulary")
    return max(tables)


def _check_positions(model: nn.Module, workload: Workload, head: Head | None) -> None:
    """Positions in a table are a limit: a longer sequence fails on the GPU with an index error."""
    if head is not None and head.reads.startswith("pictures"):
        return
    config = getattr(model, "config", None)
    own = getattr(model, "longest_sequence", None)  # of memfit's own models, whose rotations are tables too
    longest = own or getattr(config, "max_position_embeddings", None)
    generates = workload.kind == "generate"
    reached = workload.seq_len + (workload.new_tokens - 1 if generates else 0)  # the last token is not read
    reached = max(reached, workload.target_len or 0) + (virtual := virtual_tokens(workload))
    if not isinstance(longest, int) or reached <= longest:
        return
    tables = _rows_of_tables(model, getattr(config, "vocab_size", None))
    if own or any(longest <= rows <= longest + 16 for rows in tables):
        more = f" and --new-tokens {workload.new_tokens}" if generates else ""
        more += f" and num_virtual_tokens {virtual}" if virtual else ""
        takes = f"--seq-len {longest} is the longest it takes"
        if generates or virtual:
            takes = f"together at most {longest + generates}"
        raise UsageError(
            f"--seq-len {workload.seq_len}{more} is more than the {longest} positions that {workload.model} has",
            hint=takes,
        )


def _rows_of_tables(model: nn.Module, vocabulary: int | None) -> Iterator[int]:
    """Learned ones, and those of sines that do not grow when they are too short."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings != vocabulary:
            yield module.num_embeddings
        elif not hasattr(module, "make_weights"):
            yield from (b.shape[0] for b in module.buffers(recurse=False) if b.dim() == 2 and b.is_floating_point())


def takes_labels(model: nn.Module) -> bool:
    """transformers' models compute their own loss; any other module is expected to return logits."""
    base = getattr(model, "get_base_model", lambda: model)()
    return "labels" in inspect.signature(base.forward).parameters


def build_for_training(job: TrainJob, reached: Callable[[str], None] = lambda _: None) -> nn.Module:
    """The model of a run; the same weights in every process, by the seed alone. Quantised weights are read straight to
    the GPU, and there prepared and adapted: that each of these is `reached` is told."""
    config, work = job.config, job.config.workload
    torch.manual_seed(config.seed)
    folder = None if job.source is None else job.source.folder
    quantised = work.is_quantised and folder is not None
    loading = _on_the_way_to_gpu(work) if quantised else {}
    model = build_base_model(config.model, folder, DTYPES[work.weight_precision], **loading)
    if quantised and work.is_kbit_prepared:
        from peft import prepare_model_for_kbit_training

        reached("prepare")
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if work.kind == "lora":
        reached("adapt")
        model, _, _ = add_adapters(model, work, KEYS, alpha=config.method.alpha)
    if job.start_from is not None:
        load_weights(job.start_from, model)
    switch_levers_on(model, work, KEYS)
    return model


def _on_the_way_to_gpu(work: Workload) -> dict[str, Any]:
    """What `from_pretrained` is told so that it quantises; a checkpoint that is quantised already says it itself."""
    place: dict[str, Any] = {"device_map": {"": torch.cuda.current_device()}}
    if work.stored is not None:
        return place
    from transformers import BitsAndBytesConfig

    said: dict[str, Any] = {"load_in_8bit": True}
    if work.quant != "int8":
        said = {
            "load_in_4bit": True, "bnb_4bit_quant_type": work.quant, "bnb_4bit_use_double_quant": work.double_quant,
            "bnb_4bit_compute_dtype": DTYPES[work.compute_precision],
        }  # fmt: skip
    return {"quantization_config": BitsAndBytesConfig(**said), **place}


def build_base_model(model: ModelConfig, folder: Path | str | None, dtype: torch.dtype, **loading: Any) -> nn.Module:
    """With its weights: read from a folder, or drawn where there is none. Its head is its own, as in a plan: an encoder
    fills in masked words. `loading` is for `from_pretrained`."""
    import transformers

    from memfit.models.registry import make_known

    make_known()  # a folder may hold one of memfit's own models
    if FACTORY.fullmatch(model.name):
        return build_model(model.source, dtype=dtype)
    attention = None if model.attention == "sdpa" else model.attention  # eager where the family has no other
    made: Any
    try:
        if folder is None:
            config = model_config(model)
            made = build_from_config(config, language_model(config), dtype=dtype, attention=attention)
        else:
            found = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
            made = getattr(transformers, language_model(found)).from_pretrained(
                str(folder), dtype=dtype, attn_implementation=attention, trust_remote_code=False, local_files_only=True,
                **loading,
            )  # fmt: skip
    except InputError:  # in memfit's own words
        raise
    except (ValueError, ImportError, OSError) as error:
        raise InputError(f"transformers cannot build {model.name}: {first_line(error)}") from error
    if is_basics(model.name):
        made.config = None  # the Trainer would write into it, and it is no config of transformers
    built: nn.Module = made
    return built

"""The model of a job in host memory: built or read, adapters added, levers on; the same for a plan and a run.

Under `torch.device("meta")` this takes no memory, and on the CPU it makes the real thing; the job that follows cannot
tell the difference until it moves the model to its device.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from memfit.errors import InputError, UsageError
from memfit.jobs.training.config import FACTORY, ModelConfig
from memfit.jobs.training.foreign_weights import load_weights
from memfit.jobs.training.job import TrainJob
from memfit.jobs.training.levers import check_offload
from memfit.jobs.training.offload.switch import use_block_levers
from memfit.jobs.training.parallel import is_made_without_memory
from memfit.jobs.training.shapes import is_basics, model_config
from memfit.jobs.workload import Workload
from memfit.models.config_check import Head, as_language_model
from memfit.models.registry import (
    build_from_config,
    build_model,
    head_named,
    parameter_count,
    source_notes,
)

NOT_TRUE = ("fan_in_fan_out", "The following rank_pattern keys", "The following alpha_pattern keys")
"""peft sets the first right for GPT-2's Conv1D itself; patterns do match experts, which it looks for among modules."""


class Refused(ValueError):
    """peft cannot adapt these layers. `of_experts` are those that it takes for experts'; `meant` asks about a name that
    the model does not have."""

    def __init__(self, why: str, *, of_experts: Sequence[str] = (), meant: str = "") -> None:
        super().__init__(why.splitlines()[0])
        self.of_experts, self.meant = of_experts, meant


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SettingNames(NamedTuple):
    """What settings are called in errors about them."""

    targets: str
    dropout: str
    full: str
    selective: str


FLAGS = SettingNames("--target-modules", "--lora-dropout", "--grad-checkpointing", "--selective-checkpointing")
KEYS = SettingNames("method.target_modules", "method.dropout", *["memory.gradient_checkpointing"] * 2)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA's, by peft."""

    rank: int
    alpha: float | None = None
    """None is twice the rank."""
    dropout: float
    targets: Sequence[str]
    dtype: torch.dtype | None
    """None is fp32, as peft makes them whatever the base model has."""
    task: str | None = None
    """Of a model that is no language model: its head is then trained too."""

    def on(self, model: nn.Module) -> tuple[nn.Module, list[str]]:
        """The model with them, and what is to be known of it. Raises Refused."""
        from peft import LoraConfig, get_peft_model

        names = [name for name, _ in model.named_modules()]
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        config = LoraConfig(
            r=self.rank, target_modules=list(self.targets), lora_dropout=self.dropout,
            lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # type: ignore[arg-type,unused-ignore]
            task_type=self.task or ("CAUSAL_LM" if _generates(model) else None),
        )  # fmt: skip
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=self.dtype is None)  # type: ignore[arg-type,unused-ignore]
        except ValueError as error:
            self._refuse_unknown(names, config)
            raise Refused(str(error), of_experts=_of_experts(config, self.targets)) from error
        self._refuse_unknown(names, config)
        if self.dtype is not None:
            for parameter in adapted.parameters():  # peft does this itself, but not for a model on meta
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(self.dtype)
        notes = [f"peft: {text}" for w in said if not (text := str(w.message).splitlines()[0]).startswith(NOT_TRUE)]
        if of_experts := _of_experts(config, self.targets):
            notes.append(f"peft adapts every expert by {', '.join(of_experts)}, and no other layer of these names")
        return adapted, notes

    def _refuse_unknown(self, names: Sequence[str], config: object) -> None:
        """peft adapts what it finds and says nothing about the rest."""
        experts = _of_experts(config, self.targets)
        for target in self.targets:
            if target not in experts and not any(f".{name}".endswith(f".{target}") for name in names):
                near = get_close_matches(target, sorted({name.rpartition(".")[2] for name in names}), n=1)
                raise Refused(f"no module is called {target!r}", meant=f"did you mean {near[0]!r}? " if near else "")


def _of_experts(config: object, targets: Sequence[str]) -> list[str]:
    """peft replaces names that older versions of transformers had for experts by those of their 3-D parameters."""
    kept = getattr(config, "target_modules", None) or ()
    return [name for name in targets if name not in kept] if getattr(config, "target_parameters", None) else []


def add_adapters(
    model: nn.Module, work: Workload, named: SettingNames, *, alpha: float | None = None, task: str | None = None
) -> tuple[nn.Module, tuple[str, ...], list[str]]:
    """The model with them, which layers they adapt, and what is to be known of it."""
    names = linear_layers_of_blocks(model)
    targets = work.target_modules or tuple(names)
    if not targets:
        raise UsageError(f"{work.model} has no linear layer that peft could adapt")
    dtype = DTYPES[work.weight_precision] if work.adapter_dtype == "same" else None
    dropout = work.lora_dropout
    adapters = Adapters(rank=work.rank, alpha=alpha, dropout=dropout, targets=targets, dtype=dtype, task=task)
    try:
        adapted, notes = adapters.on(model)
    except Refused as error:
        if error.of_experts and dropout:
            others = ",".join(name for name in names if name not in error.of_experts)
            theirs = f"{', '.join(error.of_experts)} are theirs in {work.model}"
            raise UsageError(
                f"{named.dropout} {dropout}: peft has no dropout for experts, and {theirs}",
                hint=f"{named.dropout} 0, or adapt other layers: {named.targets} {others}",
            ) from error
        hint = f"{error.meant}linear layers of a block: {', '.join(names)}"
        raise UsageError(f"{named.targets}: {error}", hint=hint) from error
    return adapted, targets, notes


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
    offload = work.offload or ()
    use_block_levers(model, checkpointing=checkpointing, offload=offload, adapters=lora, setting=setting)


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
    loop: Loop
    """How it runs: `loop(job, device, phases, steps=3)`."""

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
        check_offload(workload, optimizer=str(workload.optimizer), setting="--offload")
    source = workload.source
    model = build_model(
        source,
        dtype=DTYPES[workload.weight_precision],
        attention=workload.attention,
        layers=layers,
        use_cache=workload.kind == "generate",
    )
    model.to(torch.get_default_device())  # `torch.normal`, for one, does not ask which that is
    _check_positions(model, workload)
    head = head_named(source)
    _check_head(head, model, workload)
    if workload.kind == "generate" and not _generates(model):
        raise UsageError(f"{workload.model} does not generate text", hint="memfit plan forward fits an encoder")
    parameters = parameter_count(model)
    notes = source_notes(source)
    if source.kind != "factory" and workload.attention == "sdpa" and _is_eager(model):
        workload = workload.with_found(attention="eager")
        notes = (f"transformers has no fused attention for {source.name}: eager, as it takes by itself", *notes)
    if workload.kind == "lora":
        task = None if head is None else head.task
        model, targets, more = add_adapters(model, workload, FLAGS, task=task)
        workload, notes = workload.with_found(target_modules=targets), (*notes, *more)
    if workload.trains:
        _check_loop(model, workload, head)
        notes = (*notes, *_keep_all_blocks(model))
        switch_levers_on(model, workload, FLAGS)
    else:
        model.eval()
    return Prepared(
        workload=workload, model=model, name=source.name, vocab_size=_vocab_size(model), parameters=parameters,
        notes=notes, head=head, loop=choose_loop(workload)
    )  # fmt: skip


def _check_head(head: Head | None, model: nn.Module, workload: Workload) -> None:
    if head is None or not workload.trains:
        return
    name = type(model).__name__
    if head.task is None:
        raise UsageError(
            f"{workload.model} is a {name} ('architectures'), which has no head and so no loss to train on",
            hint=as_language_model(name),
        )
    if workload.loop == "memfit" or workload.loss == "chunked":
        setting = "--loop memfit" if workload.loop == "memfit" else "--loss chunked"
        raise UsageError(
            f"{setting} is for language models, and {workload.model} is a {name} ('architectures')",
            hint=as_language_model(name),
        )


def _check_loop(model: nn.Module, workload: Workload, head: Head | None) -> None:
    if workload.loop == "trainer" and head is None and not takes_labels(model):
        raise UsageError(
            f"--loop trainer: {workload.model} computes no loss of its own, which the Trainer expects of it",
            hint="--loop plain works",
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


def _is_eager(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager"


def _generates(model: nn.Module) -> bool:
    return bool(getattr(model, "can_generate", lambda: False)())


def linear_layers_of_blocks(model: nn.Module) -> list[str]:
    """The last part of the names of all linear layers but those of the head."""
    from transformers.pytorch_utils import Conv1D

    head = getattr(model, "get_output_embeddings", lambda: None)()
    prefix = getattr(model, "base_model_prefix", "")
    within = "" if head is not None or not hasattr(model, prefix) else f"{prefix}."
    names = {
        name.rpartition(".")[2]: None
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and name.startswith(within)
    }
    return list(names)


def _vocab_size(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    if isinstance(getattr(config, "vocab_size", None), int):
        return int(config.vocab_size)  # type: ignore[union-attr]
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise UsageError("the factory's model has neither config.vocab_size nor an embedding to tell its vocabulary")
    return max(tables)


def _check_positions(model: nn.Module, workload: Workload) -> None:
    """Positions in a table are a limit: a longer sequence fails on the GPU with an index error."""
    config = getattr(model, "config", None)
    own = getattr(model, "longest_sequence", None)  # of memfit's own models, whose rotations are tables too
    longest = own or getattr(config, "max_position_embeddings", None)
    generates = workload.kind == "generate"
    reached = workload.seq_len + (workload.new_tokens - 1 if generates else 0)  # the last token is not read
    if not isinstance(longest, int) or reached <= longest:
        return
    tables = _rows_of_tables(model, getattr(config, "vocab_size", None))
    if own or any(longest <= rows <= longest + 16 for rows in tables):
        more = f" and --new-tokens {workload.new_tokens}" if generates else ""
        takes = f"together at most {longest + 1}" if generates else f"--seq-len {longest} is the longest it takes"
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


def build_for_training(job: TrainJob) -> nn.Module:
    """The model of a run; the same weights in every process, by the seed alone."""
    config, work = job.config, job.config.workload
    torch.manual_seed(config.seed)
    folder = None if job.source is None else job.source.folder
    model = build_base_model(config.model, folder, DTYPES[work.weight_precision])
    if work.kind == "lora":
        model, _, _ = add_adapters(model, work, KEYS, alpha=config.method.alpha)
    if job.start_from is not None:
        load_weights(job.start_from, model)
    switch_levers_on(model, work, KEYS)
    return model


def build_base_model(model: ModelConfig, folder: Path | str | None, dtype: torch.dtype) -> nn.Module:
    """With its weights: read from a folder, or drawn where there is none."""
    from transformers import AutoModelForCausalLM

    from memfit.models.own import make_known

    make_known()  # a folder may hold one of memfit's own models
    if FACTORY.fullmatch(model.name):
        return build_model(model.source, dtype=dtype)
    attention = None if model.attention == "sdpa" else model.attention  # eager where the family has no other
    made: Any
    try:
        if folder is None:
            made = build_from_config(model_config(model), "AutoModelForCausalLM", dtype=dtype, attention=attention)
        else:
            made = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, attn_implementation=attention, trust_remote_code=False, local_files_only=True
            )
    except InputError:  # in memfit's own words
        raise
    except (ValueError, ImportError, OSError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"transformers cannot build {model.name}: {first}"[:400]) from error
    if is_basics(model.name):
        made.config = None  # the Trainer would write into it, and it is no config of transformers
    built: nn.Module = made
    return built

"""`--emit`: the fitted job as something to run.

    yaml     a config for `memfit train --config`
    args     flags for a script of the Hugging Face Trainer, or for `memfit prune`
    python   a file that trains with the Hugging Face Trainer, or runs the model

A change for which there is no switch is refused with the form that has one: nothing of the answer is lost on the way.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from memfit.advice.emit_python import python_of
from memfit.advice.fit import Fitted
from memfit.advice.forecast import Forecasts
from memfit.advice.forms import FORMS
from memfit.advice.global_batch import global_batch_of
from memfit.advice.pruning_command import pruning_flags
from memfit.advice.trainer_words import environment, refuse_what_has_no_switch, trainer_settings
from memfit.errors import MemfitError, UsageError
from memfit.gpus import Gpu, find_gpu
from memfit.jobs.training.shapes import is_basics
from memfit.jobs.workload import Workload, flag
from memfit.models.gsa_names import is_gsa
from memfit.units import gib, in_mib

CLIP_NORM = 1.0


def emit(fitted: Fitted, form: str) -> str:
    if form not in FORMS:
        raise UsageError(f"--emit {form!r} is not one of {', '.join(FORMS)}")
    if not fitted.fits:
        raise UsageError("nothing fits, so there is nothing to write", hint="without --emit the nearest set is shown")
    if form == "yaml":
        return yaml_of(fitted)
    if form == "python":
        return python_of(fitted.fitted, headline(fitted))
    return args_of(fitted)


def headline(fitted: Fitted) -> str:
    """What the file is, in one line."""
    use = f"predicted {gib(fitted.after.use_bytes)} of {gib(fitted.gpu.capacity_bytes)}"
    names = ", ".join(change.lever.name for change in fitted.changes) or "nothing had to be changed"
    return f"{fitted.workload.kind} of {fitted.workload.model} on {fitted.gpu.name}: {use}; {names}"


def yaml_of(fitted: Fitted) -> str:
    from memfit.jobs.training.config_file import as_yaml
    from memfit.jobs.training.config_keys import config_from

    if not fitted.fitted.trains:
        raise UsageError(f"--emit yaml: a config is for training, not for {fitted.workload.kind}", hint="--emit args")
    document = config_document(fitted)
    config_from(document, name="fitted")  # what the engine does not take is said now, not when the file is read
    alone = fitted.fitted.world_size == 1
    launcher = "memfit train" if alone else f"torchrun --nproc_per_node={fitted.fitted.world_size} -m memfit train"
    how = f"# {launcher} --config THIS.yaml --set data.source=my.jsonl\n"
    return f"# {headline(fitted)}.\n{_in_own_loop(fitted)}{how}{as_yaml(document)}"


def _in_own_loop(fitted: Fitted) -> str:
    """The engine behind the config is not the loop that was asked about, so it is predicted too."""
    if fitted.fitted.loop == "memfit":
        return ""
    try:
        own = Forecasts(fitted.gpu, fitted.margin).of(dataclasses.replace(fitted.fitted, loop="memfit"))
    except MemfitError:
        return ""
    return f"# That is a {fitted.fitted.loop} loop; memfit train: predicted {gib(own.device_bytes)}, {own.verdict}.\n"


def config_document(fitted: Fitted) -> dict[str, Any]:
    work = fitted.fitted
    checkpointing = "full" if work.grad_checkpointing else "selective" if work.selective_checkpointing else "none"
    document: dict[str, Any] = {
        "model": {"name": work.model, "attention": work.attention, **_tokenizer(work)},
        "method": _method(work),
        "data": {"source": "builtin", "max_seq_len": work.seq_len},
        "batch": {"micro_batch_size": work.batch_size, "global_batch_size": global_batch_of(work)},
        "schedule": {"max_grad_norm": CLIP_NORM if work.clip_grad else 0.0},
        "precision": work.precision,
        "memory": {
            "gpu": _card(fitted.gpu), "margin": fitted.margin, "gradient_checkpointing": checkpointing,
            "offload": list(work.offload or ()), "alloc_conf": work.alloc_conf,
        },
        "optimizer": {"name": work.optimizer},
        "loss": {"kind": work.loss, "chunk": work.loss_chunk},
    }  # fmt: skip
    if work.world_size > 1:
        view = {"gradient_as_bucket_view": work.gradient_as_bucket_view} if work.parallel == "ddp" else {}
        document["parallel"] = {"kind": work.parallel, **view}
    return document


def _card(gpu: Gpu) -> str:
    """As `--gpu` reads it."""
    for name in (gpu.name, gpu.name.removesuffix(" card")):  # a label, such as 24 GB
        try:
            if find_gpu(name) == gpu:
                return name
        except MemfitError:
            continue
    return in_mib(gpu.capacity_bytes)


def _tokenizer(work: Workload) -> dict[str, str]:
    """A model that comes with none: this one needs no file."""
    return {"tokenizer": "bytes"} if is_gsa(work.model) or is_basics(work.model) else {}


def _method(work: Workload) -> dict[str, Any]:
    if work.kind != "lora":
        return {"kind": "full"}
    made: dict[str, Any] = {
        "kind": "lora", "rank": work.rank, "dropout": work.lora_dropout, "adapter_dtype": work.adapter_dtype
    }  # fmt: skip
    if work.target_modules is not None:
        made["target_modules"] = list(work.target_modules)
    return made


def args_of(fitted: Fitted) -> str:
    work = fitted.fitted
    if work.trains:
        refuse_what_has_no_switch(work, "args")
        launcher = f"torchrun --nproc_per_node={work.world_size} train.py" if work.world_size > 1 else "python train.py"
        return _command(fitted, launcher, _trainer_flags(work))
    if work.kind == "prune":
        return _command(fitted, "memfit prune", pruning_flags(work).items())
    return _command(fitted, f"memfit plan {work.kind}", _own_flags(work))


def _command(fitted: Fitted, launcher: str, flags: Iterable[tuple[str, str]]) -> str:
    before = "".join(f"{name}={shlex.quote(value)} " for name, value in environment(fitted.fitted).items())
    words = (f"    {name} {shlex.quote(value)}" if value else f"    {name}" for name, value in flags)
    lines = [f"{before}{launcher}", *words]
    return "".join(f"# {said}\n" for said in (headline(fitted), *_left_to_the_script(fitted.fitted))) + (
        " \\\n".join(lines) + "\n"
    )


def _left_to_the_script(work: Workload) -> Iterator[str]:
    """What is no field of TrainingArguments."""
    if not work.trains:
        return
    model = f"dtype {work.weight_precision}, attn_implementation {work.attention}, rows of {work.seq_len} tokens"
    targets = ",".join(work.target_modules) if work.target_modules else "all-linear"
    if work.loss == "chunked":
        yield "use_liger_kernel needs the package liger-kernel; its chunks of the loss are its own, not those predicted"
    if work.world_size > 1 and work.parallel == "ddp" and work.gradient_as_bucket_view:
        yield "train.py itself sets trainer.accelerator.ddp_handler, with gradient_as_bucket_view=True (--emit python)"
    adapters = f"; LoRA of rank {work.rank} on {targets}, autocast_adapter_dtype={work.adapter_dtype == 'fp32'}"
    yield f"train.py itself sets: {model}{adapters if work.kind == 'lora' else ''}"


def _trainer_flags(work: Workload) -> Iterator[tuple[str, str]]:
    """As HfArgumentParser reads the fields of TrainingArguments."""
    settings: Mapping[str, Any] = {**trainer_settings(work), **_in_place_of_own_code(work)}
    for name, value in settings.items():
        said = json.dumps(value) if isinstance(value, dict) else str(value)
        yield f"--{name}", "" if name == "fsdp" else said  # a word after it would be an option of old


def _in_place_of_own_code(work: Workload) -> dict[str, Any]:
    return {"use_liger_kernel": True} if work.loss == "chunked" else {}


def _own_flags(work: Workload) -> Iterator[tuple[str, str]]:
    for name, value in work.settings().items():
        if name != "kind" and value not in (None, False, "", []):
            yield flag(name), _text(value)


def _text(value: Any) -> str:
    return "" if value is True else ",".join(value) if isinstance(value, list) else str(value)

"""The model of a training job, on the host: built or read, adapters added, checkpointing and the loss switched on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.errors import InputError, UsageError
from memfit.jobs.adapters import Adapters, Refused
from memfit.jobs.preparing import DTYPES, linear_layers_of_blocks
from memfit.jobs.training.config import FACTORY, MethodConfig
from memfit.jobs.training.foreign_weights import load_weights
from memfit.jobs.training.offload.switching import use_block_levers
from memfit.jobs.training.preparation import TrainJob
from memfit.jobs.training.shapes import basics_config, gsa_config, is_basics, transformers_config
from memfit.models.gsa_names import is_gsa


def build_for_training(job: TrainJob) -> nn.Module:
    """The same weights in every process, by the seed alone."""
    config = job.config
    torch.manual_seed(config.seed)
    dtype = DTYPES.get(config.precision, torch.float32)
    model = _built(job, dtype)
    if config.method.kind == "lora":
        model = _with_adapters(model, config.method, dtype)
    if job.start_from is not None:
        load_weights(job.start_from, model)
    if config.loss.kind == "chunked":
        from memfit.jobs.training.chunked_loss import use_chunked_loss

        use_chunked_loss(model, chunk=config.loss.chunk)
    use_block_levers(
        model, checkpointing=config.memory.gradient_checkpointing, offload=config.memory.offload,
        adapters=config.method.kind == "lora", setting="memory.gradient_checkpointing",
    )  # fmt: skip
    model.train()
    return model


def _built(job: TrainJob, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from memfit.models.own_models import make_known

    make_known()  # a folder may hold one of memfit's own models
    model = job.config.model
    if FACTORY.fullmatch(model.name):
        from memfit.models.registry import build_model, resolve

        return build_model(resolve(model.name), dtype=dtype)
    if is_gsa(model.name):
        from memfit.models.gsa import GsaForCausalLM

        made: nn.Module = GsaForCausalLM._from_config(gsa_config(model), dtype=dtype)  # its tables stay fp32
        return made
    if is_basics(model.name):
        from memfit.models.basics import BasicsTransformer

        basics: Any = BasicsTransformer(basics_config(model)).to(dtype)
        basics.config = None  # the Trainer would write into it, and it is no config of transformers
        plain: nn.Module = basics
        return plain
    attention = None if model.attention == "sdpa" else model.attention  # eager where the family has no other
    try:
        if job.source is None:
            built: nn.Module = AutoModelForCausalLM.from_config(
                transformers_config(model), dtype=dtype, attn_implementation=attention
            )
        else:
            built = AutoModelForCausalLM.from_pretrained(
                str(job.source.folder), dtype=dtype, attn_implementation=attention, trust_remote_code=False,
                local_files_only=True,
            )  # fmt: skip
    except InputError:  # in memfit's own words
        raise
    except (ValueError, ImportError, OSError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"transformers cannot build {model.name}: {first}"[:400]) from error
    return built


def _with_adapters(model: nn.Module, method: MethodConfig, dtype: torch.dtype) -> nn.Module:
    names = linear_layers_of_blocks(model)
    adapters = Adapters(
        rank=method.rank, alpha=method.scaling_alpha, dropout=method.dropout, targets=method.target_modules or names,
        dtype=dtype if method.adapter_dtype == "same" else None,
    )  # fmt: skip
    try:
        return adapters.on(model)[0]
    except Refused as error:
        raise UsageError(
            f"method.target_modules: {error}",
            hint=f"{error.meant}linear layers of a block: {', '.join(names) or 'none'}",
        ) from error

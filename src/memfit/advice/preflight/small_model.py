"""The model of a training job as `memfit train` builds it, made small enough to be run here: its shapes alone, or its
first blocks with random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.advice.preflight.finding import CannotTell
from memfit.jobs.training.config import FACTORY, TrainConfig
from memfit.jobs.workload import Workload
from memfit.models.gsa_names import is_gsa

if TYPE_CHECKING:
    from torch import nn

    from memfit.jobs.training.preparation import TrainJob

TOKENS = 16
WORDS = 512
"""Of the vocabulary: how many words there are changes no path of a gradient."""
OF_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")


def small_job(config: TrainConfig, model_name: str, settings: dict[str, Any]) -> TrainJob:
    """The job on the CPU, with short rows of random tokens, and with these settings of the model. All that decides
    which code runs (method, precision, checkpointing, loss) is as it was; flash attention, which no CPU has, is sdpa
    here, and nothing is offloaded."""
    from memfit.jobs.training.memfit_loop import training_job

    model = dataclasses.replace(
        config.model, name=model_name, from_scratch=True, settings={**config.model.settings, **settings},
        attention="sdpa" if config.model.attention == "flash_attention_2" else config.model.attention,
    )  # fmt: skip
    small = dataclasses.replace(
        config, model=model, memory=dataclasses.replace(config.memory, auto=False, offload=()), device="cpu"
    )
    rows = Workload(kind="train", model=model_name, seq_len=TOKENS)
    job = training_job(rows, WORDS, steps=1, folder=Path())
    return dataclasses.replace(job, config=small)


def shapes_only(config: TrainConfig, model_name: str, *, layers: int | None = None) -> nn.Module:
    """On the meta device: every tensor has its shape and type, and none has memory."""
    import torch

    from memfit.jobs.training.model_building import build_for_training

    settings = {} if layers is None else cut_to(config, model_name, layers)
    job = small_job(config, model_name, settings)
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        return build_for_training(job)


def cut_to(config: TrainConfig, model_name: str, layers: int) -> dict[str, Any]:
    """Settings under which the model has only its first so many blocks."""
    if FACTORY.fullmatch(model_name):
        return {}
    if is_gsa(model_name):
        return {"n_layers": layers, "vocab_size": WORDS}
    if model_name.lower().startswith("basics"):
        return {"num_layers": layers, "vocab_size": WORDS}
    from memfit.models.registry import load_config, resolve

    known: Any = load_config(resolve(model_name))
    kinds = getattr(known, "layer_types", None)
    made: dict[str, Any] = {"num_hidden_layers": min(layers, known.num_hidden_layers), "vocab_size": WORDS}
    if isinstance(kinds, list) and not isinstance(getattr(type(known), "layer_types", None), property):
        made["layer_types"] = kinds[:layers]
    made |= {name: None for name in OF_TOKENS if isinstance(getattr(known, name, None), int)}
    return made


def few_blocks(config: TrainConfig, model_name: str, *, most_bytes: int) -> tuple[nn.Module, TrainJob, int]:
    """Its first two blocks in host memory, or only the first where two are too much."""
    from memfit.advice.preflight.repeated_weights import RepeatedWeights
    from memfit.jobs.training.model_building import build_for_training

    for layers in (2, 1):
        if bytes_to_train(shapes_only(config, model_name, layers=layers)) <= most_bytes:
            job = small_job(config, model_name, cut_to(config, model_name, layers))
            with RepeatedWeights():
                return build_for_training(job), job, layers
    raise CannotTell("one block of this model is more than this machine's free memory")


def bytes_to_train(model: nn.Module) -> int:
    """Weights, and gradients of those that are trained."""
    sizes = [(each.numel() * each.element_size(), each.requires_grad) for each in model.parameters()]
    return sum(size * (2 if trained else 1) for size, trained in sizes)

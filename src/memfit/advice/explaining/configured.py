"""The workload of a config of `memfit train`, with rows as long as it allows, and without reading its data."""

from __future__ import annotations

import dataclasses
import re

from memfit.jobs.workload import Workload

_SMALLER = re.compile(r"with micro_batch_size (\d{1,6}) instead of \d{1,6}")


def workload_of_config(name: str, log: str = "", *, world_size: int = 1) -> Workload:
    """Of a file or a shipped config. Where the log tells that the micro-batch was halved, the last size counts, at the
    same global batch."""
    from memfit.jobs.training.batch_sizes import resolve_batch
    from memfit.jobs.training.config_file import load_config
    from memfit.planning.train_workload import workload_of_config as workload_of

    config = load_config(name)
    model = _model(config.model.name, config.model.cache_dir)
    sizes = resolve_batch(config.batch, world_size)
    rows = [int(each[1]) for each in _SMALLER.finditer(log)]
    if rows and rows[-1] in sizes.rungs:
        sizes = sizes.with_micro_batch(rows[-1])
    made = workload_of(config, sizes, model, config.data.max_seq_len)
    return dataclasses.replace(
        made, grad_accum=sizes.gradient_accumulation_steps,
        alloc_conf=config.memory.alloc_conf,  # not what is exported on this machine
    )  # fmt: skip


def _model(name: str, cache_dir: str | None) -> str:
    """A name that the registry knows: a GGUF file is known by the folder that training has made of it."""
    from memfit.jobs.source import find_source
    from memfit.models.gguf import gguf_file
    from memfit.models.registry import resolve

    if gguf_file(name) is not None:
        return str(find_source(name, cache_dir=cache_dir).folder)
    resolve(name)
    return name

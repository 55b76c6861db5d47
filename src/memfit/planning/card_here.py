"""The card that a training job is planned for: the one that is asked for, or the GPU of this process.

The command that looks for what fits: the job as it was asked for, in flags.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator
from typing import Any

from memfit.errors import UsageError
from memfit.gpus import Gpu, estimate_context_start, find_gpu, is_size
from memfit.jobs.settings import flag
from memfit.jobs.workload import Workload
from memfit.units import MiB, gib

NOTICEABLE = 256 * MiB
"""What others hold is told from what CUDA itself takes only to about so much."""


def card_here() -> Gpu | None:
    """With what is left of it: less what other processes hold, and no more than this process may have. None where
    there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    index = _index(torch.cuda.device_count())
    card = _known(torch.cuda.get_device_properties(index))
    free, total = torch.cuda.mem_get_info(index)
    own = torch.cuda.memory_reserved(index) + card.context_start_bytes
    others = total - free - own
    if others > NOTICEABLE:
        note = f"other processes hold {gib(others)} of the card"
        card = dataclasses.replace(card, capacity_bytes=card.capacity_bytes - others, notes=(*card.notes, note))
    return _within_share(card, total, index)


def card_for(asked: str | None) -> Gpu | None:
    """`memory.gpu`. A size says nothing of kernels, so they are those of the GPU that is here, if one is."""
    here = card_here()
    if asked is None:
        return here
    card = find_gpu(asked, flag="memory.gpu")
    if here is None or not is_size(asked):
        return card
    return with_kernels_of(card, here)


def with_kernels_of(card: Gpu, here: Gpu) -> Gpu:
    return dataclasses.replace(
        card,
        arch=here.arch,
        sm_count=here.sm_count,
        max_threads_per_sm=here.max_threads_per_sm,
        context_start_bytes=here.context_start_bytes,
        context_basis=here.context_basis,
        context_source=here.context_source,
        context_seen=here.context_seen,
        notes=(*card.notes[:-1], f"kernels and context as on the {here.name} that is here"),
    )


def _index(count: int) -> int:
    """torchrun gives each process of a machine its own."""
    said = os.environ.get("LOCAL_RANK", "0")
    return int(said) if said.isdigit() and int(said) < count else 0


def _known(found: Any) -> Gpu:
    """Its own numbers, where the driver tells them; the context is the catalogue's, or goes by the size of the chip."""
    arch = int(found.major), int(found.minor)
    sm_count, threads = int(found.multi_processor_count), int(found.max_threads_per_multi_processor)
    try:
        like = find_gpu(str(found.name))
    except UsageError:  # a card that is not in the catalogue, or that comes in several sizes
        start, how = estimate_context_start(arch, sm_count, threads)
        note = f"what CUDA itself takes on the {found.name} is estimated, and the upper end counts: {how}"
        like = dataclasses.replace(find_gpu(f"{found.total_memory}B"), context_start_bytes=start, notes=(note,))
        like = dataclasses.replace(like, context_basis="estimated", context_source=how)
    named = dataclasses.replace(like, name=str(found.name), capacity_bytes=int(found.total_memory))
    return dataclasses.replace(named, arch=arch, sm_count=sm_count, max_threads_per_sm=threads)


def _within_share(card: Gpu, total: int, index: int) -> Gpu:
    """`torch.cuda.set_per_process_memory_fraction` limits what is reserved; the context comes on top."""
    import torch

    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    allowed = int(read(index) * total) + card.context_bytes if read is not None else card.capacity_bytes
    if allowed >= card.capacity_bytes:
        return card
    note = f"this process may reserve {gib(allowed - card.context_bytes)} of the card"
    return dataclasses.replace(card, capacity_bytes=allowed, notes=(*card.notes, note))


def fit_command(work: Workload, gpu: str, *, global_batch: int | None = None) -> str:
    """Accumulation follows from the global batch."""
    parts = ["memfit", "fit", work.kind, "--model", work.model]
    parts += unusual_flags(work, without=() if global_batch is None else ("grad_accum",))
    if global_batch is not None:
        parts += ["--global-batch", str(global_batch)]
    return shlex.join([*parts, "--gpu", gpu])


def unusual_flags(work: Workload, *, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Of the settings that this kind of job reads, only what is not as it would be without being said."""
    usual = Workload(kind=work.kind, model=work.model, loop=work.loop)
    read = [name for name in work.settings() if name not in without]
    for each in dataclasses.fields(Workload):
        value = getattr(work, each.name)
        if each.name == "loop" and work.trains and value != each.default:
            yield from ("--loop", str(value))
        elif each.name in read and value != getattr(usual, each.name):
            yield from _said(each.name, value)


def _said(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, tuple):
        return [flag(name), ",".join(map(str, value))]
    return [flag(name), str(value)]

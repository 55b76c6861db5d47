"""Run one job with no more memory than a smaller card would give it, and write down whether it ran.

    python -m accuracy.capped '{"id": "a", "cap_bytes": 8e9, "workload": {"kind": "forward", "model": "gpt2"}}'

As `accuracy.measure`, but weights are made on the GPU, which takes seconds where the host takes minutes; and pruning is
measured too: memfit's own engine over random weights, or, where the id ends with `-whole`, the public code's way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accuracy.measure import PhasePeaks, save_events, tell, weights_left_alone

WEIGHTS_IN_MEMORY = 1 << 28
"""Bytes of random weights; each tensor is read from them, from the start again where they end."""


class Peaks(PhasePeaks):
    """The weights of `model` get random values when they have been brought."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model

    def weights_are_there(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters() if self.model is not None else ():
                if parameter.is_cuda:
                    parameter.normal_(0, 0.02)

    def most(self, which: int) -> int | None:
        found = [peak[which] for name, peaks in self.peaks.items() if name != "load" for peak in peaks]
        return max(found, default=None)


def run_capped(spec: dict[str, Any], events: Path | None) -> dict[str, Any]:
    settings = spec["workload"]
    if settings.get("alloc_conf"):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings["alloc_conf"]
    from memfit.jobs.workload import Workload

    work = Workload.from_mapping(settings)
    torch.cuda.init()
    if events:
        torch.cuda.memory._record_memory_history(max_entries=3_000_000, context="alloc", stacks="python")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(spec["cap_bytes"] / torch.cuda.get_device_properties(0).total_memory)
    peaks = Peaks()
    result: dict[str, Any] = {**spec, "oom": False}
    try:
        (_prune if work.kind == "prune" else _run)(work, spec, peaks)
    except torch.OutOfMemoryError as error:
        result |= {"oom": True, "message": str(error)[:400]}
    if events:
        save_events(events / f"{spec['id']}.npz", peaks.marks)
    return result | {
        "peak_allocated": peaks.most(0), "peak_reserved": peaks.most(1), "phases": peaks.peaks,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
    }  # fmt: skip


def _run(work: Any, spec: Mapping[str, Any], peaks: Peaks) -> None:
    from memfit.jobs.build import prepare
    from memfit.jobs.run import run_job

    if "weights" in work.offload:  # they stay where they are made
        with weights_left_alone():
            job = prepare(work)
        peaks.model = job.model
        run_job(job, "cuda", peaks)
        return
    with torch.device("meta"):
        job = prepare(work)
    peaks.model = job.model
    with _made_on_the_gpu():
        run_job(job, "cuda", peaks)


@contextmanager
def _made_on_the_gpu() -> Iterator[None]:
    """A model without memory gets it where it is moved to, tensor by tensor as it would be copied."""
    from unittest import mock

    move = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _give_memory(module, args[0])
        return move(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "to", to):
        yield


def _give_memory(module: nn.Module, device: torch.device | str) -> None:
    """In the order in which torch moves a module; what is tied stays tied."""
    for child in module.children():
        _give_memory(child, device)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_meta:
            made = torch.zeros_like(tensor, device=device)
            torch.utils.swap_tensors(
                tensor, nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
            )


class RandomWeights:
    """What a checkpoint of this model would hold, made up."""

    def __init__(self, model: nn.Module) -> None:
        from memfit.models.checkpoint import StoredTensor

        kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
        self.stored = {
            name: StoredTensor(name, kinds[tensor.dtype], tuple(tensor.shape), 0, 0, tensor.nbytes)
            for name, tensor in model.state_dict().items()
        }
        dtype = next(model.parameters()).dtype
        made = torch.empty(WEIGHTS_IN_MEMORY // dtype.itemsize, dtype=dtype, device="cuda").normal_(0, 0.02)
        self._bytes = memoryview(made.cpu().view(torch.uint8).numpy())
        del made
        torch.cuda.empty_cache()

    def read_into(self, name: str, out: memoryview, start: int = 0) -> None:
        at, done = start % len(self._bytes), 0
        while done < len(out):
            part = self._bytes[at : at + len(out) - done]
            out[done : done + len(part)] = part
            done, at = done + len(part), 0


class _Nowhere:
    def write(self, block: int, parts: object, facts: object) -> None:
        return


def _prune(work: Any, spec: Mapping[str, Any], peaks: Peaks) -> None:
    from memfit.jobs.pruning.decoder import Decoder
    from memfit.jobs.pruning.engine import Engine
    from memfit.jobs.pruning.settings import PruneSettings
    from memfit.jobs.quantised import DTYPES
    from memfit.models.registry import build_model, load_config, resolve

    whole = spec["id"].endswith("-whole")
    source, layers = resolve(work.model), None if whole else spec.get("blocks")
    with torch.device("meta"):
        model = build_model(source, dtype=DTYPES[work.precision], attention=work.attention, layers=layers)
    if whole:
        _prune_whole(model, work, peaks)
        return
    windows = torch.randint(0, 30_000, (work.nsamples, work.seq_len))
    count = load_config(source).num_hidden_layers
    with Engine(
        Decoder(model, RandomWeights(model)), device="cuda", budget=work.gpu_budget_bytes, phases=peaks, whole=count
    ) as engine:
        engine.prune(PruneSettings(workload=work), windows, sink=_Nowhere())


def _prune_whole(model: Any, work: Any, peaks: Peaks) -> None:
    from memfit.jobs.pruning.decoder import Decoder
    from memfit.planning.pruning import prune_whole

    with torch.no_grad(), _made_on_the_gpu():
        prune_whole(Decoder(model, None), work, torch.device("cuda"), peaks)


if __name__ == "__main__":
    tell(sys.argv[1:], run_capped)

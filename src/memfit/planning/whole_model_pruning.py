"""Pruning as the public Wanda code does it, predicted: the whole model on the GPU, nothing streamed.

The public Wanda code holds all weights and two buffers of all hidden states; one window at a time goes through a block,
and a matrix's scores are sorted at once. What that code keeps alive is written down here, to be traced beside memfit's
own way, which streams blocks. Blocks come one after the other and leave nothing behind but what their last matrix left,
so two of them tell the peak; so do two windows.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from memfit.events import Trace
from memfit.gpus import Gpu
from memfit.jobs.pruning.decoder import Call, Decoder
from memfit.jobs.quantised import DTYPES
from memfit.jobs.run import Phases
from memfit.jobs.workload import Workload
from memfit.models.registry import build_model, parameter_count, resolve
from memfit.planning.failures import failures_of_the_job
from memfit.planning.predict import Plan, assess, context_on
from memfit.planning.pruning import ANSWERS, PruningPhases, label, within_positions
from memfit.planning.traced import Provenance, TracedShare
from memfit.platform import Platform, platform_of
from memfit.replay.alloc_config import AllocatorConfig
from memfit.tracing.answers import Answers
from memfit.tracing.tracer import Tracer, trace

BLOCKS, WINDOWS = 2, 2
WHAT = "the public Wanda code: all weights and two buffers of hidden states on the card"


def predict_whole_model_pruning(work: Workload, gpu: Gpu | None) -> Plan:
    """As `predict` for the same workload, but with all weights on the card."""
    started = time.perf_counter()
    work, shortened = within_positions(work)
    made, parameters, how = _traced(work, platform_of(gpu))
    context = context_on(gpu, training=False, flash=work.precision != "fp32")
    return assess(
        made,
        AllocatorConfig.parse(work.alloc_conf),
        gpu,
        context,
        workload=work.settings() | {"gpu": None},
        model=resolve(work.model).name,
        parameters=parameters,
        trainable_parameters=0,
        how=how,
        notes=(WHAT, how.in_words(), *shortened),
        started=started,
    )


def _traced(work: Workload, platform: Platform) -> tuple[Trace, int, Provenance]:
    with torch.device("meta"):
        model = build_model(resolve(work.model), dtype=DTYPES[work.precision], attention=work.attention)
    parameters = parameter_count(model)
    decoder = Decoder(model, None)

    def job(tracer: Tracer) -> None:
        tracer.modules.know(model, "")
        for index, block in enumerate(decoder.blocks):
            tracer.modules.know(block, f"{decoder.path}.{index}")
        with torch.no_grad():
            prune_whole(decoder, work, tracer.device, PruningPhases(tracer))

    with failures_of_the_job():
        made = trace(job, platform=platform, answers=Answers(ANSWERS))
    label(made)
    blocks, windows = len(decoder.blocks), work.nsamples
    how = Provenance(
        blocks=TracedShare(BLOCKS, blocks) if blocks > BLOCKS else None,
        micro_batches=TracedShare(WINDOWS, windows) if windows > WINDOWS else None,
    )
    return made, parameters, how


def prune_whole(decoder: Decoder, work: Workload, device: torch.device, phases: Phases) -> None:
    """A few windows through the first blocks; what is removed is nobody's to keep."""
    with phases("weights"):
        for module in (decoder.model, *decoder.blocks):
            module.to(device)
    with phases("calibration"):
        inputs = torch.zeros(
            work.nsamples, work.seq_len, decoder.hidden_size, dtype=decoder.dtype, device=device
        )  # all windows, before a block and after it
        outputs = torch.zeros_like(inputs)
    with phases("embed"):
        for window in range(min(WINDOWS, work.nsamples)):
            inputs[window] = decoder.front(torch.zeros(1, work.seq_len, dtype=torch.int64, device=device))[0]
            calls = decoder.take_calls()
    kept = _LoopVariables()
    for index, block in enumerate(decoder.blocks[:BLOCKS]):
        matrices = [module for module in block.modules() if isinstance(module, nn.Linear)]
        with phases("statistics", index):
            squares = {matrix: torch.zeros(matrix.in_features, device=device) for matrix in matrices}
            hooks = [matrix.register_forward_hook(_observing(squares)) for matrix in matrices]
            _through(decoder, index, inputs, outputs, calls)
            for hook in hooks:
                hook.remove()
        with phases("select", index):
            for matrix in matrices:
                kept.select(matrix, squares[matrix], float(work.sparsity or 0.5))
        with phases("propagate", index):
            _through(decoder, index, inputs, outputs, calls)
        inputs, outputs = outputs, inputs


class _LoopVariables:
    """Variables of a loop live on until the next round assigns them: one matrix is sorted while the last one's result
    is there."""

    def __init__(self) -> None:
        self.scores: Any = None
        self.mask: Any = None
        self.sorted: Any = None
        self.chosen: Any = None

    def select(self, matrix: nn.Linear, squares: Tensor, share: float) -> None:
        weight = matrix.weight.data
        self.scores = torch.abs(weight) * torch.sqrt(squares.reshape(1, -1))
        self.mask = torch.zeros_like(self.scores) == 1
        self.sorted = torch.sort(self.scores, dim=-1, stable=True)
        self.chosen = self.sorted[1][:, : int(self.scores.shape[1] * share)]
        self.mask.scatter_(1, self.chosen, True)
        weight[self.mask] = 0


def _observing(squares: dict[nn.Linear, Tensor]) -> Any:
    def observe(matrix: nn.Linear, given: tuple[Tensor, ...], _: Tensor) -> None:
        columns = given[0].reshape(-1, given[0].shape[-1]).t().type(torch.float32)
        squares[matrix] += torch.norm(columns, p=2, dim=1) ** 2

    return observe


def _through(decoder: Decoder, index: int, inputs: Tensor, outputs: Tensor, calls: list[Call]) -> None:
    for window in range(min(WINDOWS, len(inputs))):
        outputs[window] = decoder.run(index, inputs[window].unsqueeze(0), calls[index])[0]

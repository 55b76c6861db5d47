"""What helps when memory runs out, by the stage in which it did. Only what makes that stage smaller is named.

In this engine the device holds one block, the statistics of its inputs, and hidden states, which move to the host when
they do not fit. So a smaller model, an empty cache or gradient checkpointing, which guides advise, would not help.
"""

from __future__ import annotations

from memfit.errors import MemfitError
from memfit.jobs.memory_errors import on_the_host
from memfit.jobs.pruning.settings import PruneSettings
from memfit.units import format_bytes


class RanOut(MemfitError):
    """Memory ran out on the way to a checkpoint; the hint is what makes that stage smaller."""

    def __init__(self, stage: str, settings: PruneSettings, error: BaseException, budget: int | None) -> None:
        where = "host memory" if on_the_host(error) else "GPU memory"
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        first = first.partition(" If reserved but unallocated")[0]  # torch's own advice, which seldom fits
        helps = "\n".join(fixes(stage, settings, error, budget))
        super().__init__(f"{where} ran out before {stage}: {first}", hint=helps)


def fixes(stage: str, settings: PruneSettings, error: BaseException, budget: int | None = None) -> list[str]:
    """Lines for a person, the most likely help first. `budget` is what the run had reckoned with."""
    if on_the_host(error):
        return _for_the_host(stage, settings)
    if stage.startswith("04"):
        return _for_pruning(settings, budget)
    if stage.startswith("06"):
        return _for_evaluation(settings, budget)
    return ["close other programs on this GPU (`memfit watch` shows them), or choose another with --device cuda:1"]


def _less(budget: int | None) -> str:
    room = "8GiB" if budget is None else format_bytes(budget * 3 // 4).translate({32: None, 44: None})
    room = room.replace(".00", "")
    return f"--max-gpu-memory {room}: hidden states move to the host and fewer windows run at a time"


def _for_pruning(settings: PruneSettings, budget: int | None) -> list[str]:
    lines = [_less(budget)]
    if settings.seqlen > 512:
        lines.append(f"--seqlen {settings.seqlen // 2}: halves what a window takes on its way through a block")
    if settings.method == "sparsegpt":
        lines.append("--prune-method wanda or ria: no X^T X of each input on the device")
    if settings.reconstruct:
        lines.append("without --reconstruct: no gradients and optimizer state of a block")
    if settings.nsamples > 32:
        lines.append(f"--nsamples {settings.nsamples // 2}: half of the hidden states")
    return [*lines, "--device cpu: slow, but needs no GPU memory"]


def _for_evaluation(settings: PruneSettings, budget: int | None) -> list[str]:
    lines = [_less(budget)]
    if settings.seqlen > 512:
        lines.append(f"--seqlen {settings.seqlen // 2}: shorter windows (perplexity is then of that length)")
    lines.append("--no-eval: prune without perplexity")
    return [f"{line}, with --resume" if settings.save and "seqlen" not in line else line for line in lines]


def _for_the_host(stage: str, settings: PruneSettings) -> list[str]:
    lines = [f"--nsamples {max(1, settings.nsamples // 2)}: half of the hidden states"]
    if stage.startswith("06"):
        lines = ["--eval-windows 40: fewer hidden states at a time"]
    if settings.seqlen > 512:
        lines.append(f"--seqlen {settings.seqlen // 2}: halves them too")
    return lines

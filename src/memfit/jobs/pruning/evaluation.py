"""Perplexity by the published protocol, streamed, and zero-shot accuracy of a saved model by lm-eval.

No logits of a whole window, no more than a block on the device. The text is tokenised once and cut into windows of the
same length, the tail dropped. Of each window, the mean cross-entropy of its tokens 2 to L given those before them; the
mean of these means, exponentiated. Loss in fp32, sums in fp64. For WikiText-2 the text is the test rows joined with two
line feeds; for C4 the first 1,100 validation documents joined with a space, of which the first 256 windows count.

Zero-shot tasks are those of the published tables; lm-eval is the extra memfit[eval].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.errors import InputError, MemfitError, UsageError
from memfit.jobs.pruning.calibration import Windows, fingerprint_of, tokenise, too_short
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.placement import HiddenStates
from memfit.jobs.texts import Texts
from memfit.units import MiB

C4_WINDOWS = 256
LOGITS_BYTES = 128 * MiB
"""Of one piece of logits, in fp32."""
SAY_EVERY = 50

OnWindow = Callable[[int], None]


def evaluation_windows(texts: Texts, tokenizer: Any, seqlen: int, most: int | None = None) -> Windows:
    """The text's windows [n, seqlen], at most `most` of them from its beginning."""
    tokens = torch.tensor(tokenise(tokenizer, texts.joined()), dtype=torch.int64)
    count = len(tokens) // seqlen
    if count == 0:
        raise too_short(texts, len(tokens), f"perplexity at --seqlen {seqlen} needs at least {seqlen:,}")
    if texts.name == "c4":
        count = min(count, C4_WINDOWS)
    ids = tokens[: min(count, most or count) * seqlen].view(-1, seqlen)
    notes = texts.notes
    if len(ids) < count:
        notes = (*notes, f"perplexity is of the first {len(ids)} of {count} windows")
    fingerprint = fingerprint_of(ids, texts, tokenizer, seed=None, tokens=len(tokens))
    return Windows(ids=ids, fingerprint=fingerprint, notes=notes)


@torch.no_grad()
def perplexity_of_states(
    engine: Engine, states: HiddenStates, ids: Tensor, on_window: OnWindow = lambda _: None
) -> float:
    """What the head makes of hidden states that have left the last block. The states are let go of."""
    losses = torch.zeros(len(ids), dtype=torch.float64, device=engine.device)
    with engine.tail():
        for batch, hidden in states.batches():
            for i in range(batch.count):
                number = batch.first + i
                if number % SAY_EVERY == 0:
                    on_window(number)
                targets = ids[number].to(engine.device)
                losses[number] = _mean_loss(engine, hidden[i : i + 1], targets)
    states.release()
    engine.team.add_up([losses])
    return math.exp(min(losses.mean().item(), 700.0))


def perplexity_of_model(
    engine: Engine, ids: Tensor, on_window: OnWindow = lambda _: None, output: OutputFolder | None = None
) -> float:
    """Of the model as it is stored, or as an output folder has it."""
    states = engine.embed(ids)
    engine.run_blocks(states, output=output)
    return perplexity_of_states(engine, states, ids, on_window)


def _mean_loss(engine: Engine, hidden: Tensor, targets: Tensor) -> Tensor:
    """hidden [1, L, h], targets [L]: the last token predicts nothing that is there."""
    predicting = hidden.shape[1] - 1
    step = max(1, LOGITS_BYTES // (4 * engine.decoder.vocab_size))
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start in range(0, predicting, step):
        end = min(start + step, predicting)
        logits = engine.logits(hidden[:, start:end])[0].float()
        total += torch.nn.functional.cross_entropy(logits, targets[start + 1 : end + 1], reduction="sum").double()
        del logits
    return total / max(1, predicting)


TASKS = ("boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")


def check(save: str | None) -> None:
    """Before any work."""
    if find_spec("lm_eval") is None:
        raise InputError("--eval-zero-shot needs the package lm-eval", hint="pip install 'memfit[eval]'")
    if save is None:
        raise UsageError("--eval-zero-shot needs --save: lm-eval loads the pruned model from its folder")


def evaluate(folder: Path, device: torch.device) -> dict[str, Any]:
    """Accuracy of each task, between 0 and 1."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    try:
        model = HFLM(pretrained=str(folder), device=str(device))
        found = lm_eval.simple_evaluate(model=model, tasks=list(TASKS))
    except Exception as error:  # its data sets may be out of reach: the pruned model is saved all the same
        raise MemfitError(
            f"lm-eval ended with {type(error).__name__}: {str(error)[:200]}", hint=f"the pruned model is in {folder}"
        ) from error
    return {task: _accuracy(values) for task, values in found["results"].items()}


def _accuracy(values: dict[str, Any]) -> float | None:
    number = values.get("acc,none", values.get("acc"))
    return None if number is None else float(number)

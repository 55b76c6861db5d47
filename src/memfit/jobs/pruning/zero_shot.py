"""Zero-shot accuracy of a saved model by lm-eval, on the tasks of the published tables: the extra memfit[eval]."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from memfit.errors import InputError, MemfitError, UsageError

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

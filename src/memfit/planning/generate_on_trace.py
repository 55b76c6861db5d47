"""What `generate` asks of its tensors, answered for a run that makes exactly the tokens asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memfit.jobs.workload import Workload
from memfit.tracing.answers import Answer, Site, Value

UTILS = "transformers/generation/utils.py"
LOGITS = "transformers/generation/logits_process.py"


def generate_answers(work: Workload) -> dict[Site, Answer]:
    return {
        Site(UTILS, "_prepare_special_tokens"): False,  # the padding token is no end token; end tokens are not negative
        Site(UTILS, "generate"): False,  # is there padding on the right?
        Site(UTILS, "__call__"): true_at(work.new_tokens),  # StopCheck: has every row ended?
        Site(UTILS, "_beam_search"): beam_search(work.new_tokens),
        Site(LOGITS, "__init__"): False,  # end tokens are not negative
    }


def beam_search(count: int) -> Callable[[torch.Tensor], Value]:
    """It asks for the padding token, a number, and whether some beam goes on, yes or no."""
    ended = true_at(count)
    return lambda tensor: not ended(tensor) if tensor.dtype == torch.bool else 0


def true_at(count: int) -> Callable[[torch.Tensor], bool]:
    asked = 0

    def answer(_: torch.Tensor) -> bool:
        nonlocal asked
        asked += 1
        return asked >= count

    return answer

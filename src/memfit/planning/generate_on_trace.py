"""What `generate` asks of its tensors, answered for a run that makes exactly the tokens asked for."""

from __future__ import annotations

from collections.abc import Callable

from memfit.jobs.workload import Workload
from memfit.tracing.answers import Site, Value

UTILS = "transformers/generation/utils.py"
LOGITS = "transformers/generation/logits_process.py"


def generate_answers(work: Workload) -> dict[Site, Value | Callable[[], Value]]:
    return {
        Site(UTILS, "_prepare_special_tokens"): False,  # the padding token is no end token; end tokens are not negative
        Site(UTILS, "generate"): work.padding,  # right padding?
        Site(UTILS, "__call__"): true_at(work.new_tokens),  # StopCheck: has every row ended?
        Site(UTILS, "_beam_search_has_unfinished_sequences"): true_until(work.new_tokens),
        Site(LOGITS, "__init__"): False,  # end tokens are not negative
    }


def true_at(count: int) -> Callable[[], bool]:
    asked = 0

    def answer() -> bool:
        nonlocal asked
        asked += 1
        return asked >= count

    return answer


def true_until(count: int) -> Callable[[], bool]:
    ended = true_at(count)
    return lambda: not ended()

"""What is added in place on a GPU is added in place here, unless the job watches its ops itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reading import story
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.tracing.tracer import Tracer


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def biased(mode: AbstractContextManager[Any]) -> str:
    """Events of a linear layer whose rows do not lie one after the other."""

    def job(_: Tracer) -> None:
        x = torch.empty(4, 64, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
        weight = torch.empty(32, 128, device="cuda", dtype=torch.bfloat16)
        bias = torch.empty(32, device="cuda", dtype=torch.bfloat16)
        with mode:
            F.linear(x, weight, bias)

    return story(job)


@pytest.mark.parametrize(("mode", "sums"), [(nullcontext(), 1), (Watching(), 2)])
def test_a_bias_is_added_in_place_unless_the_job_watches(mode: AbstractContextManager[Any], sums: int) -> None:
    assert biased(mode).split().count(f"+{4 * 64 * 32 * 2}") == sums

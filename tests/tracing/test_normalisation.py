"""Norms read rows one after the other: what does not lie so is copied first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reading import story

from memfit.tracing.tracer import Tracer

ROWS, WIDTH = 64, 128
NORMED = ROWS * WIDTH * 4
STATISTIC = ROWS * 4


def test_an_input_without_gaps_is_not_copied() -> None:
    def job(_: Tracer) -> None:
        F.layer_norm(torch.empty(ROWS, WIDTH, device="cuda"), (WIDTH,))

    assert story(job).startswith(f"+{NORMED} +{NORMED} +{STATISTIC} +{STATISTIC}")


def test_one_of_three_tensors_that_lie_in_turns_is_copied_before_it_is_normed() -> None:
    def job(_: Tracer) -> None:
        F.layer_norm(torch.empty(ROWS, 3, WIDTH, device="cuda")[:, 1], (WIDTH,))

    assert story(job).startswith(f"+{3 * NORMED} +{NORMED} +{NORMED} +{STATISTIC} +{STATISTIC} -1 ")


def test_an_rms_norm_without_weight_is_one_kernel() -> None:
    def job(_: Tracer) -> None:
        F.rms_norm(torch.empty(ROWS, WIDTH, device="cuda", requires_grad=True), (WIDTH,))

    assert story(job).split()[:3] == [f"+{NORMED}", f"+{NORMED}", f"+{STATISTIC}"]
    assert story(job).count("+") == 3

"""A rule that is asked again says what it said; asked about other sizes, what a trace of those would have shown."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import ops
import pytest
import torch
import torch.nn.functional as F

from memfit.core.events import Trace
from memfit.core.holes import Call, filled, fingerprint, stream_of
from memfit.errors import TraceError
from memfit.tracing.answers import Answers
from memfit.tracing.platform import H200, Platform
from memfit.tracing.rule_answers import RuleAnswers
from memfit.tracing.tracer import trace

RECORDED = Path(__file__).parents[1] / "data" / "h200-ops.json"


def traced(job: Callable[[Any], object], **options: Any) -> tuple[Trace, list[Call]]:
    calls: list[Call] = []

    def run(tracer: Any) -> None:
        nonlocal calls
        calls = tracer.rule_calls.made
        job(tracer)
        tracer.trace.mark("end")

    made = trace(run, **options)
    made.truncate(len(made) - next(i for i, action in enumerate(reversed(made.actions)) if action == 5))
    return made, calls


def asked_again(made: Trace, calls: list[Call], platform: Platform = H200) -> Trace:
    """The trace without what rules said, filled with what they say now."""
    rules, holed = RuleAnswers(platform), stream_of(made, calls)
    different: dict[Any, int] = {}
    which = [
        different.setdefault((hole.form, numbers), len(different))
        for hole, numbers in zip(holed.stream.holes, holed.numbers, strict=True)
    ]
    answers = [rules.of(form, numbers) for form, numbers in different]
    pool = np.array([*holed.sizes, *(size for answer in answers for size in answer.sizes)])
    return filled(holed.stream, [answer.outline for answer in answers], which).trace(pool)


@cache
def every_recorded_op() -> tuple[Trace, list[Call]]:
    probes = [p for p in json.loads(RECORDED.read_text())["probes"] if p["name"] in ops.BUILDERS]

    def job(_: Any) -> None:
        for probe in probes:
            try:
                ops.BUILDERS[probe["name"]](*probe.get("spec", []))()
            except TraceError:
                continue

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return traced(job, answers=Answers(ops.ANSWERS))


def test_every_rule_says_again_what_it_said_of_the_recorded_ops() -> None:
    made, calls = every_recorded_op()
    assert len(calls) > 1000
    assert fingerprint(asked_again(made, calls)) == fingerprint(made)

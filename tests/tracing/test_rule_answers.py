"""A rule that is asked again says what it said; asked about other sizes, what a trace of those would have shown."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import ops
import pytest
import torch

from memfit.errors import TraceError
from memfit.events import Trace
from memfit.extrapolation.streams import RuleCall, filled, fingerprint, stream_of
from memfit.platform import H200
from memfit.tracing.answers import Answers
from memfit.tracing.rule_answers import RuleAnswers
from memfit.tracing.tracer import trace

RECORDED = Path(__file__).parents[1] / "data" / "h200-ops.json"


def traced(job: Callable[[Any], object], **options: Any) -> tuple[Trace, list[RuleCall]]:
    calls: list[RuleCall] = []

    def run(tracer: Any) -> None:
        nonlocal calls
        calls = tracer.rule_calls.made
        job(tracer)
        tracer.trace.mark("end")

    made = trace(run, **options)
    made.truncate(len(made) - next(i for i, action in enumerate(reversed(made.actions)) if action == 5))
    return made, calls


def asked_again(made: Trace, calls: list[RuleCall], sizes: Any = None) -> Trace:
    """The trace without what rules said, filled with what they say now, and perhaps with other sizes."""
    rules, holed = RuleAnswers(H200), stream_of(made, calls)
    different: dict[Any, int] = {}
    which = [
        different.setdefault((hole.form, numbers), len(different))
        for hole, numbers in zip(holed.stream.holes, holed.numbers, strict=True)
    ]
    answers = [rules.ask(form, numbers) for form, numbers in different]
    pool = np.array(
        [*(holed.sizes if sizes is None else sizes), *(size for answer in answers for size in answer.sizes)]
    )
    return filled(holed.stream, [answer.outline for answer in answers], which).trace(pool)


FROM_EACH = 6


@cache
def recorded_ops() -> tuple[Trace, list[RuleCall]]:
    """Some of each kind, far apart in the list: their shapes differ."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for probe in json.loads(RECORDED.read_text())["probes"]:
        by_name.setdefault(probe["name"], []).append(probe)
    chosen = [p for found in by_name.values() for p in found[:: -(-len(found) // FROM_EACH)]]

    def job(_: Any) -> None:
        for probe in chosen:
            with suppress(TraceError):
                if probe["name"] in ops.BUILDERS:
                    ops.BUILDERS[probe["name"]](*probe.get("spec", []))()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return traced(job, answers=Answers(ops.ANSWERS))


def test_every_rule_says_again_what_it_said_of_the_recorded_ops() -> None:
    made, calls = recorded_ops()
    assert len({call.form.op for call in calls}) > 40
    assert fingerprint(asked_again(made, calls)) == fingerprint(made)


def embedding_backward(count: int) -> Callable[[Any], None]:
    def job(_: Any) -> None:
        table = torch.nn.Embedding(100, 16, device="cuda")
        table(torch.zeros(count, dtype=torch.int64, device="cuda")).sum().backward()

    return job


def bias_gradient(count: int) -> Callable[[Any], None]:
    def job(_: Any) -> None:
        bias = torch.zeros(512, device="cuda", requires_grad=True)
        (torch.zeros(count, 512, device="cuda") + bias).backward(torch.ones(count, 512, device="cuda"))

    return job


@pytest.mark.parametrize(
    ("work", "few", "many", "word"),
    [(embedding_backward, 100, 5000, "radix sort"), (bias_gradient, 4, 4096, "reduction across thread blocks")],
)
def test_a_call_from_below_a_threshold_tells_what_happens_above_it(
    work: Callable[[int], Callable[[Any], None]], few: int, many: int, word: str
) -> None:
    (below, calls_below), (above, calls_above) = traced(work(few)), traced(work(many))
    assert word not in below.names
    assert word in above.names
    assert [call.form for call in calls_below] == [call.form for call in calls_above]
    streams = stream_of(below, calls_below).stream, stream_of(above, calls_above).stream
    assert streams[0] == streams[1]
    there = [RuleCall(b.form, a.numbers, b.start, b.end, b.module, b.category, b.argument_modules)
             for b, a in zip(calls_below, calls_above, strict=True)]  # fmt: skip
    sizes = stream_of(above, calls_above).sizes
    assert fingerprint(asked_again(below, there, sizes=sizes)) == fingerprint(above)


def test_a_rule_about_a_list_of_weights_is_left_as_it_was_traced() -> None:
    def job(_: Any) -> None:
        torch._foreach_norm([torch.zeros(1 << 20, device="cuda"), torch.zeros(3, device="cuda")])

    made, calls = traced(job)
    assert calls == []
    assert "foreach norm partial norms" in made.names


def test_a_workspace_that_a_rule_was_the_first_to_need_is_left_as_it_was_traced() -> None:
    def job(_: Any) -> None:
        offsets = torch.zeros(4, dtype=torch.int32, device="cuda")
        for _ in range(2):
            a, b = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 32), (4, 32, 64)))
            torch._grouped_mm(a, b, offs=offsets)

    made, calls = traced(job)
    assert fingerprint(asked_again(made, calls)) == fingerprint(made)

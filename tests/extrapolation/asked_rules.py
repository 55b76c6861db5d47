"""What a rule answers, written into a trace as the tracer does."""

from __future__ import annotations

from memfit.events import Action, Trace
from memfit.extrapolation.streams import RuleAnswer, RuleCall


def written_call(trace: Trace, form: str, numbers: tuple[int, ...], answer: RuleAnswer) -> RuleCall:
    start, blocks = len(trace), {}
    for action, subject in zip(answer.outline.actions, answer.outline.subjects, strict=True):
        if action == Action.ALLOC:
            blocks[subject] = trace.alloc(answer.sizes[subject], op=answer.outline.ops[subject])
        else:
            trace.free(blocks[subject])
    return RuleCall(form, numbers, start, len(trace), "", "", ())

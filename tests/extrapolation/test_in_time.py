"""A generation told by its first tokens and its last ones: the same stream as that of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asked_rules import written_call

from memfit.events import Action, Trace
from memfit.extrapolation.blocks import NotRepeating
from memfit.extrapolation.steps import GenerationExtension, traced_tokens
from memfit.extrapolation.streams import CALLER, Outline, RuleAnswer, RuleCall, answered, filled, fingerprint, stream_of

PROMPT, NEW = 10, 60
NOTHING = RuleAnswer(Outline((), (), (), ()), ())
Rule = Callable[[object, tuple[int, ...]], RuleAnswer]


def split_over_the_card(_: object, numbers: tuple[int, ...]) -> RuleAnswer:
    """From 33 keys on they are shared out, and partial results meet in a buffer that grows with every 16th."""
    (keys,) = numbers
    if keys <= 32:
        return NOTHING
    return RuleAnswer(Outline((Action.ALLOC, Action.FREE), (0, 0), ("partial",), (CALLER,)), (100 * (keys // 16),))


def generation(
    prompt: int, tokens: int, *, rule: Rule = split_over_the_card, window: int = 10**9, at_the_end: int | None = None
) -> tuple[Trace, list[RuleCall]]:
    """Each step makes a longer cache, drops the one before, and asks a rule."""
    trace, calls, done = Trace(), [], []
    cache = trace.alloc(4 * prompt, op="prefill")
    for length in range(prompt + 1, prompt + tokens + 1):
        longer = trace.alloc(4 * min(length, window), op="cat")
        trace.free(cache)
        cache = longer
        calls.append(written_call(trace, "attention", (length,), rule("attention", (length,))))
        if length == at_the_end:
            trace.free(trace.alloc(7, op="copy"))
        done.append(len(trace))
    trace.facts["tokens"] = done
    return trace, calls


def told(asked: list[int] | None = None, **how: Any) -> Trace:
    traced = traced_tokens(NEW)
    near = stream_of(*generation(PROMPT, traced, **how))
    far = stream_of(*generation(PROMPT + NEW - traced, traced, **how))

    def ask(form: object, numbers: tuple[int, ...]) -> RuleAnswer:
        if asked is not None:
            asked.append(numbers[0])
        return how.get("rule", split_over_the_card)(form, numbers)

    sized = GenerationExtension(near.stream, far.stream, NEW).apply(near.sized, far.sized, ask)
    outlines, pool = answered(sized, ask)
    return filled(sized.stream, outlines, sized.which).trace(pool)


def whole(**how: Any) -> Trace:
    trace, _ = generation(PROMPT, NEW, **how)
    del trace.facts["tokens"]
    return trace


def test_all_tokens_are_told_with_what_the_rule_says_at_each() -> None:
    made = told()
    assert fingerprint(made) == fingerprint(whole())
    assert made.op(len(made.requested) - 1) == "partial"


def test_a_rule_is_not_asked_at_every_token_where_both_ends_agree() -> None:
    asked: list[int] = []
    made = told(asked, rule=lambda form, numbers: NOTHING)
    assert fingerprint(made) == fingerprint(whole(rule=lambda form, numbers: NOTHING))
    assert len(asked) < NEW // 2


def test_divisibility_is_seen_at_the_ends() -> None:
    def every_fourth(form: object, numbers: tuple[int, ...]) -> RuleAnswer:
        return split_over_the_card(form, (33,)) if numbers[0] % 4 == 0 else NOTHING

    assert fingerprint(told(rule=every_fourth)) == fingerprint(whole(rule=every_fourth))


def test_what_happens_only_at_the_last_token_is_seen() -> None:
    with pytest.raises(NotRepeating):
        told(at_the_end=PROMPT + NEW)


def test_what_happens_only_in_the_first_steps_is_seen() -> None:
    with pytest.raises(NotRepeating):
        told(at_the_end=PROMPT + 8)


def test_a_cache_that_stops_growing_is_seen() -> None:
    """Sizes may differ by 1 MiB, so the bytes of a token are many here."""

    def large(prompt: int, tokens: int) -> tuple[Trace, list[RuleCall]]:
        trace, calls = generation(prompt, tokens, window=PROMPT + 30)
        for block in range(len(trace.requested)):
            trace.requested[block] <<= 20
        return trace, calls

    traced = traced_tokens(NEW)
    near, far = stream_of(*large(PROMPT, traced)), stream_of(*large(PROMPT + NEW - traced, traced))
    with pytest.raises(NotRepeating):
        GenerationExtension(near.stream, far.stream, NEW).apply(near.sized, far.sized, split_over_the_card)

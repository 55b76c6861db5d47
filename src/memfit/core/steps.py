"""More steps than were traced. From its second step on a job repeats itself: what it does in the last traced step, it
does in every later one, with new tensors. The two last steps must be the same event for event; that is the proof.

>>> trace = Trace()
>>> for step in (1, 2, 3):
...     trace.mark("forward", step)
...     trace.free(trace.alloc(1000 if step == 1 else 500))
>>> longer = with_steps(trace, 5)
>>> [mark.step for mark in longer.marks], [longer.requested[s] for a, s in longer.events() if a == Action.ALLOC]
([1, 2, 3, 4, 5], [1000, 500, 500, 500, 500])
"""

from __future__ import annotations

from memfit.core.events import Action, Trace
from memfit.core.repeat import NotRepeating
from memfit.core.window import between, step_begins


def with_steps(trace: Trace, steps: int) -> Trace:
    """The trace of `steps` steps; of fewer if fewer are wanted than it has."""
    traced = max((mark.step for mark in trace.marks), default=0)
    if steps < traced:
        return between(trace, 0, _begin(trace, steps + 1))
    made = between(trace, 0, len(trace))
    if steps == traced:
        return made
    before, last = range(_begin(trace, traced - 1), _begin(trace, traced)), range(_begin(trace, traced), len(trace))
    successor = _successors(trace, before, last)
    tail = _unfinished(trace, before, last, successor)
    whole = [(trace.actions[event], trace.subjects[event]) for event in last] + tail
    previous = successor  # a step frees what it made itself, or what the step before it made
    for step in range(traced + 1, steps + 1):
        for action, block in tail:
            made._event(Action(action), block)
        new = _append(made, trace, whole[: len(last)], step, previous)
        previous = {block: new[partner] for block, partner in successor.items()}
        tail = [(action, new[block]) for action, block in whole[len(last) :]]
    return made


def _begin(trace: Trace, step: int) -> int:
    found = step_begins(trace, step)
    if found is None:
        raise NotRepeating(f"no step {step} in the trace")
    return found


def _successors(trace: Trace, before: range, last: range) -> dict[int, int]:
    """For each block of the step before the last, the one that the last step makes in its place."""
    if len(last) > len(before):
        raise NotRepeating("the last step has more events than the one before")
    successor: dict[int, int] = {}
    for a, b in zip(before, last, strict=False):
        x, y = trace.subjects[a], trace.subjects[b]
        if trace.actions[a] != trace.actions[b]:
            raise NotRepeating("the last two steps do different things")
        if trace.actions[a] == Action.ALLOC:
            if trace.requested[x] != trace.requested[y]:
                raise NotRepeating("tensors of the last two steps differ")
            successor[x] = y
        elif Action.ALLOC < trace.actions[a] <= Action.FREE_COMPLETED and successor.get(x, y) != y:
            raise NotRepeating("the last two steps free different tensors")
    return successor


def _unfinished(trace: Trace, before: range, last: range, successor: dict[int, int]) -> list[tuple[int, int]]:
    """What the last step still held when the job ended, and would let go as the step before it did."""
    rest = [(trace.actions[event], trace.subjects[event]) for event in before[len(last) :]]
    if any(not Action.ALLOC < action <= Action.FREE_COMPLETED or block not in successor for action, block in rest):
        raise NotRepeating("the last step ends before it is over")
    return [(action, successor[block]) for action, block in rest]


def _append(
    made: Trace, trace: Trace, events: list[tuple[int, int]], step: int, previous: dict[int, int]
) -> dict[int, int]:
    """One more step. `previous`: blocks of the step before it, by those of the step before the last traced one."""
    new: dict[int, int] = {}
    for action, subject in events:
        if action == Action.MARK:
            made.mark(trace.marks[subject].phase, step)
        elif action == Action.ALLOC:
            new[subject] = made.alloc(
                trace.requested[subject], stream=trace.streams[subject], category=trace.category(subject),
                op=trace.op(subject), module=trace.module(subject),
            )  # fmt: skip
        elif action <= Action.FREE_COMPLETED:
            made._event(Action(action), _named(subject, new, previous))
        else:
            made._event(Action(action), subject)
    return new


def _named(block: int, new: dict[int, int], previous: dict[int, int]) -> int:
    if block in new:
        return new[block]
    if block in previous:
        return previous[block]
    raise NotRepeating("a step frees what was made more than one step before")

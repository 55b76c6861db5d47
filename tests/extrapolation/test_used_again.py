"""A buffer of compiled code that several have one after the other is named for who has it when most is held."""

from __future__ import annotations

import pytest

from memfit.events import Trace
from memfit.extrapolation.reused import REUSED, joined

MiB = 1 << 20


def made(trace: Trace, size: int, category: str, *, again: bool = False) -> int:
    op = REUSED if again else "aten.empty_strided.default"
    return trace.alloc(size, op=op, module=f"the {category}'s", category=category)


def passed_on(*, peak_at: int) -> Trace:
    """A buffer that holds an activation, then a product, then a gradient; the most is held beside one of them, or
    before any."""
    trace = Trace()
    before = 0
    for number, category in enumerate(("none", "activations", "temporaries", "gradients")):
        if number > 0:
            if number > 1:
                trace.free(before)
            before = made(trace, MiB, category, again=number > 1)
        if number == peak_at:
            trace.free(made(trace, 8 * MiB, "loss"))
    return joined(trace)


@pytest.mark.parametrize(
    ("peak_at", "category"), [(0, "gradients"), (1, "activations"), (2, "temporaries"), (3, "gradients")]
)
def test_a_buffer_is_named_for_who_has_it_at_the_peak_or_had_it_last(peak_at: int, category: str) -> None:
    trace = passed_on(peak_at=peak_at)
    found = [block for block, size in enumerate(trace.requested) if size == MiB]
    assert len(found) == 1
    assert trace.names[trace.category_of[found[0]]] == category
    assert trace.module(found[0]) == f"the {category}'s"
    assert trace.op(found[0]) == "aten.empty_strided.default"

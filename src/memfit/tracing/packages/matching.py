"""scipy's matching of predictions with targets: which belong together nobody knows, how many their shapes say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from memfit.tracing.own_code import OwnCodeTracer

ANY_PAIRS = "which predictions belong to which targets (linear_sum_assignment) nobody knows: any pairs were taken"


@contextmanager
def matching_of_unknown_costs(tracer: OwnCodeTracer) -> Iterator[None]:
    """Nothing until the traced code has imported scipy."""
    with ExitStack() as stack:
        settled: list[bool] = []

        def settle() -> None:
            optimize: Any = sys.modules.get("scipy.optimize")
            if settled or not hasattr(optimize, "linear_sum_assignment"):
                return
            settled.append(True)
            match = optimize.linear_sum_assignment
            numpy: Any = sys.modules["numpy"]

            def match_any(cost_matrix: Any, *args: Any, **kwargs: Any) -> Any:
                costs = numpy.asarray(cost_matrix)
                if costs.dtype.kind == "f" and numpy.isnan(costs).any():
                    tracer.assume(ANY_PAIRS)
                    costs = numpy.zeros(costs.shape)
                return match(costs, *args, **kwargs)

            stack.enter_context(mock.patch.object(optimize, "linear_sum_assignment", match_any))

        with tracer.after_each_import(settle):
            yield

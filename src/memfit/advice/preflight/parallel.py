"""Several processes: how often gradients are reduced, and weights that no gradient reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.gradient_flow import Flow
from memfit.advice.preflight.situation import Situation
from memfit.advice.preflight.sizes import trained
from memfit.units import gib

REDUCED, UNUSED = Line("config", "no_sync"), Line("config", "unused parameters")


def reductions(situation: Situation) -> Iterator[Finding]:
    """Once a step, or once in every micro-step."""
    sizes = situation.batch.needed()
    steps = sizes.gradient_accumulation_steps
    size = sum(each.numel() * each.element_size() for each in trained(situation.shapes.needed()))
    loop = "memfit" if situation.asked.workload is None else situation.asked.workload.loop
    details: dict[str, Any] = {"micro_steps": steps, "gradient_bytes": size, "loop": loop}
    if loop == "plain" and steps > 1:
        yield REDUCED.warning(
            f"a loop of your own under DDP: {steps} all-reduces of {gib(size)} in each step, where one would do",
            f"run the first {steps - 1} micro-steps under `with model.no_sync():`", **details,
        )  # fmt: skip
        return
    yield REDUCED.ok(f"{gib(size)} of gradients are reduced once a step, not in each of {steps} micro-steps", **details)


def unused_parameters(situation: Situation, followed: list[Flow]) -> Iterator[Finding]:
    """`followed` is what was seen of the gradients, if anything was."""
    config = situation.config
    if not followed:
        raise CannotTell("gradients could not be followed")
    flow = followed[0]
    said = config.parallel.find_unused_parameters
    if not flow.without:
        found = "every trained tensor has a gradient"
        if said:
            yield UNUSED.warning(f"{found}, and find_unused_parameters walks the graph in each step", "leave it out")
        else:
            yield UNUSED.ok(found)
        return
    count = f"{len(flow.without)} trained tensors get no gradient, such as {flow.without[0]}"
    if said is False and not config.memory.oom_recovery:
        yield UNUSED.failed(
            f"{count}: DDP stops with 'Expected to have finished reduction in the prior iteration'",
            "parallel.find_unused_parameters: true, or freeze them", tensors=list(flow.without),
        )  # fmt: skip
        return
    yield UNUSED.ok(f"{count}; the reduction of gradients passes over them", tensors=list(flow.without))

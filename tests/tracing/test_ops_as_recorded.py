"""Every op that was recorded on an H200, run again on the traced device: the same sizes in the same order.

The order of frees in a row is not compared, for it makes no difference to the allocator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ops
import pytest

RECORDED = Path(__file__).parents[1] / "data" / "h200-ops.json"


NOT_MODELLED = {
    "inv": "workspace of an LU factorisation, known to cusolver alone",
    "solve": "workspace of an LU factorisation, known to cusolver alone",
    "depthwise_in_cudnn": "workspace of cuDNN for the gradient of a weight in fp16",
    "amp_logits_loss": "in backward torch computes in place, and out of place while a dispatch mode is watching",
}
"""What the trace does not yet do as the GPU does."""


@dataclass(frozen=True)
class Probe:
    kind: str
    spec: list[Any]
    recorded: str
    traced: str

    @property
    def agrees(self) -> bool:
        return ops.canonical(self.recorded) == ops.canonical(self.traced)


def recorded_probes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORDED.read_text())["probes"]
    return found


@cache
def probes() -> dict[str, list[Probe]]:
    """All of them traced in one job, for to begin a trace costs more than most ops."""
    recorded = recorded_probes()
    plain = [p for p in recorded if p["name"] in ops.BUILDERS]
    events = ops.traced_events([(p["name"], p.get("spec", [])) for p in plain])
    workspaces = ops.workspace_events()
    found: dict[str, list[Probe]] = {}
    for p, traced in zip(plain, events, strict=True):
        found.setdefault(p["name"], []).append(Probe(p["name"], p.get("spec", []), p["events"], traced))
    for p in recorded:
        if p["name"] in workspaces:
            found[p["name"]] = [Probe(p["name"], [], p["events"], workspaces[p["name"]])]
    return found


KINDS = sorted({p["name"] for p in recorded_probes()})


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(NOT_MODELLED)))
def test_an_op_allocates_and_frees_what_the_gpu_did(kind: str) -> None:
    wrong = [p for p in probes()[kind] if not p.agrees]
    shown = "\n".join(f"{p.spec}\n  gpu   {p.recorded}\n  trace {p.traced}" for p in wrong[:5])
    assert not wrong, f"{len(wrong)} of {len(probes()[kind])} differ:\n{shown}"


@pytest.mark.parametrize("kind", sorted(NOT_MODELLED))
def test_what_is_listed_as_not_modelled_does_differ(kind: str) -> None:
    agree = [p.spec for p in probes()[kind] if p.agrees]
    assert not agree, f"modelled by now, so take them from the list: {agree}"


def test_every_recorded_op_can_be_run_again() -> None:
    assert sorted(probes()) == KINDS


def test_attention_was_recorded_with_every_kernel_that_can_be_chosen() -> None:
    choices = {p["choice"] for p in recorded_probes() if p["name"] == "sdpa"}
    assert choices == {0, 1, 2, 3}  # math, flash, mem-efficient, cuDNN

"""How much host memory the levers of a planned training take, as a trace has it in its facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.jobs.workload import Workload
from memfit.units import format_bytes

HOST = "host"
WORDS = {
    "weights": "frozen weights", "optimizer": "weights and gradients for the optimizer", "activations": "activations"
}  # fmt: skip


def scaled(facts: Mapping[str, Any], **times: float) -> dict[str, Any]:
    """The same facts where there is so many times as much of each lever's."""
    if HOST not in facts:
        return dict(facts)
    host = {lever: round(count * times.get(lever, 1)) for lever, count in facts[HOST].items()}
    return {**facts, HOST: host}


def host_notes(work: Workload, facts: Mapping[str, Any]) -> tuple[str, ...]:
    host: Mapping[str, int] = facts.get(HOST, {}) if work.trains else {}
    if "activations" in (work.offload or ()) and work.trains and not host.get("activations"):
        return ("--offload activations moves nothing: none that is kept has 1 MiB or more",)
    if not host:
        return ()
    parts = ", ".join(f"{WORDS[lever]} {format_bytes(count)}" for lever, count in host.items())
    notes = [f"host memory: {format_bytes(sum(host.values()))} pinned ({parts})"]
    if "optimizer" in host:  # two moments, as many bytes as a weight and its gradient
        notes.append(f"host memory for AdamW's moments: {format_bytes(host['optimizer'])}, not pinned")
    if "weights" in host:
        notes.append("of the frozen weights, those of two blocks, the embedding and the head are on the GPU")
    return tuple(notes)

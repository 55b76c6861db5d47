"""The runs of `tests/data/measured.jsonl`: what was measured on an H200, as workloads to be predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memfit.analysis.summary import PhasePeak
from memfit.jobs.workload import Workload
from memfit.planning import cache as traces
from memfit.planning.predict import Plan, predict
from memfit.versions import release_of

MEASURED = Path(__file__).parents[1] / "data" / "measured.jsonl"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {"forward": "forward", "full": "train", "lora": "lora", "generate": "generate"}

Pair = tuple[int, int]
"""Allocated and reserved bytes."""


@dataclass(frozen=True)
class Run:
    id: str
    spec: dict[str, Any]

    @property
    def peak(self) -> Pair:
        return self.spec["peak_allocated"], self.spec["peak_reserved"]

    @property
    def loaded(self) -> Pair:
        allocated, reserved = self.spec["loaded"]
        return allocated, reserved

    @property
    def is_planned(self) -> bool:
        """Of a kind that memfit plans."""
        return self.spec["kind"] in KINDS

    @property
    def has_steps(self) -> bool:
        """Measured phase by phase over three steps, not as a whole."""
        return self.spec["kind"] != "generate" and not self.spec.get("trainer")

    def phases(self) -> dict[tuple[str, int], Pair]:
        """By name and step; micro-batches of a step are one phase."""
        found: dict[tuple[str, int], Pair] = {}
        for name, peaks in self.spec["phases"].items():
            each = len(peaks) // 3  # three steps were run
            for i, (allocated, reserved) in enumerate(peaks):
                before = found.get((name, i // each + 1), (0, 0))
                found[name, i // each + 1] = (max(before[0], allocated), max(before[1], reserved))
        return found

    def workload(self) -> Workload:
        spec = self.spec
        settings: dict[str, Any] = {
            "kind": KINDS[spec["kind"]], "model": spec["model"], "batch_size": spec["batch"], "seq_len": spec["seq"],
            "precision": spec["precision"], "attention": spec.get("attn", "sdpa"),
            "alloc_conf": spec.get("alloc_conf", ""),
        }  # fmt: skip
        if spec["kind"] == "generate":
            settings["new_tokens"] = spec["new"]
        if spec["kind"] in ("full", "lora"):
            settings |= {"grad_checkpointing": bool(spec.get("ckpt")), "grad_accum": spec.get("accum", 1)}
            if spec.get("trainer"):
                settings["loop"] = "trainer"
            else:
                settings["optimizer"] = spec.get("optim", "adamw").replace("_", "-")
                settings["clip_grad"] = bool(spec.get("clip"))
                settings["outputs"] = "dropped"
        if spec["kind"] == "lora":
            settings |= {"rank": spec["rank"], "target_modules": tuple(spec.get("targets", TARGETS))}
        return Workload(**settings)


@cache
def runs() -> dict[str, Run]:
    lines = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    return {line["id"]: Run(line["id"], line) for line in lines}


@cache
def plan_of(run_id: str) -> Plan:
    """Once a run: several tests look at it."""
    return predict(runs()[run_id].workload(), gpu="H200")


def peak(plan: Plan) -> Pair:
    return plan.peak.allocated_bytes, plan.peak.reserved_bytes


def pair(phase: PhasePeak) -> Pair:
    return phase.allocated_bytes, phase.reserved_bytes


def error(predicted: int, measured: int) -> float:
    return abs(predicted / measured - 1)


CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
RELATIVE = (0.001, 0.01)
"""Of allocated and reserved bytes: how far off a prediction for other versions than those measured may be. transformers
5.22, for one, computes rotary embeddings otherwise, in some KiB less, and large blocks then split elsewhere."""


@cache
def is_pinned(*packages: str) -> bool:
    """Whether these are the releases that the measured figures are held to."""
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    here = traces.versions()
    return all(release_of(here[name] or "") == release_of(pins[name]) for name in packages)


def assert_measured(predicted: Pair, measured: Pair) -> None:
    """To the byte with the pinned packages."""
    if is_pinned("transformers", "accelerate", "peft"):
        assert predicted == measured
    else:
        assert all(error(*each) <= most for *each, most in zip(predicted, measured, RELATIVE, strict=True))

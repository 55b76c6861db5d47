"""`--load`: the model really loaded, in a process of its own, and what that took beside what was predicted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from memfit.checking.model import loading_bytes
from memfit.checking.situation import CannotTell, Finding, Line, Situation
from memfit.jobs.training.config import FACTORY
from memfit.models.files import NotHere, find_here
from memfit.recording.machine import host_memory
from memfit.units import gib

LOADED = Line("model", "loaded")
PROCESS = "memfit.checking.loading_process"
PATIENCE_SECONDS = 1800.0


def load_and_measure(situation: Situation) -> Finding:
    order = order_of(situation)
    wanted = _bytes_of(order)
    if short := _too_small(situation, wanted, on_gpu=order["device"] == "cuda"):
        return LOADED.failed(short, "a machine with more memory; `memfit plan` needs none", predicted_bytes=wanted)
    took = run(order)
    if "error" in took:
        return LOADED.failed(f"cannot be loaded: {took['error']}", "this is how the run itself would stop", **took)
    return of_loading(took, wanted)


def order_of(situation: Situation) -> dict[str, Any]:
    """What the process is told to load: the files that are here, or the model's code with random weights."""
    config, workload = situation.asked.config, situation.asked.workload
    if workload is not None:
        random = bool(FACTORY.fullmatch(workload.model))
        folder = workload.model if random else _here(workload.model)
        settings: dict[str, Any] = {}
        precision, attention, device = workload.weight_precision, str(workload.attention), "auto"
    elif config is not None:
        random = config.model.starts_from_scratch
        folder = config.model.name if random else _here(config.model.name, config.model.cache_dir)
        settings = dict(config.model.settings)
        precision, attention, device = config.workload.precision, config.model.attention, config.device
    else:
        raise CannotTell("no model is named")
    gpu = situation.here is not None and device != "cpu"
    return {
        "model": folder, "random": random, "precision": precision, "attention": attention, "settings": settings,
        "device": "cuda" if gpu else "cpu",
    }  # fmt: skip


def _here(model: str, cache_dir: str | None = None) -> str:
    try:
        return str(find_here(model, cache_dir=cache_dir))
    except NotHere as error:
        raise CannotTell(f"{error.message}; {error.hint}") from error


def of_loading(took: dict[str, Any], predicted: int) -> Finding:
    where, weights = took["device"], took["weights_bytes"]
    difference = weights - predicted
    beside = f"predicted {gib(predicted)}" + (f", {difference:+,} bytes off" if difference else ", to the byte")
    found = f"weights {gib(weights)} on the {where} in {took['seconds']:.1f} s ({beside})"
    if where == "GPU":
        found += (
            f"; allocated {gib(took['allocated_bytes'])}, reserved {gib(took['reserved_bytes'])},"
            f" device {gib(took['device_bytes'])}"
        )
    found += f"; host at most {gib(took['host_peak_bytes'])}; deleted again"
    details: dict[str, Any] = {**took, "predicted_bytes": predicted}
    if difference:
        return LOADED.warning(found, "other weights than the config of the model says", **details)
    return LOADED.ok(found, **details)


def run(order: dict[str, Any]) -> dict[str, Any]:
    """What the process says of the loading, or `error`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", PROCESS],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {PATIENCE_SECONDS:g} seconds"}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and last.startswith("{"):
        made: dict[str, Any] = json.loads(last)
        return made
    if done.returncode < 0:
        return {
            "error": f"the process was ended by signal {-done.returncode}"
            + (" (out of host memory?)" if done.returncode == -signal.SIGKILL else "")
        }
    return {"error": (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]}


def _bytes_of(order: dict[str, Any]) -> int:
    """By the shapes alone."""
    import torch

    from memfit.checking.loading_process import model_of

    with torch.device("meta"):
        return loading_bytes(model_of({**order, "random": True}))


def _too_small(situation: Situation, wanted: int, *, on_gpu: bool) -> str | None:
    """A process that takes all of the memory takes others down with it."""
    host = host_memory()
    unused = host["total_bytes"] - host["used_bytes"]
    if wanted > unused:
        return f"weights of {gib(wanted)}, and {gib(unused)} of host memory are free"
    if on_gpu and situation.here is not None and wanted > situation.here.state.free_bytes:
        return f"weights of {gib(wanted)}, and {gib(situation.here.state.free_bytes)} of the GPU are free"
    return None

"""`--load`: the model really loaded, in a process of its own, and what that took beside what was predicted.

The process runs this very file. Its order comes on stdin, and it says in one line of JSON what the loading took:

    {"model": FOLDER, "random": false, "precision": "bf16", "attention": "sdpa", "settings": {}, "device": "cuda"}
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from typing import Any

from memfit.checking.model import loading_bytes
from memfit.checking.situation import CannotTell, Finding, Line, Situation
from memfit.errors import MemfitError
from memfit.jobs.training.config import FACTORY
from memfit.models.files import NotHere, find_here
from memfit.recording.machine import NoNvml, host_memory, read_gpus
from memfit.units import gib

LOADED = Line("model", "loaded")
PROCESS = "memfit.checking.loading"
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
        command = [sys.executable, "-m", PROCESS]
        done = subprocess.run(
            command, input=json.dumps(order), capture_output=True, text=True, timeout=PATIENCE_SECONDS
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


# -- the process -------------------------------------------------------------------------------------------------------

PAGE = 4096


def load(order: dict[str, Any]) -> dict[str, Any]:
    import torch

    from memfit.recording.sampler import ProcessMemory

    host = ProcessMemory()
    before = host.read().used_bytes
    device = torch.device(order["device"])
    began = time.perf_counter()
    model = model_of(order).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    else:
        _touch(model)
    seconds = time.perf_counter() - began
    reading = host.read()
    took: dict[str, Any] = {
        "device": "GPU" if device.type == "cuda" else "CPU", "seconds": seconds,
        "weights_bytes": loading_bytes(model),
        "host_bytes": reading.used_bytes - before, "host_peak_bytes": reading.high_water_bytes or reading.used_bytes,
        **(_of_gpu() if device.type == "cuda" else {}),
    }  # fmt: skip
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        took["left_bytes"] = torch.cuda.memory_allocated()
    return took


def _touch(model: Any) -> None:
    """Weights of a file are only mapped until somebody reads them: one byte of each page does."""
    import torch

    for each in model.parameters():
        each.detach().view(-1).view(torch.uint8)[::PAGE].sum()


def model_of(order: dict[str, Any]) -> Any:
    """Read from its files, or built with random weights."""
    import torch

    from memfit.jobs.build import build_base_model
    from memfit.jobs.quantised import DTYPES
    from memfit.jobs.training.config import ModelConfig

    random, settings = order["random"], order["settings"]
    attention: Any = "sdpa" if random else order["attention"]
    model = ModelConfig(name=order["model"], from_scratch=True, attention=attention, settings=settings)
    folder = None if random else order["model"]
    return build_base_model(model, folder, DTYPES.get(order["precision"], torch.float32))


def _of_gpu() -> dict[str, Any]:
    """This process's: others may be on the card."""
    import torch

    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "device_bytes": _held_by_this_process(),
    }


def _held_by_this_process() -> int | None:
    """As the driver sees it, with the context; None where a container hides that."""
    try:
        processes = [process for gpu in read_gpus() for process in gpu.processes]
    except NoNvml:
        return None
    return next((process.used_bytes for process in processes if process.pid == os.getpid()), None)


def main() -> int:
    order = json.loads(sys.stdin.read())
    with redirect_stdout(sys.stderr):
        try:
            took = load(order)
        except (MemfitError, RuntimeError, ValueError, OSError, ImportError) as error:
            took = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]}
    sys.stdout.write(json.dumps(took) + "\n")
    sys.stdout.flush()
    os._exit(0)  # nothing is left to take down


if __name__ == "__main__":
    main()

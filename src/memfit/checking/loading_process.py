"""Load a model, say in one line of JSON what it took, delete it. Run by `loading`; the order comes on stdin.

{"model": FOLDER, "random": false, "precision": "bf16", "attention": "sdpa", "settings": {}, "device": "cuda"}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import redirect_stdout
from typing import Any

from memfit.errors import MemfitError
from memfit.recording.machine import NoNvml, read_gpus

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
        "weights_bytes": sum(each.numel() * each.element_size() for each in model.parameters()),
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

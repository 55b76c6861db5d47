"""`--device`: where a run takes place."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from typing import Any

import torch

from memfit.errors import UsageError


def device_of(name: str) -> torch.device:
    """auto is the GPU of this process, or the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name!r} is not a device", hint="auto, cpu, cuda or cuda:1") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = "finds no GPU" if torch.version.cuda else "was built without CUDA"
            raise UsageError(f"--device {name}: this torch ({torch.__version__}) {built}", hint="--device cpu works")
        index = local if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise UsageError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise UsageError(f"--device {name}: memfit prunes on cuda and cpu")
    return device


def described(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"device": str(device), "name": name, "threads": torch.get_num_threads()}


def give_back_freed_memory() -> None:
    """To the system, what malloc keeps for later. Without this a run on the CPU, whose tensors are malloc's, seems to
    grow block by block: glibc returns memory only from the end of its heap."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

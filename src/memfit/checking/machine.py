"""The machine: its GPUs and who holds them, driver and torch, host memory, and room on disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memfit.checking.model import checkpoint_bytes, loading_bytes, state_bytes
from memfit.checking.situation import VISIBLE, CannotTell, Finding, Line, Situation, output_folder
from memfit.errors import InputError
from memfit.gpus import is_size
from memfit.models.checkpoint import WeightStore
from memfit.models.files import NotHere, cache_folder
from memfit.planning.card_here import NOTICEABLE
from memfit.recording.machine import GpuProcess, GpuState, host_memory
from memfit.units import GiB, MiB, format_bytes, gib

PRESENT, FREE = Line("machine", "GPU"), Line("machine", "GPU memory")
KEPT_BY_DRIVER = 1 * GiB
"""Of a card that nobody uses the driver keeps less than this for itself: 0.60 GiB of an H200."""
SHOWN = 4
LONGEST_NAME = 60


def check_gpus(situation: Situation) -> Finding:
    gpus, wanted = situation.gpus.get(), situation.asked.world_size
    shown = os.environ.get(VISIBLE)
    by = "" if shown is None else f" ({VISIBLE}={shown})"
    if not gpus:
        advice = "nvidia-smi -L lists those that the driver sees" if shown is None else f"unset {VISIBLE}"
        return PRESENT.failed(f"torch would see no GPU{by}", advice, gpus=0)
    names = ", ".join(f"{gpu.name} ({gib(gpu.total_bytes)})" for gpu in gpus)
    found = f"{len(gpus)}: {names}{by}"
    if len(gpus) < wanted:
        return PRESENT.failed(
            f"{found}, and {wanted} processes are to train", f"torchrun --nproc_per_node={len(gpus)}", gpus=len(gpus)
        )
    return PRESENT.ok(found, gpus=len(gpus))


def check_free_memory(situation: Situation) -> Iterator[Finding]:
    gpus = situation.gpus_here()
    for gpu in gpus:
        yield of_gpu(gpu, alone=len(gpus) == 1)


def of_gpu(gpu: GpuState, *, alone: bool = False) -> Finding:
    """`alone`: there is no other GPU to go to."""
    found = f"GPU {gpu.index}: {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
    details: dict[str, Any] = {
        "gpu": gpu.index, "free_bytes": gpu.free_bytes, "total_bytes": gpu.total_bytes,
        "processes": [asdict(process) for process in gpu.processes],
    }  # fmt: skip
    known = sum(process.used_bytes or 0 for process in gpu.processes)
    unknown = any(process.used_bytes is None for process in gpu.processes)
    if known < NOTICEABLE and not unknown and gpu.used_bytes <= KEPT_BY_DRIVER:
        return FREE.ok(f"{found}, nobody holds any", **details)
    if not gpu.processes:
        found += "; the driver does not say who holds the rest, as it does inside a container"
        return FREE.warning(found, "nvidia-smi on the host names the processes", **details)
    holders = "; ".join(_holder(process) for process in gpu.processes[:SHOWN])
    more = f"; and {len(gpu.processes) - SHOWN} more" if len(gpu.processes) > SHOWN else ""
    pids = " ".join(str(process.pid) for process in gpu.processes[:SHOWN] if process.name is not None)
    advice = f"if they are yours and not needed: kill {pids}; " if pids else ""
    elsewhere = "the line `fits` counts on what they leave" if alone else f"another GPU: {VISIBLE}=N"
    return FREE.warning(f"{found}; held by {holders}{more}", advice + elsewhere, **details)


def _holder(process: GpuProcess) -> str:
    size = "an unknown size" if process.used_bytes is None else gib(process.used_bytes)
    name = "of another container, or ended" if process.name is None else _short(process.name)
    return f"process {process.pid} ({name}): {size}"


def _short(command: str) -> str:
    """The program without its folder, and as much of the rest as tells it from others."""
    program, space, rest = command.partition(" ")
    short = f"{program.rpartition('/')[2]}{space}{rest}"
    return short if len(short) <= LONGEST_NAME else f"{short[: LONGEST_NAME - 3]}..."


BUILD, ABILITIES = Line("machine", "driver and torch"), Line("machine", "what the card can do")
BF16_SINCE, FLASH_SINCE, FP8_SINCE = (8, 0), (8, 0), (8, 9)
"""Compute capabilities: bf16 and flash attention came with Ampere, fp8 with Ada and Hopper."""
INSTALL = "https://pytorch.org/get-started/locally has the build for a driver"
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)[a-z]?")


def check_build(situation: Situation) -> Finding:
    situation.gpus_here()
    driver = situation.driver.get()
    try:
        said = version("torch")
    except PackageNotFoundError:
        return BUILD.failed("torch is not installed", INSTALL)
    import torch

    cuda = torch.version.cuda
    details: dict[str, Any] = {
        "driver": driver.version, "driver_cuda": list(driver.cuda), "torch": said, "torch_cuda": cuda,
    }  # fmt: skip
    if cuda is None:
        return BUILD.failed(f"torch {said} is built without CUDA, and a GPU is here", INSTALL, **details)
    newest = ".".join(map(str, driver.cuda))
    found = f"torch {said} for CUDA {cuda}; driver {driver.version} serves CUDA up to {newest}"
    if int(cuda.split(".")[0]) > driver.cuda[0]:
        found += ": the driver is too old for this build"
        return BUILD.failed(found, f"a newer driver; or {INSTALL}", **details)
    archs = torch.cuda.get_arch_list()
    for capability in dict.fromkeys(driver.capabilities):
        if archs and not runs_on(archs, capability):
            spelled = f"sm_{capability[0]}{capability[1]}"
            found = f"torch {said} has no kernels for this GPU ({spelled}); it has {', '.join(archs)}"
            return BUILD.failed(found, INSTALL, **details)
    if not torch.cuda.is_available():
        return BUILD.failed(f"{found}; but torch finds no GPU", "CUDA_VISIBLE_DEVICES may hide it", **details)
    return BUILD.ok(found, **details)


def runs_on(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Machine code runs within its major version from its minor on; PTX (`compute_90`) on anything newer."""
    known = ((match[1], (int(match[2]), int(match[3]))) for match in map(_ARCH.fullmatch, archs) if match)
    return any(built <= capability and (kind == "compute" or built[0] == capability[0]) for kind, built in known)


def check_abilities(situation: Situation) -> Finding:
    card = situation.card
    major, minor = card.arch
    words = [
        f"bf16 {'yes' if card.arch >= BF16_SINCE else 'only by emulation'}",
        f"flash attention {'yes' if card.arch >= FLASH_SINCE else 'no'}",
        f"fp8 {'yes' if card.arch >= FP8_SINCE else 'no'}",
    ]
    details: dict[str, Any] = {
        "card": card.name, "capability": [major, minor], "bf16": card.arch >= BF16_SINCE,
        "flash_attention": card.arch >= FLASH_SINCE, "fp8": card.arch >= FP8_SINCE,
    }  # fmt: skip
    said, level = situation.named_as, f"compute capability {major}.{minor}: {', '.join(words)}"
    if situation.here is None and said is not None and is_size(said):
        found = f"a size names no card; one of {level}"
        return ABILITIES.ok(found, "--gpu 'RTX 3090': what that card can do", **details)
    return ABILITIES.ok(f"{card.name}, {level}", **details)


MEMORY, SHARED, LOCKED = Line("machine", "host memory"), Line("machine", "/dev/shm"), Line("machine", "ulimit -l")
SHM = Path("/dev/shm")
DOCKER_DEFAULT = 64 * MiB
"""What a container gets of /dev/shm if nobody asks for more."""
BYTES_A_TOKEN = 16
"""input_ids and labels of a sample, eight bytes each."""
PREFETCHED = 2
"""Batches that each worker of a DataLoader holds ready."""


def check_host_memory(situation: Situation) -> Finding:
    host = host_memory()
    unused = host["total_bytes"] - host["used_bytes"]
    found = f"{gib(unused)} of {gib(host['total_bytes'])} free"
    needs = {} if not situation.asked.trains else _needs(situation)
    wanted = sum(needs.values())
    details: dict[str, Any] = {**host, "needed_bytes": needs}
    if not needs:
        return MEMORY.ok(found, **details)
    said = ", ".join(f"{gib(size)} for {what}" for what, size in needs.items())
    if wanted > unused:
        offloads = situation.config.workload.offload
        advice = "offload less" if offloads else "close other programs; a machine with more memory"
        short = f"{found}, and the job takes {gib(wanted)}: {said}"
        return (MEMORY.failed if situation.runs_here else MEMORY.warning)(short, advice, **details)
    return MEMORY.ok(f"{found}; the job takes {said}", **details)


def _needs(situation: Situation) -> dict[str, int]:
    model, config = situation.shapes.needed(), situation.config
    processes = situation.asked.world_size
    needs = {"weights while they load": loading_bytes(model) * processes}
    if config.workload.offload:
        from memfit.planning.predict import HOST_WORDS
        from memfit.planning.traced import HOST

        host: dict[str, int] = situation.plans.needed()[0].plan.trace.facts.get(HOST, {})
        needs |= {HOST_WORDS[what]: size * processes for what, size in host.items()}
        if "optimizer" in config.workload.offload:
            needs["the optimizer's state"] = state_bytes(model, str(config.workload.optimizer)) * processes
    return needs


def check_shared_memory(situation: Situation) -> Finding:
    if not SHM.is_dir():
        raise CannotTell("this system has no /dev/shm")
    total, unused = (getattr(shutil.disk_usage(SHM), name) for name in ("total", "free"))
    config, processes = situation.asked.config, situation.asked.world_size
    workers = 0 if config is None else config.data.num_workers
    needed = 0
    if config is not None and workers:
        rows = situation.batch.needed().rows_per_process
        needed = processes * workers * PREFETCHED * rows * config.data.max_seq_len * BYTES_A_TOKEN
    found = f"{format_bytes(unused)} free"
    details: dict[str, Any] = {"free_bytes": unused, "needed_bytes": needed}
    advice = "docker run --shm-size=8g, or --ipc=host; or num_workers: 0"
    if needed > unused:
        found += f", and {workers} data workers keep {format_bytes(needed)} there"
        return SHARED.failed(found, advice, **details)
    if total <= DOCKER_DEFAULT and (processes > 1 or workers):
        who = "NCCL and data workers" if processes > 1 and workers else "NCCL" if processes > 1 else "data workers"
        return SHARED.warning(f"{found}, as Docker gives by default; {who} share memory there", advice, **details)
    return SHARED.ok(found + (f"; data workers keep {format_bytes(needed)} there" if needed else ""), **details)


def check_locked_memory(situation: Situation) -> Finding:
    """CUDA pins memory through its driver, which this limit does not bind; InfiniBand registers it as anybody else."""
    try:
        import resource
    except ImportError as error:
        raise CannotTell("this system has no such limit") from error
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return LOCKED.ok("unlimited")
    return LOCKED.ok(
        f"{format_bytes(limit)}: pinned memory of CUDA is not bound by it, NCCL over InfiniBand is",
        "over InfiniBand: ulimit -l unlimited (docker run --ulimit memlock=-1)",
        limit_bytes=limit,
    )


CHECKPOINTS, WEIGHTS = Line("machine", "disk for checkpoints"), Line("model", "weights")
PUBLISHED_BYTES = 2
"""Of a weight: models are published in 16 bit."""


def check_room_for_checkpoints(situation: Situation) -> Iterator[Finding]:
    from memfit.jobs.training.job import EarlierRun, check_output, find_beginning

    config, folder = situation.config, output_folder(situation.config)
    stops = CHECKPOINTS.failed if situation.runs_here else CHECKPOINTS.warning
    try:
        check_output(folder, resume_from=find_beginning(config, folder)[0])
    except InputError as error:
        advice = error.hint or "another --output_dir, or saving.output_dir in the file"
        if not isinstance(error, EarlierRun):
            yield stops(error.message, advice)
            return
        yield CHECKPOINTS.warning(error.message, advice)
    each = checkpoint_bytes(situation.shapes.needed(), config)
    count = config.saving.save_total_limit + 1  # a new one is whole before the oldest goes
    unused = free_on_disk(folder)
    found = f"{format_bytes(unused)} free at {folder}; {count} checkpoints of {format_bytes(each)} at once"
    details: dict[str, Any] = {
        "free_bytes": unused, "checkpoint_bytes": each, "checkpoints": count, "folder": str(folder),
    }  # fmt: skip
    if count * each > unused:
        fit = max(unused // max(each, 1) - 1, 0)
        advice = f"save_total_limit: {fit}" if fit else "another --output_dir"
        yield stops(f"{found} are {format_bytes(count * each)}", f"{advice}, or room on that disk", **details)
        return
    yield CHECKPOINTS.ok(f"{found} take {format_bytes(count * each)}", **details)


def check_weights_here(situation: Situation) -> Finding:
    """Whether they are here and whole; if they are not here, whether there is room for them."""
    try:
        folder = situation.folder.get()
        WeightStore.open(folder).close()
        return WEIGHTS.ok(f"in {folder}")
    except NotHere as error:
        unused = free_on_disk(cache_folder(situation.config.model.cache_dir))
        model = situation.shapes.needed()
        size = PUBLISHED_BYTES * sum(w.numel() for name, w in model.named_parameters() if "lora_" not in name)
        details: dict[str, Any] = {"download_bytes": size, "free_bytes": unused}
        found = f"{error.message}: about {format_bytes(size)} to download, {format_bytes(unused)} free for them"
        if size > unused:
            status = WEIGHTS.failed if situation.runs_here else WEIGHTS.warning
            return status(found, "model.cache_dir (or HF_HOME) on a larger disk", **details)
        return WEIGHTS.warning(found, error.hint, **details)
    except InputError as error:
        return WEIGHTS.failed(error.message, error.hint or "download or copy the file again")


def free_on_disk(folder: Path) -> int:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free

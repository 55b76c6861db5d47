"""The machine and what is installed: GPUs and who holds them, driver, host memory, disk; settings and packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from memfit.checking.model import checkpoint_bytes, loading_bytes, state_bytes
from memfit.checking.situation import VISIBLE, CannotTell, Finding, Line, Situation, output_folder
from memfit.environment import CUDA_VARIABLE, NEW_VARIABLE, VARIABLES, exported
from memfit.errors import InputError, UsageError
from memfit.gpus import is_size
from memfit.jobs.training.refusals import NEEDS_BITSANDBYTES
from memfit.models.checkpoint import WeightStore
from memfit.models.files import NotHere, cache_folder
from memfit.planning.card_here import NOTICEABLE
from memfit.recording.machine import GpuProcess, GpuState, host_memory
from memfit.replay.alloc_config import AllocatorConfig
from memfit.units import GiB, MiB, format_bytes, gib
from memfit.versions import TESTED, outside_tested, recorded_version, release_of

# -- its GPUs ----------------------------------------------------------------------------------------------------------

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
    said = recorded_version("torch")
    if said is None:
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


# -- host memory and disk ----------------------------------------------------------------------------------------------

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


# -- what is installed -------------------------------------------------------------------------------------------------

SET, LOADS = Line("settings", "packages"), Line("settings", "bitsandbytes")
COMPILER = Line("settings", "torch.compile")
C_COMPILERS = ("CC", "gcc", "clang", "cc")
PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "huggingface-hub")
TRAINING_EXTRA = "torch"
"""Under which transformers says what its Trainer needs."""
PATIENCE_SECONDS = 60.0
LOADING = "import bitsandbytes; print(bitsandbytes.__version__)"


def check_packages(situation: Situation) -> Iterator[Finding]:
    there = {name: found for name in PACKAGES if (found := recorded_version(name)) is not None}
    missing = [name for name in PACKAGES if name not in there]
    listed = ", ".join(f"{name} {found}" for name, found in there.items())
    if missing:
        yield SET.failed(f"{', '.join(missing)} not installed", f"pip install {' '.join(missing)}", packages=there)
    unmet = list(conflicts(there))
    for who, wants, has in unmet:
        found = f"{wants.name} {has} is not what {who} needs ({wants.name} {wants.specifier})"
        advice = f"pip install '{wants.name}{wants.specifier}'"
        yield SET.failed(f"{found}: options may be missing or renamed", advice, packages=there)
    if missing or unmet:
        return
    if strange := ", ".join(outside_tested(there)):
        found = f"memfit was not tested with {strange}: plans of such versions may be off"
        yield SET.warning(found, "pip install -U memfit, or a version within the range", packages=there)
    else:
        yield SET.ok(f"{listed}: each as the others need it", packages=there)


def conflicts(there: Mapping[str, str]) -> Iterator[tuple[str, Requirement, str]]:
    """(who needs something, what it needs, which version there is)."""
    for who in ("memfit", *there):
        try:
            lines = requires(who) or []
        except PackageNotFoundError:
            continue
        extra = TRAINING_EXTRA if who == "transformers" else ""
        for each in map(Requirement, lines):
            have = there.get(each.name.lower().replace("_", "-"))
            counts = each.marker is None or each.marker.evaluate({"extra": extra})
            if counts and have is not None and not is_met(each, have):
                yield who, each, have


def is_met(requirement: Requirement, have: str) -> bool:
    """What follows the numbers of a version does not count: `2.13.0+cpu` and `2.13.0.dev1` are 2.13.0."""
    return requirement.specifier.contains(Version(have).base_version)


def check_bitsandbytes(situation: Situation) -> Finding:
    """In a process of its own: built for another CUDA it may take the process down, and peft imports it unasked."""
    config, work = situation.asked.config, situation.asked.job
    by_weights = work is not None and work.is_quantised and work.quantised_by == "bitsandbytes"
    needed = config is not None and config.workload.optimizer in NEEDS_BITSANDBYTES
    if find_spec("bitsandbytes") is None:
        if work is not None and (needed or by_weights):
            who = work.few_bits if by_weights else "the optimizer"
            return LOADS.failed(f"not installed, and {who} needs it", "pip install 'memfit[quant]'")
        raise CannotTell("not installed, and nothing here needs it")
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return LOADS.failed(f"does not load within {PATIENCE_SECONDS:g} seconds", "pip uninstall bitsandbytes")
    if done.returncode == 0:
        return LOADS.ok(f"{done.stdout.strip().splitlines()[-1][:40]} loads")
    how = f"ends the process with signal {-done.returncode}" if done.returncode < 0 else "does not load"
    last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:200]
    return LOADS.failed(
        f"{how}: {last}; peft imports it even where nothing uses it",
        "pip uninstall bitsandbytes, or the build for this CUDA: pip install -U bitsandbytes",
    )


QUANTISED = Line("settings", "quantised weights")
PACKAGES_OF = {
    "torchao": ("torchao",), "gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",), "fp8": ("kernels",),
    "mxfp4": ("kernels",), "compressed-tensors": ("compressed-tensors",),
}  # fmt: skip
"""Which transformers asks for when it loads such weights."""


def check_quantised(situation: Situation) -> Finding:
    work = situation.asked.job
    if work is None or not work.is_quantised or work.quantised_by == "bitsandbytes":
        raise CannotTell("none, or of bitsandbytes")
    method = work.quantised_by
    unpacked = work.quant == "dequantize" and method in ("fp8", "mxfp4")  # by transformers itself
    needed = () if unpacked else PACKAGES_OF[method]
    missing = [name for name in needed if recorded_version(name) is None]
    if missing:
        way = "; or --quant dequantize" if method in ("fp8", "mxfp4") else ""
        found = f"{work.few_bits} needs {' and '.join(missing)}, not installed"
        return QUANTISED.failed(found, f"pip install {' '.join(missing)}{way}")
    return QUANTISED.ok(
        f"{work.few_bits}: {', '.join(f'{name} {recorded_version(name)}' for name in needed) or method}"
    )


def check_compiler(situation: Situation) -> Finding:
    """Of a job that is compiled: what Inductor needs on the machine that runs it, and whether memfit knows this one."""
    torch = recorded_version("torch") or ""
    if strange := ", ".join(outside_tested({"torch": torch})):
        said = f"the plan is of the compiler of {strange}, which memfit was not tested with"
        return COMPILER.warning(said, f"torch {' to '.join(TESTED['torch'])}")
    found = _for_kernels()
    lacking = " and ".join(name for name, here in found.items() if here is None)
    if lacking and situation.runs_here:
        said = f"{lacking} not here: torch.compile fails at its first kernel"
        return COMPILER.failed(said, "pip install triton; apt install gcc")
    here = " and ".join(f"{name} ({where})" for name, where in found.items() if where is not None)
    at_hand = f"here: {here}" if not lacking else f"here {lacking} is missing, which no plan needs"
    where = "" if situation.runs_here else "; the machine with the card needs triton and a C compiler"
    return COMPILER.ok(f"planned by the compiler of torch {torch}: run it with that version{where}; {at_hand}")


def _for_kernels() -> dict[str, str | None]:
    """What Inductor needs on the machine that runs a job: where it is on this one."""
    compilers = (shutil.which(os.environ.get(name, name)) for name in C_COMPILERS)
    return {
        "triton": None if find_spec("triton") is None else recorded_version("triton") or "without a version",
        "a C compiler": next(filter(None, compilers), None),
    }


# -- settings and variables --------------------------------------------------------------------------------------------

SETTINGS = Line("settings", "allocator")
CLOSE = 0.85
"""How alike the name of a variable must be to be taken for a slip of the hand: of one word, not of two."""
NEW_NAME_SINCE = (2, 10)
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"

# pytorch: the releases in which these came (pull requests 44742, 74261, 74213, 96995, 136174, 161035, 172056).
SINCE: dict[str, tuple[int, ...]] = {
    "max_split_size_mb": (1, 10), "garbage_collection_threshold": (1, 12), "roundup_power2_divisions": (1, 12),
    "backend": (2, 0), "expandable_segments": (2, 1), "max_non_split_rounding_mb": (2, 6),
    "per_process_memory_fraction": (2, 10), "large_segment_size_mb": (2, 11),
}  # fmt: skip


def check_allocator_settings(situation: Situation) -> Iterator[Finding]:
    wanted = situation.asked.job.alloc_conf if situation.asked.job else ""
    found = list(look(situation.environment, recorded_version("torch"), wanted=wanted, at_start=started_with()))
    yield from found or [SETTINGS.ok("torch's own settings: no variable is set")]


def look(
    environment: Mapping[str, str],
    torch_version: str | None,
    *,
    wanted: str = "",
    at_start: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """`wanted` is what the config asks for; `at_start` the environment in which this process began."""
    there = exported(environment)
    if environment.get(NO_CACHING, "0") not in ("", "0"):
        found = f"{NO_CACHING} is set: every tensor is asked of the driver, and the allocator does nothing"
        yield SETTINGS.failed(found, f"unset {NO_CACHING}")
    yield from _misspelt(environment)
    yield from _names(there, torch_version)
    name = next(iter(there), None)
    if name is not None and wanted and there[name] != wanted:
        found = f"{name}={there[name]} is exported and wins over memory.alloc_conf {wanted}"
        yield SETTINGS.warning(found, f"unset {name}")
    if name is not None and "torch" in sys.modules and at_start is not None and at_start.get(name) != there[name]:
        found = f"{name} was set after this process had started, when torch may have read it already"
        yield SETTINGS.warning(found, "export it before Python starts, or set it above `import torch`")
    text = there[name] if name is not None else wanted
    if text:
        yield of_text(text, torch_version, where=name or "memory.alloc_conf")


@contextmanager
def without_malformed() -> Iterator[None]:
    """torch reads the settings as it is imported, and ends the process at some of them: an H200's did at
    `expandable_segments=True`. A look must outlive that, and so must the processes that it starts."""
    aside = {name: text for name, text in exported(os.environ).items() if not _is_well_formed(text)}
    for name in aside:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(aside)


def _is_well_formed(text: str) -> bool:
    try:
        AllocatorConfig.parse(text)
    except UsageError:
        return False
    return True


def _misspelt(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in environment.items():
        meant = get_close_matches(name.upper(), VARIABLES, n=1, cutoff=CLOSE)
        if meant and name not in VARIABLES:
            yield SETTINGS.warning(f"torch reads no variable called {name}", f"export {meant[0]}={value}")


def _names(there: Mapping[str, str], torch_version: str | None) -> Iterator[Finding]:
    if len(there) > 1:
        used, *others = there
        found = f"{used} and {' and '.join(others)} are set; torch reads {used} alone: {there[used]}"
        yield SETTINGS.warning(found, f"unset {' '.join(others)}")
    if list(there) == [NEW_VARIABLE] and torch_version is not None and release_of(torch_version) < NEW_NAME_SINCE:
        found = f"torch {torch_version} does not read {NEW_VARIABLE} for CUDA; it does from 2.10 on"
        yield SETTINGS.failed(found, f"export {CUDA_VARIABLE}={there[NEW_VARIABLE]}")


def of_text(text: str, torch_version: str | None, *, where: str) -> Finding:
    try:
        config = AllocatorConfig.parse(text)
    except UsageError as error:
        return SETTINGS.failed(f"{where}={text}: {error.message}", error.hint)
    too_new = [] if torch_version is None else too_new_for(text, torch_version)
    if too_new:
        first, since = too_new[0], ".".join(map(str, SINCE[too_new[0]]))
        return SETTINGS.failed(
            f"{where}={text}: torch {torch_version} stops with 'Unrecognized CachingAllocator option: {first}'",
            f"torch {since} or newer knows it; or leave {first} out",
            too_new=too_new,
        )
    if config.expandable_segments and config.max_split_size is not None:
        limit = config.max_split_size >> 20
        return SETTINGS.warning(
            f"{where}={text}: the two cancel: free expandable ranges of {limit} MiB and more are never given to smaller"
            " requests (pytorch#123548: reserved grew from 220 MiB to 14 GiB)",
            _setting(where, "expandable_segments:True"),
        )
    if config.garbage_collection_threshold and config.memory_fraction == 1.0:
        return SETTINGS.warning(
            f"{where}={text}: garbage_collection_threshold does nothing without a limit on the process's memory",
            "torch.cuda.set_per_process_memory_fraction sets one; or leave it out",
        )
    known = "" if torch_version is None else f", which torch {torch_version} knows"
    return SETTINGS.ok(f"{where}={text}{known}")


def _setting(where: str, text: str) -> str:
    """As it is written in a shell, or in a config."""
    return f"export {where}={text}" if where in VARIABLES else f"{where}: {text}"


def too_new_for(text: str, torch_version: str) -> list[str]:
    """Options of a text that is well-formed and that an older torch would not start with."""
    outside_lists = re.sub(r"\[.*?\]", "", re.sub(r"\s", "", text))
    said = [part.partition(":")[0] for part in outside_lists.split(",")]
    return [name for name in said if release_of(torch_version) < SINCE.get(name, (0,))]


def started_with() -> dict[str, str] | None:
    """The environment that this process was given; None where the system does not tell."""
    try:
        raw = Path("/proc/self/environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None
    return dict(pair.split("=", 1) for pair in raw.split("\0") if "=" in pair)


ENVIRONMENT = Line("settings", "environment")
WITHOUT_EFFECT = ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")


def check_variables(situation: Situation) -> Iterator[Finding]:
    found = [f"{name}={os.environ[name]}" for name in WITHOUT_EFFECT if os.environ.get(name)]
    if found:
        yield ENVIRONMENT.ok(f"{', '.join(found)}: threads of the host; no effect on GPU memory")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        slow = "CUDA_LAUNCH_BLOCKING is set: every kernel waits for the one before"
        yield ENVIRONMENT.warning(slow, "unset CUDA_LAUNCH_BLOCKING")

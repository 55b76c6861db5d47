"""This machine at one moment: its GPUs and who holds them, host memory, and the memfit jobs that run.

{"schema": "memfit.watch/1", "time": "...", "gpus": [...], "no_gpus": null, "host": {...}, "jobs": [...]}

NVML sees every process, torch sees only its own: the two side by side tell a neighbour from a leak. Inside a container
the driver may hide other processes or show them under the host's numbers; what it does not tell is None, never 0.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.files import written_whole

MAX_BYTES = 64 << 10
MAX_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    pid: int
    started: float
    """Of the process, since the epoch: a number that is used again belongs to another process."""
    command: str
    at: str
    """The latest checkpoint."""
    done: int | None = None
    total: int | None = None
    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    capacity_bytes: int | None = None

    @property
    def headroom_bytes(self) -> int | None:
        if self.capacity_bytes is None or self.peak_bytes is None:
            return None
        return self.capacity_bytes - self.peak_bytes


def folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"memfit-{os.getuid() if hasattr(os, 'getuid') else 'jobs'}"


def publish(command: str, at: str, **numbers: int | None) -> None:
    """Say where this process is. A job never fails because nobody can be told."""
    with suppress(OSError):
        status = JobStatus(pid=os.getpid(), started=_started(os.getpid()) or 0.0, command=command, at=at, **numbers)
        place = folder()
        place.mkdir(mode=0o700, exist_ok=True)
        if place.stat().st_uid != os.getuid():
            return
        with written_whole(place / f"{status.pid}.json") as beside:
            beside.write_text(json.dumps(asdict(status)))


@contextmanager
def published(command: str) -> Iterator[None]:
    """The file goes when the job ends, however it ends."""
    publish(command, "start")
    try:
        yield
    finally:
        with suppress(OSError):
            (folder() / f"{os.getpid()}.json").unlink(missing_ok=True)


def running_jobs() -> list[JobStatus]:
    found = (_read(path) for path in sorted(folder().glob("*.json")))
    return [each for each in found if each is not None and _started(each.pid) == each.started]


def _read(path: Path) -> JobStatus | None:
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        values: Any = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return _checked(values) if isinstance(values, dict) else None


def _checked(values: dict[str, Any]) -> JobStatus | None:
    pid, started, command, at = (values.get(name) for name in ("pid", "started", "command", "at"))
    if type(pid) is not int or not isinstance(started, (int, float)):
        return None
    if not isinstance(command, str) or not isinstance(at, str):
        return None
    numbers = {
        name: value if type(value := values.get(name)) is int and 0 <= value < 1 << 60 else None
        for name in ("done", "total", "allocated_bytes", "peak_bytes", "capacity_bytes")
    }
    return JobStatus(pid=pid, started=started, command=_line(command), at=_line(at), **numbers)


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_TEXT]


def _started(pid: int) -> float | None:
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, ValueError, OverflowError):
        return None


class NoNvml(Exception):
    """Why there is nothing to read, in words for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    pid: int
    used_bytes: int | None
    name: str | None
    """None where the number means nothing here: another container's process, or one that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    busy_percent: int | None
    processes: tuple[GpuProcess, ...]

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@contextmanager
def nvml() -> Iterator[Any]:
    """The library, started and stopped."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("the package nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvml(f"no NVIDIA driver answers here ({error})") from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_gpus() -> tuple[GpuState, ...]:
    """All GPUs, now. Raises NoNvml where the driver cannot be asked."""
    with nvml() as library:
        return tuple(_state(library, index) for index in range(library.nvmlDeviceGetCount()))


def gpu_of_torch_device(library: Any, index: int) -> Any:
    """The driver's handle of what torch calls `cuda:index`: CUDA_VISIBLE_DEVICES renumbers and may name GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        chosen = [each.strip() for each in visible.split(",") if each.strip()]
        if index < len(chosen) and not chosen[index].isdigit():
            return library.nvmlDeviceGetHandleByUUID(chosen[index])
        index = int(chosen[index]) if index < len(chosen) else index
    return library.nvmlDeviceGetHandleByIndex(index)


def _state(library: Any, index: int) -> GpuState:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    uuid, name = library.nvmlDeviceGetUUID(handle), library.nvmlDeviceGetName(handle)
    load = _asked(library, lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu)
    return GpuState(
        index=index,
        uuid=_text(uuid),
        name=_text(name),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        busy_percent=load,
        processes=tuple(_processes(library, handle)),
    )


def _processes(library: Any, handle: Any) -> Iterator[GpuProcess]:
    found = _asked(library, lambda: library.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    for each in sorted(found, key=lambda process: -(process.usedGpuMemory or 0)):
        pid, used = int(each.pid), each.usedGpuMemory
        yield GpuProcess(pid=pid, used_bytes=None if used is None else int(used), name=_name_of(pid))


def _asked(library: Any, question: Any) -> Any:
    """Not every card answers every question: None is what such a card says."""
    try:
        return question()
    except library.NVMLError:
        return None


def _name_of(pid: int) -> str | None:
    import psutil

    try:
        command = psutil.Process(pid).cmdline()
    except psutil.Error:
        return None
    return " ".join(command)[:200] or None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


SCHEMA = "memfit.watch/1"
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_USES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
CSV_COLUMNS = ("time", "gpu", "used_bytes", "total_bytes", "busy_percent", "host_used_bytes", "job", "at", "peak_bytes")


def look() -> dict[str, Any]:
    try:
        gpus, why = read_gpus(), None
    except NoNvml as error:
        gpus, why = (), str(error)
    return {
        "schema": SCHEMA,
        "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "gpus": [asdict(gpu) | {"free_bytes": gpu.free_bytes} for gpu in gpus],
        "no_gpus": why,
        "host": host_memory(),
        "jobs": [asdict(job) | {"headroom_bytes": job.headroom_bytes} for job in running_jobs()],
    }


def host_memory() -> dict[str, int]:
    """Inside a container its own limit counts, not the machine's memory."""
    import psutil

    memory = psutil.virtual_memory()
    total, used = int(memory.total), int(memory.total - memory.available)
    limit, taken = _number(CGROUP_LIMITS), _number(CGROUP_USES)
    if limit is not None and taken is not None and limit < total:
        total, used = limit, taken
    return {"total_bytes": total, "used_bytes": used}


def csv_rows(seen: Mapping[str, Any]) -> Iterator[list[Any]]:
    """A line for each GPU, or one without where there is none; the job is the first that runs."""
    job = seen["jobs"][0] if seen["jobs"] else {}
    host = seen["host"]["used_bytes"]
    rest = [host, job.get("pid"), job.get("at"), job.get("peak_bytes")]
    for gpu in seen["gpus"] or [{}]:
        row = [seen["time"], *(gpu.get(n) for n in ("index", "used_bytes", "total_bytes", "busy_percent")), *rest]
        yield ["" if value is None else value for value in row]


def prometheus_text(seen: Mapping[str, Any]) -> str:
    """The text format that Prometheus scrapes, or reads from a file beside node_exporter."""
    lines = []
    for name, key, what in (
        ("memfit_gpu_memory_used_bytes", "used_bytes", "Memory in use on the GPU, by all processes."),
        ("memfit_gpu_memory_total_bytes", "total_bytes", "Memory of the GPU."),
        ("memfit_gpu_busy_percent", "busy_percent", "Share of time in which a kernel ran."),
    ):
        rows = [f"{name}{{{_labels(gpu)}}} {gpu[key]}" for gpu in seen["gpus"] if gpu[key] is not None]
        lines += [f"# HELP {name} {what}", f"# TYPE {name} gauge", *rows] if rows else []
    for key in ("used_bytes", "total_bytes"):
        name = f"memfit_host_memory_{key}"
        lines += [f"# HELP {name} Host memory, of the container if there is one.", f"# TYPE {name} gauge"]
        lines.append(f"{name} {seen['host'][key]}")
    peaks = [job for job in seen["jobs"] if job["peak_bytes"] is not None]
    if peaks:
        name = "memfit_job_peak_bytes"
        lines += [f"# HELP {name} Peak of allocated GPU memory of a memfit job.", f"# TYPE {name} gauge"]
        lines += [f'{name}{{pid="{job["pid"]}",at="{_escaped(job["at"])}"}} {job["peak_bytes"]}' for job in peaks]
    return "\n".join(lines) + "\n"


def _labels(gpu: Mapping[str, Any]) -> str:
    named = {"gpu": gpu["index"], "uuid": gpu["uuid"], "name": gpu["name"]}
    return ",".join(f'{key}="{_escaped(str(value))}"' for key, value in named.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # "max" is no limit
            continue
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDriver:
    version: str
    cuda: tuple[int, int]
    """The newest that it serves."""
    capabilities: tuple[tuple[int, int], ...]
    """Of each GPU, in the driver's order: (9, 0) is sm_90."""


def read_driver() -> GpuDriver:
    """Raises NoNvml where no driver answers. No CUDA context is made, so this takes no memory of a GPU."""
    with nvml() as library:
        version = library.nvmlSystemGetDriverVersion()
        cuda = int(library.nvmlSystemGetCudaDriverVersion_v2())
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        capabilities = [library.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
    return GpuDriver(
        version=_text(version),
        cuda=(cuda // 1000, cuda % 1000 // 10),
        capabilities=tuple((int(major), int(minor)) for major, minor in capabilities),
    )

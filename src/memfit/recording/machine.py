"""This machine at one moment: its GPUs and who holds them, host memory, and the memfit jobs that run. One document.

{"schema": "memfit.watch/1", "time": "...", "gpus": [...], "no_gpus": null, "host": {...}, "jobs": [...]}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.recording.nvml import GpuState, NoNvml, read_gpus
from memfit.recording.status import running_jobs

SCHEMA = "memfit.watch/1"
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_USES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
CSV_COLUMNS = ("time", "gpu", "used_bytes", "total_bytes", "busy_percent", "host_used_bytes", "job", "at", "peak_bytes")


def look() -> dict[str, Any]:
    gpus: tuple[GpuState, ...] = ()
    why = None
    try:
        gpus = read_gpus()
    except NoNvml as error:
        why = str(error)
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

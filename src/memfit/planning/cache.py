"""Traces that were made before, on disk: a plan that differs only in what comes after the trace needs no torch.

A trace is found again by everything it depends on:

    settings    of the workload, all but the card and `alloc_conf`: those two matter only to the replay
    model       a preset, or the content of a config, wherever that lies; a factory's is never kept
    platform    the class of the card: architecture, multiprocessors, threads on each, torch and cuDNN; of compiled
                jobs the L2 cache too. The number of multiprocessors differs between cards of one architecture, and
                sizes the buffers of reductions: cards share traces only where it is the same (H100 SXM and H200; a
                size such as 24GiB and the H200)
    software    python, torch, transformers and the like by version, memfit itself by the content of its source files
                and presets; the cuDNN that is asked for plans of convolutions, if there is one

Entries lie in `$MEMFIT_CACHE`, or else in `memfit/traces` below `$XDG_CACHE_HOME` or `~/.cache`; `MEMFIT_CACHE=off`
does without. The folder is a convenience and never a reason to fail: what cannot be written is not kept, and what is
damaged, too large, someone else's, a link, or about another job is not read. An entry holds numbers and JSON (see
`Trace.load`), is written aside and renamed, so that any number of processes may share the folder, and carries the whole
of its key. When the folder is full, those that were not used for longest go first.

A model of a shape that no preset has is found again as a folder with its config.json, beside the traces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from shutil import rmtree
from types import FunctionType
from typing import Any, TypeVar

from memfit.events import Trace
from memfit.files import folder_of_this_process, own_cache, written_whole
from memfit.jobs.workload import Workload
from memfit.models.config_check import MAX_FILE_BYTES
from memfit.models.registry import ModelSource
from memfit.platform import Platform
from memfit.tracing.compiled.settings import compiler_is_set_otherwise, variables_read
from memfit.tracing.kernels.cudnn import identity as cudnn_identity
from memfit.units import MiB
from memfit.versions import versions

FORMAT = "memfit.cached-trace/1"

MAX_TOTAL_BYTES = 512 * MiB
MAX_ENTRY_BYTES = 32 * MiB
MAX_INFLATED_BYTES = 256 * MiB
LOOK_EVERY_BYTES = MAX_TOTAL_BYTES // 64
"""A process looks at the size of the folder with its first entry, and again when it has written so much more."""
ABANDONED_SECONDS = 3600

ROOMS = ("extrapolation", "jobs", "models", "planning", "replay", "tracing")
OTHER_FILES = ("__init__.py", "events.py", "platform.py", "models/presets.json")
"""The parts of memfit that have a say in a trace; its version stands in the first of these files."""

ENTRY = re.compile(r"[0-9a-f]{64}\.npz")
WRITING = ".writing-"

T = TypeVar("T")


# -- what a trace depends on -------------------------------------------------------------------------------------------


def key_of(work: Workload, platform: Platform) -> str | None:
    """Canonical JSON of all that the trace depends on. None where nothing is to be kept: the cache is off, or what the
    trace depends on cannot be told."""
    if folder() is None:
        return None
    model, own_code = identity(work.source), _own_code()
    if model is None or own_code is None or _is_patched():
        return None
    settings = {name: value for name, value in work.settings().items() if name not in ("model", "gpu", "alloc_conf")}
    document = {
        "format": FORMAT, "settings": settings, "model": model, "platform": platform.facts(compiled=work.is_compiled),
        "versions": versions(), "memfit": own_code, "cudnn": cudnn_identity(),
    }  # fmt: skip
    if work.compile or work.compile_blocks:
        variables = variables_read()
        if variables is None or compiler_is_set_otherwise():
            return None
        document["compiler"] = variables
    return json.dumps(document, sort_keys=True)


PACKAGES_OF_MODELS = {
    "transformers", "torch", "torchvision", "numpy", "scipy", "PIL", "packaging", "huggingface_hub", "tokenizers",
    "einops", "kernels", "fla", "accelerate", "peft", "mamba_ssm", "causal_conv1d", "tqdm",
    "safetensors",
}  # fmt: skip


def _is_patched() -> bool:
    """Whether this process has put other code into the models of transformers or into torch's functions, as Liger does,
    or hooks around all modules: what is traced then is of no use to others."""
    modules = vars(sys.modules.get("torch.nn.modules.module", object))
    if any(modules[name] for name in modules if name.startswith("_global_") and name.endswith("hooks")):
        return True
    return any(
        _is_foreign(value) or (isinstance(value, type) and _is_foreign(vars(value).get("forward")))
        for name, module in list(sys.modules.items())
        if name == "torch.nn.functional" or (name.startswith("transformers.models.") and ".modeling_" in name)
        for value in list(vars(module).values())
    )


def _is_foreign(value: object) -> bool:
    if not isinstance(value, (type, FunctionType)):
        return False
    package = (value.__module__ or "").partition(".")[0]
    return package not in PACKAGES_OF_MODELS and package not in sys.stdlib_module_names


def identity(source: ModelSource) -> dict[str, Any] | None:
    """What a model is, whatever it is called; None if that cannot be told."""
    if source.kind == "factory":
        return None
    if source.kind == "preset":
        return {"preset": source.target}
    try:
        if not os.path.isfile(source.target):
            return None
        with open(source.target, "rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        beside = _weights_in(os.path.dirname(source.target))
    except OSError:
        return None  # the tracing will say what is wrong with it
    if len(content) > MAX_FILE_BYTES:
        return None
    return {"sha256": hashlib.sha256(content).hexdigest(), "weights": beside}


def _weights_in(folder: str) -> list[tuple[str, int, int]]:
    """Files whose headers a plan may read: of a quantised checkpoint they say how its weights lie there."""
    with os.scandir(folder or ".") as entries:
        found = [entry for entry in entries if entry.name.endswith((".safetensors", ".safetensors.index.json"))]
        return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in found)


def _own_code() -> str | None:
    """A digest of memfit's source, so that a changed rule never meets an old trace. None if the files have changed
    since this process first looked: what runs here is then no longer what they say."""
    try:
        digest, seen = _first_look()
        return digest if seen == _look() else None
    except OSError:
        return None


@cache
def _first_look() -> tuple[str, tuple[Any, ...]]:
    seen, digest = _look(), hashlib.sha256()
    for name, _, _ in seen:
        digest.update(f"{name}\n".encode())
        digest.update(hashlib.sha256((_package() / name).read_bytes()).digest())
    return digest.hexdigest(), seen


def _look() -> tuple[tuple[str, int, int], ...]:
    """Every source file with its size and time."""
    root = _package()
    facts = [(name, (root / name).stat()) for name in OTHER_FILES]
    for room in ROOMS:
        facts.extend(_sources(str(root / room), room))
    return tuple(sorted((name, stats.st_size, stats.st_mtime_ns) for name, stats in facts))


def _sources(folder: str, name: str) -> Iterator[tuple[str, os.stat_result]]:
    for entry in os.scandir(folder):
        if entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry.stat()
        elif entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry.path, f"{name}/{entry.name}")


def _package() -> Path:
    return Path(__file__).parents[1]


# -- reading and writing -----------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Where traces are kept; None if nowhere."""
    return own_cache("traces")


def load(key: str, read: Callable[[Trace, Mapping[str, Any]], T]) -> T | None:
    """What `read` makes of the trace and the facts under a key; None if there is no good entry. Anything that is wrong
    with an entry, also what `read` raises, means only that the job is traced again."""
    where = folder()
    path = None if where is None else where / file_name(key)
    try:
        if path is None or not _is_mine(path.lstat()):
            return None
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_INFLATED_BYTES:
                return None
        trace = Trace.load(path)
        kept = trace.facts.pop("cached")
        made = read(trace, kept["facts"]) if kept["key"] == key else None
    except Exception:
        return None
    with suppress(OSError):
        os.utime(path)  # used now: it goes last
    return made


def store(key: str, trace: Trace, facts: Mapping[str, Any]) -> None:
    """Keep a trace and JSON facts. Where that cannot be done, it is not done."""
    where = folder()
    if where is None:
        return
    kept = dataclasses.replace(trace, facts={**trace.facts, "cached": {"key": key, "facts": dict(facts)}})
    with suppress(OSError):
        _make(where)
        if where.stat().st_mode & stat.S_IWOTH:
            return  # anyone could put things there
        aside = Path(tempfile.mkdtemp(prefix=WRITING, dir=where))
        try:
            written = aside / "trace.npz"
            kept.save(written)
            size = written.stat().st_size
            if size <= MAX_ENTRY_BYTES:
                written.replace(where / file_name(key))  # a link of that name is replaced, not followed
        finally:
            rmtree(aside, ignore_errors=True)
        _count(size, where)


def file_name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.npz"


def _make(folder: Path) -> None:
    """For the user alone, as are the folders on the way to it."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def _is_mine(stats: os.stat_result) -> bool:
    own = not hasattr(os, "geteuid") or stats.st_uid == os.geteuid()
    return own and stat.S_ISREG(stats.st_mode) and stats.st_size <= MAX_ENTRY_BYTES


# -- bounds ------------------------------------------------------------------------------------------------------------

_written_since_look = LOOK_EVERY_BYTES


def _count(size: int, folder: Path) -> None:
    global _written_since_look
    _written_since_look += size
    if _written_since_look >= LOOK_EVERY_BYTES:
        _written_since_look = 0
        tidy(folder)


def tidy(folder: Path) -> None:
    """Delete what was not used for longest, and what a killed process left behind. Other processes may do the same at
    the same time: a file that is already gone is as good as deleted. Files of other names are left alone."""
    entries: list[tuple[float, int, str]] = []
    for found in os.scandir(folder):
        with suppress(OSError):
            stats = found.stat(follow_symlinks=False)
            if ENTRY.fullmatch(found.name):
                entries.append((stats.st_mtime, stats.st_size, found.path))
            elif found.name.startswith(WRITING) and time.time() - stats.st_mtime > ABANDONED_SECONDS:
                rmtree(found.path, ignore_errors=True)
    excess = sum(size for _, size, _ in entries) - MAX_TOTAL_BYTES
    if excess <= 0:
        return
    excess += MAX_TOTAL_BYTES // 8  # so that the next entries find room
    for _, size, path in sorted(entries):
        if excess <= 0:
            return
        with suppress(OSError):
            os.unlink(path)
        excess -= size


def shape_folder(settings: Mapping[str, Any]) -> Path:
    """The same settings have the same folder: beside the traces that are kept, or only for as long as this process
    lives where none are."""
    text = json.dumps(settings, sort_keys=True, indent=1)
    name = f"{settings.get('model_type', 'model')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    traces = folder()
    if traces is not None:
        with suppress(OSError):
            return _written(traces.parent / "shapes" / name, text)
    return _written(folder_of_this_process() / name, text)


def _written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    config = folder / "config.json"
    if not config.is_file() or config.read_text(encoding="utf-8") != text:
        with written_whole(config) as beside:
            beside.write_text(text, encoding="utf-8")
    return folder

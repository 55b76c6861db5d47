"""PYTORCH_CUDA_ALLOC_CONF: whether this torch knows its options, and whether they cancel one another."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from memfit.checking.situation import Finding, Line, Situation
from memfit.environment import CUDA_VARIABLE, NEW_VARIABLE, VARIABLES, exported
from memfit.errors import UsageError
from memfit.replay.alloc_config import AllocatorConfig
from memfit.versions import release_of

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
    try:
        torch_version: str | None = version("torch")
    except PackageNotFoundError:
        torch_version = None
    wanted = situation.asked.job.alloc_conf if situation.asked.job else ""
    found = list(look(situation.environment, torch_version, wanted=wanted, at_start=started_with()))
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
        yield SETTINGS.failed(
            f"{NO_CACHING} is set: every tensor is asked of the driver, and the allocator does nothing",
            f"unset {NO_CACHING}",
        )
    yield from _misspelt(environment)
    yield from _names(there, torch_version)
    name = next(iter(there), None)
    if name is not None and wanted and there[name] != wanted:
        yield SETTINGS.warning(
            f"{name}={there[name]} is exported and wins over memory.alloc_conf {wanted}", f"unset {name}"
        )
    if name is not None and "torch" in sys.modules and at_start is not None and at_start.get(name) != there[name]:
        yield SETTINGS.warning(
            f"{name} was set after this process had started, when torch may have read it already",
            "export it before Python starts, or set it above `import torch`",
        )
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
        yield SETTINGS.warning(
            f"{used} and {' and '.join(others)} are set; torch reads {used} alone: {there[used]}",
            f"unset {' '.join(others)}",
        )
    if list(there) == [NEW_VARIABLE] and torch_version is not None and release_of(torch_version) < NEW_NAME_SINCE:
        yield SETTINGS.failed(
            f"torch {torch_version} does not read {NEW_VARIABLE} for CUDA; it does from 2.10 on",
            f"export {CUDA_VARIABLE}={there[NEW_VARIABLE]}",
        )


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
        yield ENVIRONMENT.warning(
            "CUDA_LAUNCH_BLOCKING is set: every kernel waits for the one before", "unset CUDA_LAUNCH_BLOCKING"
        )

"""Settings of torch's CUDA caching allocator, and the two sizes that follow from a request.

A job says `PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4]"`;
`AllocatorConfig.parse` reads such text as torch does. From a request the settings then give

    rounded(requested)     the size that is looked for among the free blocks
    segment_size(rounded)  what the driver is asked for when no free block serves

    >>> config = AllocatorConfig.parse("roundup_power2_divisions:4")
    >>> config.rounded(5 * MiB + 1) // MiB, config.segment_size(6 * MiB) // MiB
    (6, 20)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memfit.environment import CUDA_VARIABLE
from memfit.errors import UnknownName, UsageError
from memfit.units import MiB

# pytorch c10/core/AllocatorConfig.h (up to 2.10 in c10/cuda/CUDACachingAllocator.cpp); the same in 1.10, 2.1, 2.4,
# 2.11 and 2.13. The large segment size was the constant kLargeBuffer before it became an option in 2.11.
MIN_BLOCK_SIZE = 512
SMALL_SIZE = 1 * MiB
SMALL_SEGMENT_SIZE = 2 * MiB
MIN_LARGE_ALLOC = 10 * MiB
LARGE_SEGMENT_SIZE = 20 * MiB
ROUND_LARGE = 2 * MiB
MAX_SEGMENT_SIZE = 1 << 50  # memfit's own bound
MAX_REQUEST = 1 << 60  # c10/cuda/CUDACachingAllocator.cpp, allocate(): "more than 1EB"

# kRoundUpPowerOfTwoIntervals in c10/core/AllocatorConfig.cpp: one entry for each power of two from 1 MiB to 32 GiB
INTERVALS = 16

# What the parsers of 2.13 know (c10/core/AllocatorConfig.cpp, c10/cuda/CUDAAllocatorConfig.h) that no size depends on.
WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom",
)  # fmt: skip

WITH_EFFECT = (
    "backend", "expandable_segments", "garbage_collection_threshold", "large_segment_size_mb",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "roundup_power2_divisions",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """One value for each option that changes a size; the defaults are torch's."""

    max_split_size: int | None = None
    """Free blocks of at least this size are neither split nor given to smaller requests; None: no such size."""

    max_non_split_rounding: int | None = None
    """How much too large a block may be for a request of `max_split_size` or more; None: `large_segment_size`."""

    garbage_collection_threshold: float = 0.0
    """Share of the memory limit above which old cached segments are returned; 0: never."""

    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    """Steps into which each power of two from 1 MiB to 32 GiB is divided for rounding; 0 and 1: none."""

    expandable_segments: bool = False
    """Grow one segment for each stream and pool instead of asking the driver for a new one."""

    large_segment_size: int = LARGE_SEGMENT_SIZE
    """The segment opened for a request of 1 to 10 MiB, and the step in which expandable segments grow."""

    memory_fraction: float = 1.0
    """Share of the device that the process may hold; `limit_on` turns it into bytes."""

    def __post_init__(self) -> None:
        least = self.large_segment_size
        if least <= MIN_LARGE_ALLOC or least % MiB:
            raise UsageError(f"large_segment_size_mb must be a whole number above 10, not {least / MiB:g}")
        if least > MAX_SEGMENT_SIZE:
            raise UsageError(f"large_segment_size_mb {least / MiB:g} is more than any GPU has")
        for name in ("max_split_size", "max_non_split_rounding"):
            size = getattr(self, name)
            if size is not None and size < least:
                raise UsageError(
                    f"{name}_mb {size / MiB:g} is too small",
                    hint=f"torch accepts {least // MiB} and more (the size of a large segment in MiB)",
                )
        if self.garbage_collection_threshold and not 0 < self.garbage_collection_threshold < 1:
            raise UsageError(
                f"garbage_collection_threshold {self.garbage_collection_threshold:g} is not between 0 and 1"
            )
        if not 0 <= self.memory_fraction <= 1:
            raise UsageError(f"per_process_memory_fraction {self.memory_fraction:g} is not between 0 and 1")
        if len(self.roundup_power2_divisions) != INTERVALS:
            raise UsageError(
                f"roundup_power2_divisions needs {INTERVALS} entries, one for each power of two from 1 MiB"
            )
        for divisions in self.roundup_power2_divisions:
            if divisions < 0 or divisions & (divisions - 1):
                raise UsageError(f"roundup_power2_divisions {divisions} is not a power of two")

    # -- sizes -----------------------------------------------------------------------------------------------

    def rounded(self, requested: int) -> int:
        """The block size asked for: a multiple of 512, or of a fraction of a power of two if divisions are set."""
        interval = min(max(requested.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and requested > MIN_BLOCK_SIZE * divisions:
            step = (1 << (requested.bit_length() - 1)) // divisions
            return -(-requested // step) * step
        return max(-(-requested // MIN_BLOCK_SIZE), 1) * MIN_BLOCK_SIZE

    def segment_size(self, rounded: int) -> int:
        """What the driver is asked for. Error messages print this figure, not the tensor's size."""
        if rounded <= SMALL_SIZE:
            return SMALL_SEGMENT_SIZE
        if rounded < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-rounded // ROUND_LARGE) * ROUND_LARGE

    def limit_on(self, total_memory: int) -> int | None:
        """The bytes that `memory_fraction` allows on a device; a fraction of 1 is no limit at all."""
        return None if self.memory_fraction == 1.0 else int(self.memory_fraction * float(total_memory))

    # -- text ------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Read a `PYTORCH_CUDA_ALLOC_CONF` string; a later key wins over an earlier one, spaces do not count."""
        settings: dict[str, object] = {}
        for key, value in _pairs(_tokens(text)):
            settings.update(_setting(key, value))
        return cls(**settings)  # type: ignore[arg-type]

    @classmethod
    def from_snapshot(cls, settings: Mapping[str, Any]) -> AllocatorConfig:
        """From the `allocator_settings` of a torch snapshot: the text, and what was in force where torch says so."""
        config = cls.parse(str(settings.get(CUDA_VARIABLE, "")))
        in_force: dict[str, object] = {}
        if "max_split_size" in settings:
            in_force["max_split_size"] = None if settings["max_split_size"] < 0 else settings["max_split_size"]
        for name in ("garbage_collection_threshold", "expandable_segments"):
            if name in settings:
                in_force[name] = settings[name]
        divisions = settings.get("roundup_power2_divisions")
        if divisions:
            in_force["roundup_power2_divisions"] = tuple(divisions.get(str(1 << i), 0) for i in range(INTERVALS))
        return replace(config, **in_force)  # type: ignore[arg-type]

    def to_text(self) -> str:
        """The shortest text that `parse` (and torch) reads back as these settings; empty for the defaults."""
        parts = []
        if self.max_split_size is not None:
            parts.append(f"max_split_size_mb:{self.max_split_size // MiB}")
        if self.max_non_split_rounding is not None:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding // MiB}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold!r}")
        if any(self.roundup_power2_divisions):
            parts.append(f"roundup_power2_divisions:{_divisions_text(self.roundup_power2_divisions)}")
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.large_segment_size != LARGE_SEGMENT_SIZE:
            parts.append(f"large_segment_size_mb:{self.large_segment_size // MiB}")
        if self.memory_fraction != 1.0:
            parts.append(f"per_process_memory_fraction:{self.memory_fraction!r}")
        return ",".join(parts)


def _tokens(text: str) -> list[str]:
    return re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))


def _pairs(tokens: list[str]) -> list[tuple[str, list[str]]]:
    """`key : value ,` repeated, where a value is one token or everything between brackets."""
    pairs = []
    at = 0
    while at < len(tokens):
        key = tokens[at]
        if key not in WITH_EFFECT and key not in WITHOUT_EFFECT:
            more = f"write {key.replace('=', ':', 1)!r} with a colon" if "=" in key else ""
            raise UnknownName("allocator option", key, WITH_EFFECT + WITHOUT_EFFECT, more=more)
        if tokens[at + 1 : at + 2] != [":"] or at + 2 == len(tokens):
            raise UsageError(f"allocator option {key!r} has no value", hint=f"write {key}:VALUE")
        end = at + 3
        if tokens[at + 2] == "[":
            if "]" not in tokens[at + 2 :]:
                raise UsageError(f"the list after {key!r} has no closing bracket")
            end = tokens.index("]", at + 2) + 1
        pairs.append((key, tokens[at + 2 : end]))
        if end < len(tokens) and tokens[end] != ",":
            raise UsageError(f"a comma is missing after {key}:{''.join(tokens[at + 2 : end])}")
        at = end + 1
    return pairs


def _setting(key: str, value: list[str]) -> dict[str, object]:
    if key in WITHOUT_EFFECT:
        return {}
    if key == "roundup_power2_divisions":
        return {key: _divisions(value)}
    if len(value) != 1:
        raise UsageError(f"allocator option {key!r} takes one value, not {''.join(value)}")
    if key == "backend":
        return _backend(value[0])
    if key == "expandable_segments":
        if value[0] not in ("True", "False"):
            raise UsageError(f"expandable_segments is {value[0]!r}", hint="torch accepts True and False, spelled so")
        return {key: value[0] == "True"}
    if key == "per_process_memory_fraction":
        return {"memory_fraction": _number(key, value[0])}
    if key == "garbage_collection_threshold":
        threshold = _number(key, value[0])
        if not threshold:
            raise UsageError(
                "garbage_collection_threshold 0 is not between 0 and 1", hint="leave it out to turn it off"
            )
        return {key: threshold}
    if key == "max_split_size_mb" and value[0].startswith("-"):
        return {"max_split_size": None}  # torch takes it modulo 2^64, and its snapshots print unlimited as -1
    return {key.removesuffix("_mb"): _whole(key, value[0]) * MiB}


def _backend(name: str) -> dict[str, object]:
    if name == "native":
        return {}
    if name in ("cudaMallocAsync", "hipMallocAsync"):
        raise UsageError(
            f"backend:{name} is another allocator, inside the CUDA driver, whose rules memfit does not know",
            hint="leave backend out, or write backend:native, to predict torch's own allocator",
        )
    raise UnknownName("allocator backend", name, ("native", "cudaMallocAsync"))


def _divisions(value: list[str]) -> tuple[int, ...]:
    """One number for all sizes, or `[256:1,512:2,>:4]`: from 256 MiB, from 512 MiB, from 1 GiB on."""
    key = "roundup_power2_divisions"
    if value[0] != "[":
        count = _whole(key, value[0])
        if not count:
            raise UsageError(f"{key} 0 is not a power of two", hint="leave it out to turn it off")
        return (count,) * INTERVALS
    entries = [0] * INTERVALS
    first, last = True, 0
    for pair in "".join(value[1:-1]).rstrip(",").split(",") if len(value) > 2 else ():
        boundary, colon, count_text = pair.partition(":")
        if not colon or ":" in count_text:
            raise UsageError(f"{key}: {pair!r} is not of the form SIZE:DIVISIONS")
        count = _whole(key, count_text)
        if boundary == ">":
            entries[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        size = _whole(key, boundary)
        if not size or size & (size - 1):
            raise UsageError(f"{key}: the size {size} (in MiB) is not a power of two")
        last = min(size.bit_length() - 1, INTERVALS - 1)
        if first:
            entries[:last] = [count] * last
            first = False
        entries[last] = count
    return tuple(entries)


def _divisions_text(entries: tuple[int, ...]) -> str:
    if len(set(entries)) == 1:
        return str(entries[0])
    return "[" + ",".join(f"{1 << i}:{count}" for i, count in enumerate(entries)) + "]"


def _whole(key: str, text: str) -> int:
    """As std::stoull reads it: digits, and whatever follows them is dropped (`512MB` is 512)."""
    match = re.match(r"\+?([0-9]+)", text)
    if match is None:
        raise UsageError(f"{key} is {text!r}, not a whole number")
    return int(match[1])


def _number(key: str, text: str) -> float:
    match = re.match(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{key} is {text!r}, not a number")
    return float(match[0])

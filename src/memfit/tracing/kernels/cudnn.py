"""cuDNN itself, asked for the workspaces of convolutions: where its library is installed, that needs no GPU.

Which kernel runs a convolution is decided by cuDNN's heuristics, in which nets were trained: no rule tells it. Every
CUDA build of torch brings the library, and `pip install nvidia-cudnn-cu13` brings it to a machine without a GPU. It
is asked in a process of its own (`cudnn_library.py`), for it may crash.

What it must know of a card was read off an H200 once, by cuDNN's own words for a card; other cards differ from that by
what is known of their architecture. Clocks, caches and the number of multiprocessors change no answer (210 of 210 asked
for Ampere, Ada and Hopper); the architecture does, and on Hopper the clusters. On the H200 the answers are those of the
GPU, plan by plan, but for products of cuBLAS, whose own workspace is not among them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from memfit.errors import UsageError
from memfit.platform import H200, Platform

if TYPE_CHECKING:
    import subprocess

VARIABLE = "MEMFIT_CUDNN"
"""The folder of the library, or "off"."""
LIBRARY = "libcudnn_graph.so.9"
BY_RULE = "the workspaces of convolutions are told by rule"
SECONDS = 60
"""Heuristics take milliseconds; the libraries are read from disk first."""
OF_CUBLAS = 1 << 40
"""What cuBLAS is made to ask for, so that its part is told apart; cuDNN rounds it up to 256 bytes."""
ROUNDED = 256

FACTS: dict[str, Any] = {
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 6, "isTccDriver": 0,
    "supportCoopLaunch": 1, "totalGlobalMem": 150109880320, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
    "l2CacheSize": 62914560, "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000, "deviceName": "NVIDIA H200",
}  # fmt: skip
"""An H200 as cuDNN 9.19 describes it."""
CLUSTERS = (18, 18, *[16] * 5, 8, *[2] * 4, *[0] * 12, 132, 66, 39, 30, 22, 17, 15, 15, 9, *[7] * 7)
"""Of the same H200, what those words leave out: multiprocessors that lie together, and how many clusters of 1 to 16 run
at once."""
SHARED_BYTES = {(7, 5): 65536, (8, 0): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}
"""Shared memory of a block at most; 101,376 on all others."""
BLOCKS = {(7, 5): 16, (8, 6): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}
"""Thread blocks on a multiprocessor; 32 on all others."""


def folder() -> Path | None:
    """Of the library: named, or among the installed packages."""
    named = os.environ.get(VARIABLE, "")
    if named.lower() == "off" or sys.platform != "linux" or os.uname().machine != "x86_64":
        return None
    if named and not Path(named, LIBRARY).is_file():
        raise UsageError(
            f"{VARIABLE} is {named}, where there is no {LIBRARY}", hint=f"{VARIABLE}=off does without cuDNN"
        )
    places = [Path(named)] if named else [Path(place, "nvidia", "cudnn", "lib") for place in sys.path if place]
    return next((place.resolve() for place in places if (place / LIBRARY).is_file()), None)


def identity() -> list[Any] | None:
    """Which library would be asked: traces depend on it."""
    place = folder()
    if place is None:
        return None
    found = (place / LIBRARY).stat()
    return [str(place), found.st_size, found.st_mtime_ns]


def plans(question: dict[str, Any], platform: Platform) -> tuple[PlanBytes, ...]:
    """In the order in which torch tries them; none where nobody can be asked."""
    place = folder()
    return () if place is None else _asked(json.dumps(question), platform, place)


def said(platform: Platform) -> str:
    """Who was asked, or why nobody was: to be told with a plan."""
    place = folder()
    if place is None:
        return f"{BY_RULE}: after `pip install nvidia-cudnn-cu13` (no GPU needed) cuDNN itself is asked"
    library = _library(platform, place, os.getpid())
    if library is None:
        return f"{BY_RULE}: the cuDNN in {place} gives no answer (it takes 9.8 or newer, with cuBLAS beside it)"
    version = library.version
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    card = (
        "" if platform == H200 else f" for {platform.arch[0]}.{platform.arch[1]}; its answers were measured on an H200"
    )
    return f"convolutions: cuDNN {number} was asked for its plans{card}"


class PlanBytes(int):
    """The bytes of its workspace."""

    multiplies: bool
    """By cuBLAS, which may take more."""

    @classmethod
    def of(cls, told: int) -> PlanBytes:
        made = cls(told - OF_CUBLAS - ROUNDED if told >= OF_CUBLAS else told)
        made.multiplies = told >= OF_CUBLAS
        return made


@lru_cache(maxsize=8192)
def _asked(question: str, platform: Platform, place: Path) -> tuple[PlanBytes, ...]:
    library = _library(platform, place, os.getpid())
    return () if library is None else tuple(map(PlanBytes.of, library.ask(question)))


@cache
def _library(platform: Platform, place: Path, process: int) -> AskedLibrary | None:
    """One for each process: a fork would share its pipes."""
    return AskedLibrary.started(platform, place)


_libraries: list[AskedLibrary] = []


@atexit.register  # now: a traced program may not leave anything for the end, and this would count as its own
def _leave() -> None:
    for library in _libraries:
        library.leave()


class AskedLibrary:
    """The process that asks. Once it fails, it is asked no more."""

    def __init__(self, process: subprocess.Popen[bytes], version: int = 0) -> None:
        self.process, self.version = process, version

    @classmethod
    def started(cls, platform: Platform, place: Path) -> AskedLibrary | None:
        import subprocess

        words = [sys.executable, "-I", str(Path(__file__).with_name("cudnn_library.py")), str(place)]
        pipe, away = subprocess.PIPE, subprocess.DEVNULL
        made = cls(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=away, bufsize=0))
        clusters = CLUSTERS if platform.arch == H200.arch else ()
        answer = made._exchange(json.dumps({"card": facts_of(platform), "clusters": clusters}))
        if not isinstance(answer, dict):
            return None
        made.version = int(answer["version"])
        _libraries.append(made)
        return made

    def ask(self, question: str) -> list[int]:
        answer = self._exchange(question)
        return answer if isinstance(answer, list) else []

    def _exchange(self, line: str) -> Any:
        if self.process.poll() is not None:
            return None
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(f"{line}\n".encode())
            return json.loads(_line(stdout))
        except (OSError, ValueError):
            self.process.kill()
            self.leave()
            return None

    def leave(self) -> None:
        """It ends when nothing more can come."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait()


def _line(stream: IO[bytes]) -> bytes:
    """In time; what comes late or not at all is an error."""
    import select

    read = b""
    while not read.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], SECONDS)
        piece = stream.read(65536) if ready else b""
        if not piece:
            raise OSError("no answer")
        read += piece
    return read


def facts_of(platform: Platform) -> dict[str, Any]:
    arch = platform.arch
    return FACTS | {
        "deviceVer": 100 * arch[0] + 10 * arch[1],
        "multiProcessorCount": platform.sm_count,
        "maxThreadsPerSM": platform.max_threads_per_sm,
        "maxSharedMemoryPerBlockOptin": SHARED_BYTES.get(arch, 101376),
        "maxCtasPerSM": BLOCKS.get(arch, 32),
    }

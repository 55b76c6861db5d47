"""Settings and packages: what the allocator is told, and whether what a run uses is there and loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from memfit.checking.situation import CannotTell, Finding, Line, Situation
from memfit.environment import CUDA_VARIABLE, NEW_VARIABLE, VARIABLES, exported
from memfit.errors import UsageError
from memfit.jobs.training.levers import NEEDS_BITSANDBYTES
from memfit.replay.alloc_config import AllocatorConfig
from memfit.versions import TESTED, outside_tested, release_of

SET, LOADS = Line("settings", "packages"), Line("settings", "bitsandbytes")
COMPILER = Line("settings", "torch.compile")
C_COMPILERS = ("CC", "gcc", "clang", "cc")
PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "huggingface-hub")
TRAINING_EXTRA = "torch"
"""Under which transformers says what its Trainer needs."""
PATIENCE_SECONDS = 60.0
LOADING = "import bitsandbytes; print(bitsandbytes.__version__)"


def check_packages(situation: Situation) -> Iterator[Finding]:
    there = {name: found for name in PACKAGES if (found := installed(name)) is not None}
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


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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


WEIGHTS = Line("settings", "quantised weights")
PACKAGES_OF = {
    "torchao": ("torchao",), "gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",), "fp8": ("kernels",),
    "mxfp4": ("kernels",), "compressed-tensors": ("compressed-tensors",),
}  # fmt: skip
"""Which transformers asks for when it loads such weights."""


def check_weights(situation: Situation) -> Finding:
    work = situation.asked.job
    if work is None or not work.is_quantised or work.quantised_by == "bitsandbytes":
        raise CannotTell("none, or of bitsandbytes")
    method = work.quantised_by
    unpacked = work.quant == "dequantize" and method in ("fp8", "mxfp4")  # by transformers itself
    needed = () if unpacked else PACKAGES_OF[method]
    missing = [name for name in needed if installed(name) is None]
    if missing:
        way = "; or --quant dequantize" if method in ("fp8", "mxfp4") else ""
        found = f"{work.few_bits} needs {' and '.join(missing)}, not installed"
        return WEIGHTS.failed(found, f"pip install {' '.join(missing)}{way}")
    return WEIGHTS.ok(f"{work.few_bits}: {', '.join(f'{name} {installed(name)}' for name in needed) or method}")


def check_compiler(situation: Situation) -> Finding:
    """Of a job that is compiled: what Inductor needs on the machine that runs it, and whether memfit knows this one."""
    torch = installed("torch") or ""
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
        "triton": None if find_spec("triton") is None else installed("triton") or "without a version",
        "a C compiler": next(filter(None, compilers), None),
    }


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
    found = list(look(situation.environment, installed("torch"), wanted=wanted, at_start=started_with()))
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

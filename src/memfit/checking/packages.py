"""The packages that a run uses: there, new enough for one another, and loadable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.version import Version

from memfit.checking.situation import CannotTell, Finding, Line, Situation
from memfit.jobs.training.levers import NEEDS_BITSANDBYTES
from memfit.versions import TESTED, outside_tested

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
        yield SET.failed(
            f"{wants.name} {has} is not what {who} needs ({wants.name} {wants.specifier}): "
            "options may be missing or renamed",
            f"pip install '{wants.name}{wants.specifier}'",
            packages=there,
        )
    if missing or unmet:
        return
    if strange := ", ".join(outside_tested(there)):
        yield SET.warning(
            f"memfit was not tested with {strange}: plans of such versions may be off",
            "pip install -U memfit, or a version within the range",
            packages=there,
        )
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


def check_bitsandbytes(situation: Situation) -> Iterator[Finding]:
    """In a process of its own: built for another CUDA it may take the process down, and peft imports it unasked."""
    config, work = situation.asked.config, situation.asked.job
    by_weights = work is not None and work.is_quantised and work.quantised_by == "bitsandbytes"
    needed = config is not None and config.workload.optimizer in NEEDS_BITSANDBYTES
    if find_spec("bitsandbytes") is None:
        if work is not None and (needed or by_weights):
            who = work.few_bits if by_weights else "the optimizer"
            yield LOADS.failed(f"not installed, and {who} needs it", "pip install 'memfit[quant]'")
            return
        raise CannotTell("not installed, and nothing here needs it")
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield LOADS.failed(f"does not load within {PATIENCE_SECONDS:g} seconds", "pip uninstall bitsandbytes")
        return
    if done.returncode == 0:
        yield LOADS.ok(f"{done.stdout.strip().splitlines()[-1][:40]} loads")
        return
    how = f"ends the process with signal {-done.returncode}" if done.returncode < 0 else "does not load"
    last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:200]
    yield LOADS.failed(
        f"{how}: {last}; peft imports it even where nothing uses it",
        "pip uninstall bitsandbytes, or the build for this CUDA: pip install -U bitsandbytes",
    )


WEIGHTS = Line("settings", "quantised weights")
PACKAGES_OF = {
    "torchao": ("torchao",), "gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",), "fp8": ("kernels",),
    "mxfp4": ("kernels",), "compressed-tensors": ("compressed-tensors",),
}  # fmt: skip
"""Which transformers asks for when it loads such weights."""


def check_weights(situation: Situation) -> Iterator[Finding]:
    work = situation.asked.job
    if work is None or not work.is_quantised or work.quantised_by == "bitsandbytes":
        raise CannotTell("none, or of bitsandbytes")
    method = work.quantised_by
    unpacked = work.quant == "dequantize" and method in ("fp8", "mxfp4")  # by transformers itself
    needed = () if unpacked else PACKAGES_OF[method]
    missing = [name for name in needed if installed(name) is None]
    if missing:
        way = "; or --quant dequantize" if method in ("fp8", "mxfp4") else ""
        yield WEIGHTS.failed(
            f"{work.few_bits} needs {' and '.join(missing)}, not installed", f"pip install {' '.join(missing)}{way}"
        )
    else:
        yield WEIGHTS.ok(f"{work.few_bits}: {', '.join(f'{name} {installed(name)}' for name in needed) or method}")


def check_compiler(situation: Situation) -> Iterator[Finding]:
    """Of a job that is compiled: what Inductor needs on the machine that runs it, and whether memfit knows this one."""
    torch = installed("torch") or ""
    if strange := ", ".join(outside_tested({"torch": torch})):
        yield COMPILER.warning(
            f"the plan is of the compiler of {strange}, which memfit was not tested with",
            f"torch {' to '.join(TESTED['torch'])}",
        )
        return
    found = _for_kernels()
    lacking = " and ".join(name for name, here in found.items() if here is None)
    if lacking and situation.runs_here:
        yield COMPILER.failed(f"{lacking} not here: torch.compile fails at its first kernel",
                              "pip install triton; apt install gcc")  # fmt: skip
        return
    here = " and ".join(f"{name} ({where})" for name, where in found.items() if where is not None)
    at_hand = f"here: {here}" if not lacking else f"here {lacking} is missing, which no plan needs"
    where = "" if situation.runs_here else "; the machine with the card needs triton and a C compiler"
    yield COMPILER.ok(f"planned by the compiler of torch {torch}: run it with that version{where}; {at_hand}")


def _for_kernels() -> dict[str, str | None]:
    """What Inductor needs on the machine that runs a job: where it is on this one."""
    compilers = (shutil.which(os.environ.get(name, name)) for name in C_COMPILERS)
    return {
        "triton": None if find_spec("triton") is None else installed("triton") or "without a version",
        "a C compiler": next(filter(None, compilers), None),
    }

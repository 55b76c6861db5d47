"""The packages that a run uses: there, new enough for one another, and loadable.

Versions of packages, compared: as much of PEP 440 as requirements of real packages use.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from memfit.checking.situation import CannotTell, Finding, Line, Situation
from memfit.jobs.training.levers import NEEDS_BITSANDBYTES
from memfit.tracing.platform import outside_tested

Version = tuple[int, ...]
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_BOUND = re.compile(r"(===|==|~=|!=|<=|>=|<|>)\s*([0-9][^,\s]*)")
EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


def numbers_of(text: str) -> Version:
    """`2.13.0+cpu` is (2, 13, 0): what follows the numbers does not count here."""
    match = _NUMBERS.match(text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@dataclass(frozen=True)
class Requirement:
    """That another package be there in some versions."""

    package: str
    bounds: tuple[tuple[str, str], ...]
    extra: str | None
    """Only where this extra is asked for."""
    conditional: bool
    """On the Python version or the system."""

    def __str__(self) -> str:
        return f"{self.package} {','.join(sign + said for sign, said in self.bounds)}"

    def unmet_by(self, version: str) -> bool:
        have = numbers_of(version)
        return not all(_holds(have, sign, said) for sign, said in self.bounds)


def requirements(lines: list[str]) -> Iterator[Requirement]:
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        if match is None:
            continue
        marker = match[3] or ""
        extra = EXTRA.search(marker)
        rest = EXTRA.sub("", marker).replace("and", "").strip(" ()")
        yield Requirement(
            package=match[1].lower().replace("_", "-"), bounds=tuple(_BOUND.findall(match[2])),
            extra=extra[1] if extra else None, conditional=bool(rest),
        )  # fmt: skip


def _holds(have: Version, sign: str, said: str) -> bool:
    want = numbers_of(said)
    if said.endswith(".*") or sign == "~=":
        stem = want[:-1] if sign == "~=" else want
        alike = have[: len(stem)] == stem
        return not alike if sign == "!=" else alike and (sign != "~=" or have >= want)
    length = max(len(have), len(want))
    left, right = (each + (0,) * (length - len(each)) for each in (have, want))
    return {
        "==": left == right, "===": left == right, "!=": left != right, ">=": left >= right, "<=": left <= right,
        ">": left > right, "<": left < right,
    }[sign]  # fmt: skip


SET, LOADS = Line("settings", "packages"), Line("settings", "bitsandbytes")
PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "huggingface-hub")
TRAINING_EXTRA = "torch"
"""Under which transformers says what its Trainer needs."""
PATIENCE_SECONDS = 60.0
LOADING = "import bitsandbytes; print(bitsandbytes.__version__)"


def version_set(situation: Situation) -> Iterator[Finding]:
    there = {name: found for name in PACKAGES if (found := installed(name)) is not None}
    missing = [name for name in PACKAGES if name not in there]
    listed = ", ".join(f"{name} {found}" for name, found in there.items())
    if missing:
        yield SET.failed(f"{', '.join(missing)} not installed", f"pip install {' '.join(missing)}", packages=there)
    unmet = list(conflicts(there))
    for who, wants, has in unmet:
        yield SET.failed(
            f"{wants.package} {has} is not what {who} needs ({wants}): options may be missing or renamed",
            f"pip install '{str(wants).replace(' ', '')}'", packages=there,
        )  # fmt: skip
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
        for each in requirements(lines):
            counts = not each.conditional and each.extra in (None, TRAINING_EXTRA if who == "transformers" else None)
            if counts and each.package in there and each.unmet_by(there[each.package]):
                yield who, each, there[each.package]


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def bitsandbytes(situation: Situation) -> Iterator[Finding]:
    """In a process of its own: built for another CUDA it may take the process down, and peft imports it unasked."""
    config = situation.asked.config
    needed = config is not None and config.optimizer.name in NEEDS_BITSANDBYTES
    if find_spec("bitsandbytes") is None:
        if needed:
            yield LOADS.failed("not installed, and the optimizer needs it", "pip install bitsandbytes")
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

"""The versions that memfit says it was tested with are those of its own files, and others are told of."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import warm_python

from memfit.versions import TESTED, outside_tested, release_of, versions

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"^([\w.-]+)==([\w.]+)$", re.MULTILINE)
FLOOR = re.compile(r'^    "([\w.-]+)>=([\d.]+)",$', re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return dict(PINNED.findall((ROOT / name).read_text(encoding="utf-8")))


def floors() -> dict[str, str]:
    dependencies = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\ndependencies = [")[1].split("]")[0]
    return dict(FLOOR.findall(dependencies))


def test_the_oldest_tested_versions_are_the_floors_of_pyproject() -> None:
    assert {name: oldest for name, (oldest, _) in TESTED.items()} == {
        name: ".".join(map(str, release_of(floors()[name]))) for name in TESTED
    }


def test_constraints_oldest_pins_every_dependency_but_torch_to_its_floor() -> None:
    def numbers(version: str) -> list[int]:
        return ([int(part) for part in version.split(".")] + [0, 0])[:3]

    pinned = pins("constraints-oldest.txt")
    assert {name: numbers(version) for name, version in pinned.items()} == {
        name: numbers(floor) for name, floor in floors().items() if name != "torch"
    }


def test_the_pinned_versions_are_within_what_was_tested() -> None:
    assert list(outside_tested(pins("constraints.txt"))) == []


def test_this_environment_is_within_what_was_tested() -> None:
    """Where this alone fails under `make test-newest`, the table may say so much more."""
    assert list(outside_tested(versions())) == []


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("transformers", "5.24.0", "transformers 5.24.0 (tested: 5.6 to 5.17)"),
        ("transformers", "6.0.0.dev0", "transformers 6.0.0.dev0 (tested: 5.6 to 5.17)"),
        ("transformers", "5.17.9", None),
        ("torch", "2.10.1+cu128", "torch 2.10.1+cu128 (tested: 2.11 to 2.13)"),
        ("torch", "2.13.0+cpu", None),
        ("peft", None, None),
    ],
)
def test_a_version_outside_is_named_with_the_range(package: str, version: str | None, said: str | None) -> None:
    assert list(outside_tested({package: version})) == ([said] if said else [])


PLAN = """
import json, memfit
print(json.dumps(memfit.predict(kind="forward", model="gpt2", seq_len=16, trace_cache=False).to_json()["notes"]))
"""
CHECK = """
import json
from memfit.checking.machine import check_packages
from memfit.checking.situation import CheckRequest, Situation
print(json.dumps([each.to_json() for each in check_packages(Situation(CheckRequest()))]))
"""


def with_peft_from_the_future(code: str, tmp_path: Path) -> Any:
    info = tmp_path / "peft-9.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 9.1.0\n")
    first = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    done = subprocess.run([warm_python(), "-c", first + code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_plan_says_first_that_it_was_traced_with_an_untested_version(tmp_path: Path) -> None:
    notes = with_peft_from_the_future(PLAN, tmp_path)

    assert notes[0].startswith("traced with versions that memfit was not tested with: ")
    assert "peft 9.1.0 (tested: 0.19 to 0." in notes[0]


def test_check_warns_of_an_untested_version(tmp_path: Path) -> None:
    (finding,) = with_peft_from_the_future(CHECK, tmp_path)

    assert finding["status"] == "warning"
    assert finding["found"].startswith("memfit was not tested with ") and "peft 9.1.0 (tested" in finding["found"]

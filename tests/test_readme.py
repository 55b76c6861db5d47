"""The README's commands print what it says, its Python runs, every link leads somewhere, every example works.

python tests/test_readme.py      # writes the present output of the commands into the pages
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.quick import quick
from support.warm_python import warm_python

pytestmark = pytest.mark.usefixtures("shared_traces")

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SHOWN = [README, ROOT / "docs" / "plan.md"]
"""Pages whose commands are run."""
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def commands() -> list[tuple[str, str]]:
    """(command, what it is said to print)"""
    blocks = "\n".join(block for page in SHOWN for block in CONSOLE.findall(page.read_text(encoding="utf-8")))
    _, *parts = re.split(r"^\$ ", blocks, flags=re.MULTILINE)
    return [(part.partition("\n")[0], part.partition("\n")[2].strip("\n")) for part in parts]


def run(command: str, python: str) -> str:
    env = {**os.environ, "NO_COLOR": "1"}
    said = f'memfit() {{ "{python}" -m memfit "$@"; }}; {command}'
    done = subprocess.run(["bash", "-c", said], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    return done.stdout.strip("\n")


EACH_TIME = [each for each in commands() if "--grad-accum" not in each[0]]  # every micro-step is traced


@pytest.mark.parametrize(
    ("command", "said"), quick(EACH_TIME, commands()), ids=[command[:40] for command, _ in commands()]
)
def test_a_command_of_the_readme_prints_what_it_says(command: str, said: str) -> None:
    assert run(command, warm_python()) == said, "if the change is meant: python tests/test_readme.py"


WITH_PYTHON = [README, *(ROOT / "docs" / name for name in ("concepts.md", "python.md", "table.md"))]
BUT_ONE = [page for page in WITH_PYTHON if page.stem != "python"]


@pytest.mark.parametrize("page", quick(BUT_ONE, WITH_PYTHON), ids=lambda page: page.name)
def test_the_python_of_a_page_gives_what_it_says(page: Path) -> None:
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert missing == []


def test_the_file_tour_names_only_what_is_there() -> None:
    tour = README.read_text(encoding="utf-8").partition("## File tour")[2]
    paths = re.findall(r"`([\w/]+/)`", tour)
    assert len(paths) > 4 and "docs/house.md" in tour  # which names every file of the source
    assert [path for path in paths if not (ROOT / path).is_dir()] == []


def test_the_page_of_plan_lists_every_kind_of_job() -> None:
    from memfit.jobs.settings import KINDS

    covered = (
        (ROOT / "docs" / "plan.md").read_text(encoding="utf-8").partition("## What it covers")[2].partition("## ")[0]
    )
    assert re.findall(r"^\| `(\w+)`", covered, flags=re.MULTILINE) == list(KINDS)


def test_the_picture_of_the_context_has_the_catalogues_figures() -> None:
    from memfit.gpus import find_gpu
    from memfit.units import MiB

    words = re.findall(r">([^<>]+)</text>", (ROOT / "docs" / "context.svg").read_text(encoding="utf-8"))
    drawn = {card: figure for card, figure in pairwise(words) if figure.endswith(" MiB")}
    assert len(drawn) == 4
    for card, figure in drawn.items():
        context = find_gpu(card).context_after(training=True, flash=True)
        ends = sorted({context.low_bytes // MiB, context.high_bytes // MiB})
        assert f"{' to '.join(map(str, ends))} MiB" == figure


def test_the_makefile_says_what_each_target_does() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    targets = {line.split()[1] for line in done.stdout.splitlines()}
    assert targets == {
        "help",
        "setup",
        "demo",
        "test",
        "test-newest",
        "test-oldest",
        "check",
        "bench",
        "accuracy",
        "faults",
        "guides",
        "house",
        "levers",
        "test-all",
    }


def test_a_step_of_ones_own_is_reported() -> None:
    done = subprocess.run(
        [warm_python(), "examples/own_step.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.startswith("safe: ")


def rewrite() -> None:
    for page in SHOWN:
        text = page.read_text(encoding="utf-8")
        for block in CONSOLE.findall(text):
            asked = [line for line in block.splitlines() if line.startswith("$ ")]
            text = text.replace(block, "".join(f"{line}\n{run(line[2:], sys.executable)}\n" for line in asked))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite()

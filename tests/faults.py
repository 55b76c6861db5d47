"""Do the tests bite? Small faults, put into a copy of the source one at a time, and the tests that should notice them.

    make faults                                    # all of them, which takes a while
    python tests/faults.py --room pruning          # one room
    python tests/faults.py --only journal --jobs 2 # those with this word in their name
    python tests/faults.py --check                 # whether every piece of source text is still there exactly once

A fault is a piece of source text that its file has exactly once, and what becomes of it (`fault_list.py`). The checkout
is never edited: the package is copied, changed there, and the named test files run on the copy until the first failure.
A piece that is gone, or is there twice, is an error: whoever rewrites such a line writes the fault again. A fault that
changes nothing a user could see says why in `harmless`, and stays in the list so that nobody looks for its test again.

Each run is a fork of this process, in which the large packages are imported already.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from fault_list import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "memfit"
TIMEOUT_S = 300.0
NOTICED, MISSED, HARMLESS, BROKEN = "noticed", "NOT NOTICED", "no consequence", "BROKEN"


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(argv)
    wrong = [problem for fault in FAULTS if (problem := problem_with(fault))]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    chosen = [f for f in FAULTS if asked.room in (None, f.room) and all(w in f.name for w in asked.only)]
    if asked.check:
        print(f"{len(chosen)} faults, each in its place")
        return 0
    os.chdir(ROOT)
    _import_large_packages()
    if not asked.trust and not passes_without_a_fault(chosen, asked.jobs):
        return 2
    verdicts = []
    for verdict in judged(chosen, asked.jobs):
        verdicts.append(verdict)
        print(f"{verdict.word:15}{verdict.seconds:5.0f} s  {verdict.fault.room:12} {verdict.fault.name}", flush=True)
        if verdict.word == BROKEN:
            print(verdict.said, file=sys.stderr)
    print("\n" + table(verdicts))
    return int(any(verdict.word in (MISSED, BROKEN) for verdict in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--room", choices=sorted({fault.room for fault in FAULTS}))
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="in the fault's name; repeatable")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--check", action="store_true", help="look for the pieces of source text, run nothing")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault first")
    return parser


def problem_with(fault: Fault) -> str | None:
    """Why a fault cannot be put in, or its tests not be run."""
    path = SOURCE / fault.file
    found = path.read_text(encoding="utf-8").count(fault.piece) if path.is_file() else 0
    if found != 1:
        return f"{fault.name}: {fault.file} has {fault.piece!r} {found} times, not once"
    lost = [test for test in fault.tests if not (ROOT / "tests" / test).is_file()]
    return f"{fault.name}: no test file {', '.join(lost)}" if lost else None


# -- running -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    word: str
    seconds: float = 0.0
    said: str = ""


def judged(faults: Sequence[Fault], jobs: int) -> Iterator[Verdict]:
    """In the order in which they are done."""
    yield from (Verdict(fault, HARMLESS) for fault in faults if fault.harmless)
    left = [fault for fault in faults if not fault.harmless]
    running: dict[TestRun, Fault] = {}
    while left or running:
        while left and len(running) < jobs:
            fault = left.pop(0)
            running[TestRun(fault.tests, fault)] = fault
        for run in [run for run in running if run.is_over()]:
            word = {0: MISSED, 1: NOTICED, 2: NOTICED}.get(run.code, BROKEN)  # 2: it cannot even be imported
            yield Verdict(running.pop(run), word, time.monotonic() - run.began, run.said)
        time.sleep(0.05)


def passes_without_a_fault(faults: Sequence[Fault], jobs: int) -> bool:
    """A test that fails anyway notices nothing."""
    left = sorted({test for fault in faults if not fault.harmless for test in fault.tests})
    running: list[TestRun] = []
    well = True
    while left or running:
        while left and len(running) < jobs:
            running.append(TestRun((left.pop(),)))
        for run in [run for run in running if run.is_over()]:
            running.remove(run)
            if run.code != 0:
                well = False
                print(f"{', '.join(run.tests)}: fails without any fault\n{run.said}", file=sys.stderr)
        time.sleep(0.05)
    return well


class TestRun:
    """pytest in a process of its own, on a copy of the source, with a fault in it or without. Compiled modules are left
    out: a fault is in the Python source."""

    def __init__(self, tests: Sequence[str], fault: Fault | None = None) -> None:
        self.tests, self.code, self.said = tests, 0, ""
        self.began = time.monotonic()
        self._folder = Path(mkdtemp(prefix="memfit-faults-"))
        shutil.copytree(SOURCE, self._folder / "memfit", ignore=shutil.ignore_patterns("__pycache__"))
        if fault is not None:
            path = self._folder / "memfit" / fault.file
            path.write_text(path.read_text(encoding="utf-8").replace(fault.piece, fault.becomes), encoding="utf-8")
        sys.stdout.flush()
        self._process = os.fork()
        if self._process == 0:
            code = 70
            try:
                code = self._tested()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def _tested(self) -> int:
        import pytest

        os.setsid()
        written = os.open(self._folder / "said", os.O_WRONLY | os.O_CREAT, 0o600)
        for descriptor in (1, 2):
            os.dup2(written, descriptor)
        os.environ |= {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1", "MEMFIT_PURE": "1"}
        sys.dont_write_bytecode = True
        sys.path[0] = str(self._folder)
        flags = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return int(pytest.main([*flags, *(f"tests/{test}" for test in self.tests)]))

    def is_over(self) -> bool:
        ended, status = os.waitpid(self._process, os.WNOHANG)
        if ended:
            self.code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - self.began < TIMEOUT_S:
            return False
        else:
            os.killpg(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            self.code = -1
        self.said = (self._folder / "said").read_text(encoding="utf-8", errors="replace")[-2000:]
        shutil.rmtree(self._folder, ignore_errors=True)
        return True


def _import_large_packages() -> None:
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401


def table(verdicts: Sequence[Verdict]) -> str:
    words = (NOTICED, MISSED, HARMLESS, BROKEN)
    counts = Counter((verdict.fault.room, verdict.word) for verdict in verdicts)
    rooms = sorted({verdict.fault.room for verdict in verdicts})
    rows = [(room, *(str(counts[room, word]) for word in words)) for room in rooms]
    total = ("all", *(str(sum(counts[room, word] for room in rooms)) for word in words))
    lines = [f"{row[0]:16}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in (("room", *words), *rows, total)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""`--try batch_size=4,8,16`: a program planned again and again, with its own arguments changed."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError, UsageError
from memfit.gpus import Gpu
from memfit.planning.own_code import LineAnswer
from memfit.planning.predict import Plan
from memfit.render.shown import Shown
from memfit.scripts.command import Program, read_command
from memfit.scripts.plan import SECONDS, STEPS, trace_once

SCHEMA = "memfit.trials/1"
MOST = 64
_BARE = re.compile(r"[\w.]+=.*")


@dataclass(frozen=True)
class Trial:
    changed: dict[str, str]
    program: Program
    plan: Plan | None
    error: str | None

    def to_json(self) -> dict[str, Any]:
        plan = None if self.plan is None else self.plan.to_json()
        return {"changed": self.changed, "command": self.program.words, "plan": plan, "error": self.error}


@dataclass(frozen=True)
class Trials(Shown):
    """A program and its plans, one for each way in which its arguments were changed."""

    program: Program
    runs: tuple[Trial, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "command": self.program.words,
            "runs": [run.to_json() for run in self.runs],
            "notes": list(self.notes),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Values that change nothing may never have been read."""
        peaks = {None if run.plan is None else run.plan.peak for run in self.runs}
        if len(self.runs) < 2 or len(peaks) > 1 or None in peaks:
            return ()
        return (f"every run needs the same: does the script read {', '.join(self.runs[0].changed)}?",)


def try_script(
    command: str | Sequence[str] | Program,
    changes: Mapping[str, Sequence[object]],
    *,
    gpu: str | Gpu | None = None,
    steps: int = STEPS,
    alloc_conf: str = "",
    answers: Mapping[str, LineAnswer] | None = None,
    seconds: float = SECONDS,
    synthetic_data: bool = False,
) -> Trials:
    """Every combination of the values in `changes` ({"batch_size": [4, 8]}); the rest as for `trace_script`.
    A run that fails is told with its error, and the others go on."""
    program = command if isinstance(command, Program) else read_command(command)
    _check(changes)
    combinations = list(itertools.product(*(dict.fromkeys(map(str, values)) for values in changes.values())))
    if not changes or not combinations:
        raise UsageError("nothing to try", hint="--try batch_size=4,8,16")
    if len(combinations) > MOST:
        raise UsageError(f"{len(combinations)} runs are more than {MOST}", hint="fewer values, or fewer keys")
    once = partial(trace_once, gpu=gpu, steps=steps, alloc_conf=alloc_conf, answers=answers, seconds=seconds,
                   synthetic_data=synthetic_data)  # fmt: skip
    runs = (_try(program, dict(zip(changes, values, strict=True)), once) for values in combinations)
    return Trials(program, tuple(runs))


def _check(changes: object) -> None:
    fine = isinstance(changes, Mapping) and all(
        isinstance(key, str) and isinstance(values, Sequence) and not isinstance(values, (str, bytes))
        for key, values in changes.items()
    )
    if not fine:
        raise UsageError(f"{changes!r} is no table of values to try", hint='{"batch_size": [4, 8]}')


def _try(program: Program, changed: dict[str, str], once: Callable[[Program], Plan]) -> Trial:
    arguments, source = program.arguments, _source(program)
    for key, value in changed.items():
        arguments = with_argument(arguments, key, value, source)
    asked = dataclasses.replace(program, arguments=arguments)
    try:
        return Trial(changed, asked, once(asked), None)
    except UsageError:
        raise
    except MemfitError as error:
        return Trial(changed, asked, None, error.message)


def _source(program: Program) -> str:
    return "" if program.is_module else Path(program.target).read_text(encoding="utf-8", errors="replace")


def with_argument(arguments: Sequence[str], key: str, value: str, source: str = "") -> tuple[str, ...]:
    """In the form in which the argument is there already, or as the program's own text spells it, or as the others.

    >>> with_argument(("--batch_size", "8", "--lr=1"), "batch_size", "4"), with_argument(("--lr=1",), "b", "4")
    (('--batch_size', '4', '--lr=1'), ('--lr=1', '--b=4'))
    >>> with_argument(("model.lr=1",), "model.size", "2")
    ('model.lr=1', 'model.size=2')
    """
    names = {f"{dashes}{spelt}" for dashes in ("--", "-", "") for spelt in _spellings(key)}
    done = list(arguments)
    for at, word in reversed(list(enumerate(arguments))):  # of two, a parser takes the last
        name, equals, _ = word.partition("=")
        if name in names and equals:
            done[at] = f"{name}={value}"
            return tuple(done)
        if name in names and name.startswith("-") and at + 1 < len(arguments):
            done[at + 1] = value
            return tuple(done)
    for spelt in _spellings(key):
        if re.search(rf"""(["'])--{re.escape(spelt)}\1""", source):
            return (*arguments, f"--{spelt}={value}")
    bare = any(_BARE.fullmatch(word) for word in arguments) and not any(word.startswith("-") for word in arguments)
    return (*arguments, f"{'' if bare or key.startswith('-') else '--'}{key}={value}")


def _spellings(key: str) -> tuple[str, ...]:
    plain = key.lstrip("-")
    return plain, plain.replace("-", "_"), plain.replace("_", "-")

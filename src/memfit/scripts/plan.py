"""`memfit.trace_script`: a program, run unmodified without a GPU, and what it would take on one.

    print(memfit.trace_script("python train.py --batch_size 8", gpu="RTX 4090"))

It runs in this process, with its own arguments, in the working folder, until its optimizer has made a few steps.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from memfit.analysis.advice import WORTH, gradients_zeroed, zeroed_in_place
from memfit.environment import COMPILER_READS, refuse_what_torch_dies_of
from memfit.errors import UsageError
from memfit.gpus import Gpu
from memfit.planning.own_code import LineAnswer, larger_of_both, trace_code
from memfit.planning.predict import Plan
from memfit.scripts.command import Program, read_command
from memfit.units import format_bytes

STEPS = 3
UNLIKE = 0.01
"""Steps that hold so much more than another were given a larger batch."""
SECONDS = 600.0


def trace_script(
    command: str | Sequence[str] | Program,
    *,
    gpu: str | Gpu | None = None,
    steps: int = STEPS,
    alloc_conf: str = "",
    answers: Mapping[str, LineAnswer] | None = None,
    seconds: float = SECONDS,
    synthetic_data: bool = False,
) -> Plan:
    """`command` as it would be typed, or as a list of words. `answers` says what the program finds where it decides by
    a value that nobody knows, by file and line: {"train.py:123": True}; "even" where it chooses, as a router chooses
    experts. A program that zeroes its gradients in place is
    run a second time, to tell what that costs. `synthetic_data` makes up tokenizers and data sets that are not here."""
    once = partial(trace_once, command, gpu=gpu, steps=steps, alloc_conf=alloc_conf, answers=answers, seconds=seconds,
                   synthetic_data=synthetic_data)  # fmt: skip
    plan = larger_of_both(once)
    place = zeroed_in_place(plan.trace)
    if place is None or plan.report.breakdown["gradients"] < plan.peak.allocated_bytes * WORTH:
        return plan
    peak, dropped = plan.peak, once(drops_gradients=True).peak
    saved = peak.allocated_bytes - dropped.allocated_bytes, peak.reserved_bytes - dropped.reserved_bytes
    return dataclasses.replace(plan, advice=(*(plan.advice or ()), gradients_zeroed(place, *saved)))


def trace_once(command: str | Sequence[str] | Program, **asked: Any) -> Plan:
    """As asked, and with the columns that the program asks made-up data for."""
    from memfit.scripts.made_up_columns import with_columns_asked_for

    return with_columns_asked_for(partial(_trace_with, command, **asked))


def _trace_with(
    command: str | Sequence[str] | Program,
    *,
    gpu: str | Gpu | None,
    steps: int,
    alloc_conf: str,
    answers: Mapping[str, LineAnswer] | None,
    seconds: float,
    synthetic_data: bool = False,
    drops_gradients: bool = False,
    more_columns: tuple[str, ...] = (),
) -> Plan:
    from memfit.scripts.hub import hub_pretended
    from memfit.scripts.kept_on_host import host_has_room
    from memfit.scripts.made_up import data_made_up
    from memfit.scripts.made_up_columns import columns_are_made_up
    from memfit.scripts.run import run_program
    from memfit.scripts.stopping import Steps

    if steps < 1:
        raise UsageError(f"--steps {steps} is not above 0", hint="such as --steps 3")
    program = command if isinstance(command, Program) else read_command(command)
    _check_variables(dict(program.environment))
    said, alloc_conf = alloc_conf, alloc_conf or program.alloc_conf
    lines = [_place(place, value) for place, value in (answers or {}).items()]
    seen: list[Steps] = []
    asked: list[Any] = []
    made_up: dict[str, tuple[str, ...]] = {}

    def run(tracer: Any) -> None:
        asked.append(tracer.answers)
        for file, number, value in lines:
            tracer.answers.answer_line(file, number, value)
        seen.append(Steps(steps, tracer))
        data = data_made_up(tracer, made_up, wanted=synthetic_data, more=more_columns)
        with hub_pretended(tracer, made_up=synthetic_data), data, host_has_room(tracer):
            run_program(program, seen[-1], seconds=seconds, tracer=tracer, alloc_conf=said)

    with columns_are_made_up(made_up, program.arguments):
        made = trace_code(
            run,
            gpu=gpu,
            alloc_conf=alloc_conf,
            name=program.name,
            more_notes=lambda: (*_not_asked(asked[-1].lines_not_asked()), _stopped(seen[-1]), *program.notes),
            drops_gradients=drops_gradients,
            workload={
                "kind": "script",
                "command": program.words,
                "processes": program.processes,
                "steps": steps,
                "alloc_conf": alloc_conf,
                "synthetic_data": synthetic_data,
            },
        )
    return dataclasses.replace(made, notes=(*_unlike_steps(made, seen[-1]), *_caught(made, program), *made.notes))


def _unlike_steps(plan: Plan, steps: Any) -> Iterator[str]:
    """The first one has no optimizer's states yet, so it is not compared."""
    held: dict[int, int] = {}
    for phase in plan.report.phases:
        if phase.step is not None and 2 <= phase.step <= steps.done:
            held[phase.step] = max(held.get(phase.step, 0), phase.allocated_bytes)
    falls = any(before > after * (1 + UNLIKE) for before, after in pairwise(held[step] for step in sorted(held)))
    if steps.rises or steps.alternates or not falls:
        return
    least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
    yield (
        f"not modelled: batches larger than the {steps.done} that were seen. The steps are not alike: step {least} held"
        f" {format_bytes(held[least])} and step {most} {format_bytes(held[most])}, so a later one may take more:"
        f" --steps {max(10, 3 * steps.done)} looks further, and data with the longest rows first tells at once"
    )


CATCHES = re.compile(r"""OutOfMemoryError|find_executable_batch_size|auto_find_batch_size=True|["']out of memory["']""")


def _caught(plan: Plan, program: Program) -> Iterator[str]:
    """By the text of its first file: in a plan nothing ever runs out."""
    if plan.verdict != "fails" or program.is_module:
        return
    try:
        text = Path(program.target).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return
    if found := CATCHES.search(text):
        yield (
            f"not modelled: what the program does when memory runs out ({found[0]} stands in it): in the plan it never"
            " does, on the card it may go on with less"
        )


def _check_variables(given: Mapping[str, str]) -> None:
    """What torch's compiler reads when it is imported would hold for the whole process, or come too late."""
    refuse_what_torch_dies_of(given)
    for name, value in given.items():
        if name.startswith(COMPILER_READS) and os.environ.get(name) != value:
            raise UsageError(
                f"{name}={value} before the command: torch reads it when it is imported, and this process has its own",
                hint=f"export {name}={value} before Python starts, or memfit plan script -- {name}={value} ...",
            )


def _not_asked(places: list[str]) -> Iterator[str]:
    if places:
        yield f"--answer {', '.join(places)} had no effect: no such line asked for a value that is not known"


def _stopped(steps: Any) -> str:
    done = steps.done
    if not done:
        return "the script ran to its end without a step of an optimizer"
    grows = "; the peak still rose in the last one and may keep growing" if steps.rises and done > 2 else ""
    later = "what comes later, such as an evaluation or a longer batch, is not in the plan"
    counted = f"backward pass{'es' * (done != 1)}" if steps.by_hand else f"optimizer step{'s' * (done != 1)}"
    return f"stopped after {done} {counted}: {later}{grows}"


def _place(place: str, value: LineAnswer) -> tuple[str, int, LineAnswer]:
    file, _, line = place.rpartition(":")
    if not file or not line.isdigit() or not (value == "even" or isinstance(value, (bool, int, float))):
        raise UsageError(f"the answer {place!r}: {value!r} has another form", hint="train.py:123=true")
    if not int(line):
        raise UsageError(f"the answer {place!r}: lines are counted from 1", hint="train.py:123=true")
    if value != value:
        raise UsageError(f"the answer {place!r}: nan is no value to decide by", hint="train.py:123=true, or a number")
    return file, int(line), value

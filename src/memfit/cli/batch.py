"""`memfit plan batch FILE|-`: many predictions in one process.

A line in is one workload as JSON, `{"kind": "train", "model": "gpt2", "batch_size": 8, "gpu": "24GB", "id": 7}`; a line
out is its plan, or `{"schema": "memfit.error/1", "id": 7, "line": 3, "error": "...", "hint": "..."}` where the line was
wrong. There is one line out for each line in that is not blank, in the same order, written when it is known.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import typer

from memfit.cli import output
from memfit.cli.options import plain_name, plain_value
from memfit.errors import InputError, MemfitError, UsageError
from memfit.models.config_check import without_doubles

ERROR_SCHEMA = "memfit.error/1"
MAX_LINE_BYTES = 1 << 20
MOST_LINES_AHEAD = 1 << 15
BAD_LINES, BUG = 2, 70


def batch(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="One workload as JSON a line; - is standard input.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="For lines that name no card themselves.")] = None,
) -> int:
    """Predict many jobs in one process: one workload as JSON a line in, one plan as JSON a line out."""
    from memfit.gpus import find_gpu

    if gpu is not None:
        find_gpu(gpu)
    code = 0
    _look_ahead(file, gpu)
    with _opened(file) as stream, _progress(file) as advance:
        for number, line in read_lines(stream):
            document, failed = answer(line, number, gpu)
            output.print_json(document, indent=None)
            code = max(code, failed)
            advance()
    return code


def _look_ahead(file: str, gpu: str | None) -> None:
    """Jobs that will be asked for at many batch sizes and lengths are worth a few traces more, which tell the rest. A
    pipe can be read only once; what is wrong with a line is said when its turn comes."""
    if file == "-" or not Path(file).is_file():
        return
    from memfit.gpus import find_gpu
    from memfit.jobs.workload import Workload
    from memfit.planning.family import family_of, point_of
    from memfit.tracing.platform import platform_of

    with suppress(OSError), Path(file).open("rb") as stream:
        for _, line in itertools.islice(read_lines(stream), MOST_LINES_AHEAD):
            with suppress(Exception):
                settings, card = _settings(_parse(line))
                name = gpu if card is None else card
                work = Workload.from_mapping(settings)
                family = family_of(work, platform_of(find_gpu(name) if name is not None else None))
                if family is not None:
                    family.corners.expected.add(point_of(work))


def answer(line: bytes | None, number: int, gpu: str | None = None) -> tuple[dict[str, Any], int]:
    """A line's plan or its error, and the exit code that it calls for. `None` is a line that was too long."""
    values: dict[str, Any] = {}
    try:
        values = _parse(line)
        settings, card = _settings(values)
        with redirect_stdout(sys.stderr):  # stdout is for answers, whatever the model's own code prints
            from memfit.planning.predict import predict

            return predict(gpu=gpu if card is None else card, id=values.get("id"), **settings).to_json(), 0
    except MemfitError as error:
        message, hint, code = error.message, error.hint, BAD_LINES
    except Exception as error:
        traceback.print_exc()
        message, hint, code = f"{type(error).__name__}: {error}", "this is a bug in memfit; the rest goes on", BUG
    return {"schema": ERROR_SCHEMA, "id": values.get("id"), "line": number, "error": message, "hint": hint}, code


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers; one that is too long is read past, never held."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        too_long = len(line) > MAX_LINE_BYTES
        while too_long and line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        if too_long:
            yield number, None
        elif line.strip():
            yield number, line


def _parse(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise InputError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    try:
        values = json.loads(
            line.decode("utf-8-sig"), parse_constant=_refuse, parse_float=_finite, object_pairs_hook=without_doubles
        )
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"not a line of JSON: {error.msg} at column {error.pos + 1}") from error
    except RecursionError as error:
        raise InputError("not a line of JSON that can be read: too many brackets inside each other") from error
    except ValueError as error:
        raise InputError(f"not a line of JSON that can be read: {str(error).partition(';')[0]}") from error
    if not isinstance(values, dict):
        raise InputError(f"{json.dumps(values)[:40]} is no object", hint='{"kind": "train", "model": "gpt2"} is one')
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _settings(values: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Names as `predict` has them: the guides' spellings are read too, a setting given twice is refused."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = plain_name(key)
        if name in settings:
            raise UsageError(f"{key!r} is a second {name!r}")
        settings[name] = plain_value(name, value)
    settings.pop("id", None)
    card = settings.pop("gpu", None)
    if card is not None and not isinstance(card, str):
        raise UsageError(f"gpu {card!r} is not text", hint='write "RTX 4090", "24GB" or "24GiB"')
    return settings, card


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(Path(file).open("rb"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"cannot read {file!r}: {why}", hint="give a file with one workload a line, or -"
            ) from error
        yield stream


@contextmanager
def _progress(file: str) -> Iterator[Any]:
    """A bar on stderr if somebody looks on there, and the answers go elsewhere."""
    err = output.errors_console()
    if not err.is_terminal or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    total = None if file == "-" else _count(Path(file))
    columns = (SpinnerColumn(), TextColumn("workloads"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("workloads", total=total)
        yield lambda: progress.advance(task)


def _count(path: Path) -> int | None:
    """Lines to do; unknown for a pipe, which can be read only once."""
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(1 for _ in read_lines(stream))

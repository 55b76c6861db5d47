"""Many jobs predicted one after the other: `memfit.predict_many`, and the lines of `memfit plan batch`.

A line is one job as JSON, `{"kind": "train", "model": "gpt2", "batch_size": 8, "gpu": "24GB", "id": 7}`. What is wrong
with a job is its answer, a `Refusal`: the rest goes on.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from memfit.errors import InputError, MemfitError, UsageError
from memfit.gpus import Gpu, find_gpu
from memfit.jobs.settings import plain_name, plain_value
from memfit.jobs.workload import Workload
from memfit.models.config_check import without_doubles

if TYPE_CHECKING:
    from memfit.planning.predict import Plan

SCHEMA = "memfit.error/1"
MAX_LINE_BYTES = 1 << 20
MOST_AHEAD = 1 << 15
TOO_LONG = None
"""In place of a line that is longer than any job."""

Job = Workload | Mapping[str, Any] | bytes | None
"""Settings, or a line of JSON with them; both may have an `id` and a `gpu` of their own."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """In place of the plan of a job that has none: what is wrong with it, and what to do."""

    id: object
    number: int
    """Of the job among all, or of its line, from 1."""
    error: Exception

    @property
    def is_bug(self) -> bool:
        return not isinstance(self.error, MemfitError)

    @property
    def message(self) -> str:
        error = self.error
        return error.message if isinstance(error, MemfitError) else f"{type(error).__name__}: {error}"

    @property
    def hint(self) -> str | None:
        error = self.error
        return error.hint if isinstance(error, MemfitError) else "this is a bug in memfit; the rest goes on"

    def __repr__(self) -> str:
        return f"<Refusal: job {self.number}: {self.message}>"

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "id": self.id, "line": self.number, "error": self.message, "hint": self.hint}


def predict_many(
    jobs: Iterable[Job] | BinaryIO | str | os.PathLike[str], *, gpu: str | Gpu | None = None
) -> Iterator[Plan | Refusal]:
    """Predict many jobs, each when its turn comes: a `Plan` for each, or a `Refusal` that says what is wrong with it.

    A job is a `Workload` or its settings as a mapping; `jobs` may also be a file with one of them as JSON a line. `gpu`
    is for those that name no card. Where all of them can be looked at before, many of one kind share a few traces."""
    if gpu is not None:
        find_gpu(gpu)
    return _answers(jobs, gpu)


def _answers(jobs: Any, gpu: str | Gpu | None) -> Iterator[Plan | Refusal]:
    _look_ahead(jobs, gpu)
    with _numbered(jobs) as numbered:
        for number, job in numbered:
            yield answer(job, number, gpu)


def answer(job: Job, number: int = 1, gpu: str | Gpu | None = None) -> Plan | Refusal:
    from memfit.planning.predict import predict

    values: dict[str, Any] = {}
    try:
        values = _values(job)
        settings, card = _settings(values)
        return predict(gpu=gpu if card is None else card, id=values.get("id"), **settings)
    except Exception as error:
        return Refusal(id=values.get("id"), number=number, error=error)


def _look_ahead(jobs: Any, gpu: str | Gpu | None) -> None:
    """Jobs that will be asked for at many batch sizes and lengths are worth a few traces more, which tell the rest. A
    pipe can be read only once; what is wrong with a job is said when its turn comes."""
    if not (Path(jobs).is_file() if isinstance(jobs, (str, os.PathLike)) else isinstance(jobs, Sequence)):
        return
    from memfit.planning.interpolation import family_of, point_of
    from memfit.platform import platform_of

    with suppress(MemfitError, OSError), _numbered(jobs) as numbered:
        for _, job in itertools.islice(numbered, MOST_AHEAD):
            with suppress(Exception):
                settings, card = _settings(_values(job))
                name = gpu if card is None else card
                work = Workload.from_mapping(settings)
                family = family_of(work, platform_of(find_gpu(name) if name is not None else None))
                if family is not None:
                    family.corners.expected.add(point_of(work))


# -- what a job is given as --------------------------------------------------------------------------------------------


@contextmanager
def _numbered(jobs: Any) -> Iterator[Iterator[tuple[int, Job]]]:
    with ExitStack() as stack:
        if isinstance(jobs, (str, os.PathLike)):
            try:
                jobs = stack.enter_context(Path(jobs).open("rb"))
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                hint = "give a file with one workload a line, or -"
                raise InputError(f"cannot read {os.fspath(jobs)!r}: {why}", hint=hint) from error
        yield read_lines(jobs) if hasattr(jobs, "readline") else enumerate(jobs, 1)


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers; one that is too long is read past, never held."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        too_long = len(line) > MAX_LINE_BYTES
        while too_long and line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        if too_long:
            yield number, TOO_LONG
        elif line.strip():
            yield number, line


def _values(job: Job) -> dict[str, Any]:
    if isinstance(job, Workload):
        return job.settings()
    if isinstance(job, Mapping):
        return dict(job)
    if job is TOO_LONG:
        raise InputError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    if not isinstance(job, bytes):
        raise UsageError(f"a job is a memfit.Workload or a dict of its settings, not a {type(job).__name__}")
    return read_object(job)


def read_object(line: bytes, what: str = "a line of JSON") -> dict[str, Any]:
    """As strangers write it: of a key that stands in it twice no value is taken, and NaN is no number."""
    try:
        text = line.decode("utf-8-sig")
        values = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=without_doubles)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"not {what}: {error.msg} at column {error.pos + 1}") from error
    except RecursionError as error:
        raise InputError(f"not {what} that can be read: too many brackets inside each other") from error
    except ValueError as error:
        raise InputError(f"not {what} that can be read: {str(error).partition(';')[0]}") from error
    if not isinstance(values, dict):
        raise InputError(f"{json.dumps(values)[:40]} is no object", hint='{"kind": "train", "model": "gpt2"} is one')
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _settings(values: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Names as `predict` has them: other spellings are read too, a setting given twice is refused."""
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

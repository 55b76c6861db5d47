"""Whose failure an exception is: the job's, to be told in one line, or memfit's."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from memfit.errors import MemfitError, TraceError


@contextmanager
def failures_of_the_job() -> Iterator[None]:
    """What the job's own code raises is the job's failure, said in one line; what memfit raises is memfit's bug."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if "/memfit/" in place.filename.replace("\\", "/"):
            raise
        said = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise TraceError(
            f"the job itself fails: {type(error).__name__}: {said[:300]}",
            hint=f"raised at {place.filename}:{place.lineno}, in {place.name}; it may well fail on a GPU too",
        ) from error

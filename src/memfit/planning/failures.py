"""Whose failure an exception is: the job's, to be told in one line, or memfit's."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memfit.errors import MemfitError, TraceError

_MEMFIT = Path(__file__).parents[1]


@contextmanager
def failures_of_the_job() -> Iterator[None]:
    """What the job's own code raises is the job's failure, said in one line; what memfit raises is memfit's bug."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if _MEMFIT in Path(frames[-1].filename).parents:
            raise
        said = str(error).strip().splitlines()[0] if str(error).strip() else ""
        place = _nearest_to_the_person(frames)
        raise TraceError(
            f"the job itself fails: {type(error).__name__}: {said[:300]}",
            hint=f"raised at {place.filename}:{place.lineno}, in {place.name}; it may well fail on a GPU too",
        ) from error


def _nearest_to_the_person(frames: traceback.StackSummary) -> traceback.FrameSummary:
    """The innermost line outside torch, which raises for others, and outside memfit, which stands in between."""
    import torch

    not_theirs = {_MEMFIT, Path(torch.__file__).parent}
    theirs = [frame for frame in frames if not_theirs.isdisjoint(Path(frame.filename).parents)]
    return (theirs or list(frames))[-1]

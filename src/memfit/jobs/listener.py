"""Who is told what while a job is prepared and runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


def _nobody(_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who is told of a job, by default nobody: `memfit.train(config, listener=memfit.Listener(say=print))`."""

    say: Callable[[str], None] = _nobody
    """The lines of the command's report, as they become known."""
    remark: Callable[[str], None] = _nobody
    """What only a person reads, beside them."""
    progress: Callable[[Any], None] = _nobody
    """How far it is: a `TrainEvent` of a training, a `Progress` of a pruning."""
    working: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()
    """Entered around what takes a while, with what it is."""

"""When a program has shown enough, or has taken too long: it is ended from within, whatever it catches."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any
from unittest import mock

from memfit.analysis.stacks import is_own
from memfit.errors import TraceError
from memfit.replay.replay import replay
from memfit.scripts.watched import is_watched, tell_deadline
from memfit.units import format_bytes

MOST_STEPS = 10
"""A peak that still rises after so many steps rises for ever."""
NOTICED = 1e-4
"""A peak rises where that shows: a number that is kept of every step is no reason to go on."""
LEAVES_WITHIN = 1.0
"""Seconds that a program takes to unwind. One that still runs then has caught what should end it."""
RINGS_AGAIN = (-6.0, -3.0)
"""Powers of ten of a second, drawn: some ring comes between the end of one `try` and the beginning of the next."""
UNHEARD = 0.01
"""A ring that comes just before the program begins to wait for a lock is only heard with the next one."""
RINGS_FOR_FINALISERS = 0.1
"""After the first such: there may be many."""
IN_LIBRARIES = 100
"""Of so many rings one may end a library's code, in which a program waits for a thread, for one."""
ALARM = "the program's own alarm clock (SIGALRM) never rings"
_MEMFIT = str(Path(__file__).parents[1])
_set_timer: Any = getattr(signal, "setitimer", None)


class EnoughSeen(BaseException):
    """Ends the program from within. No `except Exception` of its own stops it."""


class TimeIsUp(BaseException):
    """As above, with an error."""


class Steps:
    """Of the optimizer that steps most; tells when enough of them were seen. A program without any optimizer changes
    its weights by hand: there each backward pass counts."""

    def __init__(self, wanted: int, tracer: Any) -> None:
        self.wanted = wanted
        self.done = 0
        self.rises = False
        """Whether the peak still rose in the last step that was seen."""
        self._tracer = tracer
        self._seen = 0
        self._by_optimizer: dict[int, int] = {}
        self.by_hand = False
        """Whether there is no optimizer, so that backward passes are counted."""

    @property
    def alternates(self) -> bool:
        """Whether steps of several optimizers are among them."""
        return len(self._by_optimizer) > 1

    def count(self, optimizer: Any, *_: Any) -> None:
        self._by_optimizer[id(optimizer)] = self._by_optimizer.get(id(optimizer), 0) + 1
        if self._by_optimizer[id(optimizer)] > self.done:
            self._look()

    def begin_by_hand(self) -> None:
        """Before a backward pass of a program without an optimizer: the step of the one before is done."""
        if self.by_hand:
            self._look()
        self.by_hand = True

    def _look(self) -> None:
        if self._tracer.stopped is not None:
            raise self._tracer.stopped
        self.done += 1
        if self.done < self.wanted - 1:
            return
        peak, before = replay(self._tracer.trace).peak_allocated, self._seen
        self._seen, self.rises = peak, peak > before * (1 + NOTICED)
        if (self.done >= max(self.wanted, 2) and (not self.rises or self.done >= MOST_STEPS)) or self.wanted == 1:
            self._tracer.stopped = EnoughSeen
            _ring_in(LEAVES_WITHIN)
            raise EnoughSeen


@contextmanager
def ended_in_time(seconds: float, tracer: Any) -> Iterator[None]:
    """Where the clock has rung, it rings again until the program has left: one of its own `except` may catch anything,
    so what follows comes while the program's own lines run, amid a handler at last."""
    if threading.current_thread() is not threading.main_thread() or _set_timer is None:
        yield
        return
    late: list[str] = []
    rings, left = [0], [False]
    drawn = Random(0)

    def ring(_: int, frame: FrameType | None) -> None:
        if left[0]:
            return
        first = tracer.stopped is None
        if first:
            tracer.stopped = TimeIsUp
            late.append(_where(frame))
        _set_timer(signal.ITIMER_REAL, LEAVES_WITHIN if first else 10 ** drawn.uniform(*RINGS_AGAIN), UNHEARD)
        rings[0] += 1
        if first or _may_end(frame, amid_libraries=rings[0] % IN_LIBRARIES == 0):
            raise tracer.stopped

    before = signal.signal(signal.SIGALRM, ring)
    tell_deadline(seconds)
    _set_timer(signal.ITIMER_REAL, seconds, UNHEARD)
    try:
        with _alarm_kept(tracer.assume):
            yield
    except TimeIsUp:
        so_far = format_bytes(replay(tracer.trace).peak_allocated)
        raise TraceError(
            f"the script made no step of an optimizer that ended the trace within {seconds:.0f} s{late[0]}; its peak so"
            f" far: {so_far} allocated",
            hint="--seconds gives it more, --steps 1 asks for less; a run on less data, or one that accumulates fewer"
            " batches (3), shows the same peak",
        ) from None
    except EnoughSeen:
        pass
    finally:
        left[0] = True  # a ring that is only heard now must not set the clock again
        _set_timer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        tell_deadline(None)
        if is_watched():
            _end_finalisers()


def _end_finalisers() -> None:
    """Lines of the program that run when it has ended are those of objects that go. Nothing of this process is for
    anybody else, so the clock rings on in it."""

    def ring(_: int, frame: FrameType | None) -> None:
        if _may_end(frame, amid_libraries=True):
            raise TimeIsUp

    def say_of_others(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is not TimeIsUp:
            say(ignored)

    say, sys.unraisablehook = sys.unraisablehook, say_of_others
    signal.signal(signal.SIGALRM, ring)
    _set_timer(signal.ITIMER_REAL, LEAVES_WITHIN, RINGS_FOR_FINALISERS)


def _ring_in(seconds: float) -> None:
    """Also where a thread has seen enough, for which the program waits."""
    if _set_timer is not None and signal.getitimer(signal.ITIMER_REAL)[0]:
        _set_timer(signal.ITIMER_REAL, seconds, UNHEARD)


@contextmanager
def _alarm_kept(assume: Callable[[str], None]) -> Iterator[None]:
    """There is one alarm clock for a process."""

    def kept(real: Callable[..., Any], which: int | None) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if which is None or (args and args[0] == which):
                assume(ALARM)
                return {"alarm": 0, "setitimer": (0.0, 0.0)}.get(real.__name__, signal.SIG_DFL)
            return real(*args)

        return call

    with (
        mock.patch.object(signal, "signal", kept(signal.signal, signal.SIGALRM)),
        mock.patch.object(signal, "alarm", kept(signal.alarm, None)),
        mock.patch.object(signal, "setitimer", kept(signal.setitimer, signal.ITIMER_REAL)),
    ):
        yield


def _where(frame: FrameType | None) -> str:
    while frame is not None and not _is_program_s(frame):
        frame = frame.f_back
    return "" if frame is None else f" (then at {frame.f_code.co_filename}:{frame.f_lineno})"


def _may_end(frame: FrameType | None, *, amid_libraries: bool) -> bool:
    """Never amid memfit's own work, or that which libraries do for it."""
    while amid_libraries and frame is not None and not _is_program_s(frame):
        if frame.f_code.co_filename.startswith(_MEMFIT):
            return False
        frame = frame.f_back
    return frame is not None and _is_program_s(frame)


def _is_program_s(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_own(file) and not file.startswith(_MEMFIT)

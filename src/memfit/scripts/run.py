"""How a program runs inside a trace: its arguments, folder and environment, and when it has shown enough."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from memfit.analysis.own_lines import is_own
from memfit.errors import TraceError
from memfit.scripts.children import processes_at_home
from memfit.scripts.command import Program, find_module

OFFLINE = {
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": "", "COMET_MODE": "disabled",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NEPTUNE_MODE": "debug",
}  # fmt: skip
"""Nothing is fetched or sent."""
OF_WORKERS = (
    "num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout",
)  # fmt: skip
MOST_STEPS = 10
"""A peak that still rises after so many steps rises for ever."""


NOTICED = 1e-4
"""A peak rises where that shows: a number that is kept of every step is no reason to go on."""


class EnoughSeen(BaseException):
    """Ends the program from within. No `except Exception` of its own stops it."""


class Steps:
    """Of the optimizer that steps most; tells when enough of them were seen. A program without any optimizer changes
    its weights by hand: there each backward pass counts."""

    def __init__(self, wanted: int, peak: Callable[[], int]) -> None:
        self.wanted = wanted
        self.done = 0
        self.rises = False
        """Whether the peak still rose in the last step that was seen."""
        self._peak = peak
        self._seen = 0
        self._by_optimizer: dict[int, int] = {}
        self._backward_seen = False

    def count(self, optimizer: Any, *_: Any) -> None:
        self._by_optimizer[id(optimizer)] = self._by_optimizer.get(id(optimizer), 0) + 1
        if self._by_optimizer[id(optimizer)] > self.done:
            self._look()

    def begin_by_hand(self) -> None:
        """Before a backward pass of a program without an optimizer: the step of the one before is done."""
        if self._backward_seen:
            self._look()
        self._backward_seen = True

    def _look(self) -> None:
        self.done += 1
        if self.done < self.wanted - 1:
            return
        peak, before = self._peak(), self._seen
        self._seen, self.rises = peak, peak > before * (1 + NOTICED)
        if (self.done >= max(self.wanted, 2) and (not self.rises or self.done >= MOST_STEPS)) or self.wanted == 1:
            raise EnoughSeen


def run_program(program: Program, steps: Steps, *, seconds: float, assume: Callable[[str], None]) -> None:
    """To its end, or to enough steps; an error if neither comes within the time limit."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    hook = register_optimizer_step_post_hook(steps.count)
    try:
        with (
            _as_started_by_hand(program),
            _workers_at_home(),
            processes_at_home(assume),
            _steps_by_hand(steps),
            _time_limit(seconds),
        ):
            if program.is_module:
                find_module(program.target)
                runpy.run_module(program.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program.target, run_name="__main__")
    except EnoughSeen:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        hook.remove()


@contextmanager
def _as_started_by_hand(program: Program) -> Iterator[None]:
    """What the program prints is no result of memfit's: it goes where notes go. Afterwards everything is as before."""
    folder = os.getcwd() if program.is_module else str(Path(program.target).resolve().parent)
    before = set(sys.modules)
    here = os.getcwd()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [program.target, *program.arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [folder, *sys.path]))
        stack.enter_context(mock.patch.dict(os.environ, {**OFFLINE, **dict(program.environment)}))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        _hub_is_offline(stack)
        stack.enter_context(_accelerate_begins_anew())
        try:
            yield
        finally:
            os.chdir(here)
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(folder + os.sep):
                    del sys.modules[name]


def _hub_is_offline(stack: ExitStack) -> None:
    """It reads its variable when it is imported, which may have been long before."""
    constants = importlib.import_module("huggingface_hub.constants")
    stack.enter_context(mock.patch.object(constants, "HF_HUB_OFFLINE", True))


@contextmanager
def _accelerate_begins_anew() -> Iterator[None]:
    """It remembers for the whole process how many others there are, and how precisely they compute."""

    def states() -> list[dict[str, Any]]:
        module = sys.modules.get("accelerate.state")
        kinds = ("AcceleratorState", "GradientState", "PartialState")
        return [] if module is None else [getattr(module, kind)._shared_state for kind in kinds]

    before = [dict(state) for state in states()]
    for state in states():
        state.clear()
    try:
        yield
    finally:
        for state in states():
            state.clear()
        for state, held in zip(states(), before, strict=False):
            state.update(held)


@contextmanager
def _workers_at_home() -> Iterator[None]:
    """Data is read in this process: what workers do is not GPU memory, and a forked trace would be two."""
    from torch.utils.data import DataLoader

    make = DataLoader.__init__

    def make_without_workers(self: Any, *args: Any, **kwargs: Any) -> None:
        args = (*args[:5], 0, *args[6:]) if len(args) > 5 else args
        args = (*args[:7], False, *args[8:]) if len(args) > 7 else args
        unused = (
            "num_workers",
            "pin_memory",
            "prefetch_factor",
            "persistent_workers",
            "multiprocessing_context",
            "timeout",
        )
        make(self, *args, **{name: value for name, value in kwargs.items() if name not in unused})

    with mock.patch.object(DataLoader, "__init__", make_without_workers):
        yield


@contextmanager
def _steps_by_hand(steps: Steps) -> Iterator[None]:
    import torch

    make, backward = torch.optim.Optimizer.__init__, torch.autograd.backward
    optimizers: list[bool] = []

    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        optimizers.append(True)
        make(self, *args, **kwargs)

    def backward_and_count(*args: Any, **kwargs: Any) -> None:
        if not optimizers:
            steps.begin_by_hand()
        backward(*args, **kwargs)

    with (
        mock.patch.object(torch.optim.Optimizer, "__init__", make_and_note),
        mock.patch.object(torch.autograd, "backward", backward_and_count),
    ):
        yield


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(_: int, frame: FrameType | None) -> None:
        while frame is not None and not is_own(frame.f_code.co_filename):
            frame = frame.f_back
        where = "" if frame is None else f" (then at {frame.f_code.co_filename}:{frame.f_lineno})"
        raise TraceError(
            f"the script made no step of an optimizer that ended the trace within {seconds:.0f} s{where}",
            hint="--seconds gives it more, --steps 1 asks for less; a run on less data shows the same peak",
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

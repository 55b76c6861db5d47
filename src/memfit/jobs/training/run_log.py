"""The plain text log of a run: one line an event, with the time, in the run's folder."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from memfit.errors import InputError
from memfit.jobs.training.events import TrainEvent
from memfit.units import duration, gib

FILE = "train.log"


class RunLog:
    """Written line by line, so that a run that is killed leaves all of it. It is locked while the run lives: of two in
    one folder each would delete the other's checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.failed: str | None = None
        """Why no more lines are written; a run does not end for that."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / FILE).open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(f"output_dir '{folder}' cannot be written: {error.strerror}") from error
        if not _take(self._file):
            self._file.close()
            raise InputError(
                f"another run is writing to output_dir '{folder}'", hint="another --output_dir, or wait until it ends"
            )

    def write(self, text: str) -> None:
        if self.failed is not None:
            return
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        try:
            self._file.writelines(f"{now}  {line}\n" for line in text.splitlines())
        except OSError as error:
            self.failed = f"{FILE} is no longer written: {error.strerror}"

    def __call__(self, event: TrainEvent) -> None:
        self.write(in_a_line(event))

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def in_a_line(event: TrainEvent) -> str:
    of = "" if event.total_steps is None else f"/{event.total_steps}"
    parts = [
        "" if event.step is None else f"step {event.step}{of}",
        "" if event.loss is None else f"loss {event.loss:.4f}",
        "" if event.learning_rate is None else f"lr {event.learning_rate:.3g}",
        "" if event.seconds_per_step is None else f"{event.seconds_per_step:.2f} s a step",
        "" if not event.seconds_left else f"{duration(event.seconds_left)} left",
        "" if event.data_wait_share is None else f"{event.data_wait_share:.0%} waiting for data",
        "" if event.gpu_peak_bytes is None else f"GPU peak {gib(event.gpu_peak_bytes)}",
        "" if event.host_bytes is None else f"host {gib(event.host_bytes)}",
        event.text,
    ]
    said = ", ".join(part for part in parts if part)
    return said if event.kind in ("step", "note") else f"{event.kind}: {said}" if said else event.kind


def is_written_to(folder: Path) -> bool:
    """By a run that is alive."""
    try:
        with (folder / FILE).open("r+", encoding="utf-8") as file:
            return not _take(file)
    except OSError:
        return False


def _take(file: IO[str]) -> bool:
    """The kernel lets go of it however the run ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # not every network file system can
        pass
    return True

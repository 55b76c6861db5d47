"""The journal of a run: what it is, what it settled, and a line for each block that is safely on disk.

One JSON object a line, each on disk before the next step is taken. A run may be killed in the middle of a line; what
comes after the last whole line is not believed. The first line is there before anything else of the run is: whatever
lies under the run's names beside it is the run's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.files import to_disk

FORMAT = "memfit.prune-journal/1"
CLOEXEC = getattr(os, "O_CLOEXEC", 0)


class Journal:
    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        self.path = path
        self.key = dict(key)
        self.settings: dict[str, Any] = {}
        self.blocks: list[dict[str, Any]] = []
        self._file: int | None = None
        self._end = 0

    def begin(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | CLOEXEC, 0o666)
        self._append({"format": FORMAT, "run": self.key})
        to_disk(self.path.parent)

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """Up to the first line that is not whole. None where not even the first one is: nothing was begun."""
        made: Journal | None = None
        for line, at in _lines(path):
            if made is None:
                if line.get("format") != FORMAT:
                    raise InputError(f"the journal '{path}' is of another version of memfit")
                made = cls(path, line.get("run", {}))
            elif "set" in line:
                made.settings.update(line["set"])
            elif line.get("block") == len(made.blocks):
                made.blocks.append(line)
            made._end = at
        return made

    def go_on(self, key: Mapping[str, Any], *, save: str) -> None:
        """Write after the last whole line, if the run that began it was asked for the same."""
        other = sorted(name for name in {*self.key, *key} if self.key.get(name) != key.get(name))
        if other:
            was = ", ".join(f"{name} {self.key.get(name)!r}" for name in other if name != "source")
            raise InputError(
                f"--resume: '{save}' was begun with other settings: {was or 'the model has changed since'}",
                hint="use the same command, or another --save",
            )
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | CLOEXEC)
        os.ftruncate(self._file, self._end)

    def remember(self, name: str, value: Any) -> None:
        self.settings[name] = value
        self._append({"set": {name: value}})

    def add_block(self, block: int, checksum: int, facts: Mapping[str, Any]) -> None:
        line = {"block": block, "checksum": checksum, "facts": dict(facts)}
        self._append(line)
        self.blocks.append(line)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def delete(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        data = (json.dumps(line) + "\n").encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)


def forget_blocks(path: Path) -> None:
    """Leave the first line alone: the files are about to go, and no block may be believed without them."""
    for _, end in islice(_lines(path), 1):
        with path.open("r+b") as stream:
            os.ftruncate(stream.fileno(), end)
            os.fsync(stream.fileno())


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole lines, each with the place where it ends."""
    end = 0
    with path.open("rb") as stream:
        for raw in stream:
            end += len(raw)
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                line = None
            if not isinstance(line, dict):
                return
            yield line, end

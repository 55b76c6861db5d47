"""A model of two layers, and the command line run in this very process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY

from memfit.cli.main import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.fixture
def memfit(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`memfit("plan", "train", ...)` as a shell would see it. capfd: what C code writes counts too."""

    def run(*argv: object) -> Ended:
        capfd.readouterr()
        code = main([str(arg) for arg in argv])
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run

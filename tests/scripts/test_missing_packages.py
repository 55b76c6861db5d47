"""A package that a script asks for and that is not here is named as missing, not the script as broken."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfit
from memfit.errors import TraceError


def test_a_package_that_a_library_asks_for_is_told_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = "Using 4-bit weights requires nobodysbits: `pip install nobodysbits`"
    Path("train.py").write_text(f"raise ImportError({said!r})")
    with pytest.raises(TraceError, match="needs a package that is not here: Using 4-bit weights") as raised:
        memfit.trace_script("train.py")
    assert "no GPU is needed" in str(raised.value.hint)


def test_what_cannot_be_reached_is_told_as_missing_with_the_line_that_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import urllib.request\nurllib.request.urlopen('http://nobody.invalid/data.txt')\n")
    with pytest.raises(TraceError, match="wants something from the network that cannot be reached from here") as raised:
        memfit.trace_script("train.py")
    assert "train.py:2" in str(raised.value.hint)

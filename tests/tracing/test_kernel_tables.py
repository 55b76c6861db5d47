"""Every file of kernels has its rules asked: none is left out of what is gathered, and none stands in another's way."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from memfit.tracing.kernels import tables


@pytest.mark.parametrize("table", ["HIDDEN", "REPLACED"])
def test_every_rule_of_every_file_is_gathered_and_none_twice(table: str) -> None:
    names = sorted(path.stem for path in Path(str(tables.__file__)).parent.glob("*.py"))
    files = [importlib.import_module(f"memfit.tracing.kernels.{name}") for name in names if name[0] != "_"]
    found = [entry for file in files if file is not tables for entry in getattr(file, table, {}).items()]
    assert len(found) > 10
    assert dict(found) == getattr(tables, table)
    assert len(found) == len(dict(found))

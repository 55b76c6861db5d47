"""What a list of commands says of each is a whole sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Memfit = Callable[..., Any]


@pytest.mark.parametrize("line", ["--help", "plan --help", "fit --help", "check --help"])
def test_no_summary_is_cut_off(memfit: Memfit, line: str) -> None:
    listed = memfit(*line.split()).out.partition("Commands:")[2].partition("Example:")[0]

    assert listed.strip()
    assert "..." not in listed

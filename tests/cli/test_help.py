"""What help and Tab offer: whole sentences, and in bash what was begun, asked as bash asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memfit.cli.main import main


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("memfit pl", "plan"), ("memfit plan lo", "lora"), ("memfit plan lora --ran", "--rank"), ("memfit ga", "gate")],
)
def test_tab_offers_commands_and_flags(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_MEMFIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert main([]) == 0
    assert capfd.readouterr().out.split() == [offered]


Memfit = Callable[..., Any]


@pytest.mark.parametrize("line", ["--help", "plan --help", "fit --help", "check --help"])
def test_no_summary_is_cut_off(memfit: Memfit, line: str) -> None:
    listed = memfit(*line.split()).out.partition("Commands:")[2].partition("Example:")[0]

    assert listed.strip()
    assert "..." not in listed

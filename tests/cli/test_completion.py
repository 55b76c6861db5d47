"""Shell completion: what Tab offers in bash, asked as bash asks."""

from __future__ import annotations

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

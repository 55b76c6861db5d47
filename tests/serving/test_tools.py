"""Tools as functions: what an agent says reaches who answers, and nothing is printed into the protocol."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp.server.mcpserver.exceptions import ToolError

from memfit.serving import agents


class Loud:
    def to_json(self) -> dict[str, Any]:
        print("a library says something")
        return {"schema": "loud"}


def test_what_is_printed_stays_out_of_the_protocol(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agents, "report_file", lambda path, **_: Loud())

    assert agents.report("x.pickle") == {"schema": "loud"}
    assert capsys.readouterr() == ("", "a library says something\n")


def test_what_is_to_be_kept_is_told_to_who_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fit(work: Any, **given: Any) -> Loud:
        asked.update(given, rank=work.rank)
        return Loud()

    monkeypatch.setattr(agents, "make_fit", fit)
    agents.fit(gpu="8GB", kind="lora", model="gpt2", settings={"rank": 4}, keep=["rank", "seq_len"])

    assert asked == {"gpu": "8GB", "keep": ("rank", "seq_len"), "rank": 4}


def test_keys_that_are_to_be_left_out_of_a_file_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def read(file: str, **given: Any) -> Any:
        asked.update(given, file=file)
        return SimpleNamespace(workload=None)

    monkeypatch.setattr(agents, "read_job", read)
    monkeypatch.setattr(agents, "predict", lambda work, **_: Loud())
    agents.plan(job_file="job.yaml", without=["deepspeed"], settings={"rank": 2})

    assert asked == {"file": "job.yaml", "without": ["deepspeed"], "rank": 2}


def test_an_error_comes_with_what_to_do_about_it() -> None:
    with pytest.raises(ToolError, match="no model called 'gtp2'") as told:
        agents.plan(kind="train", model="gtp2")
    assert "did you mean 'gpt2'" in str(told.value)


def test_a_bug_is_told_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*_: Any, **__: Any) -> Loud:
        raise PermissionError(13, "Permission denied", "/proc/1/cwd")

    monkeypatch.setattr(agents, "explain_error", explain)
    with pytest.raises(ToolError, match=r"PermissionError: .*'/proc/1/cwd'\nthis is a bug in memfit"):
        agents.explain(text="CUDA out of memory")

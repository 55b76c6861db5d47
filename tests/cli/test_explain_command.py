"""`memfit explain`: a file, a pipe or a folder in; one answer or one document out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Memfit = Callable[..., Any]
DATA = Path(__file__).parents[1] / "data"
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 23.64 "
    "GiB of which "
    "512.00 MiB is free. Including non-PyTorch memory, this process has 22.83 GiB memory in use. Of the "
    "allocated memory "
    "21.93 GiB is allocated by PyTorch, and 300.25 MiB is reserved by PyTorch but unallocated.\n"
)
KEYS = [
    "schema", "source", "answer", "cause", "message", "found", "account", "traps", "phase", "tensor", "holders",
    "growth", "job", "fixes", "withheld", "notes", "next", "seconds",
]  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(f"step 1, loss 2.31\n{MESSAGE}")
    return path


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_json_is_one_document_on_stdout_and_nothing_else_anywhere(memfit: Memfit, log: Path) -> None:
    ended = memfit("explain", log, "--json")
    assert (ended.code, ended.err) == (0, "")
    document = ended.json
    assert list(document) == KEYS and document["schema"] == "memfit.explain/1"
    assert document["message"]["sizes"]["requested"]["text"] == "1.16 GiB"
    assert document["message"]["sizes"]["allowed"] == {
        "text": None, "bytes": None, "tolerance_bytes": None,
        "unknown": "printed only where a memory fraction is set, and by torch 2.1 to 2.4 not even then",
    }  # fmt: skip
    assert sum(row["bytes"] for row in document["account"]["rows"]) == document["account"]["capacity_bytes"]


def test_the_sentence_comes_first(memfit: Memfit, log: Path) -> None:
    ended = memfit("explain", log)
    assert ended.code == 0
    assert ended.out.startswith("out of memory: The GPU was full: 1.16 GiB was asked for and 512.00 MiB was free")
    assert ended.out.index("added up") < ended.out.index("what helps") < ended.out.index("what does not help")


@pytest.mark.parametrize("arguments", [(), ("-",)], ids=["nothing", "dash"])
def test_a_text_is_read_from_a_pipe(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    pipe(monkeypatch, MESSAGE)
    assert memfit("explain", *arguments, "--json").json["cause"]["kind"] == "shortage"


def test_a_text_without_an_error_ends_with_one(memfit: Memfit, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "step 400, loss 2.31\n")
    ended = memfit("explain")
    assert (ended.code, ended.err) == (1, "")
    assert ended.out.startswith("There is no out-of-memory message here.\n\nnext: give the whole text")


def test_with_json_the_document_is_printed_all_the_same(memfit: Memfit, tmp_path: Path) -> None:
    junk = tmp_path / "junk.bin"
    junk.write_bytes(bytes(range(256)) * 500)
    ended = memfit("explain", junk, "--json")
    assert ended.code == 1 and ended.json["cause"]["kind"] == "none" and ended.json["message"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.log",), "no file or folder 'nowhere.log'"),
        (("{log}", "--kind", "traning"), "--kind 'traning' is not one of"),
        (("{log}", "--model", "lama-3.2-1b"), "no model called 'lama-3.2-1b'"),
        (("{log}", "--gpu", "nonsense"), "no GPU called 'nonsense'"),
        (("{log}", "--seq-len", "many"), "--seq-len 'many' is not a whole number"),
        (("{log}", "--batch-size", "0"), "--batch-size 0 is not a whole number between"),
        (("{log}", "--config", "nowhere.yaml"), "no config file 'nowhere.yaml'"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_with_exit_code_two(
    memfit: Memfit, log: Path, arguments: tuple[str, ...], said: str
) -> None:
    ended = memfit("explain", *(argument.format(log=log) for argument in arguments))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {said}")


def test_nothing_piped_in_at_a_terminal_is_told(memfit: Memfit, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    ended = memfit("explain")
    assert ended.code == 2 and "nothing is piped in" in ended.err and "memfit explain < oom.txt" in ended.err


def test_a_snapshot_is_explained_with_its_holders(memfit: Memfit) -> None:
    ended = memfit("explain", DATA / "snap-oom.pickle")
    assert ended.code == 0 and "who held the memory then" in ended.out and "activations.py:66" in ended.out


def test_a_job_that_is_given_has_its_fixes_predicted(memfit: Memfit, log: Path, tiny: str) -> None:
    ended = memfit(
        "explain",
        log,
        "--kind",
        "forward",
        "--model",
        tiny,
        "--batch_size",
        2,
        "--seq_len",
        64,
        "--gpu",
        "1GiB",
        "--json",
    )
    job = ended.json["job"]
    assert job["predicted"]["peak"]["device_bytes"] > 0 and job["settings"]["seq_len"] == 64
    assert any("predicted to fit" in note for note in ended.json["notes"])


def test_names_from_the_text_cannot_move_the_cursor(memfit: Memfit, tmp_path: Path) -> None:
    path = tmp_path / "evil.log"
    path.write_text(
        f'Traceback (most recent call last):\n  File "/x\x07\x9b2J.py", line 3, in forward\n    y\x9bH\n{MESSAGE}'
    )
    ended = memfit("explain", path)
    assert ended.code == 0 and "\x9b" not in ended.out and "\x07" not in ended.out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(log: Path, width: int) -> None:
    from rich.console import Console

    from memfit.explaining.explain import explain
    from memfit.render.explain import show_explanation

    console = Console(width=width, file=io.StringIO(), color_system=None)
    show_explanation(explain(log, predict=False).to_json(), console)
    assert max(map(len, console.file.getvalue().splitlines())) <= width  # type: ignore[attr-defined]


def test_a_text_is_explained_without_torch(log: Path) -> None:
    script = (
        "import sys; from memfit.cli.main import main; code = main(['explain', sys.argv[1], '--json']); "
        "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(log)], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stderr.strip() == "[] 0" and json.loads(done.stdout)["cause"]["kind"] == "shortage"

"""How a command ends: 0 fine, 1 does not fit, 2 wrong input, 70 a bug, 130 interrupted, 141 nobody reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import warm_python

Memfit = Callable[..., Any]

FORWARD = ("plan", "forward", "--seq-len", 16)


def test_a_job_that_fits_ends_with_0(memfit: Memfit, tiny: str) -> None:
    ended = memfit(*FORWARD, "--model", tiny, "--gpu", "24GiB", "--json")
    assert (ended.code, ended.json["verdict"]) == (0, "safe")


def test_a_job_without_a_card_has_no_verdict_and_ends_with_0(memfit: Memfit, tiny: str) -> None:
    ended = memfit(*FORWARD, "--model", tiny, "--json")
    assert (ended.code, ended.json["verdict"], ended.json["headroom_bytes"]) == (0, None, None)


def test_a_job_that_does_not_fit_ends_with_1_and_still_prints_its_document(memfit: Memfit, tiny: str) -> None:
    ended = memfit(*FORWARD, "--model", tiny, "--gpu", "600MiB", "--json")
    assert (ended.code, ended.json["verdict"]) == (1, "fails")
    assert ended.json["headroom_bytes"] < 0


def test_the_report_for_people_ends_with_the_same_codes(memfit: Memfit, tiny: str) -> None:
    fits = memfit(*FORWARD, "--model", tiny, "--gpu", "24GiB")
    fails = memfit(*FORWARD, "--model", tiny, "--gpu", "600MiB")
    assert (fits.code, fails.code) == (0, 1)
    assert fits.out.startswith("safe: ")
    assert fails.out.startswith("fails: needs ")


def test_a_bug_prints_its_traceback_and_ends_with_70(
    memfit: Memfit, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("wires crossed")

    monkeypatch.setattr("memfit.planning.predict.predict", broken)
    ended = memfit(*FORWARD, "--model", tiny)
    assert (ended.code, ended.out) == (70, "")
    assert "Traceback" in ended.err
    assert "RuntimeError: wires crossed" in ended.err
    assert "error: this is a bug in memfit" in ended.err


def test_a_program_that_leaves_by_itself_is_not_mistaken_for_a_verdict(
    memfit: Memfit, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaves(*_: object, **__: object) -> None:
        raise SystemExit("enough")

    monkeypatch.setattr("memfit.planning.predict.predict", leaves)
    assert memfit(*FORWARD, "--model", tiny).code == 2


def _heeds_control_c() -> None:
    """A shell lets what it starts in the background ignore it, and all that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_control_c_ends_with_130_and_what_was_answered_before_is_out(tiny: str) -> None:
    line = json.dumps({"kind": "forward", "model": tiny, "seq_len": 16, "id": 1})
    command = [warm_python(), "-m", "memfit", "plan", "batch", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=_heeds_control_c) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())  # out before the input ends: flushed as it goes
        process.send_signal(signal.SIGINT)  # now it waits for the next line
        code = process.wait(timeout=120)
        assert (answer["id"], answer["schema"]) == (1, "memfit.plan/1")
        assert code == 130
        assert b"Traceback" not in process.stderr.read()


def test_a_reader_that_goes_away_is_neither_a_verdict_nor_a_traceback() -> None:
    command = [sys.executable, "-m", "memfit", "models", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=120) == 141
        assert process.stderr.read() == b""


COMMANDS = [["gpus"], ["--help"], ["plan", "--help"], ["models", "--json"], ["plan", "batch", "-"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_an_error_in_a_line_and_no_verdict(command: list[str], tiny: str) -> None:
    line = json.dumps({"kind": "forward", "model": tiny, "seq_len": 16})
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [warm_python(), "-m", "memfit", *command], stdout=full, stderr=subprocess.PIPE, input=line.encode()
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == b"error: the output cannot be written: No space left on device"
    assert b"Traceback" not in done.stderr


def test_a_plan_that_does_not_fit_and_cannot_be_printed_is_not_a_verdict(tiny: str) -> None:
    asked = [str(word) for word in (*FORWARD, "--model", tiny, "--gpu", "600MiB")]
    for extra in ([], ["--json"]):
        with open("/dev/full", "wb") as full:
            assert subprocess.run([warm_python(), "-m", "memfit", *asked, *extra], stdout=full).returncode == 2


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_pipe_that_nobody_reads_is_left_quietly(command: list[str], tiny: str) -> None:
    line = json.dumps({"kind": "forward", "model": tiny, "seq_len": 16})
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [warm_python(), "-m", "memfit", *command], stdout=writer, stderr=subprocess.PIPE, input=line.encode()
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["gpus", "--help", "models --json", "plan train --model gpt2"])
def test_a_closed_stdout_is_told_before_any_work(command: str) -> None:
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m memfit {command} >&-"], capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: stdout is closed: there is nowhere to write the answer\n")


@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full", "<&-"])
def test_neither_a_closed_stderr_nor_a_closed_stdin_changes_the_answer(how: str) -> None:
    for command, code in (("gpus --json", 0), ("plan train --model gtp2", 2)):
        done = subprocess.run(["sh", "-c", f"{sys.executable} -m memfit {command} {how}"], capture_output=True)
        assert done.returncode == code
        assert bool(done.stdout) == (code == 0)


@pytest.mark.parametrize(
    "moment", ["json", "memfit.cli.output", "typer", "memfit.cli.many_jobs", "numpy", "torch.version"]
)
def test_control_c_while_imports_run_ends_quietly_with_130(moment: str, tiny: str) -> None:
    """The moments are told by Python itself, which names each module on stderr as its import ends."""
    asked = [str(word) for word in (*FORWARD, "--model", tiny, "--no-trace-cache")]
    command = [sys.executable, "-X", "importtime", "-m", "memfit", *asked]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heeds_control_c
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        names = (line.decode().rpartition("|")[2].strip() for line in process.stderr)
        assert "memfit.cli.main" in names
        assert moment in names
        process.send_signal(signal.SIGINT)
        rest = [line for line in process.stderr.read().splitlines() if not line.startswith(b"import time:")]
        assert (process.wait(timeout=300), rest, process.stdout.read()) == (130, [], b"")


def test_a_job_that_was_started_to_ignore_control_c_ignores_it() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "memfit", "gpus"]
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **ignoring) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode == 0


def test_python_m_memfit_is_memfit() -> None:
    done = subprocess.run([sys.executable, "-m", "memfit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("memfit 0.")


def test_the_command_is_installed_beside_python() -> None:
    command = Path(sys.executable).with_name("memfit")
    done = subprocess.run([command, "plan", "train", "--model", "gtp2"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no model called 'gtp2'\n  did you mean 'gpt2'?")

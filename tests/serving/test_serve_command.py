"""`memfit serve` as a command: its port, its words, its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="memfit[web] is not installed")
import httpx

from memfit.cli.main import main
from memfit.serving.app import ServeSettings, _hangup_as, address, forwarding


def test_a_port_that_is_taken_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--no-browser"]) == 2
    assert capsys.readouterr().err == f"error: port {port} is taken\n  --port 0 takes any that is free\n"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--port", "70000"], "--port 70000 is not between 0 and 65535"),
        (["--dir", "nowhere-at-all"], "--dir 'nowhere-at-all' is no folder"),
        (["--host", "no.such.host.invalid", "--port", "0"], "--host 'no.such.host.invalid'"),
    ],
)
def test_what_cannot_be_served_is_said(typed: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--no-browser", *typed]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("memfit.cli.serve.find_spec", lambda name: None)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == ("error: `memfit serve` needs fastapi and uvicorn\n  pip install 'memfit[web]'\n")


def test_over_ssh_the_line_that_forwards_the_port_is_told() -> None:
    over = {"SSH_CONNECTION": "10.0.0.2 50000 10.0.0.1 22", "USER": "ada"}
    assert forwarding(8642, over) == "ssh -N -L 8642:127.0.0.1:8642 ada@10.0.0.1"
    other = {"SSH_CONNECTION": "10.0.0.2 50000 10.0.0.1 2222"}
    assert forwarding(8642, other) == "ssh -N -L 8642:127.0.0.1:8642 -p 2222 10.0.0.1"
    assert forwarding(8642, {}) is None


def test_the_address_has_a_token_that_nobody_guesses() -> None:
    one, other = ServeSettings(), ServeSettings()
    assert one.token != other.token and len(one.token) >= 32
    assert address(one) == f"http://127.0.0.1:8642/?token={one.token}"
    assert address(ServeSettings(host="::1", token="t")) == "http://[::1]:8642/?token=t"


@contextmanager
def heeded(number: signal.Signals) -> Iterator[None]:
    """By what is started here, too: under `nohup` all of it ignores SIGHUP."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "a closed terminal"])
def test_a_signal_ends_it_and_its_processes_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    served, temporary = tmp_path / "served", tmp_path / "temporary"
    served.mkdir()
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "SSH_CONNECTION": "10.0.0.2 50000 10.0.0.1 22"}
    command = [sys.executable, "-m", "memfit", "serve", "--port", "0", "--dir", str(served)]
    with (
        heeded(number),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as running,
    ):
        try:
            assert running.stdout is not None
            told = re.fullmatch(r"memfit is at (http://127\.0\.0\.1:(\d+)/\?token=(\S+))\n", running.stdout.readline())
            assert told is not None
            assert running.stdout.readline() == (f"from your own machine: {forwarding(int(told[2]), environment)}\n")
            assert httpx.get(told[1], follow_redirects=True, timeout=300).status_code == 200
            children = children_of(running.pid)
            assert children
            for child in children:  # so it is at its work for as long as this takes
                while b"memfit.serving.worker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                    time.sleep(0.05)  # until it is a program of its own, who starts it waits
                os.kill(child, signal.SIGSTOP)
            question = b'{"job": {"kind": "train", "model": "gpt2"}}'
            head = f"POST /api/plan HTTP/1.1\r\nHost: 127.0.0.1:{told[2]}\r\nAuthorization: Bearer {told[3]}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(question)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", int(told[2])), timeout=300) as asked:
                asked.sendall(head.encode() + question)
                # So the one before has arrived.
                assert httpx.get(told[1], follow_redirects=True, timeout=300).status_code == 200
                running.send_signal(number)
                assert asked.makefile("rb").readline().split()[1] == b"503"
            out, err = running.communicate(timeout=300)
        finally:
            running.kill()
    assert running.returncode == 0
    assert (out, err) == ("", "Ctrl-C ends it\n")
    assert list(served.iterdir()) == []
    assert list(temporary.glob("memfit-serve-*")) == []
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize(
    ("stdout", "code", "said"),
    [
        ("> /dev/full", 2, "error: the output cannot be written: No space left on device\n"),
        (">&-", 2, "error: stdout is closed: there is nowhere to write the answer\n"),
        ("| true", 141, ""),
    ],
)
def test_where_nobody_can_read_the_address_it_ends_and_leaves_nothing(
    tmp_path: Path, stdout: str, code: int, said: str
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = (
        f"{sys.executable} -m memfit serve --port 0 --no-browser --dir {tmp_path} {stdout}; exit ${{PIPESTATUS[0]}}"
    )
    ended = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=300, env=environment)
    assert ended.returncode == code
    assert ended.stderr.startswith(said) and "Traceback" not in ended.stderr
    assert list(tmp_path.glob("memfit-serve-*")) == []


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _hangup_as(lambda *_: None):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def children_of(pid: int) -> list[int]:
    """The process that traces is started with the server."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
        if listed.stdout.split():
            return [int(each) for each in listed.stdout.split()]
        time.sleep(0.05)
    return []


@pytest.mark.parametrize("pause", [0.0, 0.5], ids=["in one piece", "after the answer"])
def test_a_body_that_is_no_http_is_answered_without_a_traceback(tmp_path: Path, pause: float) -> None:
    command = [sys.executable, "-m", "memfit", "serve", "--port", "0", "--dir", str(tmp_path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None and running.stderr is not None
            told = re.search(r":(\d+)/\?token=(\S+)", running.stdout.readline())
            assert told is not None
            asks = "POST /api/plan HTTP/1.1\r\nHost: 127.0.0.1\r\n{}Transfer-Encoding: chunked\r\n\r\n"
            for more in ("", f"Authorization: Bearer {told[2]}\r\nContent-Type: application/json\r\n"):
                with socket.create_connection(("127.0.0.1", int(told[1])), timeout=300) as asking:
                    asking.sendall(asks.format(more).encode() + (b"" if pause else b"ZZ\r\n"))
                    if pause:
                        time.sleep(pause)
                        asking.sendall(b"ZZ\r\n")
                    assert asking.recv(4096).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))
        finally:
            running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=300)
    assert "Traceback" not in errors and "Exception" not in errors and "rror:" not in errors, errors

"""`memfit mcp` ends with its input, or when it is told to, whatever it is working on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.warm_python import warm_python

pytest.importorskip("mcp")

BUSY = """
import os, sys, tempfile, time
from memfit.serving import agents
from memfit.cli.main import run

def predict(*_, **__):
    with tempfile.TemporaryDirectory(dir=os.environ["BUSY_FOLDER"]):
        os.write(2, b"asked\\n")
        time.sleep(600)

agents.predict = predict
sys.argv = ["memfit", "mcp"]
run()
"""
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
LINES = (
    {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": HELLO},
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
    {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
     "params": {"name": "plan", "arguments": {"kind": "train", "model": "gpt2"}}},
)  # fmt: skip
SOON = 120.0


def working_on_a_question(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [warm_python(), "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "BUSY_FOLDER": str(folder)},
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in LINES))
    process.stdin.flush()
    while process.stderr.readline() != b"asked\n":
        assert process.poll() is None
    return process


def test_it_ends_with_its_input_amid_a_question_and_leaves_nothing(tmp_path: Path) -> None:
    process = working_on_a_question(tmp_path)
    assert [*tmp_path.iterdir()]
    process.communicate(timeout=SOON)
    assert process.returncode == 0
    assert not [*tmp_path.iterdir()]


def test_a_client_that_reads_no_more_ends_it_quietly(tmp_path: Path) -> None:
    process = working_on_a_question(tmp_path)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    end = time.monotonic() + SOON
    while process.poll() is None and time.monotonic() < end:
        with suppress(BrokenPipeError):  # its input is read line by line
            os.write(process.stdin.fileno(), b'{"jsonrpc": "2.0", "id": 2, "method": "ping"}\n')
        time.sleep(0.1)
    process.kill()
    assert (process.wait(), process.stderr.read()) == (141, b"")
    process.stderr.close(), process.stdin.close()


def test_a_signal_ends_it_amid_a_question(tmp_path: Path) -> None:
    process = working_on_a_question(tmp_path)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(SOON) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()

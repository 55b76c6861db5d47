"""`memfit mcp`, asked by a real client in another process, and its tools as functions.

Documents are as `--json` prints them, no code is run, nothing is printed into the protocol; it ends with its input, or
when it is told to, whatever it is working on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.warm_python import FOLDER, READ_AT_IMPORT, warm_python

pytest.importorskip("mcp")

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.server.mcpserver.exceptions import ToolError

from memfit.serving import agents

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EVIL = "from pathlib import Path\nPath('ran').write_text('yes')\ndef make():\n    print('made')\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 512.00 MiB is free. Of the allocated memory 21.93 GiB is allocated by PyTorch, and 300.25 MiB is "
    "reserved by PyTorch but unallocated."
)


async def talk(folder: Path) -> dict[str, Any]:
    """Everything in one session: a process takes seconds to start."""
    keep = ("PATH", "PYTHONPATH", "MEMFIT_CACHE", FOLDER, *READ_AT_IMPORT)
    env = {name: value for name, value in os.environ.items() if name.startswith(keep)}
    process = StdioServerParameters(command=warm_python(), args=["-m", "memfit", "mcp"], env=env, cwd=folder)
    job = {"kind": "lora", "model": str(folder / "tiny"), "settings": {"batch-size": 1, "seq_len": 32, "rank": 4}}
    found: dict[str, Any] = {}
    async with Client(stdio_client(process)) as client:
        found["tools"] = [tool.name for tool in (await client.list_tools()).tools]
        for name, tool, arguments in (
            ("plan", "plan", {**job, "gpu": "24GB"}),
            ("file", "plan", {"job_file": str(folder / "job.yaml"), "settings": {"rank": 2}}),
            ("explain", "explain", {"text": OOM}),
            ("factory", "plan", {"kind": "train", "model": "evil:make"}),
            ("in file", "plan", {"job_file": str(folder / "evil.yaml")}),
            ("in config", "explain", {"text": OOM, "job_file": str(folder / "own.yaml")}),
            ("wrong", "plan", {"kind": "train", "model": "gpt2", "settings": {"batchsize": 1}}),
            ("beside", "plan", {"kind": "train", "model": "gpt2", "batch_size": 8}),
            ("nothing", "report", {"path": str(folder / "none.pickle")}),
            ("both", "explain", {}),
            ("no gpu", "fit", {"kind": "train", "model": "gpt2"}),
            ("no object", "plan", {"kind": "train", "model": "gpt2", "settings": "rank=2"}),
            ("no list", "plan", {"job_file": str(folder / "job.yaml"), "without": 5}),
            ("no text", "plan", {"kind": 5}),
            ("own stream", "explain", {"path": "/dev/fd/0"}),
        ):
            found[name] = await client.call_tool(tool, arguments)
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    (folder / "evil.py").write_text(EVIL)
    text = "model_name_or_path: {}\nstage: sft\ndo_train: true\nfinetuning_type: lora\ncutoff_len: 32\nbf16: true\n"
    (folder / "job.yaml").write_text(text.format(folder / "tiny") + "per_device_train_batch_size: 1\n")
    (folder / "evil.yaml").write_text(text.format("evil:make"))
    (folder / "own.yaml").write_text(
        "model: evil:make\ndata: {source: builtin, max_seq_len: 32}\nmicro_batch_size: 1\n"
    )
    answers = asyncio.run(talk(folder))
    return {**answers, "ran": (folder / "ran").exists(), "written": sorted(each.name for each in folder.iterdir())}


def text_of(answer: Any) -> str:
    return str(answer.content[0].text)


def test_the_tools_are_those_that_answer_and_none_that_acts(said: dict[str, Any]) -> None:
    assert said["tools"] == ["plan", "fit", "explain", "check", "report"]


def test_answers_are_the_documents_of_json(said: dict[str, Any]) -> None:
    plan = json.loads(text_of(said["plan"]))
    assert (plan["schema"], plan["verdict"], plan["workload"]["rank"]) == ("memfit.plan/1", "safe", 4)
    assert json.loads(text_of(said["file"]))["workload"]["rank"] == 2
    assert json.loads(text_of(said["explain"]))["schema"] == "memfit.explain/1"


@pytest.mark.parametrize("name", ["factory", "in file", "in config"])
def test_no_tool_runs_code_wherever_it_is_named(said: dict[str, Any], name: str) -> None:
    words = "names Python code, which no job file may run" if name == "in file" else "names code, and none is run here"
    assert said[name].is_error and words in text_of(said[name])
    assert not said["ran"]


def test_no_tool_writes_a_file(said: dict[str, Any]) -> None:
    assert said["written"] == ["evil.py", "evil.yaml", "job.yaml", "own.yaml", "tiny"]


@pytest.mark.parametrize(
    ("name", "words"), [("wrong", "batchsize"), ("nothing", "none.pickle"), ("both", "text or path")]
)
def test_what_is_wrong_is_told_in_the_words_of_the_command(said: dict[str, Any], name: str, words: str) -> None:
    assert said[name].is_error and words in text_of(said[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no gpu", "fit needs the argument 'gpu'"),
        ("no object", "plan: settings 'rank=2' is not an object of names and values, such as {\"batch_size\": 1}"),
        ("no list", "plan: without 5 is not a list of texts"),
        ("no text", "plan: kind 5 is not a text"),
    ],
)
def test_a_wrong_argument_is_told_in_plain_words(said: dict[str, Any], name: str, words: str) -> None:
    assert said[name].is_error and text_of(said[name]) == words


def test_streams_of_the_server_itself_are_not_read(said: dict[str, Any]) -> None:
    assert said["own stream"].is_error and "'/dev/fd/0' is no file or folder" in text_of(said["own stream"])


def test_a_setting_beside_the_settings_is_told_and_not_passed_over(said: dict[str, Any]) -> None:
    assert said["beside"].is_error and "plan has no argument 'batch_size'" in text_of(said["beside"])
    assert 'put it into settings: {"batch_size": ...}' in text_of(said["beside"])


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

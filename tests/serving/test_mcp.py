"""`memfit mcp`, asked by a real client in another process: documents as `--json` prints them, and no code is run."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import FOLDER, READ_AT_IMPORT, warm_python

pytest.importorskip("mcp")

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

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

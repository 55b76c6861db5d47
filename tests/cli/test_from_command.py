"""`--from` on the command line: the same job as by flags, what became of each key, and the file written back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.checking.check import Checked
from memfit.cli.main import main
from memfit.explaining.explain import explain

pytestmark = pytest.mark.usefixtures("shared_traces")

JOB = """# tiny
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4   # small
template: qwen
cutoff_len: 64
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
FLAGS = [
    "--batch-size", "1", "--grad-accum", "2", "--seq-len", "64", "--rank", "4", "--precision", "bf16",
    "--autocast", "bf16", "--loop", "trainer", "--grad-checkpointing",
]  # fmt: skip
KEPT = "adapter-dtype,alloc-conf,attention,loss,offload,optimizer,outputs,quant,rank,seq-len"
"""So that few sets have to be predicted."""
Run = Callable[..., Any]


@pytest.fixture
def job(tmp_path: Path, tiny: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(model=tiny))
    return path


def test_a_plan_from_a_file_is_the_plan_of_its_flags(memfit: Run, job: Path, tiny: str) -> None:
    from_file = memfit("plan", "--from", job, "--gpu", "24GB", "--json").json
    by_flags = memfit("plan", "lora", "--model", tiny, *FLAGS, "--gpu", "24GB", "--json").json
    assert from_file["peak"] == by_flags["peak"] and from_file["workload"] == by_flags["workload"]
    said = from_file["from"]
    assert said["files"] == [str(job)] and said["formats"] == ["llamafactory"]
    assert said["used"]["lora_rank"] == 4 and said["without_influence"] == ["template"]
    assert "from" not in by_flags


def test_unknown_keys_stand_before_the_figures(memfit: Run, job: Path) -> None:
    job.write_text(job.read_text() + "lora_ranc: 8\n")
    lines = memfit("plan", "--from", job).out.splitlines()
    (place,) = [n for n, line in enumerate(lines) if "unknown keys, which may mean anything: lora_ranc" in line]
    assert place < 6
    assert any(line.strip().startswith("- of no influence on memory: template") for line in lines)


def test_flags_beside_the_file_replace_it(memfit: Run, job: Path) -> None:
    assert memfit("plan", "--from", job, "--rank", 8, "--json").json["workload"]["rank"] == 8
    left = memfit("plan", "--from", job, "--without", "lora_rank", "--json").json
    assert left["workload"]["rank"] == 8 and left["from"]["left_out"] == ["lora_rank"]


def test_what_cannot_be_planned_is_exit_2_without_a_number(memfit: Run, job: Path) -> None:
    job.write_text(job.read_text() + "enable_liger_kernel: true\n")
    for command in (("plan",), ("fit", "--gpu", "24GB"), ("check",)):
        ended = memfit(*command, "--from", job, "--json")
        assert (ended.code, ended.out) == (2, "")
        assert "no plan for enable_liger_kernel" in ended.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("plan", "--gpu", "24GB"), "no kind of job is named, and no job file"),
        (("plan", "--without", "x", "--gpu", "24GB"), "--without is for a job file"),
        (("plan", "--gpu", "24GB", "lora", "--model", "gpt2"), "--gpu stands before lora"),
        (("fit", "--from", "nowhere.yaml", "--gpu", "24GB"), "no job file 'nowhere.yaml'"),
        (("check", "--rank", "4"), "--rank is of a job, and none is named"),
    ],
)
def test_what_is_typed_wrong_is_told(memfit: Run, argv: tuple[str, ...], words: str) -> None:
    ended = memfit(*argv)
    assert ended.code == 2 and words in ended.err


def test_a_fit_from_a_file_writes_it_back_and_the_new_one_fits(memfit: Run, job: Path, tmp_path: Path) -> None:
    text = job.read_text().replace("batch_size: 1\n", "batch_size: 32  # rows\n").replace("_len: 64", "_len: 512")
    job.write_text(text)
    card = memfit("plan", "--from", job, "--json").json["smallest_gpu_bytes"] - (16 << 20)
    out = tmp_path / "fitted.yaml"
    ended = memfit("fit", "--from", job, "--gpu", f"{card}B", "--margin", "0", "--keep", KEPT, "--emit", out)
    assert ended.code == 0, ended.err
    assert f"written to {out}" in ended.err
    made = out.read_text()
    assert made != text and "# tiny\n" in made and "lora_rank: 4   # small\n" in made
    assert memfit("plan", "--from", out, "--gpu", f"{card}B").code == 0
    again = memfit("fit", "--from", job, "--gpu", f"{card}B", "--margin", "0", "--keep", KEPT, "--emit", out)
    assert again.code == 2 and "already exists" in again.err


def test_a_file_is_never_written_over_itself(memfit: Run, job: Path) -> None:
    ended = memfit("fit", "--from", job, "--gpu", "24GB", "--emit", job, "--force")
    assert ended.code == 2 and "is what is being read" in ended.err


def test_check_takes_the_file(memfit: Run, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def check(**given: Any) -> Checked:
        asked.update(given)
        nothing = {"config": None, "workload": None, "gpu": None}
        return Checked(asked=nothing, findings=(), seconds=0.0)

    monkeypatch.setattr("memfit.check", check, raising=False)
    assert memfit("check", "--from", job, "--gpu", "24GB", "--json").json["from"]["files"] == [str(job)]
    assert (asked["workload"].rank, asked["gpu"]) == (4, "24GB")


def test_explain_takes_the_file_as_a_config(job: Path) -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 "
        "GiB of which 512.00 MiB is free. Of the allocated memory 21.93 GiB is allocated by PyTorch, and 300.25 MiB is "
        "reserved by PyTorch but unallocated."
    )
    told = explain(message, config=str(job), predict=False)
    assert told.job.settings["rank"] == 4
    assert any("LLaMA-Factory" in note for note in told.notes)


def test_a_json_of_training_arguments_takes_model_and_length_by_flags(memfit: Run, tmp_path: Path, tiny: str) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 2, "bf16": True, "optim": "adamw_torch"}))
    made = memfit("plan", "--from", path, "--model", tiny, "--seq-len", 32, "--json").json
    assert made["workload"]["precision"] == "amp-bf16" and made["workload"]["optimizer"] == "adamw"
    assert memfit("plan", "--from", path, "--seq-len", 32).code == 2


@pytest.mark.parametrize("command", ["plan", "fit", "check"])
def test_from_behind_a_kind_of_job_is_told_where_it_stands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "train", "--from", "job.yaml"]) == 2
    assert f"`memfit {command} --from FILE`: the file says which kind of job it is" in capsys.readouterr().err

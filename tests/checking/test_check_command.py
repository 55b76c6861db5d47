"""`memfit check` as a command: lines, exit codes, JSON; on a machine without a GPU, and without torch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from check_jobs import document
from support.warm_python import warm_python

import memfit
from memfit.checking import machine, model
from memfit.checking.situation import CheckRequest, Situation
from memfit.cli.main import main
from memfit.cli.options import read_workload, with_options_of
from memfit.errors import UsageError
from memfit.jobs.workload import Workload
from memfit.planning.card_here import fit_command

pytestmark = pytest.mark.usefixtures("shared_traces")

KEYS = {"subject", "name", "status", "found", "next", "details"}


def config_file(folder: Path, **changes: Any) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document(folder, **changes)))
    return str(path)


def json_of(captured: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(captured.readouterr().out)
    return found


def test_a_sound_config_is_ready_and_every_subject_is_looked_at(tmp_path: Path, capsys: Any) -> None:
    path = config_file(tmp_path, method="lora", gradient_checkpointing=True)
    assert main(["check", "--config", path, "--gpu", "24GB", "--json"]) == 0
    found = json_of(capsys)
    assert (found["schema"], found["counts"]["failed"]) == ("memfit.check/1", 0)
    assert [*dict.fromkeys(each["subject"] for each in found["checks"])] == [
        "machine", "settings", "config", "model", "plan",
    ]  # fmt: skip
    assert all(set(each) == KEYS for each in found["checks"])
    assert sum(found["counts"].values()) == len(found["checks"])
    names = [each["name"] for each in found["checks"] if each["status"] == "ok"]
    assert {"keys", "global batch", "data", "labels", "trained weights", "gradient flow", "fits"} <= set(names)


def test_a_job_that_does_not_fit_ends_with_1_and_a_next_step(capsys: Any) -> None:
    assert main(["check", "train", "--model", "gpt2", "--batch-size", "64", "--seq-len", "1024", "--gpu", "8GB"]) == 1
    text = capsys.readouterr().out
    assert "failed  fits" in text
    assert "next: the smallest change that fits: memfit fit train --model gpt2" in text
    assert "not ready: 1 failed (fits)" in text


@pytest.mark.parametrize(("line", "said"), [
    ("prune --model gpt2 --dataset builtin --sparsity-type 3:5", "use another N:M"),
    ("train --model gpt2 --seq-len 128 --parallel fsdp2 --world-size 2 --offload optimizer", "train with ddp"),
])  # fmt: skip
def test_a_job_that_plan_refuses_is_not_ready(line: str, said: str, capsys: Any) -> None:
    assert main(["check", *line.split(), "--gpu", "8GB", "--json"]) == 1
    (wrong,) = (each for each in json_of(capsys)["checks"] if each["status"] == "failed")
    assert (wrong["name"], said in wrong["next"]) == ("fits", True)


def test_a_wrong_target_is_one_failure(capsys: Any) -> None:
    line = ["check", "lora", "--model", "gpt2", "--seq-len", "64", "--target-modules", "nosuch", "--json"]
    assert main(line) == 1
    assert json_of(capsys)["counts"]["failed"] == 1


@pytest.mark.parametrize("line", [
    "lora --model gpt2 --rank 128 --lora-dropout 0.1 --target-modules c_attn,c_proj --loss chunked --gpu 8GB",
    "train --model gpt2 --loop trainer --no-clip-grad --optimizer sgd --grad-checkpointing --gpu 'RTX 4090'",
    "prune --model gpt2 --method sparsegpt --sparsity-type 2:4 --seq-len 512 --gpu 8GB",
])  # fmt: skip
def test_the_command_of_the_next_step_is_of_the_very_same_job(line: str) -> None:
    kind, *flags = shlex.split(line)
    gpu = flags[-1]
    work = workload_of(kind, flags[:-2])
    _, _, again, *said = shlex.split(fit_command(work, gpu))
    assert (again, said[-2:], workload_of(again, said[:-2])) == (kind, ["--gpu", gpu], work)


def test_accumulation_is_left_to_follow_from_the_global_batch() -> None:
    work = Workload(kind="lora", model="gpt2", grad_accum=3)
    assert fit_command(work, "8GB", global_batch=16) == "memfit fit lora --model gpt2 --global-batch 16 --gpu 8GB"


def workload_of(kind: str, flags: list[str]) -> Workload:
    """As the command line reads it."""
    app = typer.Typer()
    made: list[Workload] = []

    def take(**given: Any) -> int:
        made.append(read_workload({"kind": kind, **given}))
        return 0

    app.command()(with_options_of(kind, take, {}))
    app(flags, standalone_mode=False)
    return made[0]


def test_a_wrong_key_ends_with_1_and_the_machine_is_looked_at_all_the_same(tmp_path: Path, capsys: Any) -> None:
    path = config_file(tmp_path, micro_bach_size=3)
    assert main(["check", "--config", path, "--json"]) == 1
    found = json_of(capsys)
    (wrong,) = (each for each in found["checks"] if each["status"] == "failed")
    assert "did you mean 'batch.micro_batch_size'" in wrong["next"]
    assert {each["subject"] for each in found["checks"]} == {"machine", "settings", "config"}


@pytest.mark.parametrize(("line", "said"), [
    (["--config", "nowhere.yaml"], "no config file"), (["--config", "smollm2-lora-dmeo"], "smollm2-lora-demo"),
    (["--gpu", "nonsense"], "no GPU called"), (["--set", "a=1"], "no --config"),
    (["--config", "smollm2-lora-demo", "--set", "rank"], "not KEY=VALUE"),
    (["--config", "smollm2-lora-demo", "lora", "--model", "gpt2"], "--config stands before lora"),
    (["lora", "--model", "gtp2"], "gpt2"), (["--world-size", "0"], "no number of processes"),
])  # fmt: skip
def test_wrong_usage_ends_with_2_and_nothing_on_stdout(line: list[str], said: str, capsys: Any) -> None:
    assert main(["check", *line]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_without_a_job_only_the_machine_is_looked_at(capsys: Any) -> None:
    assert main(["check", "--json"]) == 0
    assert {each["subject"] for each in json_of(capsys)["checks"]} == {"machine", "settings"}


def test_jobs_without_training_are_planned_and_no_more(capsys: Any) -> None:
    assert main(["check", "forward", "--model", "gpt2", "--seq-len", "128", "--gpu", "8GB", "--json"]) == 0
    names = [each["name"] for each in json_of(capsys)["checks"] if each["subject"] in ("config", "model", "plan")]
    assert names == ["precision", "positions", "attention", "fits"]


def test_weights_that_cannot_be_trained_in_fp16_are_told_for_a_workload_too(capsys: Any) -> None:
    line = ["check", "train", "--model", "gpt2", "--seq-len", "512", "--precision", "fp16", "--gpu", "80GB", "--json"]
    assert main(line) == 1
    (wrong,) = (each for each in json_of(capsys)["checks"] if each["status"] == "failed")
    assert "weights that are themselves fp16 cannot be trained" in wrong["found"]


def test_a_model_whose_files_are_not_here_is_checked_by_its_shape(tmp_path: Path) -> None:
    model = {"name": "gpt2", "cache_dir": str(tmp_path / "hub")}
    found = memfit.check(config=config_file(tmp_path, model=model, method="lora", max_seq_len=64), gpu="8GB")
    by_name = {each.name: each for each in found.findings}
    assert found.failed == ()
    assert (by_name["weights"].status, by_name["weights"].next) == (
        "warning", "`hf download openai-community/gpt2`, or give a folder",
    )  # fmt: skip
    assert by_name["weights"].details["download_bytes"] == 2 * 124_439_808
    assert (by_name["data"].status, by_name["lengths"].status) == ("ok", "skipped")
    assert by_name["fits"].details["workload"]["seq_len"] == 64
    assert by_name["gradient flow"].status == "ok"


def test_a_card_that_does_not_exist_is_one_failure_and_not_six(tmp_path: Path) -> None:
    found = memfit.check(config=config_file(tmp_path, **{"memory.gpu": "RTX 9999"}))
    assert [(each.name, "no GPU called 'RTX 9999'" in each.found) for each in found.failed] == [("keys", True)]


def test_the_micro_batch_that_memory_auto_would_choose_is_planned(tmp_path: Path) -> None:
    path = config_file(tmp_path, memory="auto", micro_batch_size=1)
    found = memfit.check(config=path, gpu="8GB")
    (fits,) = (each for each in found.findings if each.name == "fits")
    assert fits.details["workload"]["batch_size"] == 4  # all rows of a step


WITHOUT_TORCH = f"""
import sys
for name in ("torch", "transformers", "peft", "accelerate"):
    sys.modules[name] = None
sys.executable = {warm_python()!r}  # of the process that tries an import
from memfit.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("line", [[], ["lora", "--model", "gpt2", "--gpu", "24GB"]])
def test_what_needs_no_torch_is_checked_without_it(line: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "check", *line, "--json"],
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    found = json.loads(done.stdout)
    assert done.stderr == ""
    by_name = {each["name"]: each for each in found["checks"]}
    assert (by_name["host memory"]["status"], by_name["allocator"]["status"]) == ("ok", "ok")
    if line:
        assert (by_name["fits"]["status"], by_name["fits"]["next"]) == ("skipped", "pip install torch")


def test_a_config_is_read_without_torch(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "check", "--config", path, "--json"],
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    by_name = {each["name"]: each["status"] for each in json.loads(done.stdout)["checks"]}
    assert (by_name["keys"], by_name["global batch"], by_name["lengths"]) == ("ok", "ok", "skipped")


def test_the_same_in_python(tmp_path: Path) -> None:
    told: list[str] = []
    found = memfit.check(kind="forward", model="gpt2", seq_len=128, gpu="8GB", on_progress=told.append)
    assert (found.verdict in ("ok", "warning"), found.failed) == (True, ())
    assert "planning" in told
    assert str(found).startswith("check: forward of gpt2 on 8GB")
    with pytest.raises(UsageError, match="two jobs"):
        memfit.check(kind="forward", model="gpt2", config="smollm2-lora-demo")


# -- --load ------------------------------------------------------------------------------------------------------------


def saved_model(folder: Path) -> tuple[str, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
                                         num_attention_heads=8, vocab_size=300))  # fmt: skip
    model.save_pretrained(folder / "saved")
    return str(folder / "saved"), sum(each.numel() for each in model.parameters())


def test_a_model_is_really_loaded_and_takes_what_was_predicted(tmp_path: Path, capsys: Any) -> None:
    folder, count = saved_model(tmp_path)
    line = ["check", "forward", "--model", folder, "--precision", "fp32", "--seq-len", "16", "--load", "--json"]
    assert main(line) == 0
    (finding,) = (each for each in json_of(capsys)["checks"] if each["name"] == "loaded")
    details = finding["details"]
    assert (finding["status"], details["weights_bytes"]) == ("ok", 4 * count)
    assert details["weights_bytes"] == details["predicted_bytes"]
    assert details["host_bytes"] > 0.9 * 4 * count  # mapped alone they would not be there
    assert details["host_peak_bytes"] > 4 * count
    assert details["seconds"] > 0


def test_weights_that_are_cut_off_fail_as_the_run_would(tmp_path: Path) -> None:
    folder, _ = saved_model(tmp_path)
    weights = Path(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    order = {
        "model": folder,
        "random": False,
        "precision": "bf16",
        "attention": "sdpa",
        "settings": {},
        "device": "cpu",
    }
    assert "error" in model.load_in_a_process(order)


def test_a_model_that_is_not_here_is_not_downloaded_to_be_loaded(capsys: Any) -> None:
    line = ["check", "forward", "--model", "qwen2.5-7b", "--seq-len", "16", "--gpu", "24GB", "--load", "--json"]
    assert main(line) == 0
    (finding,) = (each for each in json_of(capsys)["checks"] if each["name"] == "loaded")
    assert (finding["status"], "hf download Qwen/Qwen2.5-7B" in finding["found"]) == ("skipped", True)


def test_a_model_larger_than_the_machine_s_memory_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, count = saved_model(tmp_path)
    monkeypatch.setattr(model, "host_memory", lambda: {"total_bytes": count, "used_bytes": 0})
    work = Workload(kind="forward", model=folder, seq_len=16)
    finding = model.load_and_measure(Situation(CheckRequest(workload=work)))
    assert (finding.status, "of host memory are free" in finding.found) == ("failed", True)


@pytest.mark.parametrize(("line", "missing", "said"), [
    ("qlora --model gpt2 --seq-len 64", "bitsandbytes", "not installed, and quant nf4 needs it"),
    ("forward --model Qwen/Qwen2.5-0.5B-Instruct-AWQ --seq-len 64", "gptqmodel", "needs gptqmodel, not installed"),
    ("forward --model gpt2 --quant torchao-int8 --seq-len 64", "torchao", "quant torchao-int8 needs torchao"),
])  # fmt: skip
def test_a_package_that_quantised_weights_need_is_looked_for(
    line: str, missing: str, said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, there = machine.find_spec, machine.recorded_version
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == missing else found(name))
    monkeypatch.setattr(machine, "recorded_version", lambda name: None if name == missing else there(name))
    assert main(["check", *line.split(), "--gpu", "24GB", "--json"]) == 1
    assert any(each["status"] == "failed" and said in each["found"] for each in json_of(capsys)["checks"])


def test_a_quantised_job_in_bf16_on_an_old_card_is_told_what_to_set(capsys: Any) -> None:
    main(["check", "qlora", "--model", "gpt2", "--seq-len", "64", "--gpu", "T4", "--json"])
    (said,) = (each for each in json_of(capsys)["checks"] if each["name"] == "precision")
    assert said["status"] == "warning" and "T4 has no bf16" in said["found"] and "quant.compute: fp16" in said["next"]

"""`memfit gate`: limits and baselines hold, growth is told, and what cannot be planned fails too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from memfit.checking.gate import gate
from memfit.cli.main import main
from memfit.errors import InputError, UsageError

pytestmark = pytest.mark.usefixtures("shared_traces")

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
SCRIPT = "import torch\nx = torch.zeros(1 << 20, device='cuda', requires_grad=True)\nx.sum().backward()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def written(folder: Path, *jobs: dict[str, Any], **more: Any) -> Path:
    path = folder / "gate.yaml"
    path.write_text(yaml.safe_dump({"jobs": list(jobs), **more}))
    return path


def job(folder: Path, name: str = "one", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "forward", "model": str(folder / "tiny"), "batch-size": 2, "seq_len": 32, **more}


def test_a_job_within_its_limit_passes_and_one_above_it_does_not(folder: Path) -> None:
    path = written(
        folder, job(folder, limit="4GiB"), job(folder, "two", limit="1MiB"), job(folder, "three", gpu="24GB")
    )
    result = gate(path)
    assert [each.status for each in result.jobs] == ["new", "over limit", "new"]
    assert not result.passed
    assert "over limit" in str(result) and "failed: 1 of 3 jobs" in str(result)


def test_growth_beyond_the_tolerance_fails_until_it_is_accepted(folder: Path) -> None:
    path, baseline = written(folder, job(folder)), folder / "memory.json"
    assert gate(path, baseline=baseline, update=True).passed
    for tolerance in (None, 0):  # to grow by none at all is not to grow
        assert [each.status for each in gate(path, baseline=baseline, tolerance=tolerance).jobs] == ["ok"]
    document = json.loads(baseline.read_text())
    document["jobs"]["one"]["device_bytes"] -= 20 << 20
    document["jobs"]["gone"] = {"device_bytes": 1}
    document["versions"]["torch"] = "2.0"
    baseline.write_text(json.dumps(document))
    grown = gate(path, baseline=baseline)
    assert [each.status for each in grown.jobs] == ["grew"] and not grown.passed
    assert grown.to_json()["jobs"][0]["grown_bytes"] == 20 << 20
    assert any("torch 2.0" in note for note in grown.notes) and any("gone" in note for note in grown.notes)
    assert gate(path, baseline=baseline, tolerance="90%").passed
    assert gate(path, baseline=baseline, update=True).passed
    assert list(json.loads(baseline.read_text())["jobs"]) == ["one"]


def test_a_limit_is_not_lifted_by_an_update(folder: Path) -> None:
    path = written(folder, job(folder, limit="1MiB"))
    assert not gate(path, baseline=folder / "memory.json", update=True).passed


def test_a_job_may_be_another_tools_file_or_a_script(folder: Path) -> None:
    (folder / "args.json").write_text(json.dumps({"per_device_train_batch_size": 1, "bf16": True}))
    (folder / "own.py").write_text(SCRIPT)
    from_file = {"name": "args", "from": "args.json", "model": str(folder / "tiny"), "seq_len": 32}
    result = gate(written(folder, from_file, {"name": "own", "script": ["own.py"]}, gpu="24GB"))
    assert [(each.error, each.status) for each in result.jobs] == [(None, "new"), (None, "new")]


def test_a_job_that_cannot_be_planned_fails_and_says_why(folder: Path) -> None:
    result = gate(written(folder, job(folder, rank=3), job(folder, "good")))
    assert [each.status for each in result.jobs] == ["no plan", "new"]
    assert "--rank 3 has no effect" in str(result.jobs[0].error)


def test_the_next_step_of_an_error_is_in_the_table(folder: Path) -> None:
    (folder / "args.json").write_text(json.dumps({"per_device_train_batch_size": 1, "neftune_noise_alpha": 5}))
    shown = str(gate(written(folder, {"name": "one", "from": "args.json", "model": str(folder / "tiny")})))
    assert "; --without neftune_noise_alpha plans the job as if" in " ".join(shown.split())


@pytest.mark.parametrize("without", ["neftune_noise_alpha", ["neftune_noise_alpha"]])
def test_keys_to_do_without_may_be_one_text_or_a_list(without: object, folder: Path) -> None:
    (folder / "args.json").write_text(json.dumps({"per_device_train_batch_size": 1, "neftune_noise_alpha": 5}))
    asked = {"name": "one", "from": "args.json", "model": str(folder / "tiny"), "seq_len": 32, "without": without}
    assert gate(written(folder, asked)).jobs[0].error is None


@pytest.mark.parametrize("without", [5, {"a": 1}, [1]])
def test_keys_to_do_without_that_are_no_names_are_told(without: object, folder: Path) -> None:
    (folder / "args.json").write_text(json.dumps({"per_device_train_batch_size": 1}))
    asked = {"name": "one", "from": "args.json", "model": "gpt2", "seq_len": 32, "without": without}
    assert "without is not a list of keys" in str(gate(written(folder, asked)).jobs[0].error)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "is empty"), ({"jobs": []}, "not a list of jobs"), ({"jobs": [{"kind": "train"}]}, "has no name"),
        ({"jobs": [{"name": "a"}, {"name": "a"}]}, "two jobs"), ({"jobs": [{"name": "a"}], "gpus": 1}, "unknown key"),
        ({"jobs": [{"name": "a", "limit": "big"}]}, "not a size"),
        ({"jobs": [{"name": "a", "limit": None}]}, "not a size"),
        ({"jobs": [{"name": "a", "limit": 0}]}, "takes nothing"),
        ({"jobs": [{"name": "a", "tolerance": "-1"}]}, "not a share"),
        ({"jobs": [{"name": "a", "tolerance": 2}]}, "not a share"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_in_words(document: dict[str, Any], words: str, folder: Path) -> None:
    path = folder / "gate.yaml"
    path.write_text(yaml.safe_dump(document) if document else "")
    with pytest.raises((InputError, UsageError), match=words):
        gate(path)


def test_a_baseline_that_is_none_is_told(folder: Path) -> None:
    path = written(folder, job(folder))
    with pytest.raises(InputError, match="no baseline"):
        gate(path, baseline=folder / "nothing.json")
    (folder / "other.json").write_text("[]")
    with pytest.raises(InputError, match="not a baseline"):
        gate(path, baseline=folder / "other.json")
    with pytest.raises(UsageError, match="none is named"):
        gate(path, update=True)
    with pytest.raises(InputError, match="is not a file"):
        gate(path, baseline="/dev/zero")


@pytest.mark.parametrize(
    "damaged",
    [
        {"jobs": {"one": 5}}, {"jobs": {"one": {"device_bytes": float("nan")}}},
        {"jobs": {"one": {"device_bytes": "9"}}},
        {"jobs": {"one": {"device_bytes": -1}}}, {"jobs": []}, {"versions": 5}, {"schema": "memfit.plan/1"},
    ],
)  # fmt: skip
def test_a_damaged_baseline_is_told_and_neither_believed_nor_replaced(damaged: dict[str, Any], folder: Path) -> None:
    path, baseline = written(folder, job(folder)), folder / "memory.json"
    whole = {"schema": "memfit.gate-baseline/1", "versions": {}, "jobs": {"one": {"device_bytes": 1}}}
    baseline.write_text(json.dumps(whole | damaged))
    for update in (False, True):
        with pytest.raises(InputError, match="not a baseline") as told:
            gate(path, baseline=baseline, update=update)
        assert "bring it back" in str(told.value.hint)
    assert json.loads(baseline.read_text()).keys() == whole.keys()


def test_an_update_keeps_the_figures_of_a_job_that_has_no_plan(folder: Path) -> None:
    baseline = folder / "memory.json"
    gate(written(folder, job(folder)), baseline=baseline, update=True)
    known = json.loads(baseline.read_text())["jobs"]["one"]
    assert not gate(written(folder, job(folder, rank=3)), baseline=baseline, update=True).passed
    assert json.loads(baseline.read_text())["jobs"]["one"] == known


def test_the_command_ends_with_1_and_the_document(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(folder, job(folder, limit="1MiB"))
    assert main(["gate", str(path), "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["passed"] is False
    assert main(["gate", str(written(folder, job(folder)))]) == 0


def test_sizes_that_no_card_has_are_no_limit_and_no_baseline(tmp_path: Path) -> None:
    jobs = tmp_path / "gate.yaml"
    jobs.write_text(f"jobs:\n- {{name: a, kind: forward, model: gpt2, limit: 1{'0' * 400}}}\n")
    with pytest.raises(UsageError, match="limit of a: no card has so much"):
        gate(jobs)
    jobs.write_text("jobs:\n- {name: a, kind: forward, model: gpt2}\n")
    baseline = tmp_path / "memory.json"
    figures = {"a": {"device_bytes": 10**400}}
    baseline.write_text(json.dumps({"schema": "memfit.gate-baseline/1", "versions": {}, "jobs": figures}))
    with pytest.raises(InputError, match="job 'a' has no size of more than 0 bytes that a card could have"):
        gate(jobs, baseline=baseline)

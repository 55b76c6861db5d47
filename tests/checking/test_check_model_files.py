"""The model and its tokenizer: a wrong name is one failure with what was meant, files that are cut are found, and a
tokenizer that is not the weights' own is told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jobs import LLAMA, document, only, rows_file, situation, words_tokenizer

import memfit
from memfit.checking import data, machine
from memfit.checking.situation import Finding, Situation, guarded


def failures(folder: Path, model: Any, **changes: Any) -> list[Finding]:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document(folder, **{"model": model, **changes})))
    return list(memfit.check(config=str(path), gpu="24GB").failed)


def of_weights(where: Situation) -> Finding:
    (finding,) = guarded(machine.WEIGHTS, lambda: machine.check_weights_here(where))
    return finding


def of_tokenizer(where: Situation) -> Finding:
    (finding,) = guarded(data.TOKENIZER, lambda: data.check_tokenizer(where))
    return finding


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights and a tokenizer of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("weights")
    place = Path(words_tokenizer(folder))
    sizes = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(place)  # type: ignore[arg-type]
    return place


@pytest.mark.parametrize(("model", "said"), [
    ("smolm2-135m", "did you mean 'smollm2-135m'"), ("nobody/nothing", "`hf download nobody/nothing config.json`"),
    ("./nowhere", "give a folder with config.json"), ({"name": "gtp2", "from_scratch": True}, "gpt2"),
])  # fmt: skip
def test_a_model_that_nobody_knows_is_one_failure_with_a_next_step(tmp_path: Path, model: Any, said: str) -> None:
    settings = model if isinstance(model, dict) else {"name": model}
    (finding,) = failures(tmp_path, {**settings, "tokenizer": "bytes"})
    assert (finding.subject, said in str(finding.next)) == ("model", True), finding


def test_weights_that_were_cut_off_are_found(llama: Path, tmp_path: Path) -> None:
    assert of_weights(situation(tmp_path, model=str(llama))).status == "ok"
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    finding = of_weights(situation(tmp_path, model=str(copy)))
    assert (finding.status, "was the file cut off" in finding.found) == ("failed", True)
    assert finding.next == "download or copy the file again"


def test_a_tokenizer_that_is_not_here_is_told_with_the_download_of_it_alone(tmp_path: Path) -> None:
    model = {**document(tmp_path)["model"], "tokenizer": "Qwen/Qwen2.5-7B", "cache_dir": str(tmp_path / "hub")}
    where = situation(tmp_path, model=model)
    finding = of_tokenizer(where)
    assert (finding.status, "hf download Qwen/Qwen2.5-7B --include 'tokenizer*'" in str(finding.next)) == (
        "warning", True,
    )  # fmt: skip
    (lengths,) = guarded(data.LENGTHS, lambda: data.check_lengths(where))
    assert (lengths.status, lengths.found) == ("skipped", "there is no tokenizer")


def test_a_tokenizer_that_nobody_knows_is_found(tmp_path: Path) -> None:
    finding = of_tokenizer(situation(tmp_path, model={**document(tmp_path)["model"], "tokenizer": "./nowhere"}))
    assert (finding.status, finding.found) == ("failed", "no tokenizer called './nowhere'")
    assert "`bytes`, which needs no file" in str(finding.next)


def test_a_folder_without_a_tokenizer_is_found(tmp_path: Path) -> None:
    finding = of_tokenizer(situation(tmp_path, model={**document(tmp_path)["model"], "tokenizer": str(tmp_path)}))
    assert (finding.status, "has no tokenizer" in finding.found) == ("failed", True)


def test_published_weights_under_another_tokenizer_are_told(llama: Path, tmp_path: Path) -> None:
    rows = {"data.source": rows_file(tmp_path, [{"text": "yes no yes"}] * 9), "packing": False}
    own = situation(tmp_path, model={"name": str(llama), "tokenizer": str(llama)}, **rows)
    assert of_tokenizer(own).status == "ok"
    other = situation(tmp_path, model={"name": str(llama), "tokenizer": "bytes"}, **rows)
    assert only(data.check_vocabulary, other).status == "ok"  # every byte has a row: only the words differ
    finding = of_tokenizer(other)
    assert (finding.status, "mean other words" in finding.found) == ("warning", True)
    scratch = situation(tmp_path, model={"name": str(llama), "tokenizer": "bytes", "from_scratch": True}, **rows)
    assert of_tokenizer(scratch).status == "ok"

"""Data that are not there, where the tokenizer is not here either: a plan says so all the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from training_folder import tiny_config

from memfit.errors import InputError
from memfit.jobs.training.config import ModelConfig
from memfit.jobs.training.job import prepare_job


@pytest.mark.parametrize(("source", "said"), [
    ("nowhere.jsonl", r"data\.source: no file 'nowhere\.jsonl'"), ("/nowhere/at/all", "no file '/nowhere/at/all'"),
    ("what is this?", "is no file and no name of a data set"), ("x" * 5000 + ".jsonl", "no file"),
])  # fmt: skip
def test_a_file_that_is_not_there_is_missed_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = ModelConfig(name="Qwen/Qwen2.5-0.5B", cache_dir=str(tmp_path))
    config = dataclasses.replace(tiny_config(tmp_path, **{"data.source": source}), model=model)
    with pytest.raises(InputError, match=said):
        prepare_job(config, to_run=False)

"""A job file that begins with a brace: JSON, or YAML in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.errors import InputError, UsageError
from memfit.jobfiles.file import read_job, with_values

BRACED = (
    "{base_model: gpt2, adapter: lora, lora_r: 16, lora_target_linear: true, micro_batch_size: 2, batch_size: 2, "
    "sequence_len: 64}\n"
)


def test_yaml_in_braces_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(BRACED)
    assert read_job(path).settings["batch_size"] == 2
    with pytest.raises(UsageError, match="is not written back"):
        with_values(BRACED, {"micro_batch_size": 1}, is_json=True, nested=False)


def test_what_is_neither_is_said_to_be_neither(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text("{base_model: [")
    with pytest.raises(InputError, match=r"is not JSON that can be read.*nor YAML"):
        read_job(path)


@pytest.mark.parametrize("name", ["job.json", "job.yaml"])
def test_a_file_that_is_nested_too_deeply_is_told_in_plain_words(tmp_path: Path, name: str) -> None:
    (path := tmp_path / name).write_text('{"a":' * 100_000)
    with pytest.raises(InputError, match=f"{name}' is nested too deeply for a job file$"):
        read_job(path)

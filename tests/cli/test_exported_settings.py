"""Settings of the environment at which torch ends the process are refused in words before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.cli.app import WITH_TORCH
from memfit.environment import refuse_what_torch_dies_of
from memfit.errors import UsageError


def run(*argv: str, setting: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    command = [sys.executable, "-m", "memfit", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_setting_with_an_equals_sign_is_refused_with_the_right_spelling() -> None:
    ended = run("train", "--config", "smollm2-lora-demo", setting="expandable_segments=True")

    assert (ended.returncode, ended.stdout) == (2, "")
    assert "key:value" in ended.stderr
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in ended.stderr


def test_commands_that_do_not_need_torch_run_all_the_same() -> None:
    ended = run("gpus", "--json", setting="expandable_segments=True")

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "setting", ["", "expandable_segments:True", "roundup_power2_divisions:[256:1,512:2,>:8]", "new:1"]
)
def test_whatever_torch_reads_is_left_to_torch(setting: str) -> None:
    refuse_what_torch_dies_of({"PYTORCH_ALLOC_CONF": setting})


def test_every_command_that_is_looked_after_exists() -> None:
    from memfit.cli.app import COMMANDS as ALL

    assert set(WITH_TORCH) <= set(ALL)


def test_a_folder_that_torchs_compiler_cannot_make_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "x")}
    command = [sys.executable, "-m", "memfit", "plan", "train", "--model", "gpt2", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: TORCHINDUCTOR_CACHE_DIR=")
    assert f"{tmp_path / 'file'} is no folder\n  unset TORCHINDUCTOR_CACHE_DIR" in ended.stderr


def test_a_folder_of_torchs_compiler_in_one_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(UsageError, match="not writable"):
        refuse_what_torch_dies_of({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "new" / "x")})


def test_a_folder_that_torchs_compiler_finds_or_can_make_is_left_to_it(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "new" / "x"):
        refuse_what_torch_dies_of({"TORCHINDUCTOR_CACHE_DIR": str(folder)})
    assert not list(tmp_path.iterdir())

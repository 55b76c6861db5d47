"""Allocator settings at which torch ends the process are refused in words before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memfit.cli.app import WITH_TORCH
from memfit.environment import refuse_what_torch_dies_of


def run(*argv: str, setting: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    command = [sys.executable, "-m", "memfit", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


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

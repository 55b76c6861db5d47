"""Two processes, each with its frozen weights and its optimizer on the host, are one run."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import SIZES, launch, losses
from tiny_run import LLAMA, close, run


def test_processes_that_keep_weights_on_the_host_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LLAMA, "num_hidden_layers", 3)
    levers = {
        "method": {"kind": "lora", "rank": 2}, "memory.gradient_checkpointing": "full",
        "memory.offload": ["optimizer", "activations", "weights"], "max_steps": 2,
    }  # fmt: skip
    run(tmp_path, output_dir=str(tmp_path / "alone"), **(SIZES | levers | {"memory.offload": []}))
    done = launch(tmp_path, "both", **levers)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "both") == pytest.approx(losses(tmp_path, "alone"), rel=1e-5)
    assert close(tmp_path / "alone" / "step_2", tmp_path / "both" / "step_2")

"""Tiny runs of `memfit train` in processes of their own, alone or under torchrun, disturbed or not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml
from support.warm_python import warm_python
from tiny_run import document

SCRIPT = str(Path(__file__).parent / "disturbed_run.py")
SIZES = {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 4}


def launch(folder: Path, name: str, *, processes: int = 2, resume: bool = False, env: dict[str, str] | None = None,
           **changes: Any) -> subprocess.CompletedProcess[str]:  # fmt: skip
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(document(folder, output_dir=str(folder / name), **(SIZES | changes))))
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    if processes == 1:
        command = [warm_python()]
    command += [SCRIPT, "train", "--config", str(config), *(["--resume_from", "latest"] if resume else [])]
    return subprocess.run(
        command, env={**os.environ, "PYTHON_EXEC": warm_python(), **(env or {})}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def losses(folder: Path, name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / name / "result.json").read_text())["losses"]
    return found

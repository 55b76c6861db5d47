"""A run that is killed at any moment, and resumed, ends with the same bytes as one that nobody disturbed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import english, model_folder

from memfit.cli.main import main
from memfit.jobs.pruning.output import OutputFolder

KILLED = """
import os, signal, sys
from memfit.jobs.pruning import output

def killing(name, moment, block):
    plain = getattr(output.OutputFolder, name)

    def killed(self, *args):
        hit = block is None or args[0] == block
        if hit and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        made = plain(self, *args)
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    setattr(output.OutputFolder, name, killed)

what, moment = sys.argv[1].split()
if what == "journal":
    plain = output.Journal.add_block
    def half(self, block, digest, facts):
        if block == 2:
            with self.path.open("ab") as file:
                file.write(b'{"block": 2, "dig')
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, block, digest, facts)
    output.Journal.add_block = half
else:
    killing(what, moment, 2 if what == "write" else None)
from memfit.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def asked(model: Path, out: Path) -> list[str]:
    text = str(model.parent / "text.txt")
    return [
        "prune", "--model", str(model), "--dataset", text, "--eval-dataset", text, "--nsamples", "8", "--seqlen", "64",
        "--eval-windows", "2", "--prune-method", "sparsegpt", "--device", "cpu", "--save", str(out), "--log-memory",
    ]  # fmt: skip


def digest(folder: Path) -> dict[str, str]:
    """All that makes up the model; results hold times."""
    kept = [path for path in folder.iterdir() if not path.name.startswith(("result", "memory_log"))]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text(english(200))
    return model_folder(folder, num_hidden_layers=5)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert main(asked(model, out)) == 0
    return digest(out)


@pytest.mark.parametrize("moment", ["write before", "journal half", "finish before"])
def test_a_killed_run_is_resumed_to_the_same_bytes(
    model: Path, undisturbed: dict[str, str], tmp_path: Path, moment: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, moment, *asked(model, out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here: the order of sums is part of the bytes
    killed = subprocess.run(command, capture_output=True, timeout=120, env=environment, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    assert not out.exists()
    log = (tmp_path / "out.partial" / "memory_log.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in log[1:4]] == ["01_start", "02_model_loaded", "03_before_pruning"]

    assert main(asked(model, out)) == 2, "an unfinished run is not thrown away unasked"
    assert "--resume continues it" in capfd.readouterr().err
    assert main([*asked(model, out), "--resume"]) == 0
    assert digest(out) == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_with_other_settings_is_not_resumed(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain = tmp_path / "out", OutputFolder.write

    def breaks(self: OutputFolder, block: int, *rest: Any) -> None:
        if block == 2:
            raise OSError(28, "No space left on device")
        plain(self, block, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "write", breaks)
        assert main(asked(model, out)) != 0
    assert main([*asked(model, out), "--resume", "--seed", "1"]) == 2
    assert "was begun with other settings" in capfd.readouterr().err
    assert main([*asked(model, out), "--force"]) == 0, "but it may be begun anew"

"""A run that is killed at any moment, and resumed, ends with the same bytes as one that nobody disturbed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.quick import quick
from support.warm_python import warm_python
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
    command = [warm_python(), "-c", KILLED, moment, *asked(model, out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here: the order of sums is part of the bytes
    killed = subprocess.run(command, capture_output=True, timeout=300, env=environment, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    assert not out.exists()
    log = (tmp_path / "out.partial" / "memory_log.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in log[1:4]] == ["01_start", "02_model_loaded", "03_before_pruning"]

    assert main(asked(model, out)) == 2, "an unfinished run is not thrown away unasked"
    assert "--resume continues it" in capfd.readouterr().err
    assert main([*asked(model, out), "--resume"]) == 0
    assert digest(out) == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


ANYWHERE = """
import hashlib, io, json, os, signal, sys, threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
import torch
torch.set_num_threads(1)
from memfit.cli.main import main
import memfit.jobs.pruning.run, memfit.jobs.pruning.sweep, transformers.models.llama.modeling_llama

where, again, asked = Path(sys.argv[1]), sys.argv[2] == "again", sys.argv[3:]
out = where / "out"
STEPS = "open write pwrite fsync fdatasync ftruncate posix_fallocate mkdir rename rmdir unlink".split()

def prune(*more, dies_at=None):
    "In a process of its own: its exit code and its words, and how many steps it took; killed before one of them."
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        said = os.fdopen(reading).read()
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), said
    taken, lock, tell = 0, threading.Lock(), os.write
    def counted(plain):
        def step(*args, **kwargs):
            nonlocal taken
            with lock:
                taken += 1
                if taken - 1 == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)
        return step
    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        code = main([*asked, "--save", str(out), *more])
    tell(writing, (told.getvalue() + f"STEPS {taken}").encode())
    os._exit(code)

def digest():
    kept = sorted(path for path in out.iterdir() if not path.name.startswith(("result", "log_")))
    return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in kept]

def clear():
    import shutil
    for path in where.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()

code, said = prune()
assert code == 0, said
wanted, steps = digest(), int(said.rsplit("STEPS ", 1)[1])
if again:
    code, said = prune()
    steps = int(said.rsplit("STEPS ", 1)[1])
points = [*range(0, steps, int(os.environ["EVERY"])), *range(steps - int(os.environ["LAST"]), steps)]
for point in points:
    clear()
    if again:
        assert prune()[0] == 0
    code, said = prune(dies_at=point)
    assert code == -9 or (code == 0 and point >= steps - 4), (point, code, said)
    left = sorted(path.name for path in where.iterdir())
    if point % 2:  # unasked, either it begins anew or it says how to go on
        code, said = prune()
        assert code == 0 or "--resume continues it" in said or "--force replaces it" in said, (point, left, said)
    code, said = prune("--resume")
    assert code == 0, (point, left, code, said)
    assert digest() == wanted, (point, left)
    assert [path.name for path in where.iterdir()] == ["out"], (point, left, os.listdir(where))
print("POINTS", len(points), "of", steps)
"""
EVERY = [("once", 29, 6), ("again", 140, 14), ("once", 11, 16), ("again", 60, 16)]
"""At every so many of the steps, and at each of the last ones, at which the result is put in its place."""


@pytest.mark.parametrize(("first", "every", "last"), quick(EVERY[:2], EVERY))
def test_a_run_killed_before_any_step_to_the_disk_is_never_a_dead_end(
    tmp_path: Path, first: str, every: int, last: int
) -> None:
    """Before the journal, within its lines, between the renames; also of a run that replaces an earlier result."""
    (tmp_path / "text.txt").write_text(english(20))
    asked = [
        "prune", "--model", str(model_folder(tmp_path, num_hidden_layers=2)), "--dataset", str(tmp_path / "text.txt"),
        "--nsamples", "2", "--seqlen", "32", "--no-eval", "--device", "cpu",
    ]  # fmt: skip
    (tmp_path / "runs").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "EVERY": str(every), "LAST": str(last)}
    command = [warm_python(), "-c", ANYWHERE, str(tmp_path / "runs"), first, *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "POINTS" in done.stdout


FILLS = """
import os, sys
from memfit.jobs.pruning import run, output

def fill():
    with open(os.environ["FILLER"], "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass

def filling(plain, hit):
    def call(*args):
        if hit(*args):
            fill()
        return plain(*args)
    return call

def at_block_2(folder, block, *_):
    if block == 2:
        folder.settle()
    return block == 2

if sys.argv[1] == "writing":
    output.OutputFolder.write = filling(output.OutputFolder.write, at_block_2)
else:
    run.write_result = filling(run.write_result, lambda folder, result: folder.name.endswith(".partial"))
from memfit.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("only root may make a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount here")
@pytest.mark.parametrize("moment", ["writing", "saving"])
def test_a_disk_that_fills_up_is_said_and_the_run_goes_on_once_there_is_room(
    model: Path, undisturbed: dict[str, str], small_disk: Path, moment: str
) -> None:
    filler = small_disk / "filler"
    full = subprocess.run(
        [warm_python(), "-c", FILLS, moment, *asked(model, small_disk / "out")], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FILLER": str(filler)}, timeout=300, check=False,
    )  # fmt: skip
    assert full.returncode == 2, full.stderr
    assert f"error: --save '{small_disk / 'out'}' cannot be written: No space left on device" in full.stderr
    assert "make room and run the same command with --resume" in full.stderr
    filler.unlink()
    assert main([*asked(model, small_disk / "out"), "--resume"]) == 0
    assert digest(small_disk / "out") == undisturbed
    assert [path.name for path in small_disk.iterdir()] == ["out"]


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

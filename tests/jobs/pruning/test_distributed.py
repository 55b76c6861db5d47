"""Two processes come to the masks of one, and the first of them writes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from support.warm_python import warm_python
from tiny_models import tiny_folder, tiny_windows

from memfit.errors import UsageError
from memfit.jobs.pruning.decoder import Decoder
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.placement import Team, deal
from memfit.jobs.pruning.saved_runs import journal_of, partial_of
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.pruning.sweep import Sweep
from memfit.jobs.settings import PRUNE_METHODS
from memfit.models.checkpoint import WeightStore

CASES = {"wanda": "llama", "sparsegpt": "gpt2", "ria": "mixtral"}


def prune(folder: Path, save: Path, method: str, team: Team, *, stop_at: int | None = None) -> None:
    decoder = Decoder.open(folder)
    output = OutputFolder.create(save, decoder, {}, resume=True) if team.leads else None

    def on_block(report: object) -> None:
        if stop_at is not None and getattr(report, "index", None) == stop_at:
            raise KeyboardInterrupt

    with Engine(decoder, device="cpu", micro_batch=2, team=team) as engine:
        settings = PruneSettings.asked(model="-", method=method)  # type: ignore[arg-type]
        outcome = engine.prune(settings, tiny_windows(), output=output, pruned=tiny_windows(), on_block=on_block)
        assert outcome.sparsity == 0.5
    if output is not None:
        output.finish()


HERE = Path(__file__).parent
WORKER = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from memfit.jobs.pruning.placement import Team
from test_distributed import CASES, prune
team = Team.from_environment(torch.device("cpu"))
assert team.size == 2
for method, family in CASES.items():
    prune(Path(sys.argv[1]) / family, Path(sys.argv[1]) / f"two-{method}", method, team)
prune(Path(sys.argv[1]) / "llama", Path(sys.argv[1]) / "resumed", "wanda", team)
team.leave()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case in one process and in two; and a run that one process began and two have finished."""
    where = tmp_path_factory.mktemp("runs")
    for method, family in CASES.items():
        prune(tiny_folder(where, family), where / f"one-{method}", method, Team())
    with pytest.raises(KeyboardInterrupt):
        prune(where / "llama", where / "resumed", "wanda", Team(), stop_at=1)
    environment = {**os.environ, "PYTHON_EXEC": warm_python()}
    script = where / "worker.py"
    script.write_text(f"import sys; sys.path += {[str(HERE), str(HERE.parents[1])]}\n{WORKER}")
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(where)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return where


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for file in WeightStore.open(folder).files for name, t in load_file(file.path).items()}


def test_every_method_that_looks_at_inputs_is_among_the_cases() -> None:
    assert set(CASES) == set(PRUNE_METHODS) - {"magnitude"}


@pytest.mark.parametrize("method", ["wanda", "ria"])
def test_masks_from_norms_are_those_of_one_process_to_the_bit(method: str, runs: Path) -> None:
    one, two = weights(runs / f"one-{method}"), weights(runs / f"two-{method}")
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_sparsegpt_differs_by_the_order_of_sums_only(runs: Path) -> None:
    one, two = weights(runs / "one-sparsegpt"), weights(runs / "two-sparsegpt")
    first = {name: weight for name, weight in one.items() if ".h.0." in name}
    for name, weight in first.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)


def test_two_processes_finish_what_one_began(runs: Path) -> None:
    one, two = weights(runs / "one-wanda"), weights(runs / "resumed")
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert not partial_of(runs / "resumed").exists() and not journal_of(runs / "resumed").exists()


def test_micro_batches_are_the_same_whoever_runs_them() -> None:
    alone = {(batch.first, batch.count) for batch in deal(11, 2)}
    shared = [{(batch.first, batch.count) for batch in deal(11, 2, rank, 3)} for rank in range(3)]
    assert set.union(*shared) == alone
    assert sum(len(some) for some in shared) == len(alone)
    assert [batch.row for batch in deal(11, 2, 1, 3)] == [0, 2]


class Alone(Team):
    """One process of several, of which the others never answer."""

    def tell(self, value: object) -> object:
        return value


@pytest.mark.parametrize(("processes", "size"), [(2, 4), (2, 2), (4, 4), (5, 2)])
def test_micro_batches_are_lowered_until_every_process_has_one(tmp_path: Path, processes: int, size: int) -> None:
    folder = tiny_folder(tmp_path, "llama")
    with Engine(Decoder.open(folder), device="cpu", micro_batch=size, team=Alone(0, processes)) as engine:
        sweep = Sweep(engine, PruneSettings.asked(model="-"), tiny_windows(), None, None, None)
    assert [bool(deal(5, sweep.placement.micro_batch, rank, processes)) for rank in range(processes)] == [
        True
    ] * processes
    lowered = sweep.placement.micro_batch < size
    assert lowered == (-(-5 // size) < processes), "only where it must be"
    said = f"micro-batches of {5 // processes} windows instead of {size}, so that each of {processes} processes has"
    assert [note.startswith(said) for note in sweep.notes] == ([True] if lowered else [])


def test_more_processes_than_windows_are_refused(tmp_path: Path) -> None:
    with (
        Engine(Decoder.open(tiny_folder(tmp_path, "llama")), device="cpu", team=Alone(0, 6)) as engine,
        pytest.raises(UsageError, match="6 processes cannot share 5 windows of text") as caught,
    ):
        engine.prune(PruneSettings.asked(model="-"), tiny_windows())
    assert caught.value.hint == "--nsamples 6, or --nproc-per-node 5"


def test_torchrun_with_fewer_micro_batches_than_processes_comes_to_the_weights_of_one_process(tmp_path: Path) -> None:
    from tiny_folder import english, model_folder

    (tmp_path / "text.txt").write_text(english(60))
    asked = [
        "-m", "memfit", "prune", "--model", str(model_folder(tmp_path)), "--dataset", str(tmp_path / "text.txt"),
        "--eval-dataset", str(tmp_path / "text.txt"), "--eval-windows", "1", "--nsamples", "3", "--seqlen", "64",
        "--device", "cpu",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHON_EXEC": warm_python()}
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = [
        subprocess.run(
            [warm_python(), *start, *asked, "--save", str(tmp_path / name)], env=environment, capture_output=True,
            text=True, check=False, timeout=300,
        )
        for start, name in (([], "one"), (two, "two"))
    ]  # fmt: skip
    assert [each.returncode for each in ended] == [0, 0], ended[1].stderr[-4000:]
    said = "micro-batches of 1 windows instead of 3, so that each of 2 processes has its share of 3"
    assert [said in each.stderr for each in ended] == [False, True]
    one, other = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    found = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert found[0]["perplexity_pruned"] == pytest.approx(found[1]["perplexity_pruned"], rel=1e-6)

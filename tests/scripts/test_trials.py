"""`--try`: a script's own arguments changed, and what it then takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memfit
from memfit.cli.main import main
from memfit.errors import UsageError
from memfit.scripts.trials import with_argument

SCRIPT = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()
model = torch.nn.Linear(args.width, args.width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(torch.ones(args.batch_size, args.width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def test_each_value_is_planned_as_if_it_had_been_typed() -> None:
    tried = memfit.try_script("train.py --batch-size 4", {"batch_size": [8, 4096]}, gpu="24GB")
    assert [run.changed for run in tried.runs] == [{"batch_size": "8"}, {"batch_size": "4096"}]
    for run in tried.runs:
        assert run.plan is not None and run.program.words == ["train.py", "--batch-size", run.changed["batch_size"]]
        assert run.plan.peak == memfit.trace_script(run.program.words, gpu="24GB").peak


def test_an_argument_that_was_not_typed_is_spelt_as_the_script_does() -> None:
    tried = memfit.try_script("train.py", {"batch_size": [8]}, gpu="24GB").runs[0]
    assert tried.program.arguments == ("--batch-size=8",)
    assert tried.plan is not None


def test_the_command_prints_a_row_a_run_and_goes_on_after_one_that_fails(capfd) -> None:  # type: ignore[no-untyped-def]
    line = ["plan", "script", "--gpu", "24GB", "--try", "width=64,many", "--try", "batch-size=2,4"]
    assert main([*line, "--json", "--", "train.py"]) == 2
    document = json.loads(capfd.readouterr().out)
    assert document["schema"] == "memfit.trials/1" and len(document["runs"]) == 4
    assert [run["plan"] is None for run in document["runs"]] == [False, False, True, True]
    assert main([*line, "--", "train.py"]) == 2
    shown = capfd.readouterr().out
    assert shown.count("safe") == 2 and shown.count("no answer") == 2 and "width=many, batch-size=2: " in shown


@pytest.mark.parametrize(
    ("arguments", "key", "changed"),
    [
        ((), "a", ("--a=5",)),
        (("--a", "1"), "a", ("--a", "5")),
        (("--a-b=1", "--c"), "a_b", ("--a-b=5", "--c")),
        (("-a", "1"), "a", ("-a", "5")),
        (("m.a=1",), "m.a", ("m.a=5",)),
        (("m.a=1",), "m.b", ("m.a=1", "m.b=5")),
        (("--x", "1", "m.a=1"), "b", ("--x", "1", "m.a=1", "--b=5")),
    ],
)
def test_an_argument_is_changed_in_the_form_that_it_has(
    arguments: tuple[str, ...], key: str, changed: tuple[str, ...]
) -> None:
    assert with_argument(arguments, key, "5") == changed


def test_what_cannot_be_tried_is_said(capfd) -> None:  # type: ignore[no-untyped-def]
    assert main(["plan", "script", "--try", "width", "--", "train.py"]) == 2
    assert "--try 'width' names no values" in capfd.readouterr().err
    assert main(["plan", "script", "--try", "width=1", "--save-trace", "t.npz", "--", "train.py"]) == 2
    with pytest.raises(UsageError, match="125 runs are more than 64"):
        memfit.try_script("train.py", {key: range(1, 6) for key in "abc"})


def test_values_that_change_nothing_are_run_once_and_told() -> None:
    tried = memfit.try_script("train.py", {"seed": [1, 1, "1"]})
    assert len(tried.runs) == 1 and tried.notes == ()


@pytest.mark.parametrize("changes", [None, {"bs": 5}, {5: [1]}, {"bs": "12"}])
def test_a_table_of_another_form_is_refused(changes: object) -> None:
    with pytest.raises(UsageError, match="is no table of values to try"):
        memfit.try_script("train.py", changes)  # type: ignore[arg-type]

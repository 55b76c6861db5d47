"""docs/levers.md is what its command writes: every lever of the three jobs is there, with figures that still hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accuracy.levers import JOBS, TARGET, Job, chosen_levers
from memfit.fitting.forecast import Forecasts
from memfit.fitting.levers import apply
from memfit.gpus import find_gpu

PAGE = TARGET.read_text(encoding="utf-8")
MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")


def rows(job: Job) -> dict[str, list[str]]:
    """The cells of a job's table, by lever."""
    part = PAGE.split(f"## {job.title}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[2:]}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.workload.model)
def test_every_lever_of_a_job_has_a_row_and_says_how_it_is_switched_on(job: Job) -> None:
    how = PAGE.split("## What they do")[1]
    levers = chosen_levers(job.workload)
    assert len(levers) >= 5
    for lever in levers:
        assert rows(job)[lever.name][0] == lever.cost
        assert f"| {lever.name} |" in how


def test_a_saving_on_the_page_is_what_is_predicted_now() -> None:
    job = JOBS[1]
    forecasts = Forecasts(find_gpu(job.gpu), 0.1)
    lever = next(each for each in chosen_levers(job.workload) if each.name == "chunked loss")
    before, after = forecasts.ask(job.workload), forecasts.ask(apply(job.workload, [lever]))

    said = re.fullmatch(r"-?\d+\.\d\d", rows(job)[lever.name][2])

    assert said is not None
    assert float(said[0]) == round((before.device_bytes - after.device_bytes) / 2**30, 2)


def test_the_makefile_has_the_command_that_writes_it() -> None:
    assert "-m accuracy.levers" in MAKEFILE

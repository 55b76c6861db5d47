"""A job at some batch sizes and lengths, from which others are told."""

from __future__ import annotations

import dataclasses

from memfit.events import Trace
from memfit.jobs.workload import Workload
from memfit.planning.interpolation import Family
from memfit.planning.traced import trace_workload
from memfit.platform import H200

CORNERS = [(2, 129), (2, 512), (16, 129), (16, 512)]
INSIDE = [(5, 300)]


def at(work: Workload, point: tuple[int, int]) -> Workload:
    return dataclasses.replace(work, batch_size=point[0], seq_len=point[1])


def knowing(work: Workload, points: list[tuple[int, int]]) -> Family:
    family = Family(work, H200)
    for point in points:
        family._trace(point)
    assert not family.given_up
    return family


def fresh(work: Workload) -> Trace:
    return trace_workload(work, H200, cached=False).trace

"""The workload of a config of `memfit train`: at its longest rows, without reading its data."""

from __future__ import annotations

from memfit.jobs.workload import Workload

"""What a person asks of a pruning run: what a plan of it is told, and what a plan need not know.

No torch here: `memfit prune --help` reads the defaults from these fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from memfit.errors import UsageError
from memfit.jobs.settings import Sparsity, check_one_of, check_seed, plain_name
from memfit.jobs.workload import Workload

Allocation = Literal["uniform", "owl"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """A run of `memfit prune`. Names are those of the flags, with underscores."""

    workload: Workload
    """What of the run decides its memory, but for the type of the weights; windows are no longer than the model's
    positions allow."""
    seed: int = 0
    use_variant: bool = False
    """Wanda with one share of the summed scores for all rows of a matrix, instead of one count."""
    allocation: Allocation = "uniform"
    reconstruct: bool = False
    """Tune the kept weights of each block so that it answers as the dense one did."""
    save: str | None = None
    eval: bool = False
    log_memory: bool = False
    resume: bool = False
    device: str = "auto"
    """auto is the first GPU, or the CPU where there is none."""
    dtype: Dtype = "auto"
    """Of the weights, as computed with and as written; auto is as they are stored."""

    @classmethod
    def asked(cls, **said: Any) -> PruneSettings:
        """Settings of the workload and of the run side by side, by any name of theirs."""
        own = {each.name for each in dataclasses.fields(cls)} & said.keys()
        work = {plain_name(name): value for name, value in said.items() if name not in own}
        return cls(workload=Workload(kind="prune", **work), **{name: said[name] for name in own})

    def __post_init__(self) -> None:
        check_one_of("--allocation", self.allocation, Allocation)
        check_one_of("--dtype", self.dtype, Dtype)
        check_seed("--seed", self.seed)
        method = self.workload.method
        if self.use_variant and method != "wanda":
            raise UsageError("--use-variant belongs to --prune-method wanda", hint=f"not to {method}")
        if self.use_variant and self.sparsity.group is not None:
            raise UsageError(f"--use-variant is not defined for --sparsity-type {self.sparsity.kind}")
        if self.use_variant and self.allocation != "uniform":
            raise UsageError("--use-variant sets the share of each row itself, beside --allocation uniform only")
        if self.allocation == "owl" and not self.workload.looks_at_inputs:
            raise UsageError(
                "--allocation owl needs calibration data, which magnitude pruning does not read",
                hint="--prune-method wanda reads it",
            )
        if self.resume and self.save is None:
            raise UsageError("--resume continues what --save began", hint="name the same folder with --save")

    @cached_property
    def sparsity(self) -> Sparsity:
        return Sparsity.parse(self.workload.sparsity_type, self.workload.sparsity)

    @property
    def needs_data(self) -> bool:
        """Whether the calibration windows are read at all."""
        return self.workload.looks_at_inputs or self.reconstruct

    def to_json(self) -> dict[str, Any]:
        """Every setting as it was resolved, for result.json and the journal."""
        work = self.workload
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "workload"}
        return {
            "model": work.model, "method": work.method, "nsamples": work.nsamples, "seqlen": work.seq_len,
            "dataset": work.dataset, **own, "max_gpu_memory": work.gpu_budget_bytes, "sparsity_ratio": work.sparsity,
            "sparsity_type": work.sparsity_type,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What surrounds the pruning itself and leaves the weights alone."""

    must_evaluate: bool = False
    """It is an error if there is no text to evaluate on; else there is just no perplexity."""
    eval_dataset: str | None = None
    """By default WikiText-2, or the part of the built-in text that is not calibrated on."""
    eval_windows: int | None = None
    eval_seqlen: int | None = None
    """By default as long as the windows for calibration."""
    eval_dense: bool = True
    """Perplexity before pruning too."""
    zero_shot: bool = False
    cache_dir: str | None = None
    force: bool = False
    results_also_in: str | None = None
    """A second folder for the results without the model."""

    def __post_init__(self) -> None:
        for flag, value, least in (("windows", self.eval_windows, 1), ("seqlen", self.eval_seqlen, 2)):
            if value is not None and value < least:
                raise UsageError(f"--eval-{flag} {value} is not {least} or more")

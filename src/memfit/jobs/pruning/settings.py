"""What a person asks of a pruning run, every value checked, with the defaults of the public Wanda code.

No torch here: `memfit prune --help` reads the defaults from these fields.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.errors import UsageError
from memfit.jobs.checks import check_one_of, check_whole

Method = Literal["magnitude", "wanda", "sparsegpt", "ria"]
Allocation = Literal["uniform", "owl"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]

UNSTRUCTURED = "unstructured"
DEFAULT_RATIO = 0.5
MAX_SAMPLES, MAX_SEQLEN, MAX_GROUP = 1 << 16, 1 << 20, 1 << 10
_TYPE = re.compile(r"(\d{1,4}):(\d{1,4})")


@dataclass(frozen=True, kw_only=True)
class Sparsity:
    """How much is removed. With a group it is `removed` of each `group` consecutive columns of a row, else `ratio` of
    each row (or of the matrix, as the method has it)."""

    ratio: float = DEFAULT_RATIO
    removed: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)) or not 0 <= self.ratio <= 1:
            raise UsageError(
                f"--sparsity-ratio {self.ratio!r} is not a share between 0 and 1",
                hint="0.5 removes half of the weights",
            )
        if (self.removed is None) != (self.group is None):
            raise UsageError("a group of columns needs both numbers: how many are removed, and of how many")
        if self.removed is not None and self.group is not None:
            self._check_group(self.removed, self.group)

    def _check_group(self, removed: int, group: int) -> None:
        assert 0 <= removed <= group
        if not math.isclose(self.ratio, removed / group, rel_tol=0, abs_tol=1e-6):
            raise UsageError(
                f"--sparsity-ratio {self.ratio:g} is not {removed}:{group}, which removes {removed / group:g}",
                hint="leave --sparsity-ratio out, or use --sparsity-type unstructured",
            )

    @classmethod
    def parse(cls, kind: str = UNSTRUCTURED, ratio: float | None = None) -> Sparsity:
        """`unstructured`, or `N:M`: N weights REMOVED of each M (as in the public wanda; hardware people count those
        that are kept, which is the same for 2:4 and 4:8). Without a ratio it is a half, or N/M."""
        text = str(kind).strip().lower()
        if ratio is not None and ratio == 1:
            raise UsageError("--sparsity-ratio 1 removes every weight")
        if text == UNSTRUCTURED:
            return cls(ratio=DEFAULT_RATIO if ratio is None else ratio)
        match = _TYPE.fullmatch(text)
        if match is None:
            raise UsageError(
                f"--sparsity-type {kind!r} is neither unstructured nor N:M", hint="2:4 removes 2 of each 4 weights"
            )
        removed, group = int(match[1]), int(match[2])
        if not 0 < removed < group <= MAX_GROUP:
            raise UsageError(
                f"--sparsity-type {kind} cannot be: N of each M weights are removed, 0 < N < M <= {MAX_GROUP}"
            )
        return cls(ratio=removed / group if ratio is None else ratio, removed=removed, group=group)

    @property
    def kind(self) -> str:
        return UNSTRUCTURED if self.group is None else f"{self.removed}:{self.group}"

    def with_ratio(self, ratio: float) -> Sparsity:
        """Another share for one block, where not all get the same."""
        return dataclasses.replace(self, ratio=ratio)

    def with_removed(self, removed: int) -> Sparsity:
        """Another count for one block; none and all are possible here."""
        assert self.group is not None
        return dataclasses.replace(self, removed=removed, ratio=removed / self.group)


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """A run of `memfit prune`. Names are those of the flags, with underscores."""

    model: str
    method: Method = "wanda"
    sparsity: Sparsity = field(default_factory=Sparsity)
    nsamples: int = 128
    seqlen: int = 2048
    """Asked for; the run takes no more than the model's positions allow."""
    dataset: str = "wikitext2"
    """wikitext2, c4, builtin, or the path of a file or folder."""
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
    max_gpu_memory: int | None = None
    """Bytes; None is what is free."""
    dtype: Dtype = "auto"
    """Of the weights, as computed with and as written; auto is as they are stored."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise UsageError("--model is empty", hint="a folder with config.json, a hub id or a GGUF file")
        check_one_of("--prune-method", self.method, Method)
        check_one_of("--allocation", self.allocation, Allocation)
        check_one_of("--dtype", self.dtype, Dtype)
        check_whole("--nsamples", self.nsamples, most=MAX_SAMPLES)
        check_whole("--seqlen", self.seqlen, most=MAX_SEQLEN)
        check_whole("--seed", self.seed, least=0, most=(1 << 32) - 1)
        if not isinstance(self.dataset, str) or not self.dataset.strip():
            raise UsageError("--dataset is empty", hint="wikitext2, c4, builtin, or a file or folder of text")
        if self.max_gpu_memory is not None and self.max_gpu_memory <= 0:
            raise UsageError(f"--max-gpu-memory {self.max_gpu_memory!r} is not a size", hint="sizes look like 16GiB")
        self._check_together()

    def _check_together(self) -> None:
        if self.use_variant and self.method != "wanda":
            raise UsageError("--use-variant belongs to --prune-method wanda", hint=f"not to {self.method}")
        if self.use_variant and self.sparsity.group is not None:
            raise UsageError(f"--use-variant is not defined for --sparsity-type {self.sparsity.kind}")
        if self.use_variant and self.allocation != "uniform":
            raise UsageError("--use-variant sets the share of each row itself, beside --allocation uniform only")
        if self.allocation == "owl" and not self._looks_at_inputs:
            raise UsageError(
                "--allocation owl needs calibration data, which magnitude pruning does not read",
                hint="--prune-method wanda reads it",
            )
        if self.resume and self.save is None:
            raise UsageError("--resume continues what --save began", hint="name the same folder with --save")

    @property
    def needs_data(self) -> bool:
        """Whether the calibration windows are read at all."""
        return self._looks_at_inputs or self.reconstruct

    @property
    def _looks_at_inputs(self) -> bool:
        return self.method != "magnitude"

    def to_json(self) -> dict[str, Any]:
        """Every setting as it was resolved, for result.json and the journal."""
        made = dataclasses.asdict(self)
        made["sparsity_ratio"], made["sparsity_type"] = self.sparsity.ratio, self.sparsity.kind
        del made["sparsity"]
        return made

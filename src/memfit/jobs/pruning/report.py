"""What a pruning run came to, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.jobs.pruning.placement import HiddenStates, Where


@dataclass(frozen=True, kw_only=True)
class MatrixReport:
    name: str
    rows: int
    columns: int
    zeros: int
    tokens: int | None = None
    """How many of them an expert saw; None for what every token goes through."""

    @property
    def sparsity(self) -> float:
        return self.zeros / (self.rows * self.columns)


@dataclass(frozen=True, kw_only=True)
class BlockReport:
    index: int
    matrices: tuple[MatrixReport, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    resumed: bool = False
    """Found finished by an earlier run."""

    @property
    def weights(self) -> int:
        return sum(matrix.rows * matrix.columns for matrix in self.matrices)

    @property
    def zeros(self) -> int:
        return sum(matrix.zeros for matrix in self.matrices)

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> BlockReport:
        """As the journal of an earlier run has it."""
        return cls(
            index=int(facts["index"]), matrices=tuple(MatrixReport(**each) for each in facts["matrices"]),
            seconds=float(facts["seconds"]), notes=tuple(facts["notes"]), resumed=True,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    blocks: tuple[BlockReport, ...]
    ratios: tuple[float, ...]
    """What was asked of each block."""
    micro_batch: int
    hidden_on: Where
    host_peak_bytes: int
    notes: tuple[str, ...] = ()
    dense_states: HiddenStates | None = None
    pruned_states: HiddenStates | None = None

    @property
    def sparsity(self) -> float:
        return sum(block.zeros for block in self.blocks) / sum(block.weights for block in self.blocks)

"""Statistics of a block's inputs, from one run of the dense block over the calibration windows.

Matrices that are multiplied with the same tensor (q, k and v; gate and up) share one statistic. Which do is seen in the
first micro-batch by the identity of the tensor. Once every input has been seen the rest of the block is not computed:
the product of the last matrix is wanted by nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.jobs.pruning import experts
from memfit.jobs.pruning.decoder import forget_frames
from memfit.jobs.pruning.matrices import Matrix
from memfit.jobs.pruning.placement import MicroBatch


class Statistic(Protocol):
    def add(self, x: Tensor, first_sample: int) -> None: ...

    def add_tokens(self, x: Tensor, sequence_of_token: Tensor) -> None: ...

    def summary(self) -> Tensor:
        """One number a column, finite if all inputs were."""
        ...


class Enough(Exception):
    """All inputs of the block have been seen."""


@dataclass
class Group:
    """Matrices with one input."""

    matrices: list[Matrix]
    statistic: Statistic
    tokens: Tensor | None = None
    """How many of them an expert saw, counted on the device; None for what every token goes through."""
    seen: int | None = None
    """The same, asked of the device."""

    @property
    def columns(self) -> int:
        return self.matrices[0].columns


@dataclass(frozen=True)
class Pattern:
    """Which matrices of a block share an input, by name, and where the last new input is seen. Blocks that are built
    alike have the same."""

    groups: tuple[tuple[str, ...], ...]
    last: str


@dataclass
class Observer:
    matrices: list[Matrix]
    make: Callable[[int], Statistic]
    """A fresh statistic for so many columns."""
    length: int
    device: torch.device
    pattern: Pattern | None = None
    whole: bool = False
    """Whether the block's output is wanted too."""
    groups: list[Group] = field(default_factory=list)
    _seen: list[tuple[weakref.ref[Tensor], Group]] = field(default_factory=list)
    _order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._of_expert: dict[tuple[nn.Module, int, str], Group] = {}
        for matrix in self.matrices:
            if matrix.expert is not None:
                self._join_expert(matrix)
        if self.pattern is not None:
            self._lead_by_pattern(self.pattern)

    @contextmanager
    def watching(self, block: nn.Module, batch: MicroBatch) -> Iterator[None]:
        """Around one run of the block. It may end early."""
        with ExitStack() as stack:
            for matrix in self.matrices if self.pattern is None else [group.matrices[0] for group in self.groups]:
                if matrix.expert is None:
                    hook = self._hook(matrix, batch)
                    stack.callback(matrix.module.register_forward_pre_hook(hook).remove)
            if self._of_expert:
                stack.enter_context(experts.seen(block, self._see_expert(batch), self._after_experts))
            try:
                yield
            except Enough as enough:
                forget_frames(enough)
        self._end_of_batch()

    # -- linear layers ---------------------------------------------------------------------------------------------

    def _hook(self, matrix: Matrix, batch: MicroBatch) -> Callable[[nn.Module, Any], None]:
        def seen(_: nn.Module, args: Any) -> None:
            self._see(matrix, args[0], batch)

        return seen

    def _see(self, matrix: Matrix, x: Tensor, batch: MicroBatch) -> None:
        group = self._group_of(matrix, x)
        if group is not None:
            group.statistic.add(self._by_window(matrix, x, batch), batch.first)
            self._order.append(group.matrices[0].name)
        if not self.whole and self.pattern is not None and matrix.name == self.pattern.last:
            raise Enough

    def _group_of(self, matrix: Matrix, x: Tensor) -> Group | None:
        """None if the statistics have this tensor already."""
        if self.pattern is not None:
            return next(group for group in self.groups if group.matrices[0] is matrix)
        for known, group in self._seen:
            if known() is x and group.columns == matrix.columns:
                group.matrices.append(matrix)
                return None
        group = Group([matrix], self.make(matrix.columns))
        self.groups.append(group)
        self._seen.append((weakref.ref(x), group))
        return group

    def _by_window(self, matrix: Matrix, x: Tensor, batch: MicroBatch) -> Tensor:
        if x.numel() != batch.count * self.length * matrix.columns:
            raise InputError(
                f"'{matrix.name}' is not given every token of the text, and memfit cannot tell which it is given",
                hint="this model's experts are of a kind that memfit does not prune yet",
            )
        return x.reshape(batch.count, self.length, matrix.columns)

    # -- experts ---------------------------------------------------------------------------------------------------

    def _join_expert(self, matrix: Matrix) -> None:
        assert matrix.expert is not None
        key = (matrix.module, matrix.expert, matrix.side)
        if key in self._of_expert:
            self._of_expert[key].matrices.append(matrix)
            return
        counted = torch.zeros((), dtype=torch.int64, device=self.device)
        group = Group([matrix], self.make(matrix.columns), counted)
        self._of_expert[key] = group
        self.groups.append(group)

    def _see_expert(self, batch: MicroBatch) -> experts.See:
        def see(module: nn.Module, expert: int, side: str, x: Tensor, tokens: Tensor) -> None:
            group = self._of_expert[module, expert, side]
            group.statistic.add_tokens(x, batch.first + tokens // self.length)
            assert group.tokens is not None
            group.tokens += x.shape[0]

        return see

    def _after_experts(self, module: nn.Module) -> None:
        name = next(m.name for m in self.matrices if m.module is module)
        self._order.append(name)
        if not self.whole and self.pattern is not None and name == self.pattern.last:
            raise Enough

    # -- the pattern -----------------------------------------------------------------------------------------------

    def _end_of_batch(self) -> None:
        self._seen.clear()
        if self.pattern is None:
            linear = tuple(tuple(m.name for m in g.matrices) for g in self.groups if g.matrices[0].expert is None)
            self.pattern = Pattern(linear, self._order[-1])
        self._order.clear()

    def _lead_by_pattern(self, pattern: Pattern) -> None:
        by_name = {matrix.name: matrix for matrix in self.matrices}
        for names in pattern.groups:
            members = [by_name[name] for name in names]
            self.groups.append(Group(members, self.make(members[0].columns)))

    @property
    def unseen(self) -> list[Matrix]:
        """Matrices that the block's forward never used."""
        known = {id(matrix) for group in self.groups for matrix in group.matrices}
        return [matrix for matrix in self.matrices if id(matrix) not in known]

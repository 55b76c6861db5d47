"""What is pruned in a block, and statistics of its inputs from one run over the calibration windows.

Matrices that are multiplied with the same tensor (q, k and v; gate and up) share one statistic. Which do is seen in the
first micro-batch by the identity of the tensor. Once every input has been seen the rest of the block is not computed:
the product of the last matrix is wanted by nobody.

Pruned are a block's linear layers, whatever they are called, and the matrices of its experts. Routers, norms, biases,
embeddings and the head are left alone. A matrix is seen as rows (outputs) by columns (inputs): a Linear's weight as it
is, GPT-2's Conv1D turned over, and one expert of a 3-D parameter as a slice.

Each expert's own tokens reach its own statistics: transformers keeps the experts of a block as 3-D parameters and
multiplies them in one grouped product, where no hook sees a single expert. While statistics are collected, the experts
run one by one instead, each on the tokens that the router sent to it, in the order of the text.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from memfit.errors import InputError
from memfit.jobs.pruning.decoder import forget_frames
from memfit.jobs.pruning.placement import MicroBatch

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that choose experts."""


@dataclass(frozen=True)
class Matrix:
    name: str
    module: nn.Module
    """Whose input it is multiplied with."""
    slot: str
    """The parameter inside the block."""
    rows: int
    columns: int
    transposed: bool = False
    expert: int | None = None
    first_row: int = 0
    side: str = ""
    """Which of an experts module's two inputs: `in` of gate and up, `down`."""

    def weight(self, slots: Mapping[str, Tensor]) -> Tensor:
        """As a view [rows, columns] of the block's own memory."""
        whole = slots[self.slot]
        if self.expert is not None:
            return whole[self.expert, self.first_row : self.first_row + self.rows]
        return whole.t() if self.transposed else whole


def find_matrices(block: nn.Module) -> list[Matrix]:
    found = list(_list_matrices(block))
    if not found:
        raise InputError(f"a {type(block).__name__} has no linear layers to prune")
    return found


def _list_matrices(block: nn.Module) -> Iterator[Matrix]:
    from transformers.pytorch_utils import Conv1D

    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ROUTERS:
            yield Matrix(name, module, f"{name}.weight", module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            columns, rows = module.weight.shape
            yield Matrix(name, module, f"{name}.weight", rows, columns, transposed=True)
        elif is_experts(module):
            yield from _of_experts(name, module)


def is_experts(module: nn.Module) -> bool:
    """Experts as one 3-D parameter for each of their layers."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3


def _of_experts(name: str, module: nn.Module) -> Iterator[Matrix]:
    gated = module._parameters.get("gate_up_proj")
    if gated is None or getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        raise InputError(
            f"the experts of a {type(module).__name__} are stored in a layout that memfit does not prune yet",
            hint="Mixtral, Qwen-MoE and others with [gate; up] matrices of outputs by inputs can be pruned",
        )
    experts, double, columns = gated.shape
    rows, narrow = module.down_proj.shape[1:]  # type: ignore[index]
    for expert in range(experts):
        both, path = f"{name}.gate_up_proj", f"{name}.{expert}"
        for first, which in ((0, "gate_proj"), (double // 2, "up_proj")):
            shape = (double // 2, columns)
            yield Matrix(f"{path}.{which}", module, both, *shape, expert=expert, first_row=first, side="in")
        yield Matrix(f"{path}.down_proj", module, f"{name}.down_proj", rows, narrow, expert=expert, side="down")


See = Callable[[nn.Module, int, str, Tensor, Tensor], None]
"""Module, number of the expert, side, its input [tokens, n], and the place of each token among all of them."""


@contextmanager
def seen(block: nn.Module, see: See, after: Callable[[nn.Module], None]) -> Iterator[None]:
    """Show what each expert is given; `after` is called when a block's experts have all been shown."""
    replaced = [module for module in block.modules() if is_experts(module)]
    for module in replaced:
        usual = module.forward

        def forward(hidden: Tensor, chosen: Tensor, shares: Tensor, module: Any = module, usual: Any = usual) -> Tensor:
            _show(module, hidden, chosen, see)
            after(module)
            made: Tensor = usual(hidden, chosen, shares)
            return made

        module.forward = forward
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _show(module: Any, hidden: Tensor, chosen: Tensor, see: See) -> None:
    experts, each = module.num_experts, chosen.shape[-1]
    order = torch.sort(chosen.reshape(-1), stable=True)
    tokens = order.indices // each
    counts = (order.values[None, :] == torch.arange(experts, device=hidden.device)[:, None]).sum(1)
    start = 0
    for expert, count in enumerate(sizes(counts, tokens.numel())):
        if not count:
            continue
        mine = tokens[start : start + count]
        start += count
        given = hidden[mine]
        see(module, expert, "in", given, mine)
        inner = module._apply_gate(linear(given, module.gate_up_proj[expert]))
        del given
        see(module, expert, "down", inner, mine)


def sizes(counts: Tensor, total: int) -> list[int]:
    """How many tokens each expert has: the one thing here that the program must wait for. Without data, as in a plan,
    they are spread evenly."""
    if counts.is_meta:
        even, more = divmod(total, counts.numel())
        return [even + (expert < more) for expert in range(counts.numel())]
    made: list[int] = counts.tolist()
    return made


class Statistic(Protocol):
    @property
    def sums(self) -> Sequence[Tensor]:
        """What it holds: processes that saw other windows add these up."""
        ...

    def add(self, x: Tensor, first_sample: int) -> None: ...

    def add_tokens(self, x: Tensor, sequence_of_token: Tensor) -> None: ...

    def summary(self) -> Tensor:
        """One number a column, finite if all inputs were."""
        ...


class AllInputsSeen(Exception):
    """All inputs of the block have been seen."""


@dataclass
class SharedInput:
    """Matrices with one input."""

    matrices: list[Matrix]
    statistic: Statistic | None
    """None of a method that looks at no inputs, and once it has been used."""
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
    groups: list[SharedInput] = field(default_factory=list)
    _seen: list[tuple[weakref.ref[Tensor], SharedInput]] = field(default_factory=list)
    _order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._of_expert: dict[tuple[nn.Module, int, str], SharedInput] = {}
        for matrix in self.matrices:
            if matrix.expert is not None:
                self._join_expert(matrix)
        by_name = {matrix.name: matrix for matrix in self.matrices}
        for names in self.pattern.groups if self.pattern is not None else ():
            members = [by_name[name] for name in names]
            self.groups.append(SharedInput(members, self.make(members[0].columns)))

    @contextmanager
    def watching(self, block: nn.Module, batch: MicroBatch) -> Iterator[None]:
        """Around one run of the block. It may end early."""
        with ExitStack() as stack:
            for matrix in self.matrices if self.pattern is None else [group.matrices[0] for group in self.groups]:
                if matrix.expert is None:
                    hook = partial(self._see, matrix, batch)
                    stack.callback(matrix.module.register_forward_pre_hook(hook).remove)
            if self._of_expert:
                stack.enter_context(seen(block, partial(self._see_expert, batch), self._after_experts))
            try:
                yield
            except AllInputsSeen as enough:
                forget_frames(enough)
        self._end_of_batch()

    # -- linear layers ---------------------------------------------------------------------------------------------

    def _see(self, matrix: Matrix, batch: MicroBatch, _: nn.Module, args: Any) -> None:
        x: Tensor = args[0]
        group = self._group_of(matrix, x)
        if group is not None and group.statistic is not None:
            group.statistic.add(self._by_window(matrix, x, batch), batch.first)
            self._order.append(group.matrices[0].name)
        if not self.whole and self.pattern is not None and matrix.name == self.pattern.last:
            raise AllInputsSeen

    def _group_of(self, matrix: Matrix, x: Tensor) -> SharedInput | None:
        """None if the statistics have this tensor already."""
        if self.pattern is not None:
            return next(group for group in self.groups if group.matrices[0] is matrix)
        for known, group in self._seen:
            if known() is x and group.columns == matrix.columns:
                group.matrices.append(matrix)
                return None
        group = SharedInput([matrix], self.make(matrix.columns))
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
        group = SharedInput([matrix], self.make(matrix.columns), counted)
        self._of_expert[key] = group
        self.groups.append(group)

    def _see_expert(
        self, batch: MicroBatch, module: nn.Module, expert: int, side: str, x: Tensor, tokens: Tensor
    ) -> None:
        group = self._of_expert[module, expert, side]
        assert group.statistic is not None and group.tokens is not None
        group.statistic.add_tokens(x, batch.first + tokens // self.length)
        group.tokens += x.shape[0]

    def _after_experts(self, module: nn.Module) -> None:
        name = next(m.name for m in self.matrices if m.module is module)
        self._order.append(name)
        if not self.whole and self.pattern is not None and name == self.pattern.last:
            raise AllInputsSeen

    # -- the pattern -----------------------------------------------------------------------------------------------

    def _end_of_batch(self) -> None:
        self._seen.clear()
        if self.pattern is None:
            linear = tuple(tuple(m.name for m in g.matrices) for g in self.groups if g.matrices[0].expert is None)
            self.pattern = Pattern(linear, self._order[-1])
        self._order.clear()

    @property
    def unseen(self) -> list[Matrix]:
        """Matrices that the block's forward never used."""
        known = {id(matrix) for group in self.groups for matrix in group.matrices}
        return [matrix for matrix in self.matrices if id(matrix) not in known]

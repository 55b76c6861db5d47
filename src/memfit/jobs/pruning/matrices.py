"""What is pruned in a block: its linear layers, whatever they are called, and the matrices of its experts.

Routers, norms, biases, embeddings and the head are left alone. A matrix is seen as rows (outputs) by columns (inputs):
a Linear's weight as it is, GPT-2's Conv1D turned over, and one expert of a 3-D parameter as a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from memfit.errors import InputError

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
    found = list(_of(block))
    if not found:
        raise InputError(f"a {type(block).__name__} has no linear layers to prune")
    return found


def _of(block: nn.Module) -> Iterator[Matrix]:
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
        for number, which in enumerate(("gate_proj", "up_proj")):
            yield Matrix(
                f"{name}.{expert}.{which}", module, f"{name}.gate_up_proj", double // 2, columns,
                expert=expert, first_row=number * double // 2, side="in",
            )  # fmt: skip
        yield Matrix(
            f"{name}.{expert}.down_proj", module, f"{name}.down_proj", rows, narrow, expert=expert, side="down"
        )

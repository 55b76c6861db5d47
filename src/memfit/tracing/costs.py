"""What every op of a traced run costs: floating-point operations, bytes of GPU memory, bytes over the link to the host.

Counted from the ops themselves while the job runs without memory. Products and attention are counted by torch's own
formulas (`torch.utils.flop_counter`), of causal attention only the half that its kernels compute. An op reads each
tensor that it is given and writes each that it makes or changes, once; views cost nothing. Caches and kernels that
read a tensor twice are not modelled, so this is the least that a GPU can do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memfit.events import OpCost
from memfit.tracing.tracer import Tracer

Tensor = torch.Tensor

COSTS_NOTHING = ("empty", "new_empty", "_unsafe_view", "_local_scalar_dense", "_reshape_alias", "lift_fresh", "set_")
"""Ops that touch no data, and do not say so by their schema. `empty_like` and the rest begin like `empty`."""
ONLY_WRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "_foreach_zero_", "_foreach_copy_"}
READS_ROWS = {"embedding", "index_select", "gather", "index"}
"""Of their first argument only what they give back."""
FACTORS = ("mat2", "batch2", "query", "weight", "self")
"""Arguments of products that are multiplied, by the names in their schemas."""
WRITES_ROWS = {"index_put_", "index_copy_", "index_add_", "scatter_", "scatter_add_"}
"""Into their first argument as much as their largest other one has."""


class OpCosts(TorchDispatchMode):
    """Entered after the tracer, so that it sees ops before the tracer's rules replace them."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.by_mark: dict[int, Counter[OpCost]] = {}
        """By the number of the mark (`Trace.marks`) that was set last."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        op = _known(func)
        if op is not None:
            with torch._C.DisableTorchFunction():
                cost = self._cost(op, args, kwargs, out)
            if cost is not None:
                self.by_mark.setdefault(len(self.tracer.trace.marks) - 1, Counter())[cost] += 1
        return out

    def _cost(self, op: _Op, args: Any, kwargs: Any, out: Any) -> OpCost | None:
        touched = list(_touched(op, args, kwargs, out))
        here = sum(size for tensor, size in touched if self.tracer.block_of(tensor) is not None)
        if not here:
            return None  # the host's own work
        there = sum(size for tensor, size in touched if tensor.dim() and self.tracer.block_of(tensor) is None)
        return OpCost(_flops(op, args, kwargs, out), _is_wide(op, args, kwargs), here, there)


@dataclass(frozen=True, slots=True)
class _Op:
    name: str
    formula: Any
    arguments: tuple[str, ...]
    written: frozenset[str]
    """Arguments that it writes into."""
    makes: bool
    """Whether it gives back tensors of its own."""

    def named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


@cache
def _known(func: Any) -> _Op | None:
    """None where an op moves no data: views, and those that only set memory aside."""
    name = func._schema.name.partition("::")[2]
    results, arguments = func._schema.returns, func._schema.arguments
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in results)
    if views or name.startswith(COSTS_NOTHING):
        return None
    return _Op(
        name=name,
        formula=_formula(name, func),
        arguments=tuple(argument.name for argument in arguments),
        written=frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        makes=any(result.alias_info is None for result in results),
    )


def _formula(name: str, func: Any) -> Any:
    if name == "_grouped_mm":
        return _grouped
    if name.startswith("_scaled_dot_product"):
        return _attention_backward if name.endswith("_backward") else _attention
    return flop_registry.get(func._overloadpacket)


def _touched(op: _Op, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[Tensor, int]]:
    """Every tensor that is read or written, with so many bytes."""
    made = [(tensor, _bytes(tensor)) for tensor in _tensors((out,))] if op.makes else []
    yield from made
    if op.name in READS_ROWS or op.name in WRITES_ROWS:
        yield from _rows(op, [*args, *kwargs.values()], made)
        return
    for name, value in op.named(args, kwargs).items():
        read = op.name not in ONLY_WRITES or name not in op.written
        for tensor in _tensors((value,)):
            yield tensor, (read + (name in op.written)) * _bytes(tensor)


def _rows(op: _Op, given: list[Any], made: list[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
    others = [(tensor, _bytes(tensor)) for tensor in _tensors(given[1:])]
    yield from others
    if isinstance(given[0], Tensor):
        yield given[0], max((size for _, size in (made if op.name in READS_ROWS else others)), default=0)


def _flops(op: _Op, args: Any, kwargs: Any, out: Any) -> int:
    if op.formula is None:
        return 0
    flops = int(op.formula(*args, **kwargs, out_val=out))
    named = op.named(args, kwargs)
    if not named.get("is_causal", False):
        return flops
    rows, keys = int(named["query"].shape[-2]), int(named["key"].shape[-2])
    pairs = sum(min(row + 1, keys) for row in range(rows))
    return flops * pairs // (rows * keys)


def _is_wide(op: _Op, args: Any, kwargs: Any) -> bool:
    """By what is multiplied: 16-bit products may be summed into an fp32 matrix."""
    if op.formula is None:
        return False
    named = op.named(args, kwargs)
    factor = next((named[name] for name in FACTORS if isinstance(named.get(name), Tensor)), None)
    return factor is not None and factor.dtype in (torch.float32, torch.float64)


def _grouped(a: Tensor, b: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Each group of rows with a matrix of its own, whichever of them the groups lie along."""
    return 2 * a.numel() * b.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, and their product with the values. torch's own formula refuses fewer heads of keys before 2.12."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Scores again, two products with the values' width, and two more with the queries'."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """What an expanded tensor repeats is there once."""
    size = tensor.element_size() if tensor.numel() else 0
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            size *= length
    return size

"""What is alive at a moment, and where it came from: totals by any label, and the largest allocations one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.core.course import Course
from memfit.core.labels import ALL_CATEGORIES, Labels
from memfit.core.lifetimes import BEFORE, Ints
from memfit.core.report import any_layer


@dataclass(frozen=True, slots=True)
class Share:
    """All blocks that have one name in common."""

    name: str
    count: int
    allocated_bytes: int
    category: str  # of most of its bytes


def breakdown(course: Course, labels: Labels, blocks: Ints) -> dict[str, int]:
    """Bytes by category, all of them; they sum to what is allocated."""
    totals = np.zeros(len(ALL_CATEGORIES), dtype=np.int64)
    np.add.at(totals, labels.category[blocks], course.size[blocks])
    return dict(zip(ALL_CATEGORIES, totals.tolist(), strict=True))


def shares(
    course: Course, labels: Labels, blocks: Ints, names: Sequence[str], number: Ints, *, limit: int = 20
) -> tuple[Share, ...]:
    """The largest groups first. Blocks whose name is empty are a group of their own, with an empty name."""
    size = course.size[blocks]
    total = np.zeros(len(names), dtype=np.int64)
    count = np.bincount(number[blocks], minlength=len(names))
    np.add.at(total, number[blocks], size)
    found = np.argsort(-total, kind="stable")[:limit]
    return tuple(
        Share(names[i], int(count[i]), int(total[i]), _main_category(course, labels, blocks[number[blocks] == i]))
        for i in found.tolist()
        if count[i]
    )


def _main_category(course: Course, labels: Labels, blocks: Ints) -> str:
    totals = np.bincount(labels.category[blocks], weights=course.size[blocks], minlength=len(ALL_CATEGORIES))
    return ALL_CATEGORIES[int(totals.argmax())]


def by_line(course: Course, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    return shares(course, labels, blocks, labels.lines, labels.line, limit=limit)


def by_module(course: Course, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    """What repeats in every layer is one module."""
    wanted = np.unique(labels.module[blocks])
    names: dict[str, int] = {}
    table = np.zeros(len(labels.modules), dtype=np.int64)
    for i in wanted.tolist():
        table[i] = names.setdefault(any_layer(labels.modules[i]), len(names))
    return shares(course, labels, blocks, tuple(names), table[labels.module], limit=limit)


def by_op(course: Course, labels: Labels, blocks: Ints, *, limit: int = 20) -> tuple[Share, ...]:
    return shares(course, labels, blocks, labels.ops, labels.op, limit=limit)


def there_before(course: Course, blocks: Ints) -> tuple[int, int]:
    """Of these blocks, how many and how many bytes have no beginning in the trace."""
    old = blocks[course.lives.birth[blocks] == BEFORE]
    return len(old), int(course.size[old].sum())


def largest(course: Course, blocks: Ints, count: int) -> Ints:
    """The largest of these blocks; of equal ones, the older first."""
    order = np.lexsort((course.lives.birth[blocks], -course.size[blocks]))
    return blocks[order[:count]]


def largest_kinds(course: Course, labels: Labels, blocks: Ints, count: int) -> list[Ints]:
    """The largest blocks, those of one size and from one place together: twelve equal layers are one line to read."""
    kinds: dict[tuple[int, int, str, int, int], list[int]] = {}
    smallest = 0
    for block in largest(course, blocks, len(blocks)).tolist():
        size = int(course.size[block])
        if len(kinds) == count and size < smallest:
            break
        module = any_layer(labels.modules[labels.module[block]])
        key = size, int(labels.line[block]), module, int(labels.op[block]), int(labels.category[block])
        if key in kinds:
            kinds[key].append(block)
        elif len(kinds) < count:
            kinds[key], smallest = [block], size
    return [np.array(found, dtype=np.int64) for found in kinds.values()]

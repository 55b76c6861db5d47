"""What is alive at a moment as a tree: from the program down to the line, or from the model down to the op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from memfit.core.labels import ALL_CATEGORIES
from memfit.core.lifetimes import Ints
from memfit.core.run import Run
from memfit.core.stack_reading import is_python, line_text

MAX_DEPTH = 120
HOPS = ("_wrapped_call_impl", "_call_impl")  # torch's own, between every module and the next
LEAST_SHARE = 0.0002
"""A node below this share of the whole is too narrow to be seen; such siblings are put together."""


@dataclass(slots=True)
class Node:
    name: str
    nbytes: int = 0
    count: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    def below(self, name: str) -> Node:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = Node(name)
        return found


def paths(run: Run, blocks: Ints) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(names from the outside in, bytes, how many blocks), each path once."""
    sums: dict[tuple[str, ...], list[int]] = {}
    of_stack: dict[tuple[int, ...], tuple[str, ...]] = {}
    stacks = run.stack_numbers()
    for block in blocks.tolist():
        key = _key(run, block, stacks)
        path = of_stack.get(key)
        if path is None:
            path = of_stack[key] = _path(run, block)
        found = sums.setdefault(path, [0, 0])
        found[0] += int(run.course.size[block])
        found[1] += 1
    for path, (nbytes, count) in sums.items():
        yield path, nbytes, count


def tree(run: Run, blocks: Ints) -> Node:
    root = Node("all")
    for path, nbytes, count in paths(run, blocks):
        node = root
        for name in ("", *path):
            node = node.below(name) if name else node
            node.nbytes += nbytes
            node.count += count
    return root


def pruned(root: Node) -> Node:
    """Siblings that would be thinner than a hair become one. No recursion: a stack may be deep."""
    least = root.nbytes * LEAST_SHARE
    todo = [root]
    while todo:
        node = todo.pop()
        thin = [child for child in node.children.values() if child.nbytes < least]
        if len(thin) > 1:
            for child in thin:
                del node.children[child.name]
            name = f"{len(thin):,} smaller"
            node.children[name] = Node(name, sum(c.nbytes for c in thin), sum(c.count for c in thin))
        todo.extend(node.children.values())
    return root


def _key(run: Run, block: int, stacks: Ints) -> tuple[int, ...]:
    labels = run.labels
    if labels.stacks:
        return int(stacks[block]), int(labels.line[block])
    return int(labels.category[block]), int(labels.module[block]), int(labels.op[block])


def _path(run: Run, block: int) -> tuple[str, ...]:
    labels = run.labels
    if labels.stacks:
        frames = [frame for frame in run.frames(block) if is_python(frame) and frame.name not in HOPS][:MAX_DEPTH]
        return tuple(line_text(frame) for frame in reversed(frames)) or (labels.lines[labels.line[block]],)
    category = ALL_CATEGORIES[labels.category[block]].replace("_", " ")
    return (category, *_module_parts(labels.modules[labels.module[block]]), labels.ops[labels.op[block]] or "(no op)")


def _module_parts(module: str) -> Sequence[str]:
    return [part for part in module.split(".") if part][:MAX_DEPTH]

"""Forward and backward passes that do again what those before them did, where gradients are accumulated.

A call with gradients is told together with its backward pass, if that leaves no new gradients of weights: so it does
where they are there already, as in all but the first of the passes whose gradients one optimizer step sums. What
autograd would keep hangs on one node, which lets go in the order that was seen; what was alive after the pass, and dead
after the next one, goes with that node. Values may be asked for, if they follow from the
call's arguments and those have the values that they had. Hooks of libraries are left to what they were seen to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memfit.events import LISTS, Action
from memfit.tracing.repeated.calls import (
    MadeAgain,
    Maker,
    RepeatedCalls,
    changed_nothing,
    events_of_call,
    held_elsewhere,
    kept_by_autocast,
    put_into_autocast,
    still_alive,
)
from memfit.tracing.repeated.code_reads import CodeReads
from memfit.tracing.repeated.state import code_of, key_of_call

Tensor = torch.Tensor
ALIKE = 2
"""Passes in a row that must have been the same: each takes seconds."""
SKIPPED = (
    "forward and backward passes whose gradients are added to those that are there, on the same shapes, were told from"
    " the ones before: every one was taken to do the same"
)


class CallDiffers(BaseException):
    """The code does with what was told what no call before did: only a trace with every call run tells what follows. No
    `except Exception` of that code stops it."""


@dataclass
class PassRecord:
    forward: list[tuple[int, int]]
    blocks: list[tuple[Any, ...]]
    returned: list[Any]
    form: TreeSpec
    cast: list[MadeAgain]
    weights: list[weakref.ref[Tensor]] = field(compare=False)
    asked: dict[int, bytes] = field(default_factory=dict)
    """Arguments by whose values the code decides there, with those values."""
    exactly: frozenset[int] = frozenset()
    """Those of which it asks more than yes or no."""
    backward: list[tuple[int, str, Any]] = field(default_factory=list)
    """Action, whose block (of the call, of the pass itself, an argument's, of a gradient that comes in), and its
    number; of a mark, its phase."""
    made: list[tuple[Any, ...]] = field(default_factory=list)
    """Blocks of the backward pass."""
    given: int = 0
    """For which of the tensors that are returned a gradient comes in."""
    left: list[int] = field(default_factory=list)
    """Blocks of it that go with the graph."""
    blocks_left: set[int] = field(default_factory=set, compare=False)
    """As the trace numbers them, and those of the call that stay as long."""
    times: int = field(default=1, compare=False)

    def lets_go(self, whose: str) -> set[int]:
        return {number for action, owner, number in self.backward if action == Action.FREE and owner == whose}


@dataclass
class _PendingCall:
    """A call that has run, and waits for its backward pass."""

    key: Any
    noted: PassRecord
    first_block: int
    arguments: dict[int, int]
    """Blocks, and which argument lies there."""
    values: dict[int, bytes]
    exact_values: dict[int, bytes]
    unexplained: int = 0
    at: int = -1
    """The event with which its backward pass began."""
    blocks_then: int = 0
    gradients: dict[int, int] = field(default_factory=dict)


class RepeatedPasses:
    def __init__(self, names: Any, is_own: Callable[[str], bool], reads: CodeReads) -> None:
        self._names, self._tracer, self._autocast = names, names.tracer, names.autocast
        self._maker = Maker(names.tracer)
        self._is_own, self._reads = is_own, reads
        self._seen: dict[Any, dict[Any, PassRecord]] = {}
        """By the call, and the values that it decided by."""
        self._reached: list[_PendingCall] = []
        """Calls whose nodes the backward pass that runs has come to."""
        self._depth = 0
        self._last: tuple[Any, PassRecord] | None = None
        self._outlived: set[Any] = set()
        """Calls of which something was still there after the next pass, whoever has it: they are always run."""

    def run(self, module: torch.nn.Module, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        tracer = self._tracer
        with torch._C.DisableTorchFunction():
            tracer.on_call()
            leaves = tree_leaves((args, kwargs))
            key = self._key(module, args, kwargs, leaves)
            for before in self._seen.get(key, {}).values():
                may_be_told = before.times >= ALIKE and key not in self._outlived
                if may_be_told and before.asked == self._values(leaves, before.asked, before.exactly):
                    tracer.assume(SKIPPED)
                    return self._repeat(key, before, leaves)
            if key is not None:
                all_of_them = range(len(leaves))
                values, exact = self._values(leaves, all_of_them), self._values(leaves, all_of_them, all_of_them)
                tracer.values.begin_origins({i: leaves[i] for i in values})
                tracer.answers.asked_about.clear()
                arguments = {tracer.block_of(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
            del leaves
        if key is None:
            return call()
        event, block, unexplained = len(tracer.trace), len(tracer.trace.requested), tracer.answers.unexplained
        lists = len(tracer.trace.facts.get(LISTS, ()))
        returned = [call()]
        with torch._C.DisableTorchFunction():
            noted = self._noted_call(event, block, returned)
            explained = tracer.answers.unexplained == unexplained and len(tracer.trace.facts.get(LISTS, ())) == lists
            if noted is not None and explained and changed_nothing(key[0], self._is_harmless, self._reads):
                self._wait(_PendingCall(key, noted, block, arguments, values, exact), returned)
        return returned[0]

    def _key(self, module: torch.nn.Module, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside torch.func
            return None
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return None
        if any(
            weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
            for weight in module.parameters()
        ):
            return None
        key = key_of_call(self._names, module, args, kwargs, self._is_harmless, self._reads.signs)
        return None if key is None else (key, _gradients(module))

    def _is_harmless(self, hook: Any) -> bool:
        code = code_of(hook)
        return code is not None and not self._is_own(code.co_filename)

    def _values(self, leaves: list[Any], which: Any, exactly: Container[int] = ()) -> dict[int, bytes]:
        """Of these arguments, where they are known. Of a mask whether all of it is ones: that is what code asks of it,
        and masks of padding differ from batch to batch. `exactly`: those of which it asks more, such as how many."""
        found = {}
        with _disable_current_modes():
            for i in which:
                known = self._tracer.values.read(leaves[i]) if isinstance(leaves[i], Tensor) else None
                if known is None:
                    continue
                if i not in exactly and known.numel() > 1 and not bool((known != known.bool()).any()):
                    found[i] = b"mask" + bytes([bool(known.all()), bool(known.any())])
                else:
                    found[i] = known.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return found

    # -- noting ------------------------------------------------------------------------------------------------------

    def _noted_call(self, first_event: int, first_block: int, returned: list[Any]) -> PassRecord | None:
        events = events_of_call(self._tracer.trace, first_event, first_block)
        leaves, form = tree_flatten(returned)
        if events is None or held_elsewhere(returned, leaves):
            return None
        forms = [self._maker.form(leaf, first_block) for leaf in leaves]
        if any(each is None for each in forms):
            return None
        weights, cast = kept_by_autocast(self._autocast, self._maker, first_block)
        return PassRecord(events, self._maker.noted_blocks(first_block), forms, form, cast, weights)

    def _wait(self, begun: _PendingCall, returned: list[Any]) -> None:
        """For the first node of the call's that a backward pass comes to: from there on all nodes are the call's, for
        those that were made later have run."""
        tensors = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        nodes = [tensor.grad_fn for tensor in tensors]
        if len({id(node) for node in nodes if node is not None}) != sum(node is not None for node in nodes):
            return
        for number, node in enumerate(nodes):
            if node is not None:
                node.register_prehook(lambda gradients, number=number: self._come_to(begun, number, gradients))

    def _come_to(self, begun: _PendingCall, number: int, gradients: Sequence[Tensor | None]) -> None:
        trace = self._tracer.trace
        if begun.at >= 0 or not _has_its_gradients(begun.key):
            return
        begun.noted.given, begun.at, begun.blocks_then = number, len(trace), len(trace.requested)
        begun.unexplained = self._tracer.answers.unexplained
        with torch._C.DisableTorchFunction():
            blocks = [self._tracer.block_of(each) for each in gradients if each is not None]
        begun.gradients = {block: i for i, block in enumerate(blocks) if block is not None}
        self._reached.append(begun)

    def around_backward(self, begins: bool) -> None:
        self._depth += 1 if begins else -1
        if not begins and self._depth == 0:
            if self._last is not None and self._last[1].blocks_left & self._tracer.alive_blocks():
                self._outlived.add(self._last[0])
            self._last = None
            if len(self._reached) == 1:
                self._keep(self._reached[0])
            self._reached.clear()
            self._tracer.values.begin_origins(None)

    def _keep(self, begun: _PendingCall) -> None:
        """It is known from now on, if it is whole."""
        noted, answers = begun.noted, self._tracer.answers
        asked = set(answers.asked_about)
        if answers.unexplained != begun.unexplained or not asked <= set(begun.values):
            return
        if not _has_its_gradients(begun.key):
            return
        noted.exactly = frozenset(i for i in asked if answers.asked_about[i])
        noted.asked = {i: (begun.exact_values if i in noted.exactly else begun.values)[i] for i in asked}
        if not self._note_backward(begun):
            return
        seen, values = self._seen.setdefault(begun.key, {}), tuple(noted.asked.items())
        before = seen.get(values)
        if before == noted and begun.key not in self._outlived:
            noted.times = before.times + 1
        seen[values] = noted
        self._last = begun.key, noted

    def _note_backward(self, begun: _PendingCall) -> bool:
        """False where something else happened than what can be noted."""
        trace, noted = self._tracer.trace, begun.noted
        alive: set[int] = set()
        for at in range(begun.at, len(trace)):
            action, block = trace.actions[at], trace.subjects[at]
            own = block - begun.blocks_then
            if action == Action.MARK:
                noted.backward.append((action, "", trace.marks[block].phase))
            elif action not in (Action.ALLOC, Action.FREE):
                return False
            elif own >= 0:
                noted.backward.append((action, "pass", own))
                alive.add(own) if action == Action.ALLOC else alive.remove(own)
            elif 0 <= block - begun.first_block < len(noted.blocks):
                noted.backward.append((action, "call", block - begun.first_block))
            elif block in begun.arguments:
                noted.backward.append((action, "argument", begun.arguments[block]))
            elif block in begun.gradients:
                noted.backward.append((action, "gradient", begun.gradients[block]))
            else:
                return False
        noted.made = self._maker.noted_blocks(begun.blocks_then)
        noted.left = sorted(alive)
        kept = {each.block for each in (*noted.returned, *noted.cast) if isinstance(each, MadeAgain)}
        with_graph = still_alive(noted.forward) - kept - noted.lets_go("call")
        noted.blocks_left = {begun.blocks_then + number for number in alive}
        noted.blocks_left |= {begun.first_block + number for number in with_graph}
        return True

    # -- telling -----------------------------------------------------------------------------------------------------

    def _repeat(self, key: Any, noted: PassRecord, leaves: list[Any]) -> Any:
        def make() -> tuple[list[Tensor], dict[tuple[str, int], Any]]:
            first = self._maker.repeat(noted.forward, noted.blocks)
            alive = still_alive(noted.forward)
            storages = {number: self._maker.storage(first + number, noted.blocks[number][0]) for number in alive}
            copies = [self._maker.tensor(each, storages[each.block]) for each in noted.cast]
            put_into_autocast(self._tracer, self._autocast, noted.weights, copies)
            kept = {each.block for each in (*noted.returned, *noted.cast) if isinstance(each, MadeAgain)}
            held = {("call", number): storages[number] for number in (alive - kept) | (noted.lets_go("call") & alive)}
            held |= {("argument", i): leaves[i].untyped_storage() for i in noted.lets_go("argument")}
            made = [
                self._maker.tensor(each, storages[each.block]) for each in noted.returned if isinstance(each, MadeAgain)
            ]
            return made, held

        with torch._C.DisableTorchFunction():
            begin = torch.empty(0, device="cpu", requires_grad=True)
            tensors = iter(_RepeatedNode.apply(begin, make, self, key, noted))
        told = [next(tensors) if isinstance(each, MadeAgain) else each[0] for each in noted.returned]
        return tree_unflatten(told, noted.form)[0]

    def pass_backward(
        self, key: Any, noted: PassRecord, held: dict[tuple[str, int], Any], gradients: Sequence[Any]
    ) -> None:
        given = [i for i, each in enumerate(gradients) if each is not None]
        needed = {(whose, number) for whose in ("call", "argument") for number in noted.lets_go(whose)}
        if given != [noted.given] or not needed <= held.keys() or not _has_its_gradients(key):
            raise CallDiffers
        trace, made = self._tracer.trace, []
        for action, whose, number in noted.backward:
            if action == Action.MARK:
                trace.mark(number, trace.marks[-1].step)
            elif action == Action.ALLOC:
                made.append(self._maker.alloc(noted.made[number]))
            elif whose == "pass":
                trace.free(made[number])
            elif whose == "gradient":
                self._tracer.free_now(gradients[noted.given])
            else:
                del held[whose, number]
        for number in noted.left:
            held["pass", number] = self._maker.storage(made[number], noted.made[number][0])


def _has_its_gradients(key: Any) -> bool:
    """Those that were there when the call began: code may drop them before the backward pass."""
    call, gradients = key
    module = call[0]()
    with torch._C.DisableTorchFunction():
        return module is not None and gradients == _gradients(module)


def _gradients(module: torch.nn.Module) -> tuple[bool, ...]:
    """Which weights have theirs."""
    return tuple(weight.requires_grad and weight.grad is not None for weight in module.parameters())


class _RepeatedNode(torch.autograd.Function):
    """One node in the place of all that a call made. `held_of_told_calls`: what those would keep."""

    @staticmethod
    def forward(
        ctx: Any, begin: Tensor, make: Callable[[], Any], passes: RepeatedPasses, key: Any, noted: PassRecord
    ) -> Any:
        tensors, ctx.held_of_told_calls = make()
        ctx.passes, ctx.key, ctx.noted = passes, key, noted
        ctx.set_materialize_grads(False)
        forms = [each for each in noted.returned if isinstance(each, MadeAgain)]
        ctx.mark_non_differentiable(
            *(tensor for tensor, form in zip(tensors, forms, strict=True) if not form.requires_grad)
        )
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch._C.DisableTorchFunction():
            ctx.passes.pass_backward(ctx.key, ctx.noted, ctx.held_of_told_calls, gradients)
        return None, None, None, None, None


@contextmanager
def repeated_calls_skipped(names: Any, is_own: Callable[[str], bool]) -> Iterator[None]:
    """Modules that are called by no other one, or by one other again and again, are told instead of run. `is_own`:
    whether a file is the person's own: what its hooks may do nobody knows."""
    reads = CodeReads(is_own)
    calls, passes, tracer = RepeatedCalls(names, reads), RepeatedPasses(names, is_own, reads), names.tracer
    call, around = torch.nn.Module.__call__, tracer.on_backward

    def call_or_repeat(module: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.in_backward or (tracer.modules.depth and torch.is_grad_enabled()):
            return call(module, *args, **kwargs)
        repeated = passes if torch.is_grad_enabled() else calls.for_call_of(module)
        if repeated is None:
            return call(module, *args, **kwargs)
        return repeated.run(module, lambda: call(module, *args, **kwargs), args, kwargs)

    def around_backward(begins: bool) -> None:
        passes.around_backward(begins)
        around(begins)

    tracer.on_backward = around_backward
    with mock.patch.object(torch.nn.Module, "__call__", call_or_repeat):
        yield
    tracer.on_backward = around

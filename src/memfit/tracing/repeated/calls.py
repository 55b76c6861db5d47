"""A model called again and again without gradients, on tensors of the same shapes, as evaluations do hundreds of times.

Once some such calls have made the same events, the next ones are not run: their events are written down again, and
what they would return is made without them. A call counts only if it asked for no values but such as follow from
shapes, or from its arguments, which must then have the same ones; if nothing that it made stays but what it returns and
the weights that autocast keeps, nobody else holds that, and no block of before it was freed. The model may be a part of
another one that calls it so, as a diffusion's sampler does. It is told from others only while the model is what it was
then: weights, modes, attributes, and no hooks.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memfit.events import Action, Refrain
from memfit.tracing.repeated.code_reads import CodeReads
from memfit.tracing.repeated.state import PLAIN, bytes_of, key_of_call, known_ones, state_of

Tensor = torch.Tensor
ALIKE = 8
"""Calls in a row that must have been the same: nobody waits for fewer."""
LONG, LONG_ALIKE = 10_000, 3
"""Events of a call that takes seconds, and how many of such must have been the same."""
OWN_USES = 2
"""Of a storage: its tensor, and the object by which memfit sees it go."""
MOST_DECISIONS = 16
"""Of calls that decided by other values each, so many are kept in mind."""
SKIPPED = (
    "calls of a model without gradients, on the same shapes, were told from the ones before: every one was taken to do"
    " the same"
)


@dataclass
class _NotedCall:
    events: list[tuple[int, int]]
    """Blocks are numbered from the first of the call."""
    blocks: list[tuple[Any, ...]]
    returned: list[Any]
    form: TreeSpec
    cast: list[MadeAgain]
    """What autocast keeps of weights."""
    weights: list[weakref.ref[Tensor]] = field(compare=False)
    asked: dict[int, bytes] = field(default_factory=dict)
    """Arguments by whose values the code decides there, with those values."""
    times: int = field(default=1, compare=False)


class RepeatedCalls:
    def __init__(self, names: Any, reads: CodeReads) -> None:
        self._reads = reads
        self._names, self._tracer, self._autocast = names, names.tracer, names.autocast
        self._maker = Maker(names.tracer)
        self._seen: dict[Any, dict[Any, _NotedCall]] = {}
        """By the call, and the values that it decided by."""
        self._inside: Counter[int] = Counter()
        """How often each module was called by the outermost one that runs, as a sampler calls its model."""
        self._runs_inside = False

    def for_call_of(self, module: torch.nn.Module) -> RepeatedCalls | None:
        """None where the call is not looked at. Buffers may be what a module in training counts with."""
        if self._tracer.modules.depth == 0:
            self._inside.clear()
        elif self._runs_inside:
            return None
        else:
            self._inside[id(module)] += 1
            if self._inside[id(module)] <= ALIKE:
                return None
        return None if module.training and next(module.buffers(), None) is not None else self

    def run(self, module: torch.nn.Module, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # tensors as they are, not as the traced code sees them
            leaves = tree_leaves((args, kwargs))
            key = key_of_call(self._names, module, args, kwargs, lambda hook: False, self._reads.signs)
            if key is None:
                del leaves
            else:
                key = key, known_ones(self._tracer.values, leaves)
                before = self._before(key, leaves)
                if before is not None and before.times >= (LONG_ALIKE if len(before.events) >= LONG else ALIKE):
                    self._tracer.assume(SKIPPED)
                    return self._repeat(before)
        return call() if key is None else self._run_and_note(key, leaves, call)

    def _before(self, key: Any, leaves: list[Any]) -> _NotedCall | None:
        """A call that was the same, and decided by the values that these have."""
        seen = self._seen.get(key, {}).values()
        values = {i: bytes_of(self._tracer.values, leaves[i]) for i in {i for each in seen for i in each.asked}}
        return next((each for each in seen if all(values[i] == value for i, value in each.asked.items())), None)

    def _run_and_note(self, key: Any, leaves: list[Any], call: Callable[[], Any]) -> Any:
        tracer, trace, answers = self._tracer, self._tracer.trace, self._tracer.answers
        events, blocks = len(trace), len(trace.requested)
        questions, unexplained = answers.questions, answers.unexplained
        asked_before = dict(answers.asked_about)
        with torch._C.DisableTorchFunction():
            values = self._begin_origins(key[1], leaves)
            leaves.clear()
        was, self._runs_inside = self._runs_inside, tracer.modules.depth > 0
        try:
            returned = [call()]
        finally:
            self._runs_inside = was
            asked = set(answers.asked_about)
            if values is not None:
                tracer.values.begin_origins(None)
                answers.asked_about = asked_before  # of a pass that waits for its backward pass
        explained = questions == answers.questions if values is None else unexplained == answers.unexplained
        with torch._C.DisableTorchFunction():
            explained = explained and changed_nothing(key[0], lambda hook: False, self._reads)
            now = self._noted(events, blocks, returned) if explained else None
        if now is None:
            self._seen.pop(key, None)
            return returned[0]
        if values is not None:
            now.asked = {i: values[i] for i in sorted(asked)}
        seen, decided_by = self._seen.setdefault(key, {}), tuple(now.asked.items())
        now.times += seen[decided_by].times if seen.get(decided_by) == now else 0
        seen[decided_by] = now
        if len(seen) > MOST_DECISIONS:
            del seen[next(iter(seen))]
        return returned[0]

    def _begin_origins(self, known: tuple[int, ...], leaves: list[Any]) -> dict[int, bytes] | None:
        """The arguments' values, where it is followed from now on what comes of them: not inside of another call that
        is noted, nor where two arguments share memory."""
        values = self._tracer.values
        if values.follows_origins or len({leaves[i].untyped_storage()._cdata for i in known}) < len(known):
            return None
        values.begin_origins({i: leaves[i] for i in known})
        self._tracer.answers.asked_about.clear()
        return {i: bytes_of(values, leaves[i]) for i in known}

    def _noted(self, first_event: int, first_block: int, returned: list[Any]) -> _NotedCall | None:
        events = events_of_call(self._tracer.trace, first_event, first_block)
        leaves, form = tree_flatten(returned)
        if events is None or held_elsewhere(returned, leaves):
            return None
        forms = [self._maker.form(leaf, first_block) for leaf in leaves]
        weights, cast = kept_by_autocast(self._autocast, self._maker, first_block)
        kept = {each.block for each in (*forms, *cast) if isinstance(each, MadeAgain)}
        if any(each is None for each in forms) or kept != still_alive(events):
            return None
        return _NotedCall(events, self._maker.noted_blocks(first_block), forms, form, cast, weights)

    def _repeat(self, call: _NotedCall) -> Any:
        first = self._maker.repeat(call.events, call.blocks)
        storages = {
            number: self._maker.storage(first + number, call.blocks[number][0])
            for number in {each.block for each in (*call.returned, *call.cast) if isinstance(each, MadeAgain)}
        }
        put_into_autocast(self._tracer, self._autocast, call.weights, [
            self._maker.tensor(copy, storages[copy.block]) for copy in call.cast
        ])  # fmt: skip
        leaves = [
            self._maker.tensor(each, storages[each.block]) if isinstance(each, MadeAgain) else each[0]
            for each in call.returned
        ]
        return tree_unflatten(leaves, call.form)[0]


def changed_nothing(key: Any, is_harmless: Callable[[Any], bool], reads: CodeReads) -> bool:
    """Whether a call left the model as it found it: a list of its own that has grown keeps what the call made, until
    somebody empties it."""
    module = key[0]()
    return module is not None and bool(state_of(module, is_harmless, reads.signs) == key[1])


def events_of_call(trace: Any, first_event: int, first_block: int) -> list[tuple[int, int]] | None:
    """None where it did more than make blocks and free its own."""
    events: list[tuple[int, int]] = []
    for at in range(first_event, len(trace)):
        action, block = trace.actions[at], trace.subjects[at] - first_block
        if action not in (Action.ALLOC, Action.FREE) or block < 0:
            return None
        events.append((action, block))
    return events


def still_alive(events: list[tuple[int, int]]) -> set[int]:
    alive: set[int] = set()
    for action, block in events:
        alive.add(block) if action == Action.ALLOC else alive.remove(block)
    return alive


def kept_by_autocast(autocast: Any, maker: Maker, first_block: int) -> tuple[list[Any], list[MadeAgain]]:
    """Weights, and the copies of them that were made since."""
    weights, cast = [], []
    for weight, copy in autocast._cache.values():
        if (form := maker.form_of_tensor(copy, first_block)) is not None:
            weights.append(weakref.ref(weight))
            cast.append(form)
    return weights, cast


def put_into_autocast(tracer: Any, autocast: Any, weights: list[Any], copies: list[Tensor]) -> None:
    for reference, made in zip(weights, copies, strict=True):
        weight = reference()
        assert weight is not None, "the model is there, and so are its weights"
        if (known := tracer.values.read(weight)) is not None:
            tracer.values.put(made, known)
        autocast._cache[id(weight)] = (weight, made)


# -- blocks and tensors that a call made, as they can be made again ----------------------------------------------------


WIDENED = "widened"


@dataclass(frozen=True)
class MadeAgain:
    """A tensor of a call's own, by the number of its block among those of the call."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False


class Maker:
    """Blocks are numbered from the first of a call."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._refrains: dict[int, tuple[list[tuple[Any, ...]], Refrain]] = {}
        """Of what was repeated: by the id of its blocks, which stays theirs while they are here."""

    def noted_blocks(self, first: int) -> list[tuple[Any, ...]]:
        """From the first on: of each its size, stream, category, op, module, stack, and whether it is a 16-bit tensor
        in fp32."""
        trace = self._tracer.trace
        column, widened = trace.stack_of, set(trace.facts.get(WIDENED, ())[-(len(trace.requested) - first) :])
        return [
            (trace.requested[i], trace.streams[i], trace.category(i), trace.op(i), trace.module(i),
             column[i] if i < len(column) else 0, i in widened)
            for i in range(first, len(trace.requested))
        ]  # fmt: skip

    def alloc(self, block: tuple[Any, ...]) -> int:
        trace = self._tracer.trace
        nbytes, stream, category, op, module, stack, widened = block
        trace.stack_of.extend([0] * (len(trace.requested) - len(trace.stack_of)))
        trace.stack_of.append(stack)
        made = int(trace.alloc(nbytes, stream=stream, category=category, op=op, module=module))
        if widened:
            trace.facts.setdefault(WIDENED, []).append(made)
        return made

    def repeat(self, events: list[tuple[int, int]], blocks: list[tuple[Any, ...]]) -> int:
        """Returns the number of the first block."""
        trace = self._tracer.trace
        if id(blocks) not in self._refrains:
            self._refrains[id(blocks)] = blocks, Refrain.of(trace, events, [block[:-1] for block in blocks])
        first = self._refrains[id(blocks)][1].write(trace)
        if widened := [first + number for number, block in enumerate(blocks) if block[-1]]:
            trace.facts.setdefault(WIDENED, []).extend(widened)
        return first

    def form(self, leaf: Any, first_block: int) -> Any:
        """Of what is returned; None for what cannot be made again."""
        if not isinstance(leaf, Tensor):
            return (leaf,) if isinstance(leaf, PLAIN) else None
        return None if self._tracer.values.read(leaf) is not None else self.form_of_tensor(leaf, first_block)

    def form_of_tensor(self, leaf: Tensor, first_block: int) -> MadeAgain | None:
        block = self._tracer.block_of(leaf)
        if type(leaf) is not Tensor or block is None or block < first_block:
            return None
        shape, stride, offset = tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())
        return MadeAgain(block - first_block, leaf.dtype, shape, stride, offset, leaf.requires_grad)

    def storage(self, block: int, nbytes: int) -> torch.UntypedStorage:
        """Followed: the block is freed when it goes."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            raw = torch.empty(nbytes, dtype=torch.uint8, device=self._tracer.device)
            storage = raw.untyped_storage()
            self._tracer._follow(storage, block)
            return storage

    def tensor(self, made: MadeAgain, storage: torch.UntypedStorage) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            empty = torch.empty(0, dtype=made.dtype, device=self._tracer.device)
            return empty.set_(storage, made.offset, made.shape, made.stride)


def held_elsewhere(returned: list[Any], leaves: list[Any]) -> bool:
    """Whether somebody beside the caller has a tensor that a call returns. What transformers returns has each as an
    item and as an attribute. `returned`: a list of that alone, for an interpreter that Dynamo has changed counts the
    arguments of a call twice."""
    is_mapping = isinstance(returned[0], Mapping)
    attributes = {id(value) for value in getattr(returned[0], "__dict__", {}).values()} if is_mapping else set()
    if _shared_with_others(leaves):
        return True
    own = 4  # the structure that is returned, the list here, the name below, the argument of `getrefcount`
    return any(isinstance(leaf, Tensor) and sys.getrefcount(leaf) > own + (id(leaf) in attributes) for leaf in leaves)


def _shared_with_others(leaves: list[Any]) -> bool:
    """Whether another tensor of the code's lies where a returned one does (`kept.append(hidden.detach())`). Autograd's
    own are not seen by Python; what a view is one of, it holds itself."""
    known: dict[int, set[int]] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            known.setdefault(leaf.untyped_storage()._cdata, set()).update((id(leaf), id(leaf._base)))
    doubtful = {place for place, ids in known.items() if torch._C._storage_Use_Count(place) > OWN_USES}
    if not doubtful:
        return False
    others = (each for each in gc.get_objects() if issubclass(type(each), Tensor))  # of proxies too
    return any((place := _place_of(each)) in doubtful and id(each) not in known[place] for each in others)


def _place_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # such as a sparse one
        return 0

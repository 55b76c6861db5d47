"""Values that are known although the traced device has no memory: numbers from the host, and what is made of them.

Token ids, masks, positions and labels decide shapes and branches: a mask with a zero in it forces other attention
kernels. So tensors of whole numbers and truth values, and small ones of any type, keep their values beside them in host
memory, and an op whose inputs are all known is also computed there. So do larger fractions that are reckoned from data
without weights, and larger ones still that are mere copies, of a mask, or of what the host has, pictures or a table of
angles, also put side by side, for a program may look at one of them, and masks made of ones; weights do not.
Everything else, a loss for one, has no value.

A value belongs to a storage, as memory does: views share it, and an op in place changes it for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memfit.tracing.memo import PLAIN

aten = torch.ops.aten
Tensor = torch.Tensor
Storage = torch.UntypedStorage

MOST_NUMBERS = 1 << 24
"""Elements of whole numbers that are followed; a batch of ids and its mask of pairs have fewer."""
MOST_FLOATS = 1 << 12
MOST_OF_DATA = 1 << 20
"""Fractions that are reckoned from data alone, such as boxes that are matched with anchors before a loss."""
MOST_COPIED = 1 << 22

MADE_EMPTY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.empty_permuted.default,
        aten.resize_.default,
    }
)
OVERWRITES = frozenset(
    {
        aten.copy_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.random_.default,
        getattr(aten.random_, "from"),
        aten.random_.to,
        aten.bernoulli_.float,
    }
)
"""Whatever their first argument held before, it is known afterwards."""
ARRANGES = frozenset(
    {aten.cat.default, aten.stack.default, aten.clone.default, aten.triu.default, aten.tril.default}
    | {aten.index.Tensor, aten.index_select.default, aten.masked_select.default, aten.gather.default}
    | {aten.ones.default, aten.new_ones.default, aten.ones_like.default}
    | {aten.full.default, aten.new_full.default, aten.full_like.default}
)
"""What they make are copies of what they are given, and no more. Masks are made of ones, not of zeros: these are where
sums and an optimizer's states begin."""
BY_SHAPE = frozenset(
    {aten.new_ones.default, aten.ones_like.default, aten.new_full.default, aten.full_like.default}
    | {aten.new_zeros.default, aten.zeros_like.default}
)
"""Of what they are given they take shape and type, and no value."""
CHOICES = frozenset({aten.topk.default, aten.argmax.default, aten.max.dim})
"""The last that each of them makes is which it was."""
CHOOSES_ONE = frozenset({aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim})
KNOWN_FROM_NOTHING = BY_SHAPE | OVERWRITES | CHOICES | CHOOSES_ONE | {aten.multinomial.default}
"""Something is known of what they make, although what they are given is not."""


class Values:
    def __init__(self, device: torch.device, chooses_evenly: Callable[[], bool] = lambda: False) -> None:
        self._device = device
        self.chooses_evenly = chooses_evenly
        """Whether it is said of the line that now runs."""
        self.drawn = False
        """Whether whole numbers were drawn at random on the GPU: the host's draw stands in for them."""
        self._known: dict[int, tuple[weakref.ref[Storage], Storage]] = {}
        self._origins: dict[int, frozenset[int]] | None = None
        self._hidden: weakref.WeakSet[Storage] = weakref.WeakSet()
        """Of the host, but filled from the GPU with what nobody knows."""
        self._choices: weakref.WeakSet[Storage] = weakref.WeakSet()

    def read(self, tensor: Tensor) -> Tensor | None:
        """In host memory, sharing what later ops in place write; None if unknown."""
        if tensor.device.type == "cpu":
            return None if self._hidden and tensor.untyped_storage() in self._hidden else tensor
        found = self._known.get(tensor.untyped_storage()._cdata)
        if found is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.numel() == 0 else None
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made.set_(found[1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def begin_origins(self, named: dict[int, Tensor] | None) -> None:
        """From now on it is followed from which of these tensors values come; from none, if there are none."""
        self._origins = (
            None if named is None else {each.untyped_storage()._cdata: frozenset({i}) for i, each in named.items()}
        )

    @property
    def follows_origins(self) -> bool:
        return self._origins is not None

    def origins(self, tensor: Tensor) -> frozenset[int] | None:
        """None where that is not known."""
        return None if self._origins is None else self._origins.get(tensor.untyped_storage()._cdata)

    def hide(self, tensor: Tensor) -> None:
        self._hidden.add(tensor.untyped_storage())

    def is_choice(self, tensor: Tensor) -> bool:
        """Which of several it was, as a predicted class or an action is: nobody knows it, but 0 is one of them."""
        return tensor.untyped_storage() in self._choices

    def pass_on_choice(self, source: Tensor, copy: Tensor) -> None:
        if self.is_choice(source) and not copy.is_floating_point():
            self._choices.add(copy.untyped_storage())

    def put(self, tensor: Tensor, value: Tensor, most_floats: int = MOST_FLOATS) -> None:
        if not _is_followed(tensor, most_floats):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata

        def died(_: object) -> None:
            self._known.pop(key, None)
            if self._origins is not None:
                self._origins.pop(key, None)

        with _as_on_host():
            beside = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
            self._known[key] = (weakref.ref(storage, died), beside)
            written = self.read(tensor)
            assert written is not None
            written.copy_(value)

    def compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        """On the host; NotImplemented where an input is unknown, or too much would have to be computed."""
        if op in BY_SHAPE:
            with _as_on_host():
                args = (torch.empty((), dtype=args[0].dtype, device="cpu").expand(args[0].shape), *args[1:])
        tensors = tensors_in((args, kwargs))
        if op not in BY_SHAPE and any(tensor.numel() > MOST_NUMBERS for tensor in tensors):
            return NotImplemented
        found = {id(tensor): self.read(tensor) for tensor in tensors}
        if any(value is None for value in found.values()):
            return NotImplemented
        args, kwargs = tree_map_only(Tensor, lambda tensor: found[id(tensor)], (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        try:
            with _as_on_host():
                return op(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError):
            return NotImplemented

    def follow(self, op: Any, args: Any, kwargs: Any, out: Any, lacks_one: bool) -> None:
        """After an op has run: what it made or changed is known, if what it was given is. `lacks_one`: it was not."""
        known = _followed_op(op)
        written = [value for value in _written(known, args, kwargs) if value.device.type == self._device.type]
        if lacks_one and not known.from_nothing and not (known.copies and self._choices):
            self._is_unknown(written)
            return
        new = [t for t in tensors_in(out) if t.device.type == self._device.type and not _is_among(t, written)]
        most_floats = _most_floats(op, args, kwargs)
        if not written and not any(_is_followed(each, most_floats) for each in new):
            return
        if op in MADE_EMPTY or (not tensors_in(args) and _draws_fractions(op, new)):
            return
        if op in OVERWRITES and written and self.read(written[0]) is None and _is_whole(written[0]):
            self.put(written[0], torch.zeros((), dtype=written[0].dtype), most_floats)
        if not written and any(_is_among(made, tensors_in(args)) for made in new):
            return  # views of what is known, or of what is not
        origins = self._origins_of_made(op, args, kwargs)
        made = self.compute(op, args, kwargs)
        if made is NotImplemented and op is aten.multinomial.default:
            with _as_on_host():  # drawn from what nobody knows: any of them will do
                made = torch.randint(args[0].shape[-1], tuple(out.shape))
        if made is NotImplemented and op in CHOICES and self.chooses_evenly():
            *_, indices = tensors_in(out)
            self.put(indices, _spread(op, args, kwargs, indices))
            self._note_origins([indices], frozenset())
            return
        if made is NotImplemented:
            self._is_unknown((*written, *new))
            self._follow_choices(op, args, out)
            return
        self.drawn = self.drawn or torch.Tag.nondeterministic_seeded in op.tags
        for tensor, value in zip(tensors_in(out), tensors_in(made), strict=False):
            if (
                tensor.device.type == self._device.type
                and not _is_among(tensor, written)
                and value.shape == tensor.shape
            ):
                self.put(tensor, value, most_floats)  # else the host makes another one than CUDA, as of `embedding_bag`
        self._note_origins((*written, *new), origins)

    def lacks_one(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these has no value: then what is made of them has none. That is all that is to be known of
        most ops."""
        for tensor in tensors:
            if tensor.device.type == "cpu":
                if self._hidden and tensor.untyped_storage() in self._hidden:
                    return True
            elif tensor.untyped_storage()._cdata not in self._known and tensor.numel():
                return True
        return False

    def _is_unknown(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()._cdata
            self._known.pop(storage, None)
            if self._origins is not None:
                self._origins.pop(storage, None)

    def _follow_choices(self, op: Any, args: Any, out: Any) -> None:
        if op in CHOOSES_ONE:
            *_, indices = tensors_in(out)
            self._choices.add(indices.untyped_storage())
        elif op in ARRANGES or op is aten._to_copy.default:
            sources = tensors_in(args)
            if sources and all(self.is_choice(each) for each in sources):
                self.pass_on_choice(sources[0], out)

    def _origins_of_made(self, op: Any, args: Any, kwargs: Any) -> frozenset[int] | None:
        """None where that is not known, as of what is drawn."""
        if self._origins is None or torch.Tag.nondeterministic_seeded in op.tags:
            return None
        found = [] if op in BY_SHAPE else [self.origins(tensor) for tensor in tensors_in((args, kwargs))]
        return None if None in found else frozenset[int]().union(*(each for each in found if each is not None))

    def _note_origins(self, tensors: Sequence[Tensor], origins: frozenset[int] | None) -> None:
        if self._origins is None:
            return
        for storage in {tensor.untyped_storage()._cdata for tensor in tensors}:
            if origins is None or storage not in self._known:
                self._origins.pop(storage, None)
            else:
                self._origins[storage] = origins


def _spread(op: Any, args: Any, kwargs: Any, indices: Tensor) -> Tensor:
    """Each row goes on where the one before it ended, so that all are chosen equally often."""
    by_name = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    several = op is aten.topk.default
    dim = by_name.get("dim", -1 if several else None)
    with _as_on_host():
        options = args[0].numel() if dim is None else args[0].shape[dim]
        spread: Tensor = torch.arange(indices.numel()) % options
        shape = list(indices.shape)
        if several and shape:
            shape.append(shape.pop(dim))
            return spread.view(shape).movedim(-1, dim)
        return spread.view(shape)


class _as_on_host:
    """Without the modes of the trace, and without autograd."""

    def __enter__(self) -> None:
        self._modes = _disable_current_modes()
        self._modes.__enter__()
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._inference = torch.inference_mode(False)
        self._inference.__enter__()
        self._grad = torch.no_grad()
        self._grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in (self._grad, self._inference, self._functions, self._modes):
            context.__exit__(*error)


def tensors_in(values: Any) -> list[Tensor]:
    """In their order. An op is given tensors, lists of them and plain values, for which torch's trees take too long."""
    found: list[Tensor] = []
    _collect((values,), found)
    return found


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if type(value) in PLAIN:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


@dataclass(frozen=True, slots=True)
class _FollowedOp:
    """What is asked of an op each time that it runs."""

    written: tuple[tuple[int, str], ...]
    """Arguments that it writes into: place and name."""
    from_nothing: bool
    copies: bool


@cache
def _followed_op(op: Any) -> _FollowedOp:
    arguments = enumerate(op._schema.arguments)
    return _FollowedOp(
        tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write),
        op in KNOWN_FROM_NOTHING,
        op in ARRANGES or op is aten._to_copy.default,
    )


def _is_followed(tensor: Tensor, most_floats: int = MOST_FLOATS) -> bool:
    counted = tensor.untyped_storage().nbytes() // tensor.element_size()
    fractions = tensor.is_floating_point() or tensor.is_complex()
    return 0 < counted <= (most_floats if fractions else MOST_NUMBERS)


def _most_floats(op: Any, args: Any, kwargs: Any) -> int:
    if _copies_known(op, args):
        return MOST_COPIED
    given = tensors_in((args, kwargs))
    return MOST_FLOATS if not given or any(each.requires_grad for each in given) else MOST_OF_DATA


def _copies_known(op: Any, args: Any) -> bool:
    if op in ARRANGES:
        return True
    place = {aten._to_copy.default: 0, aten.copy_.default: 1}.get(op, 0 if op.overloadpacket is aten.to else None)
    if place is None:
        return False
    source = args[place]
    return not (source.is_floating_point() and isinstance(source, torch.nn.Parameter))


def _written(op: _FollowedOp, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for place, name in op.written:
        _collect((args[place] if place < len(args) else kwargs.get(name),), found)
    return found


def _is_among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in others)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _draws_fractions(op: Any, made: Sequence[Tensor]) -> bool:
    """Random fractions are nobody's value; random whole numbers are ids, of which any will do."""
    return torch.Tag.nondeterministic_seeded in op.tags and any(tensor.is_floating_point() for tensor in made)

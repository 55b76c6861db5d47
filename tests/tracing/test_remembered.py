"""What an op gives back is the same whether it is worked out or remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from memfit.events import Action
from memfit.platform import H200, Platform
from memfit.tracing import memo
from memfit.tracing.memo import Gives, Remembered, remembered_on, what_is_given
from memfit.tracing.tracer import Tracer, trace

aten = torch.ops.aten
META = torch.device("meta")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def layout(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return tuple(out.shape), out.stride(), out.dtype, out.untyped_storage().nbytes()
    return type(out), [layout(each) for each in out] if isinstance(out, (list, tuple)) else out


class Counted:
    """An op that counts how often it is asked."""

    def __init__(self, op: Any) -> None:
        self.op, self.calls = op, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.op(*args, **kwargs)


def asked_twice(op: Any, make: Callable[[], tuple[Any, ...]], **kwargs: Any) -> tuple[Any, Any, int]:
    known, counted = Remembered(META), Counted(op)
    first, second = (known.call(counted, what_is_given(op), make(), kwargs) for _ in range(2))
    return first, second, counted.calls


CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "elementwise": (aten.mul.Tensor, lambda: (meta(2, 3), meta(3))),
    "of a transposed tensor": (aten.exp.default, lambda: (meta(2, 3, 4).transpose(0, 1),)),
    "a product": (aten.mm.default, lambda: (meta(2, 3), meta(3, 4))),
    "several results": (aten.native_layer_norm.default, lambda: (meta(2, 3), [3], meta(3), meta(3), 1e-5)),
    "a list": (aten._foreach_sqrt.default, lambda: ([meta(2), meta(3, 3)],)),
    "another dtype": (aten.eq.Scalar, lambda: (meta(5), 0)),
    "nothing in it": (aten.neg.default, lambda: (meta(0, 4),)),
    "a number": (aten.sum.default, lambda: (meta(4, 4),)),
}


@pytest.mark.parametrize("which", CALLS)
def test_the_same_shapes_are_worked_out_once(which: str) -> None:
    first, second, calls = asked_twice(*CALLS[which])
    assert calls == 1
    assert layout(second) == layout(first)


def test_new_tensors_are_new_each_time() -> None:
    first, second, _ = asked_twice(aten.neg.default, lambda: (meta(4),))
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((meta(4, dtype=torch.int64), 2), (meta(4, dtype=torch.int64), 2.0)),
        ((meta(4, 4), 2), (meta(4, 4).t(), 2)),
        ((meta(4), 2), (meta(4, dtype=torch.bfloat16), 2)),
        ((meta(4), 1), (meta(4), True)),
    ],
    ids=["whole and real numbers", "strides", "dtypes", "numbers and truth"],
)
def test_what_only_looks_the_same_is_worked_out_anew(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    known, counted = Remembered(META), Counted(aten.mul.Tensor)
    for args in (first, second):
        out = known.call(counted, Gives.NEW, args, {})
        assert layout(out) == layout(aten.mul.Tensor(*args))
    assert counted.calls == 2


def test_another_default_dtype_is_another_answer() -> None:
    known, counted = Remembered(META), Counted(aten.full.default)
    for dtype in (torch.float32, torch.float64):
        with mock.patch.object(torch, "get_default_dtype", lambda dtype=dtype: dtype):
            known.call(counted, Gives.NEW, ([4], 1.0), {"device": META})
    assert counted.calls == 2


def test_nothing_is_taken_for_known_of_people_s_own_ops() -> None:
    with torch.library._scoped_library("memfit_test", "FRAGMENT") as library:
        library.define("own(Tensor x) -> Tensor")
        assert what_is_given(torch.ops.memfit_test.own.default) is Gives.OTHER


def test_a_view_that_does_not_say_so_stays_one() -> None:
    x = meta(4, 3)
    first, second, calls = asked_twice(aten._unsafe_view.default, lambda: (x, [12]))
    assert calls == 2
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_what_is_written_into_is_given_back() -> None:
    x = meta(4)
    first, second, calls = asked_twice(aten.add_.Tensor, lambda: (x, meta(4)))
    assert first is x and second is x and calls == 1


def test_lists_are_written_into_whatever_the_numbers() -> None:
    known, counted = Remembered(META), Counted(aten._foreach_addcdiv_.ScalarList)
    lists = [[meta(4), meta(2, 2), meta(4)] for _ in range(3)]
    for step in (1.0, 2.0):
        assert known.call(counted, Gives.NOTHING, (*lists, [step] * 3), {}) is None
    assert counted.calls == 1


def test_wrong_shapes_are_refused_each_time() -> None:
    known = Remembered(META)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            known.call(aten.mm.default, Gives.NEW, (meta(2, 3), meta(2, 3)), {})
    with pytest.raises(RuntimeError):
        known.call(aten._foreach_add_.List, Gives.NOTHING, ([meta(4), meta(3)], [meta(4), meta(2)]), {})


def test_tensors_with_values_keep_them() -> None:
    x = torch.arange(3)
    first, second, calls = asked_twice(aten.add.Tensor, lambda: (x, 1))
    assert first.tolist() == second.tolist() == [1, 2, 3] and calls == 2


@pytest.mark.parametrize(
    ("op", "given"),
    [
        (aten.mul.Tensor, Gives.NEW), (aten.mul_.Tensor, Gives.FIRST), (aten._foreach_mul_.Scalar, Gives.NOTHING),
        (aten._fused_adamw_.default, Gives.NOTHING), (aten.view.default, Gives.OTHER), (aten.t_.default, Gives.OTHER),
        (aten.set_.source_Tensor, Gives.OTHER), (aten.resize_.default, Gives.OTHER), (aten.mm.out, Gives.OTHER),
    ],
    ids=str,
)  # fmt: skip
def test_the_schema_tells_what_is_given(op: Any, given: Gives) -> None:
    assert what_is_given(op) is given


def test_a_remembered_result_lives_and_dies_like_any_other() -> None:
    def step(tracer: Tracer) -> None:
        x = torch.empty(1000, device=tracer.device)
        for _ in range(3):
            y = x * 2
            del y

    made = trace(step)
    events = [(Action(action), made.requested[block]) for action, block in made.events()]
    once = [(Action.ALLOC, 4000), (Action.FREE, 4000)]
    assert events[1:7] == 3 * once


def test_the_next_trace_for_the_same_card_remembers_and_one_for_another_does_not() -> None:
    first, other = (remembered_on(META, platform) for platform in (H200, Platform(arch=(8, 9))))
    counted = Counted(aten.mul.Tensor)
    for known, calls in ((first, 1), (remembered_on(META, Platform()), 1), (other, 2)):
        known.call(counted, Gives.NEW, (meta(4), 7), {})
        assert counted.calls == calls


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MOST", 10)
    known = Remembered(META)
    for size in range(25):
        assert known.call(aten.neg.default, Gives.NEW, (meta(size),), {}).shape == (size,)
        known.call(aten.neg_.default, Gives.FIRST, (meta(size),), {})
        assert len(known._known) <= 10 and len(known._written) <= 10

"""Literal streams of four units, and what they become with more."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from memfit.analysis.compare import compare
from memfit.events import Action, Trace
from memfit.extrapolation.blocks import NotRepeating, extend
from memfit.replay.replay import replay

ALLOC = re.compile(r"(?:(\d+)\.)?([a-z]+)(\d+)")


def trace_of(text: str) -> Trace:
    """`|forward 0.a8 x3 -0.a` is: a mark, 8 bytes made by op a in block 0, 3 made by op x in no block, a free."""
    trace, blocks = Trace(), {}
    for word in text.split():
        if word.startswith("|"):
            trace.mark(word[1:])
        elif word.startswith("-"):
            trace.free(blocks[word[1:]])
        else:
            found = ALLOC.fullmatch(word)
            assert found, word
            layer, op, size = found.groups()
            name = op if layer is None else f"{layer}.{op}"
            blocks[name] = trace.alloc(int(size), op=op, module="" if layer is None else f"layers.{layer}.{op}")
    return trace


def text_of(trace: Trace) -> str:
    def name(block: int) -> str:
        layer = trace.module(block).removeprefix("layers.").partition(".")[0]
        return f"{layer}.{trace.op(block)}" if layer else trace.op(block)

    words = {
        Action.ALLOC: lambda block: f"{name(block)}{trace.requested[block]}",
        Action.FREE: lambda block: f"-{name(block)}",
        Action.MARK: lambda mark: f"|{trace.marks[mark].phase}",
    }
    return " ".join(words[Action(action)](subject) for action, subject in trace.events())


def extended(text: str, units: int = 6, period: int = 1) -> str:
    return text_of(extend(trace_of(text), "layers", period=period, units=units))


# -- passes ------------------------------------------------------------------------------------------------------------


def test_an_upward_pass_gets_more_inner_units() -> None:
    assert extended("0.a8 1.a8 2.a8 3.a8") == "0.a8 1.a8 2.a8 3.a8 4.a8 5.a8"


def test_a_downward_pass_gets_more_inner_units_too() -> None:
    assert extended("3.a8 2.a8 1.a8 0.a8") == "5.a8 4.a8 3.a8 2.a8 1.a8 0.a8"


def test_up_and_down_again_is_two_passes() -> None:
    made = extended("|f 0.a8 1.a8 2.a8 3.a8 |b 3.g4 -3.a 2.g4 -2.a 1.g4 -1.a 0.g4 -0.a", units=5)
    assert made == "|f 0.a8 1.a8 2.a8 3.a8 4.a8 |b 4.g4 -4.a 3.g4 -3.a 2.g4 -2.a 1.g4 -1.a 0.g4 -0.a"


def test_passes_follow_each_other_in_the_same_direction() -> None:
    made = extended("|one 0.a8 1.a8 2.a8 3.a8 |two 0.b4 1.b4 2.b4 3.b4", units=5)
    assert made == "|one 0.a8 1.a8 2.a8 3.a8 4.a8 |two 0.b4 1.b4 2.b4 3.b4 4.b4"


def test_passes_without_a_mark_between_them_are_told_apart() -> None:
    assert extended("0.a8 1.a8 2.a8 3.a8 0.b4 1.b4 2.b4 3.b4", 5) == "0.a8 1.a8 2.a8 3.a8 4.a8 0.b4 1.b4 2.b4 3.b4 4.b4"


def test_the_first_and_the_last_unit_stay_as_they_were_traced() -> None:
    made = extended("0.a8 0.only1 1.a8 2.a8 3.a8 3.last2 3.more3", units=5)
    assert made == "0.a8 0.only1 1.a8 2.a8 3.a8 4.a8 4.last2 4.more3"


def test_what_happens_before_between_and_after_passes_stays_as_it_was() -> None:
    made = extended("|load x5 0.w8 1.w8 2.w8 3.w8 y6 |step z7 -x", units=5)
    assert made == "|load x5 0.w8 1.w8 2.w8 3.w8 4.w8 y6 |step z7 -x"


def test_a_stretch_in_which_only_one_end_works_is_no_pass() -> None:
    made = extended("|load 0.w8 1.w8 2.w8 3.w8 |head 3.h4 -3.h |tail 0.t4 -0.t", units=5)
    assert made == "|load 0.w8 1.w8 2.w8 3.w8 4.w8 |head 4.h4 -4.h |tail 0.t4 -0.t"


def test_four_units_stay_four() -> None:
    text = "|f x1 0.a8 1.a8 -0.a 2.a8 -1.a 3.a8 -2.a |b 3.g4 2.g4 -3.g 1.g4 -2.g 0.g4 -1.g"
    assert extended(text, units=4) == text


def test_many_units() -> None:
    made = extended("0.a8 1.a8 -0.a 2.a8 -1.a 3.a8 -2.a", units=100)
    assert made == "0.a8 " + " ".join(f"{n}.a8 -{n - 1}.a" for n in range(1, 100))


# -- whose tensors are freed -------------------------------------------------------------------------------------------


def test_a_unit_frees_its_own() -> None:
    assert extended("0.t8 -0.t 1.t8 -1.t 2.t8 -2.t 3.t8 -3.t", 5) == "0.t8 -0.t 1.t8 -1.t 2.t8 -2.t 3.t8 -3.t 4.t8 -4.t"


def test_a_unit_frees_what_the_one_before_it_made() -> None:
    assert extended("0.a8 1.a8 -0.a 2.a8 -1.a 3.a8 -2.a", 5) == "0.a8 1.a8 -0.a 2.a8 -1.a 3.a8 -2.a 4.a8 -3.a"


def test_on_the_way_down_a_unit_frees_what_the_one_above_it_made() -> None:
    made = extended("3.g8 2.g8 -3.g 1.g8 -2.g 0.g8 -1.g", units=5)
    assert made == "4.g8 3.g8 -4.g 2.g8 -3.g 1.g8 -2.g 0.g8 -1.g"


def test_a_unit_frees_what_the_next_one_has_from_an_earlier_pass() -> None:
    made = extended("|a 0.w8 1.w8 2.w8 3.w8 |b 0.v4 -1.w 1.v4 -2.w 2.v4 -3.w 3.v4", units=5)
    assert made == "|a 0.w8 1.w8 2.w8 3.w8 4.w8 |b 0.v4 -1.w 1.v4 -2.w 2.v4 -3.w 3.v4 -4.w 4.v4"


def test_the_end_of_a_pass_may_name_the_last_two_units() -> None:
    made = extended("0.a8 1.a8 2.a8 3.a8 x1 -2.a", units=6)
    assert made == "0.a8 1.a8 2.a8 3.a8 4.a8 5.a8 x1 -4.a"


def test_the_beginning_of_a_pass_may_name_the_first_two_units() -> None:
    made = extended("|a 0.w8 1.w8 2.w8 3.w8 |b x1 -1.w 0.v4 1.v4 2.v4 3.v4", units=6)
    assert made == "|a 0.w8 1.w8 2.w8 3.w8 4.w8 5.w8 |b x1 -1.w 0.v4 1.v4 2.v4 3.v4 4.v4 5.v4"


def test_what_the_first_unit_made_may_be_freed_by_the_last() -> None:
    assert extended("0.a8 0.r2 1.a8 2.a8 3.a8 -0.r", units=5) == "0.a8 0.r2 1.a8 2.a8 3.a8 4.a8 -0.r"


def test_what_no_unit_made_inside_an_inner_unit_is_that_unit_s() -> None:
    """A counter of the optimizer, say, made for each parameter on its way."""
    made = extended("|step 0.m8 x4 1.m8 x4 2.m8 x4 3.m8 x4", units=6)
    assert made == "|step 0.m8 x4 1.m8 x4 2.m8 x4 3.m8 x4 4.m8 x4 5.m8 x4"


def test_what_no_unit_made_is_freed_by_the_unit_that_comes_next() -> None:
    """A variable of the optimizer's loop, that is, which lives until it is given another value."""
    made = extended("|step 0.m8 x4 1.m8 -x x4 2.m8 -x x4 3.m8 -x x4 -x", units=5)
    assert made == "|step 0.m8 x4 1.m8 -x x4 2.m8 -x x4 3.m8 -x x4 4.m8 -x x4 -x"
    made = extended("|step 3.m8 x4 2.m8 -x x4 1.m8 -x x4 0.m8 -x x4 -x", units=5)
    assert made == "|step 4.m8 x4 3.m8 -x x4 2.m8 -x x4 1.m8 -x x4 0.m8 -x x4 -x"


# -- passes of frees alone ---------------------------------------------------------------------------------------------

BUILT = "0.a8 1.a8 2.a8 3.a8"


@pytest.mark.parametrize(
    ("frees", "more"),
    [
        ("-0.a -1.a -2.a -3.a", "-0.a -1.a -2.a -3.a -4.a"),
        ("-3.a -2.a -1.a -0.a", "-4.a -3.a -2.a -1.a -0.a"),
        ("x1 -0.a -1.a -2.a -3.a y1", "x1 -0.a -1.a -2.a -3.a -4.a y1"),
        ("x1 -x -0.a -1.a -2.a -3.a", "x1 -x -0.a -1.a -2.a -3.a -4.a"),
    ],
)
def test_frees_that_go_over_all_units_are_a_pass(frees: str, more: str) -> None:
    assert extended(f"|f {BUILT} |z {frees}", units=5) == f"|f {BUILT} 4.a8 |z {more}"


def test_frees_that_go_over_all_units_right_after_a_pass_are_one_of_their_own() -> None:
    made = extended(f"{BUILT} -0.a -1.a -2.a -3.a", units=5)
    assert made == f"{BUILT} 4.a8 -0.a -1.a -2.a -3.a -4.a"


def test_frees_of_two_tensors_a_unit_are_a_pass() -> None:
    made = extended("|f 0.a8 0.b4 1.a8 1.b4 2.a8 2.b4 3.a8 3.b4 |z -0.a -0.b -1.a -1.b -2.a -2.b -3.a -3.b", units=5)
    assert made.partition("|z ")[2] == "-0.a -0.b -1.a -1.b -2.a -2.b -3.a -3.b -4.a -4.b"


# -- patterns of blocks ------------------------------------------------------------------------------------------------


def test_a_unit_may_be_a_pattern_of_blocks() -> None:
    made = extended("0.a8 1.b4 2.a8 3.b4 4.a8 5.b4 6.a8 7.b4", units=5, period=2)
    assert made == "0.a8 1.b4 2.a8 3.b4 4.a8 5.b4 6.a8 7.b4 8.a8 9.b4"


def test_blocks_left_over_come_last() -> None:
    made = extended("0.a8 1.b4 2.a8 3.b4 4.a8 5.b4 6.a8 7.b4 8.a8", units=6, period=2)
    assert made == "0.a8 1.b4 2.a8 3.b4 4.a8 5.b4 6.a8 7.b4 8.a8 9.b4 10.a8 11.b4 12.a8"


def test_blocks_left_over_come_first_on_the_way_down() -> None:
    made = extended("8.a8 7.b4 6.a8 5.b4 4.a8 3.b4 2.a8 1.b4 0.a8", units=5, period=2)
    assert made == "10.a8 9.b4 8.a8 7.b4 6.a8 5.b4 4.a8 3.b4 2.a8 1.b4 0.a8"


# -- what a block carries ----------------------------------------------------------------------------------------------


def test_op_category_and_stream_come_along() -> None:
    trace = Trace()
    for layer in range(4):
        trace.alloc(8, op="aten.mm", module=f"layers.{layer}", category="weights", stream=7)
    made = extend(trace, "layers", period=1, units=6)
    assert [made.op(b) for b in range(6)] == ["aten.mm"] * 6
    assert [made.category(b) for b in range(6)] == ["weights"] * 6
    assert list(made.streams) == [7] * 6


@pytest.mark.parametrize(
    ("path", "inner"),
    [
        ("model.layers", ".mlp.experts.3"),
        ("base_model.model.transformer.h", ".attn"),
        ("layers", ""),
        ("a.layers", ".layers.2"),
    ],
)
def test_modules_are_named_by_their_own_block_and_nothing_else_in_the_name_changes(path: str, inner: str) -> None:
    trace = Trace()
    for layer in range(4):
        trace.alloc(8, op="a", module=f"{path}.{layer}{inner}")
    made = extend(trace, path, period=1, units=12)
    assert [made.module(b) for b in range(12)] == [f"{path}.{layer}{inner}" for layer in range(12)]


def test_a_dot_in_the_path_is_a_dot() -> None:
    trace = Trace()
    for path in ("model-layers", "model.layers"):
        for layer in range(4):
            trace.alloc(8, op="a", module=f"{path}.{layer}")
    made = extend(trace, "model.layers", period=1, units=5)
    assert len(made.requested) == 4 + 5


@pytest.mark.parametrize(
    "other", ["mylayers.1", "layers.1x", "head.layers.1", "layers", "layersx.2", "model.layers.1", ""]
)
def test_only_modules_of_the_list_of_blocks_are_units(other: str) -> None:
    trace = Trace()
    trace.alloc(1, op="x", module=other)
    for layer in range(4):
        trace.alloc(8, op="a", module=f"layers.{layer}")
    made = extend(trace, "layers", period=1, units=5)
    assert [made.module(b) for b in range(6)] == [other, *(f"layers.{layer}" for layer in range(5))]


def test_origin_and_facts_come_along() -> None:
    trace = trace_of(BUILT)
    trace.facts = {"device": "meta", "arch": [9, 0]}
    made = extend(trace, "layers", period=1, units=5)
    assert (made.origin, made.facts) == ("predicted", {"device": "meta", "arch": [9, 0]})


def test_the_trace_that_was_given_is_left_alone() -> None:
    text = "|step 0.m8 x4 1.m8 x4 2.m8 x4 3.m8 x4 |z -0.m -1.m -2.m -3.m"
    trace = trace_of(text)
    names = list(trace.names)
    extend(trace, "layers", period=1, units=9)
    assert (text_of(trace), trace.names) == (text, names)


def test_an_extended_trace_can_be_saved_and_loaded(tmp_path: Path) -> None:
    made = extend(trace_of("|f 0.a8 1.a8 -0.a 2.a8 -1.a 3.a8 -2.a"), "layers", period=1, units=7)
    made.save(tmp_path / "trace.npz")
    assert text_of(Trace.load(tmp_path / "trace.npz")) == text_of(made)


# -- buffers with an entry for each tensor of a list -------------------------------------------------------------------


def with_list(members: list[int | None], entry: int = 4) -> Trace:
    """Four blocks of one gradient each, one gradient outside, and the norms of some list of them in one buffer."""
    trace = trace_of("|backward x1 3.g8 2.g8 1.g8 0.g8 |clip")
    block = trace.alloc(entry * len(members), op="norms")
    trace.facts["lists"] = {str(block): members}
    return trace


@pytest.mark.parametrize(
    ("members", "entries"),
    [
        ([0, 1, 2, 3, 4], 9),  # four more blocks with one each
        ([1, 2, 3, 4, 1, 2, 3, 4], 16),
        ([0, 1, 4], 3),  # of the ends only
        ([None, 0], 2),  # of tensors that were there before
        ([None, 3, 2], 7),
    ],
)
def test_a_buffer_with_an_entry_a_tensor_grows_with_the_inner_units(members: list[int | None], entries: int) -> None:
    made = extend(with_list(members), "layers", period=1, units=8)
    assert text_of(made).endswith(f"|clip norms{4 * entries}")


def test_a_buffer_that_is_made_while_the_first_unit_works_grows_as_well() -> None:
    trace = trace_of("|backward 3.g8 2.g8 1.g8 0.g8 |clip 0.n4")
    block = trace.alloc(16, op="norms")
    for unit in (1, 2, 3):
        trace.alloc(4, op="n", module=f"layers.{unit}.n")
    trace.facts["lists"] = {str(block): [0, 1, 2, 3]}
    made = extend(trace, "layers", period=1, units=6)
    assert text_of(made).endswith("|clip 0.n4 norms24 1.n4 2.n4 3.n4 4.n4 5.n4")


def test_the_lists_are_of_no_use_in_the_extended_trace() -> None:
    assert "lists" not in extend(with_list([0, 1, 2, 3, 4]), "layers", period=1, units=8).facts


def test_a_list_inside_a_unit_does_not_grow() -> None:
    trace = trace_of(BUILT)
    trace.facts["lists"] = {"1": [0, 1, 2, 3]}
    assert text_of(extend(trace, "layers", period=1, units=5)) == f"{BUILT} 4.a8"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.a8 1.a8 2.a8", "a pass over units [0, 1, 2]"),
        ("1.a8 2.a8", "a pass over units [1, 2]"),
        ("0.a8 2.a8 1.a8 3.a8", "a pass over units"),
        ("0.a8 1.a8 2.a8 3.a8 |again 0.b8 3.b8 1.b8", "a pass over units"),
        ("0.a8 1.a8 1.b4 2.a8 3.a8", "inner units hold different numbers of tensors"),
        ("0.a8 1.a8 -1.a 2.a8 3.a8", "inner units have different numbers of events"),
        ("0.a8 1.a8 -1.a 1.b4 2.a8 2.b4 -2.a 3.a8", "inner units do different things"),
        ("0.a8 1.a8 2.a9 3.a8", "tensors of inner units differ"),
        ("0.a8 1.a8 2.b8 3.a8", "tensors of inner units differ"),
        ("0.a8 1.a8 1.b8 -1.a 2.a8 2.b8 -2.b 3.a8", "tensors of inner units differ"),
        ("x1 y1 0.a8 1.a8 -x 2.a8 -y 3.a8", "an inner unit frees what is not its own nor its neighbour's"),
        ("0.a8 1.a8 -0.a 2.a8 -2.a 3.a8", "an inner unit frees what is not its own nor its neighbour's"),
        ("|f 0.a8 1.a8 2.a8 3.a8 |b 0.b8 1.b8 -3.a 2.b8 -0.a 3.b8", "an inner unit frees what is not its own"),
        ("|f 0.a8 1.a8 2.a8 3.a8 |z -1.a -2.a", "inner units are named outside of a pass"),
        ("|f 0.a8 1.a8 2.a8 3.a8 |z x1 -2.a x1", "inner units are named outside of a pass"),
        ("|f 0.a8 1.a8 2.a8 3.a8 |z -0.a -2.a -1.a -3.a", "a pass over units"),
        ("0.a8 1.a8 |mark 2.a8 3.a8", "a pass over units [0, 1]"),
        ("0.a8 1.a8 2.a8 3.a8 3.b8 2.b8 1.b8 0.b8", "a pass over units [2, 1, 0]"),  # where does the way down begin?
    ],
)
def test_what_does_not_repeat_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(NotRepeating, match=re.escape(why)):
        extended(text)


def test_fewer_than_four_units_cannot_be_made() -> None:
    with pytest.raises(NotRepeating, match="fewer than 4 units"):
        extended(BUILT, units=3)


def test_two_tensors_of_a_unit_freed_in_another_order_are_refused() -> None:
    twins = " ".join(f"{n}.a8 {n}.b8" for n in range(4))
    trace = trace_of(f"|f {twins} |b 3.g1 -3.a -3.b 2.g1 -2.a -2.b 1.g1 -1.b -1.a 0.g1 -0.a -0.b")
    for block, op in enumerate(trace.op_of):
        trace.op_of[block] = trace.name_id("a") if trace.names[op] == "b" else op
    with pytest.raises(NotRepeating, match="come in different orders"):
        extend(trace, "layers", period=1, units=5)


# -- any step at all ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A tensor that each unit makes, and when it dies: after how many more of its own or of its neighbour's tensors."""

    size: int
    dies: str  # never, in its own unit, in the next one, or (of forward) in its own or the next unit of backward
    after: int


@dataclass(frozen=True)
class Step:
    """A training step in miniature: a model of units, each of them the same."""

    forward: tuple[Made, ...]
    backward: tuple[Made, ...]
    zero: str  # how what is left of backward dies: up, down, or not at all

    def trace(self, units: int) -> Trace:
        trace = Trace()
        for step in (1, 2):
            trace.mark("forward", step)
            saved = self._pass(trace, range(units), self.forward, "f", {})
            trace.mark("backward", step)
            kept = self._pass(trace, range(units - 1, -1, -1), self.backward, "b", saved)
            trace.mark("zero", step)
            order = sorted(kept, reverse=self.zero == "down") if self.zero != "never" else []
            for unit in order:
                for block in kept[unit].values():
                    trace.free(block)
        return trace

    def _pass(
        self, trace: Trace, units: range, made: tuple[Made, ...], op: str, saved: dict[int, dict[int, int]]
    ) -> dict[int, dict[int, int]]:
        """What is left of the pass: for each unit its tensors by their number."""
        left: dict[int, dict[int, int]] = {}
        behind = units.start - units.step
        for unit in units:
            mine = left[unit] = {}
            for number, each in enumerate(made):
                mine[number] = trace.alloc(each.size, op=f"{op}{number}", module=f"layers.{unit}")
                for where, tensors, kinds in (
                    ("own", mine, made), ("next", left.get(behind, {}), made),
                    ("own back", saved.get(unit, {}), self.forward), ("next back", saved.get(behind, {}), self.forward),
                ):  # fmt: skip
                    due = [n for n in tensors if kinds[n].dies == where and kinds[n].after % len(made) == number]
                    for other in due:
                        trace.free(tensors.pop(other))
            behind = unit
        return left


def made(*dies: str) -> st.SearchStrategy[tuple[Made, ...]]:
    one = st.builds(
        Made, size=st.sampled_from([8, 8, 600, 1 << 20, 3 << 20]), dies=st.sampled_from(dies), after=st.integers(0, 5)
    )
    return st.lists(one, min_size=1, max_size=6).map(tuple)


STEPS = st.builds(
    Step,
    forward=made("own", "next", "own back", "next back", "never"),
    backward=made("own", "next", "never"),
    zero=st.sampled_from(["up", "down", "never"]),
)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS, st.integers(5, 9))
def test_any_step_whose_units_are_alike_extends_to_the_stream_of_more_units(step: Step, units: int) -> None:
    short, full = extend(step.trace(4), "layers", period=1, units=units), step.trace(units)
    assert text_of(short) == text_of(full)
    assert compare(short, full).same
    a, b = replay(short), replay(full)
    assert (a.peak_allocated, a.peak_reserved) == (b.peak_allocated, b.peak_reserved)

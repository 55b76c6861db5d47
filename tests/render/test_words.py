"""The small words of reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.render.pieces import clean, count, percent, short_op, tail


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0"),
        (12_345, "12,345"),
        (124_439_808, "124 million"),
        (7_615_616_512, "7.62 billion"),
        (10**12, "1 trillion"),
    ],
)
def test_counts_are_said_with_three_digits(number: int, said: str) -> None:
    assert count(number) == said


def test_a_share_of_nothing_is_unknown() -> None:
    assert percent(1, 3) == "33.3 %"
    assert percent(0, 0) == "n/a"


def test_an_op_is_called_what_people_call_it() -> None:
    assert short_op("aten._log_softmax.default") == "_log_softmax"
    assert short_op("aten.add.Tensor") == "add.Tensor"
    assert short_op("cublas workspace") == "cublas workspace"


def test_the_end_of_a_path_is_what_is_kept() -> None:
    assert tail("model.layers.*.mlp", 10) == "…ers.*.mlp"
    assert tail("mlp", 10) == "mlp"


@given(st.text())
def test_clean_text_is_printable_whatever_it_was(text: str) -> None:
    assert clean(text).isprintable()


@given(st.text(min_size=1), st.integers(2, 40))
def test_a_tail_is_never_longer_than_asked(text: str, width: int) -> None:
    assert len(tail(text, width)) <= width


def test_what_rounds_to_a_thousand_millions_is_a_billion() -> None:
    assert [count(number) for number in (999_400_000, 999_885_952, 1_000_000_000)] == [
        "999 million", "1 billion", "1 billion",
    ]  # fmt: skip

"""What an error carries for the person who reads it."""

from __future__ import annotations

import pytest

from memfit.errors import InputError, MemfitError, TraceError, UnknownName, UsageError


@pytest.mark.parametrize("kind", [UsageError, InputError])
def test_mistakes_of_the_user_are_value_errors_too(kind: type[MemfitError]) -> None:
    assert issubclass(kind, ValueError)


def test_a_job_that_cannot_be_traced_is_not_a_wrong_value() -> None:
    assert not issubclass(TraceError, ValueError)


def test_an_error_is_its_message_and_may_say_what_to_do() -> None:
    error = InputError("the file is empty", hint="record again")

    assert (str(error), error.message, error.hint) == ("the file is empty", "the file is empty", "record again")
    assert InputError("the file is empty").hint is None


def test_an_unknown_name_is_told_as_typed_with_at_most_three_close_ones() -> None:
    error = UnknownName("colour", "Redd", ["red", "reed", "read", "rend", "blue"])

    assert str(error) == "no colour called 'Redd'"
    assert len(error.nearest) == 3 and "red" in error.nearest
    assert str(error.hint).startswith("did you mean 'red'")


def test_an_unknown_name_far_from_all_others_suggests_nothing() -> None:
    assert UnknownName("colour", "x", ["red"]).hint is None
    assert UnknownName("colour", "x", ["red"], more="see the chart").hint == "see the chart"


def test_more_follows_the_guess() -> None:
    assert UnknownName("colour", "redd", ["red"], more="see the chart").hint == "did you mean 'red'? see the chart"


@pytest.mark.parametrize("text", ["x" * 100_000, "x " * 50_000, "x\n" * 50_000])
def test_a_name_or_a_value_without_end_is_cut_in_the_middle_wherever_it_stands(text: str) -> None:
    for error in (InputError(f"cannot read {text!r} here", hint=text), UnknownName("model", text, ["gpt2"])):
        assert len(error.message) < 3100 and len(error.hint or "") < 3100 and "..." in error.message


def test_a_long_path_is_told_whole() -> None:
    path = "/".join(["folder"] * 40)
    assert path in InputError(f"cannot read '{path}' where the job is").message

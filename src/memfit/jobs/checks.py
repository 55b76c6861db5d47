"""What the value of a setting must be, said with the name by which the user called it: a flag or a config's key."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from memfit.errors import UsageError

MOST = 1 << 31


def check_by_type(key: str, value: object, hint: Any, **limits: Any) -> None:
    """As the setting's own type has it; `limits` are those of a number."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if (value is None and NoneType in kinds) or (isinstance(value, bool) and bool in kinds):
        return
    kind = [each for each in kinds if each is not NoneType][-1]
    if get_origin(kind) is Literal:
        check_one_of(key, value, kind)
    elif check := {bool: check_yes_or_no, str: check_text, int: check_whole, float: check_number}.get(kind):
        check(key, value, **limits)


LARGEST = 1e300
"""Beyond it a whole number is no fraction of this machine."""


def check_one_of(key: str, value: object, literal: Any) -> None:
    allowed = get_args(literal)
    if value not in allowed:
        raise UsageError(f"{key} {value!r} is not one of {', '.join(allowed)}")


def check_whole(key: str, value: object, *, least: int = 1, most: int = MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{key} {shortened(value)} is not a whole number between {least} and {most:,}")


def is_huge(value: object) -> bool:
    return isinstance(value, int) and abs(value) > LARGEST


def shortened(value: object) -> str:
    """A number of hundreds of digits by the first of them."""
    return f"{str(value)[:20]}..." if is_huge(value) else repr(value)


def check_seed(key: str, value: object) -> None:
    check_whole(key, value, least=0, most=(1 << 32) - 1)


def check_number(
    key: str, value: object, *, least: float | None = None, above: float | None = None, below: float | None = None
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise UsageError(f"{key} {shortened(value)} is not a number" + (" of this size" if is_huge(value) else ""))
    limits = (
        ("at least", least, least is None or value >= least),
        ("above", above, above is None or value > above),
        ("below", below, below is None or value < below),
    )
    if not all(holds for _, _, holds in limits):
        wanted = " and ".join(f"{word} {limit:g}" for word, limit, _ in limits if limit is not None)
        raise UsageError(f"{key} {value!r} is not {wanted}")


def check_text(key: str, value: object, *, empty: bool = False) -> None:
    if not (isinstance(value, str) and (empty or value.strip())):
        raise UsageError(f"{key} {value!r} is not text")


def check_yes_or_no(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(
            f"{key} is true or false, not {value!r}", hint="write true or false without quotes, or leave it out"
        )


def check_names(key: str, value: object, *, hint: str | None = None) -> None:
    """Of modules; None is for all of them."""
    fine = value is None or (isinstance(value, tuple) and value and all(isinstance(n, str) and n for n in value))
    if not fine:
        raise UsageError(f"{key} {value!r} is not a list of module names", hint=hint)

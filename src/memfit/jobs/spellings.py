"""Settings by the names and spellings that people know them by: other names, dashes, lists in one text."""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from memfit.jobs.workload import Workload

ALIASES = {"seq_len": ("seqlen", "context_length"), "method": ("prune_method",), "sparsity": ("sparsity_ratio",)}
"""Other names that people know a setting by, on the command line and in a line of `plan batch`."""


def plain_name(name: str) -> str:
    """A setting by whatever spelling: `context-length` is `seq_len`."""
    name = name.replace("-", "_")
    return next((field for field, aliases in ALIASES.items() if name in aliases), name)


def plain_value(name: str, value: Any) -> Any:
    """Names out of a list may have underscores; names of modules may be one text with commas."""
    kind = setting_types().get(name)
    if isinstance(value, str) and get_origin(kind) is Literal:
        return value.replace("_", "-")
    return split_names([value]) if isinstance(value, str) and get_origin(kind) is tuple else value


def split_names(values: list[str]) -> list[str]:
    """`a,b` and a repeated flag are the same list."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


@cache
def setting_types() -> dict[str, Any]:
    """What each setting is when it is given: `None` stands only for its absence."""
    return {name: without_none(annotation) for name, annotation in get_type_hints(Workload).items()}


def without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        (inner,) = (arg for arg in get_args(annotation) if arg is not type(None))
        return inner
    return annotation

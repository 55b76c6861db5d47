"""Keys of a config file, under every name that they go by, as the one name that memfit uses.

A key may stand in its section or alone (`max_seq_len: 1024` or `data: {max_seq_len: 1024}`), and under the names of the
guides and of Hugging Face. What is not known is an error with a suggestion: a setting that nobody reads is worse than
none. What is given twice must agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_type_hints

from memfit.errors import UsageError
from memfit.jobs.training.config import ModelConfig, TrainConfig
from memfit.jobs.training.config_names import (
    ALIASES,
    AUTOCAST,
    FIXED,
    IGNORED,
    IN_SECTION,
    INSTEAD,
    LOOSE,
    LORA_SECTIONS,
    MODEL_SETTINGS,
    SECTION_ALIASES,
    SETTINGS,
    SHORTHAND,
)
from memfit.jobs.training.config_values import SEVERAL, converted, type_of

Found = Iterator[tuple[str, Any, str]]
"""(memfit's key, value, key as written)."""


_KINDS: dict[str, Any] = get_type_hints(TrainConfig)


def _fields() -> dict[str, list[str]]:
    """Sections and what they hold, read off the dataclasses; the keys without a section stand under ''."""
    made: dict[str, list[str]] = {"": []}
    for name, hint in _KINDS.items():
        if dataclasses.is_dataclass(hint):
            made[name] = [inner.name for inner in dataclasses.fields(hint)]
        elif name != "remarks":
            made[""].append(name)
    return made


FIELDS = _fields()
SECTIONS = tuple(section for section in FIELDS if section)
_LEAVES = [leaf for section in SECTIONS for leaf in FIELDS[section]]
_NEEDS_ITS_SECTION = (*SECTIONS, *FIELDS[""], "auto", "settings", "format", "subset", "split", "source", "gpu")
ALONE = {
    leaf: f"{section}.{leaf}"
    for section in SECTIONS
    for leaf in FIELDS[section]
    if _LEAVES.count(leaf) == 1 and leaf not in _NEEDS_ITS_SECTION
}
"""Keys that may stand without their section."""


@dataclass(frozen=True)
class Given:
    """A value, and the key as it stands in the file."""

    value: Any
    key: str


def config_from(
    document: Mapping[str, Any], *, name: str = "train", over: Mapping[str, Any] | None = None
) -> TrainConfig:
    """A file's content as a config; what is in `over` replaces what the file says."""
    remarks: list[str] = []
    given, replaced = canonical(document, remarks), canonical(over or {}, remarks)
    _precision(given, {})
    _precision(replaced, given)
    given = {"name": Given(name, "name"), **given, **replaced}
    if "model.name" not in given and any(each.key.split(".")[-2:-1] == ["gsa"] for each in given.values()):
        given["model.name"] = Given("gsa", "gsa")
    return _build(given, tuple(remarks))


def canonical(document: Mapping[str, Any], remarks: list[str] | None = None) -> dict[str, Given]:
    """Every value under memfit's own name of its key."""
    found: dict[str, Given] = {}
    for path, value, key in _walk(document):
        if path in IGNORED:
            if remarks is not None:
                remarks.append(f"{key} is of no effect: {IGNORED[path]}")
            continue
        if path in FIXED:
            _check_fixed(path, value, key)
            continue
        for target, made in converted(path, value, key):
            known = found.get(target)
            if known is not None and known.value != made:
                raise UsageError(
                    f"{known.key} is {known.value!r} and {key} is {made!r}, and both mean {target}",
                    hint="keep one of them",
                )
            found[target] = Given(made, key)
    return found


# -- from the file's keys to memfit's ----------------------------------------------------------------------------------


def _walk(document: Mapping[str, Any], inside: str = "") -> Found:
    for raw, value in document.items():
        key = str(raw)
        section = SECTION_ALIASES.get(key, key)
        if key in LOOSE and isinstance(value, Mapping):
            yield from _walk(value, f"{inside}{key}.")
        elif section in SECTIONS and isinstance(value, Mapping):
            yield from _walk_section(section, value, f"{inside}{key}")
        elif key in SHORTHAND and not isinstance(value, Mapping):
            yield SHORTHAND[key], value, f"{inside}{key}"
        elif "." in key:
            first, rest = key.split(".", 1)
            yield from _walk({first: {rest: value}}, inside)
        else:
            yield _alone(key, inside), value, f"{inside}{key}"


def _walk_section(section: str, values: Mapping[str, Any], said: str) -> Found:
    if said in LORA_SECTIONS:
        yield "method.kind", "lora", said
    for raw, value in values.items():
        key = str(raw)
        if section == "model" and key == "settings":
            if value is not None and not isinstance(value, Mapping):
                raise UsageError(f"{said}.settings {value!r} is not a mapping of names to values")
            yield from ((f"{SETTINGS}.{name}", each, f"{said}.settings.{name}") for name, each in (value or {}).items())
        elif section == "model" and key.startswith("settings."):
            yield f"model.{key}", value, f"{said}.{key}"
        elif section == "model" and key == "gsa" and isinstance(value, Mapping):
            yield from _walk_section("model", value, f"{said}.gsa")
        else:
            yield _in_section(section, key, said), value, f"{said}.{key}"


def _in_section(section: str, key: str, said: str) -> str:
    own = said.rpartition(".")[2]
    for spelled in (f"{own}.{key}", f"{section}.{key}"):
        if spelled in IN_SECTION:
            return IN_SECTION[spelled]
    if key in FIELDS[section] and own != "gsa":
        return f"{section}.{key}"
    if section == "model" and key in MODEL_SETTINGS:
        return f"{SETTINGS}.{key}"
    return _alone(key, f"{said}.")


def _alone(key: str, inside: str) -> str:
    if key in FIELDS[""] or key in SEVERAL or key in IGNORED or key in FIXED:
        return key
    if key in ALIASES:
        return ALIASES[key]
    if key in ALONE:
        return ALONE[key]
    raise _unknown(key, inside)


def _unknown(key: str, inside: str) -> UsageError:
    if key.lower() in INSTEAD:
        return UsageError(f"unknown key '{inside}{key}'", hint=INSTEAD[key.lower()])
    own = inside.rstrip(".").rpartition(".")[2]
    section = SECTION_ALIASES.get(own, own)
    mine = [*FIELDS.get(section, []), *(MODEL_SETTINGS if section == "model" else ())]
    known = [*mine, *ALONE, *ALIASES, *SEVERAL, *FIELDS[""], *(SECTIONS if not inside else ())]
    near = get_close_matches(key.lower(), dict.fromkeys(known), n=2, cutoff=0.6)
    guess = f"did you mean {' or '.join(repr(each) for each in near)}? " if near else ""
    listed = (
        f"keys of {own}: {', '.join(FIELDS[section])}" if section in SECTIONS else f"sections: {', '.join(SECTIONS)}"
    )
    return UsageError(f"unknown key '{inside}{key}'", hint=guess + listed)


def _check_fixed(path: str, value: Any, key: str) -> None:
    if value not in FIXED[path]:
        said = str(FIXED[path][0]).lower() if isinstance(FIXED[path][0], bool) else FIXED[path][0]
        raise UsageError(f"{key} can only be {'empty' if said is None else said}", hint=INSTEAD.get(path))


def _precision(given: dict[str, Given], before: Mapping[str, Given]) -> None:
    """`bf16: true` is autocast to Hugging Face, over weights that LoRA loads in 16 bit and full training in fp32."""
    autocast = given.pop(AUTOCAST, None)
    if autocast is None:
        return
    said = given.get("precision")
    method = given.get("method.kind") or before.get("method.kind")
    over_fp32 = f"amp-{autocast.value}"
    wanted = autocast.value if method is not None and method.value == "lora" else over_fp32
    if said is not None:
        if said.value not in (autocast.value, over_fp32, "fp32"):
            raise UsageError(f"{autocast.key} and {said.key} {said.value!r} do not agree", hint=f"precision: {wanted}")
        wanted = over_fp32 if said.value == "fp32" else said.value
    given["precision"] = Given(wanted, autocast.key)


# -- the dataclasses ---------------------------------------------------------------------------------------------------


def _build(given: Mapping[str, Given], remarks: tuple[str, ...]) -> TrainConfig:
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    whole: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for path, each in given.items():
        if path.startswith(f"{SETTINGS}."):
            settings[path.removeprefix(f"{SETTINGS}.")] = each.value
            continue
        if each.value is None and NoneType not in get_args(type_of(path)):
            continue  # `key:` with nothing after it is the default
        section, _, leaf = path.rpartition(".")
        (parts[section] if section else whole)[leaf] = each.value
    made: dict[str, Any] = {
        section: _KINDS[section](**values) for section, values in parts.items() if section != "model"
    }
    return TrainConfig(model=ModelConfig(**parts["model"], settings=settings), remarks=remarks, **made, **whole)

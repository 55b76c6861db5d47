"""Keys of a config file, under every name that they go by, as the one name that memfit uses.

A key may stand in its section or alone (`max_seq_len: 1024` or `data: {max_seq_len: 1024}`), and under the names of the
guides and of Hugging Face. What is not known is an error with a suggestion, all of them at once: a setting that nobody
reads is worse than none. What is given twice must agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
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
    NO_AUTOCAST,
    SECTION_ALIASES,
    SETTINGS,
    SHORTHAND,
)
from memfit.jobs.training.config_values import SEVERAL, converted, type_of


@dataclass(frozen=True)
class Unknown:
    """A key that nothing here reads, and what to write in its place."""

    hint: str


Found = Iterator[tuple[str | Unknown, Any, str]]
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
    replaced = _with_precision(replaced, remarks)
    of_file = _with_precision(given, [] if "precision" in replaced else remarks)
    given = {"name": Given(name, "name"), **of_file, **replaced}
    _make_adapters(given)
    if "model.name" not in given and any(each.key.split(".")[-2:-1] == ["gsa"] for each in given.values()):
        given["model.name"] = Given("gsa", "gsa")
    return _build(given, tuple(remarks))


def canonical(document: Mapping[str, Any], remarks: list[str] | None = None) -> dict[str, Given]:
    """Every value under memfit's own name of its key. Keys that cannot be read are one error."""
    walked = list(_walk(document))
    wrong = {key: why for path, value, key in walked if (why := _refused(path, value, key)) is not None}
    if wrong:
        raise _all_in_one(wrong)
    found: dict[str, Given] = {}
    for path, value, key in walked:
        assert isinstance(path, str)
        if path in IGNORED:
            if remarks is not None:
                remarks.append(f"{key} is of no effect: {IGNORED[path]}")
        elif path not in FIXED:
            _take(found, path, value, key)
    return found


def _refused(path: str | Unknown, value: Any, key: str) -> UsageError | None:
    if isinstance(path, Unknown):
        return UsageError(f"unknown key '{key}'", hint=path.hint)
    return _not_as_fixed(path, key) if path in FIXED and value not in FIXED[path] else None


def _take(found: dict[str, Given], path: str, value: Any, key: str) -> None:
    for target, made in converted(path, value, key):
        known = found.get(target)
        if known is not None and known.value != made:
            raise UsageError(
                f"{known.key} is {known.value!r} and {key} is {made!r}, and both mean {target}",
                hint="keep one of them",
            )
        found[target] = Given(made, key)


def _all_in_one(wrong: Mapping[str, UsageError]) -> UsageError:
    if len(wrong) == 1:
        return next(iter(wrong.values()))
    hints = [f"{key}: {each.hint or each.message}" for key, each in wrong.items()]
    return UsageError(
        f"{len(wrong)} keys are not read: {', '.join(repr(key) for key in wrong)}",
        hint="\n".join([*hints, f"sections: {', '.join(SECTIONS)}"]),
    )


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


def _in_section(section: str, key: str, said: str) -> str | Unknown:
    own = said.rpartition(".")[2]
    for spelled in (f"{own}.{key}", f"{section}.{key}"):
        if spelled in IN_SECTION:
            return IN_SECTION[spelled]
    if key in FIELDS[section] and own != "gsa":
        return f"{section}.{key}"
    if section == "model" and key in MODEL_SETTINGS:
        return f"{SETTINGS}.{key}"
    return _alone(key, f"{said}.")


def _alone(key: str, inside: str) -> str | Unknown:
    if key in FIELDS[""] or key in SEVERAL or key in IGNORED or key in FIXED:
        return key
    if key in ALIASES:
        return ALIASES[key]
    if key in ALONE:
        return ALONE[key]
    return Unknown(_instead_of(key, inside))


def _instead_of(key: str, inside: str) -> str:
    """The nearest keys, each with its section; those of the section that it stands in come first."""
    if key.lower() in INSTEAD:
        return INSTEAD[key.lower()]
    own = inside.rstrip(".").rpartition(".")[2]
    section = SECTION_ALIASES.get(own, own)
    mine = ((leaf, f"{section}.{leaf}") for leaf in FIELDS.get(section, ()))
    known = dict(reversed([*chain(mine, _every_name())]))
    near = get_close_matches(key.lower(), known, n=2, cutoff=0.6)
    meant = {_with_section(each, known[each]): None for each in near}
    return f"did you mean {' or '.join(meant)}?" if meant else f"sections: {', '.join(SECTIONS)}"


def _every_name() -> Iterator[tuple[str, str]]:
    """(name, memfit's own key)."""
    yield from ((leaf, f"{section}.{leaf}") for section in SECTIONS for leaf in FIELDS[section])
    yield from ((name, f"model.{name}") for name in MODEL_SETTINGS)
    yield from ALIASES.items()
    yield from ((name, name) for name in (*FIELDS[""], *SEVERAL, *SECTIONS))


def _with_section(name: str, path: str) -> str:
    return f"'{path}'" if path.rpartition(".")[2] == name else f"'{name}' (which is {path})"


def _not_as_fixed(path: str, key: str) -> UsageError:
    said = str(FIXED[path][0]).lower() if isinstance(FIXED[path][0], bool) else FIXED[path][0]
    return UsageError(f"{key} can only be {'empty' if said is None else said}", hint=INSTEAD.get(path))


def _make_adapters(given: dict[str, Given]) -> None:
    """`r: 128` is a setting of adapters: whoever gives one wants them, unless `method` says otherwise."""
    if given.get("method.kind", Given(None, "")).value is not None:
        return
    all_layers = "method.target_modules"  # which are None
    of_adapters = {path: each for path, each in given.items() if path.startswith("method.")}
    said = [each for path, each in of_adapters.items() if each.value is not None or path == all_layers]
    if said:
        given["method.kind"] = Given("lora", said[0].key)


def _with_precision(given: dict[str, Given], remarks: list[str]) -> dict[str, Given]:
    """`bf16: true` is autocast over fp32 weights, as Hugging Face means it; 16-bit weights are asked for by their own
    type. With `bf16: false` and no type there are no 16 bits anywhere."""
    without = {name: off for name in ("bf16", "fp16") if (off := given.pop(f"{NO_AUTOCAST}{name}", None))}
    autocast = given.pop(AUTOCAST, None)
    weights = given.get("precision")
    said = autocast or next(iter(without.values()), None)
    if said is None:
        return given
    if weights is None or weights.value in (None, "fp32"):
        return {**given, "precision": Given(f"amp-{said.value}" if said.value else "fp32", said.key)}
    type_of_weights = str(weights.value)
    clash = [off for name, off in without.items() if type_of_weights == f"amp-{name}"]
    if autocast and type_of_weights not in (autocast.value, f"amp-{autocast.value}" if autocast.value else ""):
        clash.append(autocast)
    if clash and (clash[0].value or type_of_weights.startswith("amp-")):
        raise UsageError(f"{clash[0].key} and {weights.key} {weights.value!r} do not agree", hint="keep one of them")
    if type_of_weights == said.value:
        scaler = " and without a gradient scaler" if said.value == "fp16" else ""
        remarks.append(
            f"{said.key} is of no effect over {said.value} weights ({weights.key}), which memfit trains without"
            f" autocast{scaler}; alone it is autocast over fp32 weights"
        )
    return given


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

"""`--config`: a YAML file or a shipped config, its keys under every name that they go by, as a TrainConfig.

YAML is read as plain data: a bounded file, no tags, no anchors, no key twice in one mapping. A key may stand in its
section or alone (`max_seq_len: 1024` or `data: {max_seq_len: 1024}`), and under other usual names, as Hugging Face's.
What is not known is an error with a suggestion, all of them at once: a setting that nobody reads is worse than none.
What is given twice must agree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from memfit.errors import InputError, UnknownName, UsageError
from memfit.files import text_in
from memfit.jobs.training.config import DOCUMENT, OF_WORKLOAD, ModelConfig, TrainConfig, workload_of
from memfit.jobs.training.config_names import (
    ALIASES,
    AUTOCAST,
    FIXED,
    FOUR_BIT_TYPE,
    IGNORED,
    IN_4_BITS,
    IN_8_BITS,
    IN_SECTION,
    INSTEAD,
    LOOSE,
    LORA_SECTIONS,
    MODEL_SETTINGS,
    NO_AUTOCAST,
    SECTION_ALIASES,
    SETTINGS,
    SEVERAL,
    SHORTHAND,
    converted,
    type_of,
)
from memfit.jobs.workload import NO_MODEL, Workload
from memfit.models.stored_weights import StoredWeights

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True)
class Unknown:
    """A key that nothing here reads, and what to write in its place."""

    hint: str


Found = Iterator[tuple[str | Unknown, Any, str]]
"""(memfit's key, value, key as written)."""


FIELDS = {
    "": tuple(key for key, names in DOCUMENT.items() if not names),
    **{key: names for key, names in DOCUMENT.items() if names},
}
"""Sections and what they hold; the keys without a section stand under ''."""
SECTIONS = tuple(section for section in FIELDS if section)
_LEAVES = [leaf for section in SECTIONS for leaf in FIELDS[section]]
_NEEDS_ITS_SECTION = (
    *SECTIONS, *FIELDS[""], "auto", "settings", "format", "subset", "split", "source", "gpu", "double", "compute",
    "prepare",
)  # fmt: skip
ALONE = {
    leaf: f"{section}.{leaf}"
    for section in SECTIONS
    for leaf in FIELDS[section]
    if _LEAVES.count(leaf) == 1 and leaf not in _NEEDS_ITS_SECTION
}
"""Keys that may stand without their section."""


@dataclass(frozen=True)
class GivenValue:
    """A value, and the key as it stands in the file."""

    value: Any
    key: str


def config_from(
    document: Mapping[str, Any],
    *,
    name: str = "train",
    over: Mapping[str, Any] | None = None,
    found: Workload | None = None,
) -> TrainConfig:
    """A file's content as a config; what is in `over` replaces what the file says. `found` is a job with its model."""
    remarks: list[str] = []
    given, replaced = canonical(document, remarks), canonical(over or {}, remarks)
    found = found or _found({**given, **replaced})
    stored = found.stored
    quant = _quant({**given, **replaced}, stored, remarks)
    quantised = quant is not None or stored is not None
    replaced = _with_precision(replaced, remarks, quantised=quantised)
    of_file = _with_precision(given, [] if "precision" in replaced else remarks, quantised=quantised)
    given = {"name": GivenValue(name, "name"), **of_file, **replaced}
    for path in (IN_4_BITS, IN_8_BITS, FOUR_BIT_TYPE):
        given.pop(path, None)
    if quant is not None:
        given["quant.kind"] = quant
        if stored is not None and stored.method == "bitsandbytes" and stored.bits == 4:
            given["quant.double"], given["quant.compute"] = (
                GivenValue(value, quant.key) for value in (stored.double, stored.compute)
            )
    _make_adapters(given)
    if "model.name" not in given and any(each.key.split(".")[-2:-1] == ["gsa"] for each in given.values()):
        given["model.name"] = GivenValue("gsa", "gsa")
    return _build(given, tuple(remarks), found)


def canonical(document: Mapping[str, Any], remarks: list[str] | None = None) -> dict[str, GivenValue]:
    """Every value under memfit's own name of its key. Keys that cannot be read are one error."""
    walked = list(_walk(document))
    wrong = {key: why for path, value, key in walked if (why := _refused(path, value, key)) is not None}
    if wrong:
        raise _all_in_one(wrong)
    found: dict[str, GivenValue] = {}
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
        last = key.rpartition(".")[2]
        if last in LOOSE or SECTION_ALIASES.get(last, last) in SECTIONS:
            return UsageError(f"{key} is {value!r}, not a section of keys and values", hint=f"{key}.KEY is one of its")
        return UsageError(f"unknown key '{key}'", hint=path.hint)
    if path not in FIXED or value in FIXED[path]:
        return None
    fixed = FIXED[path][0]
    said = str(fixed).lower() if isinstance(fixed, bool) else "empty" if fixed is None else fixed
    return UsageError(f"{key} can only be {said}", hint=INSTEAD.get(path))


def _take(found: dict[str, GivenValue], path: str, value: Any, key: str) -> None:
    for target, made in converted(path, value, key):
        known = found.get(target)
        if known is not None and known.value != made:
            raise UsageError(
                f"{known.key} is {known.value!r} and {key} is {made!r}, and both mean {target}", hint="keep one of them"
            )
        found[target] = GivenValue(made, key)


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
        key = _in_small_letters(raw)
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


def _in_small_letters(key: object) -> str:
    """Constants of a config.py are keys too: MAX_SEQ_LENGTH, LORA_CONFIG."""
    return str(key).lower() if str(key).isupper() else str(key)


def _walk_section(section: str, values: Mapping[str, Any], said: str) -> Found:
    if said in LORA_SECTIONS:
        yield "method.kind", "lora", said
    for raw, value in values.items():
        key = _in_small_letters(raw)
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
    return ALIASES.get(key) or ALONE.get(key) or Unknown(_instead_of(key, inside))


def key_called(name: str) -> str | None:
    """memfit's own key, of a name that stands alone."""
    found = _alone(name, "")
    return None if isinstance(found, Unknown) else found


def _instead_of(key: str, inside: str) -> str:
    """The nearest keys, each with its section; those of the section that it stands in come first."""
    if key.lower() in INSTEAD:
        return INSTEAD[key.lower()]
    own = inside.rstrip(".").rpartition(".")[2]
    section = SECTION_ALIASES.get(own, own)
    mine = ((leaf, f"{section}.{leaf}") for leaf in FIELDS.get(section, ()))
    known = dict(reversed([*chain(mine, _every_name())]))
    near = {each: known[each] for each in get_close_matches(key.lower(), known, n=2, cutoff=0.6)}
    ends = {name: path.rpartition(".")[2] == name for name, path in near.items()}
    meant = dict.fromkeys(f"'{path}'" if ends[name] else f"'{name}' (which is {path})" for name, path in near.items())
    return f"did you mean {' or '.join(meant)}?" if meant else f"sections: {', '.join(SECTIONS)}"


def _every_name() -> Iterator[tuple[str, str]]:
    """(name, memfit's own key)."""
    yield from ((leaf, f"{section}.{leaf}") for section in SECTIONS for leaf in FIELDS[section])
    yield from ((name, f"model.{name}") for name in MODEL_SETTINGS)
    yield from (*ALIASES.items(), *SECTION_ALIASES.items())
    yield from ((name, name) for name in (*LOOSE, *FIELDS[""], *SEVERAL, *SECTIONS))


def _make_adapters(given: dict[str, GivenValue]) -> None:
    """`r: 128` is a setting of adapters: whoever gives one wants them, unless `method` says otherwise."""
    if given.get("method.kind", GivenValue(None, "")).value is not None:
        return
    all_layers = "method.target_modules"  # which are None
    of_adapters = {path: each for path, each in given.items() if path.startswith("method.")}
    said = [each for path, each in of_adapters.items() if each.value is not None or path == all_layers]
    if said:
        given["method.kind"] = GivenValue("lora", said[0].key)


def _quant(given: Mapping[str, GivenValue], stored: StoredWeights | None, remarks: list[str]) -> GivenValue | None:
    """What `quant`, `load_in_4bit` and `load_in_8bit` say together; None where the weights stay as they are. Beside a
    checkpoint that bitsandbytes has quantised it must be what is stored, which counts."""
    if stored is None or stored.method != "bitsandbytes":
        return _asked_quant(given, None, remarks)
    asked = _asked_quant(given, stored, remarks)
    fixed = {"quant.double": stored.double, "quant.compute": stored.compute} if stored.bits == 4 else {}
    said = {path: given[path] for path in fixed if path in given and given[path].value is not None}
    unlike = [each for path, each in said.items() if each.value != fixed[path]]
    if asked is None:  # a double of no is the default, and may have been written by memfit
        remarks.extend(
            f"{each.key} {each.value} has no effect: {_as_stored(stored)}" for each in unlike if not each.value
        )
        unlike = [each for each in unlike if each.value]
    elif asked.value != stored.kind:
        unlike = [asked]
    else:
        remarks.append(f"{asked.key}: {_as_stored(stored)}, and loaded so")
    for each in unlike:
        raise UsageError(f"{each.key} {each.value}: {_as_stored(stored)}", hint=f"leave {each.key} out")
    return asked


def _as_stored(stored: StoredWeights) -> str:
    return f"the checkpoint is stored as {stored.as_loaded()}"


def _asked_quant(
    given: Mapping[str, GivenValue], stored: StoredWeights | None, remarks: list[str]
) -> GivenValue | None:
    said = given.get("quant.kind", GivenValue(None, ""))
    asked = [each for path in (IN_4_BITS, IN_8_BITS) if (each := given.get(path)) is not None and each.value]
    four, kind = given.get(IN_4_BITS, GivenValue(None, "")), given.get(FOUR_BIT_TYPE)
    if len(asked) == 2:
        raise UsageError(f"{asked[0].key} and {asked[1].key} are both yes", hint="keep one of them")
    if not asked:
        if kind is not None and said.value is None:
            remarks.append(f"{kind.key} is of no effect without load_in_4bit")
        if kind is not None and said.value in ("nf4", "fp4") and said.value != kind.value:
            raise UsageError(f"{said.key} {said.value} and {kind.key} {kind.value} do not agree", hint="keep one")
        return None if said.value in (None, "none") else said
    usual = stored.kind if stored is not None and stored.bits == 4 else "nf4"
    if asked[0] is four and kind is None and said.value not in ("nf4", "fp4") and stored is None:
        remarks.append(f"{four.key} without bnb_4bit_quant_type: nf4, as in QLoRA (BitsAndBytesConfig alone takes fp4)")
    meant = "int8" if asked[0] is not four else kind.value if kind else said.value or usual
    if said.value not in (None, meant):
        raise UsageError(f"{said.key} {said.value} and {asked[0].key} do not agree", hint="keep one of them")
    return GivenValue(meant, asked[0].key)


def _found(given: Mapping[str, GivenValue]) -> Workload:
    """The model, looked for once."""
    name = given.get("model.name", GivenValue(None, "")).value
    return Workload(kind="lora", model=name if isinstance(name, str) and name else NO_MODEL)


def _with_precision(given: dict[str, GivenValue], remarks: list[str], *, quantised: bool) -> dict[str, GivenValue]:
    """`bf16: true` is autocast over fp32 weights, as Hugging Face means it; 16-bit weights are asked for by their own
    type. With `bf16: false` and no type there are no 16 bits anywhere. Beside quantised weights it is autocast over
    others of 16 bits."""
    without = {name: off for name in ("bf16", "fp16") if (off := given.pop(f"{NO_AUTOCAST}{name}", None))}
    autocast = given.pop(AUTOCAST, None)
    weights = given.get("precision")
    said = autocast or next(iter(without.values()), None)
    if said is None:
        return given
    if quantised:
        half = {"autocast": autocast, "precision": weights or autocast} if autocast and autocast.value else {}
        return {**given, **half}
    if weights is None or weights.value in (None, "fp32"):
        return {**given, "precision": GivenValue(f"amp-{said.value}" if said.value else "fp32", said.key)}
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


def _build(given: Mapping[str, GivenValue], remarks: tuple[str, ...], found: Workload) -> TrainConfig:
    kinds = get_type_hints(TrainConfig)
    parts: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    settings: dict[str, Any] = {}
    of_workload: dict[str, Any] = {}
    for path, each in given.items():
        section, _, leaf = path.rpartition(".")
        if path.startswith(f"{SETTINGS}."):
            settings[path.removeprefix(f"{SETTINGS}.")] = each.value
        elif each.value is None and (path in OF_WORKLOAD or NoneType not in get_args(type_of(path))):
            continue  # `key:` with nothing after it is the default
        elif path in OF_WORKLOAD:
            of_workload[path] = each.value
        else:
            parts[section][leaf] = each.value
    whole, model = parts.pop(""), parts.pop("model")
    made: dict[str, Any] = {name: kinds[name](**values) for name, values in parts.items() if name in kinds}
    made["model"] = ModelConfig(**model, settings=settings)
    if "source" in vars(found):
        vars(made["model"])["source"] = found.source
    work = workload_of(made["model"], made["schedule"], of_workload).with_model_of(found)
    return TrainConfig(workload=work, remarks=remarks, **made, **whole)


MAX_BYTES = 1 << 20
MAX_DEPTH = 12
ENDINGS = (".yaml", ".yml")


def load_config(config: str | Mapping[str, Any], *, sets: Iterable[str] = ()) -> TrainConfig:
    """The settings of a run, from a file, by the name of a shipped one, or as they are; `sets` are `key=value` and
    replace them."""
    if isinstance(config, Mapping):
        return config_from(config, over=_assignments(sets))
    name, text, where = find_config(config)
    document = parse_yaml(text, where)
    over = _assignments(sets)
    try:
        return config_from(document, name=name, over=over)
    except UsageError as error:
        error.message = f"{where}: {error.message}"
        error.args = (error.message,)
        raise


def shipped_configs() -> tuple[str, ...]:
    folder = resources.files("memfit") / "configs"
    return tuple(sorted(Path(each.name).stem for each in folder.iterdir() if each.name.endswith(ENDINGS)))


def dump(config: TrainConfig) -> str:
    """The config with every setting, as YAML that reads back as the same config."""
    settings = config.to_json()
    del settings["name"]
    return as_yaml(settings)


def as_yaml(document: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True))


def find_config(said: str) -> tuple[str, str, str]:
    """(name, text, where it was found)."""
    path = Path(os.path.expanduser(said))
    if not os.path.exists(path) and said.removesuffix(".yaml") in shipped_configs():
        name = said.removesuffix(".yaml")
        text = (resources.files("memfit") / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
        return name, text, f"shipped config {name}"
    if not os.path.exists(path):
        if path.suffix in (*ENDINGS, ".json") or path.parent != Path("."):
            raise InputError(f"no config file '{said}'", hint=f"configs that come with memfit: {_shipped()}")
        raise UnknownName("config", said, shipped_configs(), more=f"a .yaml file works too; shipped: {_shipped()}")
    if path.is_dir():
        raise InputError(f"--config '{said}' is a folder, not a YAML file")
    refuse_python(path)
    return path.stem, text_in(path, MAX_BYTES, "a config"), f"'{said}'"


def refuse_python(path: Path) -> None:
    """Constants in a module are a config too, but to read it means to run it."""
    if path.suffix == ".py":
        raise InputError(
            f"'{path}' is a Python file, which is not read as a config, for that would run it",
            hint="the same keys in lower case in a YAML file are (max_seq_length: 1536, lora_config: {r: 16}),\n"
            "or begin with one that comes with memfit: `memfit train --config qwen2.5-7b-lora-24gb --dry-run`",
        )


def _shipped() -> str:
    return ", ".join(shipped_configs())


def _assignments(sets: Iterable[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for said in sets:
        key, equals, text = (part.strip() for part in said.partition("="))
        if not equals or not key:
            raise UsageError(f"--set {said!r} is not KEY=VALUE", hint="such as --set max_seq_len=512")
        value = _parse(text, f"--set {said!r}")
        if key in made and made[key] != value:
            raise UsageError(f"--set gives {key} twice: {made[key]!r} and {value!r}", hint="keep one of them")
        made[key] = value
    return made


def parse_yaml(text: str, where: str) -> Mapping[str, Any]:
    document = _parse(text, where)
    if document is None:
        raise InputError(f"{where} is empty", hint=f"configs that come with memfit: {_shipped()}")
    if not isinstance(document, dict):
        raise InputError(f"{where} is not a mapping of keys to values")
    return document


def _parse(text: str, where: str) -> Any:
    import yaml

    try:
        _check_events(text, where)
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise InputError(
            f"{where}{line}: not YAML that memfit reads: {getattr(error, 'problem', None) or error}"
        ) from error
    except (ValueError, RecursionError, OverflowError) as error:  # a date or a number that cannot be
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: a value in it cannot be read ({error})") from error


def _check_events(text: str, where: str) -> None:
    """Before anything is built: anchors could grow a small file without end, tags could mean anything."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InputError(f"{where}, line {line}: anchors and aliases are not read", hint="write the value out")
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            raise InputError(f"{where}, line {line}: the tag {tag!r} is not read", hint="plain values only")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise InputError(f"{where}, line {line}: nested deeper than {MAX_DEPTH}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _loader() -> type[yaml.SafeLoader]:
    import yaml

    class OneKeyOnce(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                is_text = isinstance(key.value, str)
                if not is_text or key.value in seen:
                    problem = f"the key {key.value!r} stands twice" if is_text else "a key is no text"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    return OneKeyOnce

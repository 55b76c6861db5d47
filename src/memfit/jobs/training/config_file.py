"""`--config`: a YAML file, or the name of a config that comes with memfit.

YAML is read as plain data: a bounded file, no tags, no anchors, no key twice in one mapping.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, UnknownName, UsageError
from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.config_keys import config_from

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 12
ENDINGS = (".yaml", ".yml")


def load_config(path_or_name: str, *, sets: Iterable[str] = ()) -> TrainConfig:
    """The settings of a run; `sets` are `key=value` and replace what the file says."""
    name, text, where = find_config(path_or_name)
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
    if not path.exists() and said.removesuffix(".yaml") in shipped_configs():
        name = said.removesuffix(".yaml")
        text = (resources.files("memfit") / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
        return name, text, f"shipped config {name}"
    if not path.exists():
        if path.suffix in (*ENDINGS, ".json") or path.parent != Path("."):
            raise InputError(f"no config file '{said}'", hint=f"configs that come with memfit: {_shipped()}")
        raise UnknownName("config", said, shipped_configs(), more=f"a .yaml file works too; shipped: {_shipped()}")
    try:
        if path.is_dir():
            raise InputError(f"--config '{said}' is a folder, not a YAML file")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"'{said}' has {path.stat().st_size:,} bytes; a config has at most {MAX_BYTES:,}")
        return path.stem, path.read_text(encoding="utf-8"), f"'{said}'"
    except UnicodeDecodeError as error:
        raise InputError(f"'{said}' is not UTF-8 text") from error
    except OSError as error:
        raise InputError(f"cannot read '{said}': {error.strerror}") from error


def _shipped() -> str:
    return ", ".join(shipped_configs())


def _assignments(sets: Iterable[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for said in sets:
        key, value = _assignment(said)
        if key in made and made[key] != value:
            raise UsageError(f"--set gives {key} twice: {made[key]!r} and {value!r}", hint="keep one of them")
        made[key] = value
    return made


def _assignment(said: str) -> tuple[str, Any]:
    key, equals, value = said.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {said!r} is not KEY=VALUE", hint="such as --set max_seq_len=512")
    return key.strip(), _parse(value, f"--set {said!r}")


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
                if key.value in seen if isinstance(key.value, str) else True:
                    problem = (
                        f"the key {key.value!r} stands twice" if isinstance(key.value, str) else "a key is no text"
                    )
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    return OneKeyOnce

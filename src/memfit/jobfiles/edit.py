"""A job file with a few values changed: everything else, comments and order too, stays as it was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memfit.errors import UsageError

if TYPE_CHECKING:
    import yaml

Node = Any


def with_values(text: str, values: Mapping[str, Any], *, is_json: bool, nested: bool) -> str:
    """Keys as the format has them, with dots where they stand in sections. None leaves a key out that is not there."""
    if is_json:
        return _in_json(text, values)
    for key, value in values.items():
        text = _with_value(text, key.split(".") if nested else [key], value)
    return text


def with_heading(text: str, lines: list[str]) -> str:
    """Remarks at the top."""
    return "".join(f"# {line}\n" for line in lines) + text


def _in_json(text: str, values: Mapping[str, Any]) -> str:
    """There are no comments in it."""
    try:
        document = json.loads(text)
    except ValueError:
        raise UsageError("YAML that begins with a brace is not written back", hint="--emit args or python") from None
    document.update({key: value for key, value in values.items() if value is not None})
    second = next((line for line in text.splitlines()[1:] if line.strip()), "")
    indent = len(second) - len(second.lstrip()) or None
    return json.dumps(document, indent=indent, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")


def _with_value(text: str, path: list[str], value: Any) -> str:
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    above, node = _find(root, path)
    if node is not None:
        return _replaced(text, node, value)
    if value is None:
        return text
    if len(path) > 1 and above is None:
        raise UsageError(f"there is no section {'.'.join(path[:-1])} to write {path[-1]} into")
    return _added(text, above, path[-1], value)


def _find(root: yaml.Node, path: list[str]) -> tuple[Node, Node]:
    """(the section, the value in it); None where there is none."""
    here: Node = root
    for depth, name in enumerate(path):
        pairs = here.value if hasattr(here, "value") and isinstance(here.value, list) else []
        found = next((value for key, value in pairs if getattr(key, "value", None) == name), None)
        if depth == len(path) - 1:
            return here, found
        if found is None:
            return None, None
        here = found
    return here, None


def _replaced(text: str, node: Node, value: Any) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    written = text[start:end]
    if start == end:  # `key:` with nothing after it
        return f"{text[:start]}{'' if text[start - 1 : start] == ' ' else ' '}{_yaml(value)}{text[end:]}"
    rest = written[len(written.rstrip()) :]  # a block's end lies behind its last line
    return f"{text[:start]}{_yaml(value)}{rest}{text[end:]}"


def _added(text: str, section: Node, key: str, value: Any) -> str:
    """As the last key of its section."""
    if getattr(section, "flow_style", False):
        place = section.start_mark.index + 1
        return f"{text[:place]}{key}: {_yaml(value)}, {text[place:]}"
    last = section.value[-1][1]
    place = last.end_mark.index
    body, indent = text[:place].rstrip(), " " * section.start_mark.column
    rest = text[len(body) :]
    line_end = rest.find("\n")
    tail, after = (rest, "") if line_end < 0 else (rest[:line_end], rest[line_end:])
    return f"{body}{tail}\n{indent}{key}: {_yaml(value)}{after or chr(10)}"


def _yaml(value: Any) -> str:
    """In one line. What JSON writes is YAML too; plain words need no quotes."""
    if isinstance(value, str) and value.replace("_", "").replace("-", "").replace(".", "").isalnum():
        return value
    return "null" if value is None else json.dumps(value)

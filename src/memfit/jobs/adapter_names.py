"""Adapters of peft by name, which flags each reads, and `--adapter-config` as text, a file or an object.

    --adapter vera --adapter-config r=128,d_initial=0.1
    --adapter boft --adapter-config adapter_config.json

What a config may hold is for peft to say (`jobs/adapters.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from memfit.errors import InputError, UsageError
from memfit.files import text_in

Adapter = Literal[
    "lora", "dora", "adalora", "adaption-prompt", "beft", "boft", "c3a", "cartridge", "deft", "delora", "fourierft",
    "glora", "gralora", "hira", "hra", "ia3", "lily", "ln-tuning", "loha", "lokr", "miss", "oft", "osf", "p-tuning",
    "peanut", "prefix", "prompt", "psoft", "pvera", "randlora", "road", "supertuning", "tinylora",
    "trainable-tokens", "unilora", "vblora", "vera",
]  # fmt: skip
ADAPTERS: tuple[str, ...] = get_args(Adapter)
LORAS = ("lora", "dora")
PROMPTS = ("cartridge", "p-tuning", "prefix", "prompt")
"""Trained tokens before the text: no layer is changed."""
NO_TARGETS = (*PROMPTS, "adaption-prompt")
NO_RANK = (
    *NO_TARGETS, "beft", "boft", "c3a", "fourierft", "ia3", "ln-tuning", "osf", "road", "trainable-tokens",
)  # fmt: skip
OWN_TARGETS = ("adaption-prompt", "ia3", "ln-tuning", "trainable-tokens")
"""Which layers they are made for, peft knows of each family of models."""
BEYOND_BLOCKS = ("adaption-prompt", "cartridge", "lily", "prefix", "tinylora")
"""What they are made of is shared by blocks, or grows with their number: a few blocks do not tell of all."""
USUAL_RANK = 16
OF_THE_FILE = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")
"""Keys of a saved adapter_config.json that say nothing of the job."""
MAX_CONFIG_BYTES = 1 << 20
_PAIRS = re.compile(r",(?![^\[]*\])(?=\s*\w+=)")
"""The commas between pairs, not those inside a list."""


def adapter_config_of(said: object, adapter: str) -> dict[str, Any]:
    """As peft's config would be told it."""
    made = dict(said) if isinstance(said, Mapping) else _of_text(said) if isinstance(said, str) else None
    if made is None:
        raise UsageError(f"--adapter-config {said!r} is neither KEY=VALUE,... nor a file", hint="such as r=8,alpha=16")
    kind = made.pop("peft_type", None)
    if kind is not None and str(kind).upper() != peft_type(adapter):
        raise UsageError(f"--adapter {adapter}: --adapter-config is one of {kind} (peft_type)")
    return {key: value for key, value in made.items() if key not in OF_THE_FILE}


def peft_type(adapter: str) -> str:
    """As peft calls it: DoRA is a LoRA whose config says so."""
    others = {"dora": "LORA", "prefix": "PREFIX_TUNING", "prompt": "PROMPT_TUNING"}
    return others.get(adapter, adapter.replace("-", "_").upper())


def _of_text(text: str) -> dict[str, Any] | None:
    text = text.strip()
    if text.startswith("{"):
        return _object(text, "--adapter-config")
    if "=" in text:
        pairs = [pair.partition("=") for pair in _PAIRS.split(text)]
        return {key.strip(): _value(value.strip()) for key, _, value in pairs}
    return _of_file(Path(text)) if text else None


def _of_file(path: Path) -> dict[str, Any]:
    try:
        text = text_in(path, MAX_CONFIG_BYTES, "an adapter's config")
    except InputError as error:
        raise InputError(f"--adapter-config: {error.message}", hint="such as r=8,alpha=16") from error
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"'{path}' is not a YAML file: {str(error).splitlines()[0]}") from error
        return _checked(found, str(path))
    return _object(text, str(path))


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        return _checked(json.loads(text), where)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is not JSON: {error}") from error


def _checked(found: object, where: str) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InputError(f"{where} holds no settings by name")
    return found


def _value(text: str) -> Any:
    """A number, a truth value or null as JSON has them; [a, b] a list of names; else text."""
    known = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
    if text in known:
        return known[text]
    try:
        return json.loads(text)
    except ValueError:
        inside = text.startswith("[") and text.endswith("]")
        return [_value(each.strip()) for each in text[1:-1].split(",") if each.strip()] if inside else text

"""The shipped models: hyper-parameters only, for memory does not depend on the values of weights.

`presets.json` holds, for each model, the fields of its `config.json` that change shapes, dropout, masks or token ids,
the exact parameter count (a test builds every one of them), and where the numbers come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One shipped model."""

    name: str
    aliases: tuple[str, ...]
    parameters: int
    config: Mapping[str, Any]
    source: str
    note: str | None = None

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


@cache
def presets() -> tuple[Preset, ...]:
    """All presets, grouped by family and growing in size."""
    document = json.loads(files(__package__).joinpath("presets.json").read_text(encoding="utf-8"))
    return tuple(Preset(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in document["presets"])


def name_key(name: str) -> str:
    """A name without case and punctuation; what stands between two digits still parts them.

    `Llama-3.2-1B`, `llama3.2 1b` and `LLAMA_3_2_1B` are one name; `opt-1.3b` and `opt-13b` are two.
    """
    parted = re.sub(r"(?<=\d)[\W_]+(?=\d)", "\0", name.casefold())
    return re.sub(r"[^\w\0]|_", "", parted).replace("\0", ".")


@cache
def _by_key() -> dict[str, Preset]:
    return {name_key(name): preset for preset in presets() for name in (preset.name, *preset.aliases)}


def find_preset(name: str) -> Preset | None:
    return _by_key().get(name_key(name))

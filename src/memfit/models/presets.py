"""The shipped models: hyper-parameters only, for memory does not depend on the values of weights.

`presets.json` holds, for each published model, the fields of its `config.json` that change shapes, dropout, masks or
token ids, the exact parameter count (a test builds every one of them), and where the numbers come from. The models that
memfit has as code (`own_models.py`) have their sizes beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from memfit.models.basics_sizes import BASICS, LATER_SIZES, SIZES
from memfit.models.gsa_names import GSA_TYPE
from memfit.models.gsa_sizes import GATHER, GSA_SIZES, parameters_of


@dataclass(frozen=True, eq=False)
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
    published = (Preset(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in document["presets"])
    return (*published, *_basics(), *_gsa())


def _basics() -> Iterator[Preset]:
    for name, size in {**SIZES, **LATER_SIZES}.items():
        year = 2026 if name in LATER_SIZES else 2025
        yield Preset(
            f"{BASICS}-{name.lower()}", (), size.parameters, {"model_type": BASICS, **asdict(size)},
            f"hand-out of Stanford's CS336, assignment 2, {year}",
        )  # fmt: skip


def _gsa() -> Iterator[Preset]:
    for name, size in sorted(GSA_SIZES.items(), key=lambda each: parameters_of(each[1])):
        yield Preset(
            name, (), parameters_of(size), {"model_type": GSA_TYPE, **size},
            "github alfredcs/Gated-Sparse-Attention@b23ccad, and arXiv 2601.15305", _paths(name),
        )  # fmt: skip


def _paths(name: str) -> str:
    base = name.removesuffix(GATHER)
    if base != name:
        return f"as published: keys and values are copied out for every query; {base} computes the same without"
    return f"the keys that a query chose are a mask over fused attention; {name}{GATHER} is the published way"


def name_key(name: str) -> str:
    """A name without case and punctuation; what stands between two digits still parts them.

    `Llama-3.2-1B`, `llama3.2 1b` and `LLAMA_3_2_1B` are one name; `opt-1.3b` and `opt-13b` are two.
    """
    parted = re.sub(r"(?<=\d)[\W_]+(?=\d)", "\0", name.casefold())
    return re.sub(r"[^\w\0]|_", "", parted).replace("\0", ".")


@cache
def _by_key() -> dict[str, Preset]:
    """A hub id is known without its owner too, if no two models are called that."""
    bare: dict[str, set[Preset]] = {}
    for preset in presets():
        for alias in preset.aliases:
            bare.setdefault(name_key(alias.rpartition("/")[2]), set()).add(preset)
    known = {key: owners.pop() for key, owners in bare.items() if len(owners) == 1}
    return known | {name_key(name): preset for preset in presets() for name in (preset.name, *preset.aliases)}


def find_preset(name: str) -> Preset | None:
    return _by_key().get(name_key(name))

"""The shipped models: hyper-parameters only, for memory does not depend on the values of weights.

`presets.json`, and `encoders.json` for all but decoders of text, holds, for each published model, the fields of its
`config.json` that change shapes, dropout, masks or token ids, the exact parameter count (a test builds every one of
them), and where the numbers come from. The models that memfit has as code have their sizes here: GSA as the
published code and its pre-training files have them, the CS336 course's as its hand-out of 2025 does. `variants.json`
has the same models as they are published quantised: by hub id, with what of `quantization_config` decides their
storage. No torch: a config file is checked before it is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

BASICS = "basics"
"""`model_type` in a config.json, and how the names of its sizes begin."""


@dataclass(frozen=True, kw_only=True)
class BasicsConfig:
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000
    context_length: int = 2048
    rope_theta: float = 10_000.0

    @property
    def parameters(self) -> int:
        block = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * self.vocab_size * self.d_model + self.num_layers * block + self.d_model


SIZES = {
    "small": BasicsConfig(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": BasicsConfig(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": BasicsConfig(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": BasicsConfig(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    "2.7B": BasicsConfig(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
}
LATER_SIZES = {"10B": BasicsConfig(d_model=4608, d_ff=12288, num_layers=50, num_heads=36)}
"""Of the hand-out of 2026, whose xl is the 2.7B of 2025."""


GSA_TYPE = "gsa"
"""`model_type` in a config.json."""

GSA_SETTINGS = (
    "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ffn", "vocab_size", "max_position_embeddings", "rope_theta",
    "norm_eps", "k_base", "k_min", "k_max", "temperature", "adaptive_k", "indexer_heads", "indexer_dim", "path",
    "tie_word_embeddings", "initializer_range",
)  # fmt: skip


GATHER = "-gather"
"""At the end of a name: the path of the published code."""


def is_gsa(model: str) -> bool:
    name = model.strip().lower()
    return name == GSA_TYPE or name.startswith(f"{GSA_TYPE}-")


def is_basics(model: str) -> bool:
    return model.lower() == BASICS or model.lower().startswith(f"{BASICS}-")


GSA: dict[str, int] = {
    "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ffn": 11008, "vocab_size": 128256,
    "max_position_embeddings": 131072, "k_base": 2048, "k_min": 256, "k_max": 4096, "indexer_heads": 4,
    "indexer_dim": 64,
}  # fmt: skip
"""The defaults of its class."""

_PRETRAINED = {
    **GSA, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 151936, "max_position_embeddings": 8192,
    "k_base": 512, "k_min": 64, "k_max": 1024,
}  # fmt: skip

GSA_SIZES: dict[str, dict[str, Any]] = {
    "gsa": GSA,
    "gsa-512m": {**_PRETRAINED, "d_model": 512, "n_layers": 8, "d_ffn": 1536},
    "gsa-512m-copy1": {**_PRETRAINED, "d_model": 768, "n_layers": 12, "d_ffn": 2048},
    "gsa-1b": {**_PRETRAINED, "d_model": 896, "n_layers": 14, "d_ffn": 2304},
}
GSA_SIZES |= {f"{name}{GATHER}": {**sizes, "path": "gather"} for name, sizes in GSA_SIZES.items()}
"""Each again on the path of the published code, which copies the chosen keys and values out for every query."""


def parameters_of(size: dict[str, Any]) -> int:
    """Of an untied model, counted from its sizes."""
    d, width = size["d_model"], size["d_model"] // size["n_heads"]
    wide, narrow = size["n_heads"] * width, size["n_kv_heads"] * width
    indexer = d * (size["indexer_heads"] + 1) * size["indexer_dim"] + (d + 2) * size["indexer_heads"]
    layer = 2 * d * (wide + narrow) + (d + 1) * (wide + narrow) + indexer + 2 * d + 3 * d * size["d_ffn"]
    return int(size["n_layers"] * layer + 2 * size["vocab_size"] * d + d)


@dataclass(frozen=True, eq=False)
class Preset:
    """One shipped model."""

    name: str
    aliases: tuple[str, ...]
    parameters: int
    config: Mapping[str, Any]
    source: str
    note: str | None = None
    storage: str | None = None
    """Of a variant, how it is quantised; None is plain weights."""

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


RECONSTRUCTED = "reconstructed"
"""Among the `sources` of encoders.json: a config that no public copy confirms."""

NOT_COMPARED = "its config was reconstructed from its published sizes: dropout or stored type may differ on the Hub"


@cache
def presets() -> tuple[Preset, ...]:
    """All presets, grouped by family and growing in size."""
    document = json.loads(files(__package__).joinpath("presets.json").read_text(encoding="utf-8"))
    published = (Preset(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in document["presets"])
    return (*published, *_basics(), *_gsa())


@cache
def encoders() -> tuple[Preset, ...]:
    """Published models that are no decoders of text: those that read texts, translate them, see or listen. Scripts load
    them by their hub ids; `plan` takes those whose kind it has."""
    document = json.loads(files(__package__).joinpath("encoders.json").read_text(encoding="utf-8"))
    said = {None: document["source"], **document["sources"]}
    return tuple(
        Preset(
            **{**entry, "aliases": tuple(entry["aliases"]), "source": said[entry.get("source")]},
            note=NOT_COMPARED if entry.get("source") == RECONSTRUCTED else None,
        )
        for entry in document["presets"]
    )


def _basics() -> Iterator[Preset]:
    for name, size in {**SIZES, **LATER_SIZES}.items():
        source = f"hand-out of Stanford's CS336, assignment 2, {2026 if name in LATER_SIZES else 2025}"
        config = {"model_type": BASICS, **asdict(size)}
        yield Preset(f"{BASICS}-{name.lower()}", (), size.parameters, config, source)


def _gsa() -> Iterator[Preset]:
    source = "github alfredcs/Gated-Sparse-Attention@b23ccad, and arXiv 2601.15305"
    for name, size in sorted(GSA_SIZES.items(), key=lambda each: parameters_of(each[1])):
        note = f"the keys that a query chose are a mask over fused attention; {name}{GATHER} is the published way"
        if name.endswith(GATHER):
            base = name.removesuffix(GATHER)
            note = f"as published: keys and values are copied out for every query; {base} computes the same without"
        yield Preset(name, (), parameters_of(size), {"model_type": GSA_TYPE, **size}, source, note)


def name_key(name: str) -> str:
    """A name without case and punctuation; what stands between two digits still parts them.

    `Llama-3.2-1B`, `llama3.2 1b` and `LLAMA_3_2_1B` are one name; `opt-1.3b` and `opt-13b` are two.
    """
    parted = re.sub(r"(?<=\d)[\W_]+(?=\d)", "\0", name.casefold())
    return re.sub(r"[^\w\0]|_", "", parted).replace("\0", ".")


@cache
def variants() -> dict[str, dict[str, Preset]]:
    """Quantised checkpoints of the presets: by preset, then by the name of a storage and a hub id."""
    document = json.loads(files(__package__).joinpath("variants.json").read_text(encoding="utf-8"))
    plain, made = {preset.name: preset for preset in presets()}, dict[str, dict[str, Preset]]()
    for entry in document["variants"]:
        base, said = plain[entry["of"]], document["storages"][entry["storage"]]
        for name in entry["ids"]:
            config = {**base.config, "quantization_config": said}
            source = f"{base.name} as {name} stores it"
            note = f"how {name} is stored is what memfit ships; a copy in the Hugging Face cache goes before"
            made.setdefault(base.name, {})[name] = Preset(
                name, (name,), base.parameters, config, source, note, entry["storage"]
            )
    return made


@cache
def _by_key() -> dict[str, Preset]:
    """A hub id is known without its owner too, if no two models are called that."""
    bare: dict[str, set[Preset]] = {}
    quantised = [each for named in variants().values() for each in named.values()]
    for preset in (*presets(), *quantised, *encoders()):
        for alias in preset.aliases:
            bare.setdefault(name_key(alias.rpartition("/")[2]), set()).add(preset)
    known = {key: owners.pop() for key, owners in bare.items() if len(owners) == 1}
    everyone = (*quantised, *encoders(), *presets())  # whose own names go before
    return known | {name_key(name): preset for preset in everyone for name in (preset.name, *preset.aliases)}


def find_preset(name: str) -> Preset | None:
    return _by_key().get(name_key(name))


NO_REPOSITORIES = frozenset(
    f"{owner}{size}b{end}"
    for size in (7, 13, 30, 65)
    for owner, end in (("meta-llama/llama-", ""), ("meta-llama/llama-1-", ""), ("decapoda-research/llama-", "-hf"))
)
"""Ids of the first LLaMA that guides and papers have, and the Hub has not, or no longer."""


def where_published(hub_id: str) -> str:
    """The repository with the weights of that model, if the id that it goes by is none."""
    preset = find_preset(hub_id) if hub_id.lower() in NO_REPOSITORIES else None
    return hub_id if preset is None else next(alias for alias in preset.aliases if "/" in alias)

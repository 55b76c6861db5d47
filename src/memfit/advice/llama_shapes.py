"""A Llama of any size: a shipped one where there is one of about that size, or else a shape between two of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memfit.errors import UsageError
from memfit.models.presets import Preset, presets

ABOUT = 0.1
"""People call a model of 6.7 billion parameters a 7B, and one of 32.5 a 30B."""
WIDTH, INNER = 128, 256
"""Widths of blocks and of their inner layers are multiples of these in every Llama of 1B and more."""


@contextmanager
def llama_of_size(parameters: float) -> Iterator[tuple[str, str]]:
    """What to give as a model's name, for as long as this is open, and how it was chosen, in words."""
    known = _known()
    nearest = min(known, key=lambda preset: abs(math.log(preset.parameters / parameters)))
    if abs(nearest.parameters - parameters) <= ABOUT * parameters:
        yield nearest.name, f"{nearest.name}, which has {nearest.parameters / 1e9:.2f} billion parameters"
        return
    smaller = [preset for preset in known if preset.parameters < parameters]
    larger = [preset for preset in known if preset.parameters > parameters]
    if not smaller or not larger:
        ends = f"{known[0].parameters / 1e9:.2g} and {known[-1].parameters / 1e9:.0f}"
        raise UsageError(
            f"there is no Llama of {parameters / 1e9:g} billion parameters",
            hint=f"sizes between {ends} billion are known; `memfit plan prune --model FOLDER` takes any config.json",
        )
    with TemporaryDirectory(prefix="memfit-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(between(smaller[-1], larger[0], parameters)), encoding="utf-8")
        yield str(path), f"a shape between {smaller[-1].name} and {larger[0].name}, in width and depth"


def _known() -> list[Preset]:
    """One of each size: the first of several."""
    found: dict[int, Preset] = {}
    for preset in presets():
        if preset.model_type == "llama":
            found.setdefault(preset.parameters, preset)
    return [found[size] for size in sorted(found)]


def between(smaller: Preset, larger: Preset, parameters: float) -> dict[str, Any]:
    """Widths by their geometric mean, as far along as the size is; so many blocks that the size comes out."""
    share = math.log(parameters / smaller.parameters) / math.log(larger.parameters / smaller.parameters)
    nearer = (smaller if share < 0.5 else larger).config

    def mean(name: str, step: int) -> int:
        width: float = smaller.config[name] ** (1 - share) * larger.config[name] ** share
        return max(1, round(width / step)) * step

    head = nearer["hidden_size"] // nearer["num_attention_heads"]
    hidden, inner = mean("hidden_size", WIDTH), mean("intermediate_size", INNER)
    heads = hidden // head
    keys = math.gcd(heads, nearer["num_key_value_heads"]) if _shares_keys(nearer) else heads
    block = 2 * hidden * hidden + 2 * hidden * keys * head + 3 * hidden * inner
    tables = nearer["vocab_size"] * hidden * (1 if nearer["tie_word_embeddings"] else 2)
    layers = max(1, round((parameters - tables) / block))
    return {
        **nearer, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": keys, "head_dim": head, "num_hidden_layers": layers,
    }  # fmt: skip


def _shares_keys(config: Mapping[str, Any]) -> bool:
    return bool(config["num_key_value_heads"] < config["num_attention_heads"])

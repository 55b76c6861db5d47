"""Pipelines of diffusers by their names on the Hub: the configs of their parts, as published, and no weights.

`pipelines.json` holds each part once, as its `config.json` has it, and for each pipeline its ids, which part lies in
which folder, and where the configs were read. A test counts the parameters of every part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

SHIPPED = "memfit-pipelines"
"""In the path of every folder that is written for one."""
_FILES = {"scheduler": "scheduler_config.json", "feature_extractor": "preprocessor_config.json"}


@dataclass(frozen=True, eq=False)
class Pipeline:
    name: str
    kind: str
    """Its class; "" of a model by itself."""
    parts: Mapping[str, Mapping[str, Any]]
    """By folder. That of a tokenizer has the config of the model that reads its tokens."""

    def written_to(self, folder: Path) -> Path:
        """As the Hub has it, without weights and vocabularies."""
        place = folder / SHIPPED / self.name.replace("/", "--")
        if place.is_dir():
            return place
        for part, config in self.parts.items():
            file = place / part / _FILES.get(part, "config.json")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(config))
        if self.kind:
            (place / "model_index.json").write_text(json.dumps(self._index()))
        return place

    def files(self) -> list[str]:
        own = ["model_index.json"] if self.kind else []
        return own + [str(Path(part, _FILES.get(part, "config.json"))) for part in self.parts]

    def _index(self) -> dict[str, Any]:
        return {"_class_name": self.kind, **{part: _class_of(part, config) for part, config in self.parts.items()}}


def _class_of(part: str, config: Mapping[str, Any]) -> tuple[str, str]:
    if part == "feature_extractor":
        return "transformers", "CLIPImageProcessor"
    if part == "safety_checker":
        return "stable_diffusion", "StableDiffusionSafetyChecker"
    if part.startswith("tokenizer"):
        return "transformers", "T5TokenizerFast" if config["model_type"] == "t5" else "CLIPTokenizer"
    if "_class_name" in config:
        return "diffusers", str(config["_class_name"])
    return "transformers", str(config["architectures"][0])


@cache
def pipelines() -> Mapping[str, Pipeline]:
    """By hub id."""
    document = json.loads(files(__package__).joinpath("pipelines.json").read_text(encoding="utf-8"))
    known = document["parts"]
    return {
        name: Pipeline(name, each["class"], {folder: known[part] for folder, part in each["parts"].items()})
        for each in document["pipelines"]
        for name in each["ids"]
    }


def is_shipped(path: str) -> bool:
    return SHIPPED in Path(path).parts

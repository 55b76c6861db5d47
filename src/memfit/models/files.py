"""A model's files on this machine: where a run looks for weights and tokenizer, without fetching anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.models.checkpoint import INDEX, SINGLE, is_whole, locate, why_no_hub
from memfit.models.gguf import as_folder, gguf_file, look_for_folder
from memfit.models.presets import find_preset


class NotHere(InputError):
    """It could be fetched from the Hub."""

    def __init__(self, name: str, hub_id: str, what: str) -> None:
        super().__init__(f"{what} of {name} are not on this machine", hint=f"`hf download {hub_id}`, or give a folder")
        self.hub_id = hub_id


def find_here(model: str, *, cache_dir: str | None = None) -> Path:
    """The folder with the weights. A GGUF file is converted the first time."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _with_weights(path)
    place = None if cache_dir is None else Path(cache_dir).expanduser()
    gguf = gguf_file(model)
    if gguf is not None:
        return as_folder(gguf, cache_dir=place)
    hub_id = _hub_id(model)
    found = _cached(hub_id, "config.json", cache_dir)
    if found is None or not is_whole(found.parent):
        raise NotHere(model, hub_id, "the weights")
    return found.parent


def find_tokenizer_here(model: str, *, cache_dir: str | None = None) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if gguf_file(model) is not None:
        return find_here(model, cache_dir=cache_dir)
    hub_id = _hub_id(model)
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        if (found := _cached(hub_id, name, cache_dir)) is not None:
            return found.parent
    raise NotHere(model, hub_id, "the tokenizer's files")


def cache_folder(cache_dir: str | None = None) -> Path:
    """Where a download would go."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _hub_id(model: str) -> str:
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return model
    preset = find_preset(model)
    known = next((alias for alias in preset.aliases if alias.count("/") == 1), None) if preset else None
    if known is None:
        raise InputError(f"'{model}' is no folder with weights, and no model on the Hub is known by that name")
    return known


def _cached(hub_id: str, name: str, cache_dir: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError, OSError):  # not a possible id
        found = try_to_load_from_cache(hub_id, name, cache_dir=cache_dir)
        return Path(found) if isinstance(found, str) else None
    return None


def _with_weights(folder: Path) -> Path:
    if not is_whole(folder):
        raise InputError(
            f"'{folder}' holds no weights, or not all that its index names",
            hint=f"a model's folder has {SINGLE}, or {INDEX} and the files that it names",
        )
    return folder


FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken",
    "*.jinja", "config.json",
)  # fmt: skip


def tokenizer_folder(hub_id: str, *, cache_dir: str | None = None) -> Path | None:
    """Where its files lie, fetched if they are not in the cache; None where that cannot be done."""
    if hub_id.count("/") != 1:
        return None
    from huggingface_hub import snapshot_download

    for only_local in (True,) if why_no_hub() is not None else (True, False):
        with suppress(Exception):  # not cached, offline, unknown, gated: each version raises something else
            found = Path(
                snapshot_download(hub_id, cache_dir=cache_dir, allow_patterns=list(FILES), local_files_only=only_local)
            )
            if any(found.glob("tokenizer*")) or any(found.glob("vocab*")):
                return found
    return None


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "*.tiktoken")


@dataclass(frozen=True, kw_only=True)
class Source:
    folder: Path
    gguf: Path | None = None

    @property
    def revision(self) -> str | None:
        """The commit, where the folder is a snapshot in the Hub's cache."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    def describe(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder), "gguf": None if self.gguf is None else str(self.gguf), "revision": self.revision
        }  # fmt: skip


def find_source(model: str, *, cache_dir: str | None = None, say: Callable[[str], None] | None = None) -> Source:
    """Where the weights are. A GGUF file is converted the first time it is asked for."""
    place = None if cache_dir is None else Path(cache_dir).expanduser()
    gguf = gguf_file(model)
    if gguf is not None:
        return Source(folder=as_folder(gguf, cache_dir=place, say=say), gguf=gguf)
    return Source(folder=locate(model, cache_dir=place))


def look_at_source(model: str, *, cache_dir: str | None = None) -> Path | None:
    """A folder with the model's settings and tokenizer, before any of its weights is fetched or converted. None where
    these come only with the weights: of a GGUF file that was not converted yet."""
    place = None if cache_dir is None else Path(cache_dir).expanduser()
    gguf = gguf_file(model)
    if gguf is not None:
        return look_for_folder(gguf, cache_dir=place)
    return locate(model, cache_dir=place, weights=False)


def load_tokenizer(folder: Path) -> Any:
    """As transformers makes it from the folder's files; no code that comes with a model is run."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise InputError(
            f"'{folder}' has no tokenizer, without which no text can be read",
            hint="copy tokenizer.json (and tokenizer_config.json) of the model into that folder",
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a damaged file, a missing package: each kind raises its own
        said = str(error).strip().splitlines()
        why = f"the tokenizer in '{folder}' cannot be loaded: {type(error).__name__}: {said[0] if said else ''}"
        raise InputError(why[:400]) from error

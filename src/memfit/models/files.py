"""Where a model's files are: on this machine, in the Hub's cache, or on the Hub; and its tokenizer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from memfit.errors import InputError
from memfit.models.checkpoint import INDEX, SINGLE, WEIGHTS, is_whole
from memfit.models.gguf import as_folder, gguf_file, look_for_folder
from memfit.models.presets import find_preset, where_published

SETTINGS = ("*.json", "*.model", "*.txt", "*.jinja")
"""What a download brings beside the weights: settings and the tokenizer."""
OF_TOKENIZER = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken",
    "*.jinja", "config.json",
)  # fmt: skip
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "*.tiktoken")
CONNECT_SECONDS = 5.0


class NotHere(InputError):
    """It could be fetched from the Hub."""

    def __init__(self, name: str, hub_id: str, what: str) -> None:
        self.hub_id = where_published(hub_id)
        hint = f"{_renamed(hub_id)}`hf download {self.hub_id}`, or give a folder"
        super().__init__(f"{what} of {name} are not on this machine", hint=hint)


@dataclass(frozen=True, kw_only=True)
class Source:
    folder: Path
    gguf: Path | None = None

    @property
    def revision(self) -> str | None:
        """The commit, where the folder is a snapshot in the Hub's cache."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    def describe(self) -> dict[str, Any]:
        gguf = None if self.gguf is None else str(self.gguf)
        return {"folder": str(self.folder), "gguf": gguf, "revision": self.revision}


# -- without fetching anything -----------------------------------------------------------------------------------------


def find_here(model: str, *, cache_dir: str | None = None) -> Path:
    """The folder with the weights. A GGUF file is converted the first time."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not is_whole(path):
            raise InputError(
                f"'{path}' holds no weights, or not all that its index names",
                hint=f"a model's folder has {SINGLE}, or {INDEX} and the files that it names",
            )
        return path
    if (gguf := gguf_file(model)) is not None:
        return as_folder(gguf, cache_dir=_place(cache_dir))
    return _known_in_cache(model, cache_dir, is_whole, "the weights")


def find_tokenizer_here(model: str, *, cache_dir: str | None = None) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if gguf_file(model) is not None:
        return find_here(model, cache_dir=cache_dir)
    has_files = lambda folder: any((folder / name).is_file() for name in TOKENIZERS[:3])  # noqa: E731
    return _known_in_cache(model, cache_dir, has_files, "the tokenizer's files")


def _known_in_cache(model: str, cache_dir: str | None, has_all: Callable[[Path], bool], what: str) -> Path:
    hub_id = _hub_id(model)
    if hub_id is None:
        raise InputError(f"'{model}' is no folder with weights, and no model on the Hub is known by that name")
    found = _cached(hub_id, _place(cache_dir))
    if found is None or not has_all(found):
        raise NotHere(model, hub_id, what)
    return found


def cache_folder(cache_dir: str | None = None) -> Path:
    """Where a download would go."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return _place(cache_dir) or Path(HF_HUB_CACHE)


def look_at_source(model: str, *, cache_dir: str | None = None) -> Path | None:
    """A folder with the model's settings and tokenizer, before any of its weights is fetched or converted. None where
    these come only with the weights: of a GGUF file that was not converted yet."""
    if (gguf := gguf_file(model)) is not None:
        return look_for_folder(gguf, cache_dir=_place(cache_dir))
    return locate(model, cache_dir=cache_dir, weights=False)


def _place(cache_dir: str | Path | None) -> Path | None:
    return None if cache_dir is None else Path(cache_dir).expanduser()


def _hub_id(model: str) -> str | None:
    """A hub id as it stands, or the one that a preset is known by on the hub."""
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return model
    preset = find_preset(model)
    return next((alias for alias in preset.aliases if alias.count("/") == 1), None) if preset else None


def _cached(hub_id: str, place: Path | None) -> Path | None:
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # not in the cache, or not a possible id
        return Path(snapshot_download(hub_id, cache_dir=place, local_files_only=True))
    return None


# -- fetched if need be ------------------------------------------------------------------------------------------------


def find_source(model: str, *, cache_dir: str | None = None, say: Callable[[str], None] | None = None) -> Source:
    """Where the weights are. A GGUF file is converted the first time it is asked for."""
    if (gguf := gguf_file(model)) is not None:
        return Source(folder=as_folder(gguf, cache_dir=_place(cache_dir), say=say), gguf=gguf)
    return Source(folder=locate(model, cache_dir=cache_dir))


def locate(model: str, *, cache_dir: str | Path | None = None, weights: bool = True) -> Path:
    """The folder that a name means: itself, or a hub id's in the local cache, downloaded if need be. `cache_dir` is the
    cache to use instead of the usual one. Without `weights`, settings and tokenizer are enough."""
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return path
    if path.suffix == ".json" and path.is_file():
        return path.parent
    hub_id = _hub_id(model)
    if hub_id is None:
        from memfit.models.registry import resolve

        source = resolve(model)  # says what is wrong with the name
        raise InputError(
            f"'{source.name}' is a {source.kind} without weights", hint="give a folder with weights, or a hub id"
        )
    place = _place(cache_dir)
    here = _cached(hub_id, place)
    if here is not None and (is_whole(here) if weights else _has_settings(here)):
        return here
    if (why := why_no_hub()) is not None:
        raise _cannot_fetch(hub_id, why)
    from huggingface_hub import snapshot_download

    try:
        wanted = [*SETTINGS, WEIGHTS] if weights else list(SETTINGS)
        return Path(snapshot_download(hub_id, cache_dir=place, allow_patterns=wanted))
    except Exception as error:
        raise _cannot_fetch(hub_id, first_line(error)) from error


def _has_settings(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(
        any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")
    )


def bytes_to_fetch(model: str, *, cache_dir: str | None = None) -> int:
    """Of the weights that `locate` would download: none where they are on this machine."""
    hub_id = None if Path(os.path.expanduser(model)).exists() else _hub_id(model)
    if hub_id is None:
        return 0
    here = _cached(hub_id, _place(cache_dir))
    if (here is not None and is_whole(here)) or why_no_hub() is not None:
        return 0
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(hub_id, files_metadata=True).siblings or []
    except Exception as error:
        raise _cannot_fetch(hub_id, first_line(error)) from error
    wanted = [file for file in files if fnmatch(file.rfilename, WEIGHTS)]
    return sum(file.size or 0 for file in wanted if here is None or not (here / file.rfilename).exists())


def why_no_hub() -> str | None:
    """Why nothing can be fetched; None if the Hub answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return None if getproxies() else _why_unreachable(constants.ENDPOINT)


@cache
def _why_unreachable(endpoint: str) -> str | None:
    """Asked once: left alone, huggingface_hub tries each file for half a minute."""
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror or error}"
    return None


def first_line(error: Exception) -> str:
    """What an exception says, for a sentence of our own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _renamed(hub_id: str) -> str:
    """How a hint begins where the id is one that the Hub has not."""
    there = where_published(hub_id)
    return "" if there == hub_id else f"the Hub has no such repository; name the same model {there}:\n"


def _cannot_fetch(hub_id: str, why: str) -> InputError:
    there = where_published(hub_id)
    return InputError(
        f"'{hub_id}' is not in the Hugging Face cache and cannot be fetched: {why}",
        hint=f"{_renamed(hub_id)}`hf download {there}` where there is a network "
        "(`hf auth login` first if it is gated), or a folder",
    )


# -- tokenizers --------------------------------------------------------------------------------------------------------


def tokenizer_folder(hub_id: str, *, cache_dir: str | None = None) -> Path | None:
    """Where its files lie, fetched if they are not in the cache; None where that cannot be done."""
    if hub_id.count("/") != 1:
        return None
    from huggingface_hub import snapshot_download

    for only_local in (True,) if why_no_hub() is not None else (True, False):
        with suppress(Exception):  # not cached, offline, unknown, gated: each version raises something else
            found = Path(
                snapshot_download(
                    hub_id, cache_dir=cache_dir, allow_patterns=list(OF_TOKENIZER), local_files_only=only_local
                )
            )
            if any(found.glob("tokenizer*")) or any(found.glob("vocab*")):
                return found
    return None


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
        why = f"the tokenizer in '{folder}' cannot be loaded: {type(error).__name__}: {first_line(error)}"
        raise InputError(why[:400]) from error

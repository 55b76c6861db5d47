"""Whether a model's files are on this machine: the same places that a run looks in, without fetching anything."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from memfit.errors import InputError
from memfit.models.checkpoint import INDEX, SINGLE, is_whole
from memfit.models.gguf import as_folder, gguf_file
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

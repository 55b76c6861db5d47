"""`--model` of a job that needs weights: a folder, a hub id, a GGUF file; and the tokenizer that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.models.checkpoint import locate
from memfit.models.gguf import as_folder, gguf_file, look_for_folder

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

"""The tokenizer of a training job: the model's own, another one's, or plain bytes, which needs no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.jobs.source import find_source, load_tokenizer
from memfit.models.gguf import gguf_file
from memfit.models.presets import find_preset
from memfit.models.tokenizer_files import tokenizer_folder

BYTES = "bytes"
_HINT = "model.tokenizer: a folder with tokenizer.json, a hub id, or `bytes`, which needs no file"


class ByteTokenizer:
    """One token a byte of UTF-8, and one for the end of a text."""

    eos_token_id = 256
    pad_token_id = 256
    bos_token_id = None
    chat_template = None
    vocab_size = 257

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | list[str], **_: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": list(text.encode())}
        return {"input_ids": [list(each.encode()) for each in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")


def tokenizer_named(name: str, *, cache_dir: str | None = None, say: Callable[[str], None] | None = None) -> Any:
    """`bytes`, a folder, a hub id or a GGUF file."""
    if name.strip().lower() == BYTES:
        return ByteTokenizer()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return load_tokenizer(folder)
    if gguf_file(name) is not None:
        return load_tokenizer(find_source(name, cache_dir=cache_dir, say=say).folder)
    if (found := tokenizer_folder(name, cache_dir=cache_dir)) is None:
        raise InputError(f"model.tokenizer '{name}' is no folder and not on the Hub or in its cache", hint=_HINT)
    return load_tokenizer(found)


def tokenizer_of_shape(name: str, *, cache_dir: str | None = None) -> Any:
    """Of a model that is trained from scratch: that of the published one, if it can be had."""
    if Path(name).is_dir():
        return load_tokenizer(Path(name))
    preset = find_preset(name)
    hub_id = name if preset is None else next((alias for alias in preset.aliases if alias.count("/") == 1), name)
    if (found := tokenizer_folder(hub_id, cache_dir=cache_dir)) is None:
        raise InputError(f"the tokenizer of {name} is not on this machine, and the Hub does not give it", hint=_HINT)
    return load_tokenizer(found)


def pad_id_of(tokenizer: Any) -> int:
    """What fills up a row. It is masked, so that any token will do."""
    for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
        found = getattr(tokenizer, name, None)
        if isinstance(found, int):
            return found
    return 0

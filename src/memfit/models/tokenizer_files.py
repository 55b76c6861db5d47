"""The tokenizer of a model on the Hub, without its weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from memfit.models.checkpoint import why_no_hub

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

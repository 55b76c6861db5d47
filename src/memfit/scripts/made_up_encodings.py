"""`--synthetic-data`: encodings of tiktoken whose files are not on this machine, in their sizes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

CHARACTERS_A_TOKEN = 4
BYTES = 256
READERS = ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks")


def patches_of_encodings(tracer: Any) -> list[Any]:
    """None before tiktoken is imported."""
    package: Any = sys.modules.get("tiktoken")
    if not hasattr(package, "encoding_for_model"):
        return []
    found = _found_or_made(package.get_encoding, tracer)
    return [mock.patch.object(each, "get_encoding", found) for each in (package, package.registry, package.model)]


def _found_or_made(find: Callable[[str], Any], tracer: Any) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get_encoding(name: str) -> Any:
        if name in made:
            return made[name]
        try:
            return find(name)
        except OSError:
            made[name] = make_encoding(name)
        tracer.assume(
            f"{name}: a made-up encoding of {made[name].n_vocab:,} tokens, one for {CHARACTERS_A_TOKEN} characters"
        )
        return made[name]

    return get_encoding


def make_encoding(name: str) -> Any:
    """By tiktoken's own description of it, but for what stands in files."""
    package: Any = sys.modules["tiktoken"]
    describe = package.registry.ENCODING_CONSTRUCTORS[name]
    with mock.patch.dict(vars(sys.modules[describe.__module__]), dict.fromkeys(READERS, lambda *_, **__: {})):
        said = describe()
    special = said["special_tokens"]
    end = said.get("explicit_n_vocab") or min(special.values())
    words = {bytes([number]): number for number in range(BYTES)}
    words |= {b"<%d>" % number: number for number in range(BYTES, end) if number not in special.values()}
    made = package.Encoding(**{**said, "mergeable_ranks": words})
    made._core_bpe = FourCharacters(made._core_bpe)
    return made


class FourCharacters:
    """What tiktoken's own core does, but that any four characters of text are one token."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def encode_ordinary(self, text: str) -> list[int]:
        return [BYTES] * -(-len(text) // CHARACTERS_A_TOKEN)

    def encode(self, text: str, allowed_special: Iterable[str]) -> list[int]:
        allowed = sorted(allowed_special, key=len, reverse=True)
        if not allowed:
            return self.encode_ordinary(text)
        pieces = re.split(f"({'|'.join(map(re.escape, allowed))})", text)
        tokens: list[int] = []
        for number, piece in enumerate(pieces):
            tokens += [self._core.encode_single_token(piece.encode())] if number % 2 else self.encode_ordinary(piece)
        return tokens

    def encode_to_tiktoken_buffer(self, text: str, allowed_special: Iterable[str]) -> bytes:
        import numpy as np

        return np.array(self.encode(text, allowed_special), np.uint32).tobytes()

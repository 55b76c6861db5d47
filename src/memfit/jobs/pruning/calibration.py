"""Calibration windows as the published code draws them.

WikiText-2 and other running text: everything joined with one space and tokenised once; each window starts at a place
drawn by `randint(0, tokens - length - 1)`. C4: documents are drawn until one is longer than the window, then the start
within it. The generator is Python's `random`, seeded once. Windows are full: no padding, no special tokens but those
that the tokenizer put there, no regard for the ends of documents.
"""

from __future__ import annotations

import hashlib
import platform
import random
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import InputError
from memfit.jobs.texts import Texts
from memfit.versions import recorded_version

ENOUGH_TRIES = 1000
"""So many documents in a row too short, and all of them are measured before more are drawn."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What the windows are, so that two runs can be compared. Tokenizers of different versions cut text differently."""

    dataset: str
    split: str
    origin: str
    windows: int
    seqlen: int
    seed: int | None
    text_tokens: int | None
    """Of the whole text; None where only the documents that were drawn have been tokenised."""
    sha256: str
    """Of the token ids of all windows, as 64-bit little-endian integers."""
    tokenizers: str | None
    tokenizer: str
    python: str | None = None
    """Where the text comes with Python."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    ids: torch.Tensor
    """[windows, seqlen], 64-bit integers."""
    fingerprint: Fingerprint
    notes: tuple[str, ...] = ()


def calibration_windows(texts: Texts, tokenizer: Any, nsamples: int, seqlen: int, seed: int) -> Windows:
    draw = _from_documents if texts.by_document else _from_running_text
    ids, tokens, notes = draw(texts, tokenizer, nsamples, seqlen, random.Random(seed))
    fingerprint = fingerprint_of(ids, texts, tokenizer, seed=seed, tokens=tokens)
    return Windows(ids=ids, fingerprint=fingerprint, notes=(*texts.notes, *notes))


def tokenise(tokenizer: Any, text: str) -> list[int]:
    """With the special tokens that the tokenizer adds by itself; long texts are what this is for."""
    return list(tokenizer(text, verbose=False)["input_ids"])


def fingerprint_of(
    ids: torch.Tensor, texts: Texts, tokenizer: Any, *, seed: int | None, tokens: int | None
) -> Fingerprint:
    digest = hashlib.sha256(ids.to(torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()
    return Fingerprint(
        dataset=texts.name,
        split=texts.split,
        origin=texts.origin,
        windows=len(ids),
        seqlen=ids.shape[1],
        seed=seed,
        text_tokens=tokens,
        sha256=digest,
        tokenizers=recorded_version("tokenizers"),
        tokenizer=type(tokenizer).__name__,
        python=platform.python_version() if texts.name == "builtin" else None,
    )


def _from_running_text(
    texts: Texts, tokenizer: Any, nsamples: int, seqlen: int, chance: random.Random
) -> tuple[torch.Tensor, int, tuple[str, ...]]:
    tokens = torch.tensor(tokenise(tokenizer, texts.joined()), dtype=torch.int64)
    last = len(tokens) - seqlen - 1
    if last < 0:
        raise too_short(texts, len(tokens), f"--seqlen {seqlen} needs at least {seqlen + 1:,}")
    starts = [chance.randint(0, last) for _ in range(nsamples)]
    return torch.stack([tokens[start : start + seqlen] for start in starts]), len(tokens), ()


def _from_documents(
    texts: Texts, tokenizer: Any, nsamples: int, seqlen: int, chance: random.Random
) -> tuple[torch.Tensor, int | None, tuple[str, ...]]:
    documents = _Documents(texts, tokenizer)
    windows, used = [], set()
    for _ in range(nsamples):
        number = documents.draw_longer_than(seqlen, chance)
        tokens = documents.tokens(number)
        start = chance.randint(0, len(tokens) - seqlen - 1)
        windows.append(torch.tensor(tokens[start : start + seqlen], dtype=torch.int64))
        used.add(number)
    notes: tuple[str, ...] = ()
    if len(used) * 2 < nsamples:
        notes = (f"the {nsamples} windows come from only {len(used)} documents that are longer than {seqlen} tokens",)
    return torch.stack(windows), None, notes


class _Documents:
    """C4's documents, tokenised when they are first drawn. Lengths of all are kept, tokens of the long ones."""

    def __init__(self, texts: Texts, tokenizer: Any) -> None:
        self.texts, self.tokenizer = texts, tokenizer
        self.lengths: dict[int, int] = {}
        self.long: dict[int, list[int]] = {}

    def tokens(self, number: int) -> list[int]:
        if number not in self.long:
            self.long[number] = tokenise(self.tokenizer, self.texts.documents[number])
        return self.long[number]

    def length(self, number: int) -> int:
        if number not in self.lengths:
            self.lengths[number] = len(tokenise(self.tokenizer, self.texts.documents[number]))
        return self.lengths[number]

    def draw_longer_than(self, seqlen: int, chance: random.Random) -> int:
        count, tries = len(self.texts.documents), 0
        while True:
            number = chance.randint(0, count - 1)
            if self.length(number) > seqlen:
                return number
            tries += 1
            if tries == ENOUGH_TRIES:
                self._check_that_one_is_long_enough(seqlen)

    def _check_that_one_is_long_enough(self, seqlen: int) -> None:
        longest = max(self.length(number) for number in range(len(self.texts.documents)))
        if longest <= seqlen:
            why = f"--seqlen {seqlen}: the longest of {len(self.texts.documents):,} documents has {longest:,} tokens"
            raise InputError(
                f"{why} ({self.texts.origin})", hint=f"--seqlen {max(1, longest // 2)} works, or another --dataset"
            )


def too_short(texts: Texts, tokens: int, needs: str) -> InputError:
    why = f"--dataset {texts.name}: its {texts.split} text has only {tokens:,} tokens; {needs}"
    return InputError(f"{why} ({texts.origin})", hint="a shorter --seqlen or more text")

"""The tokenizer: here, loadable, and the one that the weights were trained with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.models.local_files import NotHere

TOKENIZER = Line("model", "tokenizer")


def tokenizer(situation: Situation) -> Iterator[Finding]:
    model = situation.config.model
    named = model.tokenizer or model.name
    try:
        found = situation.tokenizer.get()
    except NotHere as error:
        if model.tokenizer is None and not model.starts_from_scratch:
            raise CannotTell("it comes with the weights, which are not here") from error
        yield TOKENIZER.warning(error.message, f"`hf download {error.hub_id} --include 'tokenizer*'`, or give a folder")
        return
    own = None if model.tokenizer is None else situation.own_tokenizer
    if own is not None and _words(own) != _words(found):
        yield TOKENIZER.warning(
            f"{named} is not the tokenizer of {model.name}: its tokens mean other words to those weights",
            "leave model.tokenizer out; or from_scratch: true trains weights for it",
        )
        return
    yield TOKENIZER.ok(f"of {named}, {len(_words(found)):,} tokens")


def _words(found: Any) -> dict[str, int]:
    """Each token and its number; of one token a byte, their number stands for all."""
    if hasattr(found, "get_vocab"):
        words: dict[str, int] = found.get_vocab()
        return words
    return {str(number): number for number in range(len(found))}

"""The tokenizer of a GGUF file.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) is read by transformers; its special tokens are then set as the file says,
for transformers takes over only some of them. The SentencePiece kind (Llama 2, Mistral, Gemma) is built here: the file
lists pieces with scores, and text is cut by joining, again and again, the neighbours whose piece has the highest score.
That is BPE with the merges in the order of the scores, after those of pieces that were added by hand. transformers
5.17 reads Gemma's scores as a unigram model, which cuts words into pieces that the model has hardly seen.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PREFIX = "tokenizer.ggml."


def tokenizer_of(path: Path, reader: Any) -> Any:
    from transformers import AutoTokenizer

    fields = {name: field for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    said = {name.removeprefix(PREFIX): field.contents() for name, field in fields.items() if len(field.types) == 1}
    if said.get("model") == "llama" and f"{PREFIX}scores" in fields:
        made = _sentencepiece(
            tokens=fields[f"{PREFIX}tokens"].contents(),
            scores=fields[f"{PREFIX}scores"].contents(),
            types=fields[f"{PREFIX}token_type"].contents(),
            prefix=bool(said.get("add_space_prefix", True)),
            unknown=said.get("unknown_token_id"),
        )
        made.chat_template = said.get("tokenizer.chat_template")
    else:
        made = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    _name_special_tokens(made, said)
    if said.get("add_bos_token", said.get("model") == "llama") and made.bos_token is not None:
        _begin_with_bos(made)
    return made


def _name_special_tokens(tokenizer: Any, said: dict[str, Any]) -> None:
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = said.get(f"{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokenizer):
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))


def _begin_with_bos(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    if tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
        )


def _sentencepiece(
    *, tokens: list[str], scores: list[float], types: list[int], prefix: bool, unknown: int | None
) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    numbers = {piece: i for i, piece in reversed(list(enumerate(pieces)))}  # the first of two alike counts
    unk = None if unknown is None else pieces[unknown]
    joinable = [i for i, kind in enumerate(types) if kind not in (UNKNOWN, CONTROL, BYTE) and numbers[pieces[i]] == i]
    ranks = [-math.inf if kind == USER_DEFINED else -score for kind, score in zip(types, scores, strict=True)]
    merges = _merges(pieces, ranks, joinable)
    made = Tokenizer(models.BPE(vocab=numbers, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    made.add_special_tokens(
        [AddedToken(pieces[i], normalized=False, special=True) for i, kind in enumerate(types) if kind == CONTROL]
    )
    made.add_tokens(
        [AddedToken(pieces[i], normalized=False) for i, kind in enumerate(types) if kind == USER_DEFINED and pieces[i]]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


def _merges(pieces: list[str], ranks: list[float], joinable: list[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two, in the order of the pieces' ranks."""
    known = {pieces[i] for i in joinable}
    found: list[tuple[float, int, str, str]] = []
    for i in joinable:
        piece = pieces[i]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                found.append((ranks[i], i, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]

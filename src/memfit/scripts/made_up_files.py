"""`--synthetic-data`: files that a program reads beside its data: names of classes, and how nltk parts sentences."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from memfit.scripts.made_up_rows import CLASSES
from memfit.scripts.watched import path_for_a_file

_NAMES_OF_CLASSES = re.compile(r"(id2label|label2id)\w*\.json$")


def patches_of_hub(tracer: Any) -> list[Any]:
    """None before `huggingface_hub` is imported."""
    hub: Any = sys.modules.get("huggingface_hub")
    if hub is None:
        return []
    return [mock.patch.object(hub, "hf_hub_download", _found_or_named(hub.hf_hub_download, tracer))]


def _found_or_named(find: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    def hf_hub_download(repo_id: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return find(repo_id, filename, *args, **kwargs)
        except OSError:
            asked = _NAMES_OF_CLASSES.search(str(filename))
            if asked is None or tracer.stopped is not None:
                raise
        count = next(count for words, count in CLASSES if re.search(words, f"{repo_id} {filename}", re.IGNORECASE))
        tracer.assume(f"{repo_id}: a made-up {filename}, {count} classes")
        names = {f"class {number}": number for number in range(count)}
        said = names if asked[1] == "label2id" else {str(number): name for name, number in names.items()}
        path = path_for_a_file("names.json")
        path.write_text(json.dumps(said))
        return str(path)

    return hf_hub_download


def patches_of_nltk(tracer: Any) -> list[Any]:
    """None before it is imported, and none where it has its data."""
    nltk: Any = sys.modules.get("nltk")
    if not hasattr(nltk, "sent_tokenize") or not hasattr(nltk, "download") or _has_sentences(nltk):
        return []

    def found(path: Any, *_: Any, **__: Any) -> Any:
        tracer.assume("nltk's own data is not here: sentences end at a full stop, words at a space")
        return path

    return [
        mock.patch.object(nltk.data, "find", found),
        mock.patch.object(nltk, "download", lambda *_, **__: True),
        mock.patch.object(nltk, "sent_tokenize", lambda text, *_, **__: re.split(r"(?<=[.!?])\s+", text)),
        mock.patch.object(nltk, "word_tokenize", lambda text, *_, **__: text.split()),
    ]


def _has_sentences(nltk: Any) -> bool:
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True

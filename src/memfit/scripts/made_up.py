"""`--synthetic-data`: tokenizers, data sets and metrics that are not here, made up in the form they would have.

A made-up tokenizer has the model's vocabulary and makes one id of four characters; a made-up data set has the columns
of the public one, where its name tells them, and long rows: what bounds them is the program's own truncation. A
metric takes all that it is given and has scores that nobody knows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

CHARACTERS_A_TOKEN = 4
FEWEST_TOKENS = 100
"""Those of bytes have more; one without its files has a handful."""
ROWS = {"train": 1000, "validation": 100, "test": 100}
SHORT_ROWS = ROWS | {"train": 5000}
"""Some programs put thousands of rows aside."""
WORDS, FEW_WORDS = 1000, 100
SHORT = 6 * FEW_WORDS
LONG = ("text", "content", "context", "article", "document", "dialogue", "sentence", "sentence1", "premise", "review")
_TALK = [{"role": "user", "content": "{few}"}, {"role": "assistant", "content": "{few}"}]
COLUMNS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"mrpc|rte|stsb|wnli", {"sentence1": "", "sentence2": "", "label": 0, "idx": 0}),
    (r"mnli|snli|xnli|anli", {"premise": "", "hypothesis": "", "label": 0, "idx": 0}),
    (r"hellaswag", {"ctx": "", "endings": [""] * 4, "label": "0"}),
    (r"swag", {**dict.fromkeys(("sent1", "sent2", "ending0", "ending1", "ending2", "ending3"), ""), "label": 0}),
    (r"qqp", {"question1": "", "question2": "", "label": 0, "idx": 0}),
    (r"sst2|cola|glue", {"sentence": "", "label": 0, "idx": 0}),
    (r"squad", {"id": "", "title": "", "context": "", "question": "", "answers": {"text": [""], "answer_start": [0]}}),
    (r"ultrafeedback.*binarized|dpo|preference|hh-rlhf", {"prompt": "", "chosen": "", "rejected": ""}),
    (r"gsm8k", {"question": "", "answer": ""}),
    (r"alpaca|dolly", {"instruction": "", "input": "", "output": "", "text": ""}),
    (r"ultrachat|capybara|no_robots|smoltalk|chat", {"messages": _TALK}),
    (r"tldr", {"prompt": "", "completion": ""}),
    (r"cnn_dailymail", {"article": "", "highlights": "", "id": ""}),
    (r"xsum", {"document": "", "summary": "", "id": ""}),
    (r"samsum", {"id": "", "dialogue": "", "summary": ""}),
    (r"wmt|opus|translation", {"translation": {"en": "", "de": "", "fr": "", "ro": ""}}),
    (r"conll|wnut|\bner\b", {"id": "", "tokens": [""] * 8, "ner_tags": [0] * 8}),
    (r"wikitext|bookcorpus|\bc4\b|openwebtext|pile|fineweb|tinystories|wikipedia|slimpajama", {"text": ""}),
    (r"imdb|yelp|ag_news|amazon|emotion|rotten", {"text": "", "label": 0}),
    (r"", {"text": "", "label": 0}),
)
"""By what stands in the data set's name; the last is taken for all others."""
CLASSES = (
    (r"stsb", 0), (r"mnli|snli|xnli|anli", 3), (r"hellaswag|\bswag|ag_news", 4), (r"emotion", 6), (r"conll", 9),
    (r"wnut", 13), (r"yelp_review_full|amazon_reviews|sst5", 5), (r"", 2),
)  # fmt: skip
"""What the public ones tell apart; 0: they have a score."""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SCORES = ("accuracy", "f1", "precision", "recall", "matthews_correlation", "pearson", "spearmanr", "bleu", "score")
WITH_MASK = re.compile("bert|electra|mpnet|deberta|ernie|xlnet|camembert|roformer")


@contextmanager
def data_made_up(tracer: Any, *, wanted: bool) -> Iterator[None]:
    """Unless it is `wanted`, what is not here is an error, also where transformers makes an empty tokenizer of it."""
    done: set[str] = set()
    with ExitStack() as stack:

        def patch() -> None:
            for module, name in (
                ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
                ("transformers.models.auto.tokenization_auto", "AutoTokenizer"),
            ):
                kind = getattr(sys.modules.get(module), name, None)
                if kind is not None and name not in done:
                    done.add(name)
                    found = classmethod(_found_or_made(kind.__dict__["from_pretrained"].__func__, tracer, wanted))
                    stack.enter_context(mock.patch.object(kind, "from_pretrained", found))
            processors: Any = sys.modules.get("transformers.models.auto.processing_auto")
            if hasattr(processors, "AutoProcessor") and wanted and "AutoProcessor" not in done:
                done.add("AutoProcessor")
                kind = processors.AutoProcessor
                found = classmethod(_processor_or_tokenizer(kind.__dict__["from_pretrained"].__func__))
                stack.enter_context(mock.patch.object(kind, "from_pretrained", found))
            data: Any = sys.modules.get("datasets")
            if hasattr(data, "load_dataset") and hasattr(data, "Dataset") and wanted and "data" not in done:
                done.add("data")
                for name in ("load_dataset", "load_from_disk"):
                    made = _loaded_or_made(getattr(data, name), data, tracer)
                    stack.enter_context(mock.patch.object(data, name, made))

            metrics: Any = sys.modules.get("evaluate")
            if hasattr(metrics, "load") and wanted and "metrics" not in done:
                done.add("metrics")
                stack.enter_context(mock.patch.object(metrics, "load", _loaded_or_unknown(metrics.load, tracer)))

        patch()
        tracer.after_import.append(patch)
        try:
            yield
        finally:
            tracer.after_import.remove(patch)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def _found_or_made(find: Callable[..., Any], tracer: Any, wanted: bool) -> Callable[..., Any]:
    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found = find(cls, name, *args, **kwargs)
            if len(found) >= FEWEST_TOKENS or os.path.isdir(name):
                return found
            raise OSError(f"the tokenizer of {name} is not in the cache of huggingface.co")
        except (OSError, ValueError) as error:  # the latter of a tokenizer that has found none of its files
            if not wanted or (isinstance(error, ValueError) and os.path.isdir(name)):
                raise
        made = make_tokenizer(str(name), kwargs)
        tracer.assume(
            f"{name}: a made-up tokenizer of {len(made):,} tokens, one for {CHARACTERS_A_TOKEN} characters of text"
        )
        return made

    return from_pretrained


def _processor_or_tokenizer(find: Callable[..., Any]) -> Callable[..., Any]:
    """Of a model of text its tokenizer is all that there is to process."""

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import AutoConfig, AutoTokenizer

        try:
            return find(cls, name, *args, **kwargs)
        except (OSError, ValueError):
            config = AutoConfig.from_pretrained(name)
            if config.get_text_config() is not config:
                raise
        return AutoTokenizer.from_pretrained(name, *args, **kwargs)

    return from_pretrained


def make_tokenizer(name: str, asked: dict[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    config = AutoConfig.from_pretrained(name).get_text_config()
    special: dict[str, int] = {}
    for kind in ("bos", "eos", "pad"):
        number = getattr(config, f"{kind}_token_id", None)
        number = number[0] if isinstance(number, (list, tuple)) and number else number
        if isinstance(number, int) and 0 <= number < config.vocab_size:
            special[kind] = number
    special.setdefault("eos", config.vocab_size - 1)
    special.setdefault("pad", special["eos"])
    free = (number for number in range(config.vocab_size) if number not in special.values())
    if WITH_MASK.search(config.model_type):
        special |= {kind: next(free) for kind in ("cls", "sep", "mask")}
    words = {number: f"<{number}>" for number in range(config.vocab_size)}
    words |= {number: f"<|{kind}|>" for kind, number in special.items()}
    unknown = words[next(free)]
    made = Tokenizer(models.WordLevel({word: number for number, word in words.items()}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(f"[\\s\\S]{{1,{CHARACTERS_A_TOKEN}}}"), "isolated")
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or int(1e30)
    kept = {key: value for key, value in asked.items() if key in ("padding_side", "truncation_side", "pad_token")}
    tokens = {f"{kind}_token": words[number] for kind, number in special.items()}
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=made, name_or_path=name, model_max_length=asked.get("model_max_length") or longest,
        **{**tokens, **kept},
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# -- data sets ---------------------------------------------------------------------------------------------------------


def _loaded_or_made(load: Callable[..., Any], data: Any, tracer: Any) -> Callable[..., Any]:
    def load_dataset(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(path, *args, **kwargs)
        except Exception as error:
            if not _is_missing(error):
                raise
        named = " ".join(str(each) for each in (path, *args[:1], kwargs.get("name")) if each)
        row = columns_of(named)
        tracer.assume(f"{named}: a made-up data set with the columns {', '.join(row)}, up to {WORDS:,} words a text")
        of_words = SHORT_ROWS if max(map(len, map(str, row.values()))) < SHORT else ROWS
        classes = next(count for words, count in CLASSES if re.search(words, named, re.IGNORECASE))
        made = {
            split: _with_classes(data.Dataset.from_list([row] * rows), data, classes)
            for split, rows in of_words.items()
        }
        split = kwargs.get("split")
        if split is None:
            return (
                data.IterableDatasetDict({name: each.to_iterable_dataset() for name, each in made.items()})
                if (kwargs.get("streaming"))
                else data.DatasetDict(made)
            )
        if isinstance(split, (list, tuple)):
            return [made[_split(each)] for each in split]
        found = made[_split(split)]
        return found.to_iterable_dataset() if kwargs.get("streaming") else found

    return load_dataset


def _with_classes(made: Any, data: Any, count: int) -> Any:
    """Whole numbers that stand for classes, with names."""
    if not count:
        return made.cast_column("label", data.Value("float32")) if "label" in made.features else made
    kind = data.ClassLabel(names=[f"class {number}" for number in range(count)])
    if "label" in made.features and made.features["label"].dtype == "int64":
        made = made.cast_column("label", kind)
    return made.cast_column("ner_tags", data.Sequence(kind)) if "ner_tags" in made.features else made


def _split(asked: Any) -> str:
    name = re.split(r"[\[+]", str(asked))[0]
    return name if name in ROWS else "train" if name.startswith("train") else "test"


def _is_missing(error: Exception) -> bool:
    return isinstance(error, (ConnectionError, FileNotFoundError)) or any(
        word in f"{type(error).__name__} {error}" for word in ("NotFound", "offline", "Offline", "Hub")
    )


def columns_of(name: str) -> dict[str, Any]:
    """A row, by what the data set is called."""
    row = next(columns for words, columns in COLUMNS if re.search(words, name, re.IGNORECASE))
    return {column: _filled(value, column) for column, value in row.items()}


def _filled(value: Any, column: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, column) for each in value]
    if value in ("", "{few}"):
        return "word " * (WORDS if column in LONG and value == "" else FEW_WORDS)
    return value


# -- metrics -----------------------------------------------------------------------------------------------------------


def _loaded_or_unknown(load: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    def load_metric(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(path, *args, **kwargs)
        except Exception as error:
            if not _is_missing(error):
                raise
        tracer.assume(f"{path}: a metric that is not here; its scores are not known")
        return UnknownMetric(tracer)

    return load_metric


class UnknownMetric:
    """Takes what it is given as one of `evaluate` does, and has numbers for it that nobody knows."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def add(self, *_: Any, **given: Any) -> None:
        pass

    add_batch = add

    def compute(self, *_: Any, **given: Any) -> dict[str, Any]:
        import torch

        return dict.fromkeys(SCORES, self._tracer.answers.unknown(torch.zeros(())))

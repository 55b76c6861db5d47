"""`--synthetic-data`: tokenizers, data sets and metrics that are not here, made up in the form they would have.

A made-up tokenizer has the model's vocabulary and makes one id of four characters; a made-up data set has the rows that
`made_up_rows` tells by its name. A metric takes all that it is given and has scores that nobody knows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from memfit.models.pipelines import is_shipped
from memfit.scripts.made_up_columns import MadeUp, columns_asked_for
from memfit.scripts.made_up_encodings import CHARACTERS_A_TOKEN, patches_of_encodings
from memfit.scripts.made_up_files import patches_of_hub, patches_of_nltk
from memfit.scripts.made_up_pictures import patches_of_pictures, patches_of_timm
from memfit.scripts.made_up_rows import (
    MADE_UP,
    ROWS,
    as_long_as_published,
    columns_of,
    columns_told,
    data_sets_of,
    seconds_of,
    sound,
)

PATCHES = (patches_of_pictures, patches_of_timm, patches_of_encodings, patches_of_hub, patches_of_nltk)
TIMES_STREAMED, FEWEST_PARTED = 100, 100
FEWEST_TOKENS = 250
"""Those of bytes have more; one without its files has a handful, T5's a hundred."""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SCORES = ("accuracy", "f1", "precision", "recall", "matthews_correlation", "pearson", "spearmanr", "bleu", "score")
WITH_MASK = re.compile("bert|electra|mpnet|deberta|ernie|xlnet|camembert|roformer")


@contextmanager
def data_made_up(tracer: Any, made_up: MadeUp, *, wanted: bool, more: Sequence[str] = ()) -> Iterator[None]:
    """Unless it is `wanted`, what is not here is an error, also where transformers makes an empty tokenizer of it.
    `more`: columns for which the program has asked."""
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
                    found = classmethod(
                        _found_or_made(kind.__dict__["from_pretrained"].__func__, tracer, made_up, wanted)
                    )
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
                    made = _loaded_or_made(getattr(data, name), data, tracer, made_up, more)
                    stack.enter_context(mock.patch.object(data, name, made))
                for name in ("map", "filter"):
                    alone = _in_this_process(getattr(data.Dataset, name))
                    stack.enter_context(mock.patch.object(data.Dataset, name, alone))
                chosen = _again_from_the_first(data.Dataset.select)
                stack.enter_context(mock.patch.object(data.Dataset, "select", chosen))
                parted = _with_rows_to_spare(data.Dataset.train_test_split)
                stack.enter_context(mock.patch.object(data.Dataset, "train_test_split", parted))
                for name, changed in (("decode_example", _heard), ("encode_example", _recorded)):
                    stack.enter_context(mock.patch.object(data.Audio, name, changed(getattr(data.Audio, name))))

            metrics: Any = sys.modules.get("evaluate")
            if hasattr(metrics, "load") and wanted and "metrics" not in done:
                done.add("metrics")
                stack.enter_context(mock.patch.object(metrics, "load", _loaded_or_unknown(metrics.load, tracer)))

            for patches in PATCHES:
                if wanted and patches.__name__ not in done and (replaced := patches(tracer)):
                    done.add(patches.__name__)
                    for each in replaced:
                        stack.enter_context(each)

        with tracer.after_each_import(patch):
            yield


# -- tokenizers --------------------------------------------------------------------------------------------------------


def _found_or_made(find: Callable[..., Any], tracer: Any, made_up: MadeUp, wanted: bool) -> Callable[..., Any]:
    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            found = find(cls, name, *args, **kwargs)
            if len(found) >= FEWEST_TOKENS or _is_a_folder_of_its_own(name):
                return found
            raise OSError(f"the tokenizer of {name} is not in the cache of huggingface.co")
        except (OSError, ValueError, TypeError) as error:  # others than the first where it has found none of its files
            if not wanted or (not isinstance(error, OSError) and _is_a_folder_of_its_own(name)):
                raise
        made = make_tokenizer(str(name), kwargs)
        made_up[str(name)] = (f"a tokenizer of {len(made):,} tokens",)
        tracer.assume(
            f"{name}: a made-up tokenizer of {len(made):,} tokens, one for {CHARACTERS_A_TOKEN} characters of text"
        )
        return made

    return from_pretrained


def _is_a_folder_of_its_own(name: Any) -> bool:
    return os.path.isdir(name) and not is_shipped(str(name))


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

    config = AutoConfig.from_pretrained(name, subfolder=asked.get("subfolder") or "").get_text_config()
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
    told = (getattr(config, each, None) for each in ("max_position_embeddings", "n_positions"))
    longest = next((each for each in told if isinstance(each, int) and each > 0), int(1e30))
    kept = {key: value for key, value in asked.items() if key in ("padding_side", "truncation_side", "pad_token")}
    tokens = {f"{kind}_token": words[number] for kind, number in special.items()}
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=made, name_or_path=name, model_max_length=asked.get("model_max_length") or longest,
        **{**tokens, **kept},
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    if config.model_type == "whisper":
        tokenizer.set_prefix_tokens = lambda *_, **__: None  # four tokens before what is said
    return tokenizer


# -- data sets ---------------------------------------------------------------------------------------------------------


def _loaded_or_made(
    load: Callable[..., Any], data: Any, tracer: Any, made_up: MadeUp, more: Sequence[str]
) -> Callable[..., Any]:
    def load_dataset(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(path, *args, **kwargs)
        except Exception as error:
            if not _is_missing(error):
                raise
        languages = "-".join(kwargs[each] for each in ("lang1", "lang2") if each in kwargs)
        named = " ".join(str(each) for each in (path, *args[:1], kwargs.get("name"), languages) if each)
        row = columns_of(named)
        row = as_long_as_published(named, row | columns_asked_for(more, row))
        made_up[named] = tuple(row)
        tracer.assume(f"{named}: a made-up data set with the columns {columns_told(named, row)}")
        made = data_sets_of(named, row, data)
        if kwargs.get("streaming"):
            made = {name: _streamed(each, name) for name, each in made.items()}
        split = kwargs.get("split")
        if split is None:
            return (data.IterableDatasetDict if kwargs.get("streaming") else data.DatasetDict)(made)
        if isinstance(split, (list, tuple)):
            return [made[_split(each)] for each in split]
        return made[_split(split)]

    return load_dataset


def _streamed(made: Any, split: str) -> Any:
    """What is streamed is long: a program may take thousands of rows for a step."""
    rows = made.to_iterable_dataset()
    return rows.repeat(TIMES_STREAMED) if split == "train" else rows


def _in_this_process(change: Callable[..., Any]) -> Callable[..., Any]:
    """There are few rows, and processes that start amid a trace may wait for its locks."""

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, *args, **{name: value for name, value in kwargs.items() if name != "num_proc"})

    return changed


def _again_from_the_first(select: Callable[..., Any]) -> Callable[..., Any]:
    """A made-up data set has as many rows as a program wants to choose."""

    def chosen(self: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return select(self, indices, *args, **kwargs)
        except IndexError:
            if self.info.description != MADE_UP or not len(self):
                raise
        return select(self, [index % len(self) for index in indices], *args, **kwargs)

    return chosen


def _with_rows_to_spare(part: Callable[..., Any]) -> Callable[..., Any]:
    """A made-up data set stands for a long one: also a thousandth of that is more than a batch."""

    def parted(self: Any, test_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.info.description == MADE_UP:
            if isinstance(test_size, int) and test_size >= len(self):
                self = self.select(range(test_size + len(self)))
            if isinstance(test_size, float) and test_size * len(self) < FEWEST_PARTED < len(self):
                test_size = FEWEST_PARTED
        return part(self, test_size, *args, **kwargs)

    return parted


def _heard(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Sound that nobody has recorded needs no decoder."""

    def decode_example(feature: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, dict) and seconds_of(str(value.get("path"))):
            return value if "array" in value else sound(feature.sampling_rate, value["path"])
        return decode(feature, value, *args, **kwargs)

    return decode_example


def _recorded(encode: Callable[..., Any]) -> Callable[..., Any]:
    def encode_example(feature: Any, value: Any) -> Any:
        if isinstance(value, dict) and seconds_of(str(value.get("path"))):
            return {"bytes": None, "path": value["path"]}
        return encode(feature, value)

    return encode_example


def _split(asked: Any) -> str:
    name = re.split(r"[\[+]", str(asked))[0]
    return name if name in ROWS else "train" if name.startswith("train") else "test"


def _is_missing(error: Exception) -> bool:
    return isinstance(error, (ConnectionError, FileNotFoundError)) or any(
        word in f"{type(error).__name__} {error}" for word in ("NotFound", "offline", "Offline", "Hub")
    )


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

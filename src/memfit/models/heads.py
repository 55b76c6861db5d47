"""What a model ends in: the class that a config.json names under `architectures`.

Most name a language model. Some name one that was fine-tuned into something else, with another head and another loss:
it is planned as such, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.errors import InputError
from memfit.models.config_check import show

MAX_LABELS = 1 << 16
USUAL_LABELS = 2
"""As transformers has it where a file says nothing."""
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
LANGUAGE_MODELS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ModelWithLMHead")


@dataclass(frozen=True)
class Head:
    auto: str
    """The class of transformers that finds the model."""
    task: str | None
    """As peft calls it; None where there is nothing to train on."""


HEADS = {
    "ForSequenceClassification": Head("AutoModelForSequenceClassification", "SEQ_CLS"),
    "ForTokenClassification": Head("AutoModelForTokenClassification", "TOKEN_CLS"),
    "ForQuestionAnswering": Head("AutoModelForQuestionAnswering", "QUESTION_ANS"),
    "Model": Head("AutoModel", None),
}


def class_named(data: Mapping[str, Any]) -> str | None:
    named = data.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None


def head_of(data: Mapping[str, Any], where: str) -> Head | None:
    """None is a language model's."""
    name = class_named(data)
    if name is None or name.endswith(LANGUAGE_MODELS):
        return None
    for ending, head in HEADS.items():
        if name.endswith(ending):
            return head
    raise InputError(f"{where}: memfit cannot plan a {show(name)} ('architectures')", hint=as_language_model(name))


def as_language_model(name: str) -> str:
    stem = next((name.removesuffix(ending) for ending in HEADS if name.endswith(ending)), name.partition("For")[0])
    return f'to plan the language model give a copy of config.json with "architectures": ["{stem}ForCausalLM"]'


def labels_of(data: Mapping[str, Any], where: str) -> int:
    names, count = data.get("id2label"), data.get("num_labels", USUAL_LABELS)
    labels = len(names) if isinstance(names, dict) and names else count
    if isinstance(labels, bool) or not isinstance(labels, int) or not 1 <= labels <= MAX_LABELS:
        raise InputError(f"{where}: 'num_labels' is {show(labels)}, not a whole number from 1 to {MAX_LABELS:,}")
    return labels


def problem_of(data: Mapping[str, Any], where: str) -> Any:
    """What the labels are like; None leaves it to their number and type."""
    said = data.get("problem_type")
    if said is not None and said not in PROBLEMS:
        raise InputError(f"{where}: 'problem_type' is {show(said)}, not one of {', '.join(PROBLEMS)}")
    return said

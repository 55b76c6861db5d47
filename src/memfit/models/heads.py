"""What a model ends in and what it reads: its head, and how many tokens a picture is, with its pixels as tensors.

A picture is what the model's own processor makes of it: LLaVA and ViT are given squares of one size, Qwen's models keep
a picture's shape, in multiples of a patch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memfit.errors import InputError, UsageError
from memfit.models.config_check import show

MAX_LABELS = 1 << 16
USUAL_LABELS = 2
"""As transformers has it where a file says nothing."""
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
LANGUAGE_MODELS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ModelWithLMHead")
Reads = Literal["text", "text to text", "pictures", "pictures and text"]


@dataclass(frozen=True)
class Head:
    auto: str
    """The class of transformers that finds the model."""
    task: str | None = None
    """As peft calls it, where it has a word for it."""
    reads: Reads = "text"
    learns: bool = True
    """Whether there is anything to train on."""
    labels: bool = False
    """Whether its size is a number of labels."""


TEXT_TO_TEXT = Head("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", "text to text")
PICTURES_AND_TEXT = Head("AutoModelForImageTextToText", "CAUSAL_LM", "pictures and text")
HEADS = {
    "ForSequenceClassification": Head("AutoModelForSequenceClassification", "SEQ_CLS", labels=True),
    "ForTokenClassification": Head("AutoModelForTokenClassification", "TOKEN_CLS", labels=True),
    "ForQuestionAnswering": Head("AutoModelForQuestionAnswering", "QUESTION_ANS"),
    "ForImageClassification": Head("AutoModelForImageClassification", None, "pictures", labels=True),
    "ForConditionalGeneration": TEXT_TO_TEXT,
    "MTModel": TEXT_TO_TEXT,
    "Model": Head("AutoModel", learns=False),
}
HEAD_NAMES: dict[str, Head] = {
    "causal-lm": Head("AutoModelForCausalLM", "CAUSAL_LM"),
    "masked-lm": Head("AutoModelForMaskedLM"),
    "seq2seq-lm": TEXT_TO_TEXT,
    "sequence-classification": HEADS["ForSequenceClassification"],
    "token-classification": HEADS["ForTokenClassification"],
    "question-answering": HEADS["ForQuestionAnswering"],
    "image-classification": HEADS["ForImageClassification"],
}
"""As `--head` has them, whatever `architectures` says."""


def class_named(data: Mapping[str, Any]) -> str | None:
    named = data.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None


def head_of(data: Mapping[str, Any], where: str) -> Head | None:
    """None is a language model's."""
    name = class_named(data)
    if isinstance(data.get("vision_config"), dict) and (name is None or name.endswith("ForConditionalGeneration")):
        return PICTURES_AND_TEXT
    if name is None or name.endswith(LANGUAGE_MODELS):
        both = data.get("is_encoder_decoder") is True and not (name or "").endswith("ForCausalLM")
        return TEXT_TO_TEXT if both else None
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


# -- pictures ----------------------------------------------------------------------------------------------------------

QWEN = ("qwen2_vl", "qwen2_5_vl")
PICTURE_FAMILIES = ("llava", *QWEN)
"""Models of pictures and text that are planned; of others nobody has read the rule yet."""
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 14 * 14 * 4 * 1280
"""As the processors of Qwen have it where a call does not say otherwise."""
USUAL = (448, 448)
SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


@dataclass(frozen=True)
class Picture:
    """One of them, as the model gets it."""

    tokens: int
    """Of the text's length."""
    pixels: tuple[int, ...]
    """The shape of its numbers; the first is how many rows they are in a batch."""
    grid: tuple[int, int, int] | None = None
    """Time, height and width in patches, where the model is told so."""


def size_of(text: str) -> tuple[int, int]:
    """Width and height."""
    found = SIZE.fullmatch(text.lower())
    if found is None or not all(1 <= int(side) <= 1 << 14 for side in found.groups()):
        raise UsageError(f"--image-size {text!r} is not WIDTHxHEIGHT in pixels", hint="such as 640x480")
    return int(found[1]), int(found[2])


def picture(config: Any, size: str | None) -> Picture:
    """Raises UsageError where the model takes no picture of this size."""
    vision = getattr(config, "vision_config", config)
    if config.model_type in QWEN:
        return _in_patches(vision, *(size_of(size) if size else USUAL))
    side = vision.image_size
    width, height = side if isinstance(side, (list, tuple)) else (side, side)
    if size is not None and size_of(size) != (width, height):
        raise UsageError(
            f"--image-size {size}: a '{config.model_type}' model is given {width}x{height}, whatever the picture's size"
        )
    patches = (width // vision.patch_size) * (height // vision.patch_size)
    # CLIP has a patch more than there are in the picture, and LLaVA leaves the first one out by default.
    patches += getattr(vision, "model_type", "").startswith("clip")
    patches -= getattr(config, "vision_feature_select_strategy", "default") == "default"
    return Picture(patches, (1, vision.num_channels, height, width))


def _in_patches(vision: Any, width: int, height: int) -> Picture:
    patch, merged, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    wide, high = _resized(width, height, patch * merged)
    grid = (1, high // patch, wide // patch)
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    rows = grid[1] * grid[2]
    return Picture(rows // merged**2, (rows, channels * frames * patch * patch), grid)


def _resized(width: int, height: int, factor: int) -> tuple[int, int]:
    """To multiples of `factor`, within the pixels that the processor allows, at nearly the same shape."""
    if max(width, height) / min(width, height) > 200:
        raise UsageError(f"--image-size {width}x{height}: one side is more than 200 times the other")
    wide, high = (round(side / factor) * factor for side in (width, height))
    if wide * high > MOST_PIXELS:
        scale = math.sqrt(width * height / MOST_PIXELS)
        wide, high = (max(factor, math.floor(side / scale / factor) * factor) for side in (width, height))
    elif wide * high < LEAST_PIXELS:
        scale = math.sqrt(LEAST_PIXELS / (width * height))
        wide, high = (math.ceil(side * scale / factor) * factor for side in (width, height))
    return wide, high

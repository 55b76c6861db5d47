"""What a picture is to a model: how many tokens of the text it takes the place of, and its pixels as tensors.

By the rule of the model's own processor: LLaVA and ViT are given squares of one size, Qwen's models keep a picture's
shape, in multiples of a patch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from memfit.errors import UsageError

QWEN = ("qwen2_vl", "qwen2_5_vl")
FAMILIES = ("llava", *QWEN)
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

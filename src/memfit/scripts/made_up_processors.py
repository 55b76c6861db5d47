"""`--synthetic-data`: what turns pictures and sound into numbers, made up as the file that the Hub would have for it.

Which class it is and how large its pictures are, the model's config tells; the rest are the defaults of that class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FILE = "preprocessor_config.json"
_SAME = ("max_length", "num_mel_bins", "sampling_rate")
"""What a config calls as those who prepare sound do."""


def settings_made_up(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What that file would say; None where the model sees and hears nothing."""
    found = _of_pictures(config)
    return _of_sound(config) if found is None else found


def told(settings: Mapping[str, Any]) -> str:
    name = settings.get("image_processor_type") or settings["feature_extractor_type"]
    size = settings.get("size")
    return f"a made-up {name}" + (f", pictures of {_size_told(size)}" if size else "")


def _size_told(size: Mapping[str, int]) -> str:
    if "height" in size:
        return f"{size['width']}x{size['height']}"
    return ", ".join(f"{value} at the {side.replace('_', ' ')}" for side, value in size.items())


def _of_pictures(config: Mapping[str, Any]) -> dict[str, Any] | None:
    from transformers.models.auto import image_processing_auto

    auto: Any = image_processing_auto
    names = _named(auto.IMAGE_PROCESSOR_MAPPING_NAMES, config)
    if names is None:
        return None
    either = [each for each in (names.values() if isinstance(names, Mapping) else names) if each]
    name = min(either, key=len)  # the one that the Hub's files name: others add the library that they use
    kinds = map(auto.get_image_processor_class_from_name, either)
    kind = next((each for each in kinds if each is not None and not getattr(each, "is_dummy", False)), None)
    size = _plain(getattr(kind, "size", None))
    crop = _plain(getattr(kind, "crop_size", None))
    pictures = (config.get("vision_config") or config).get("image_size")
    if isinstance(pictures, int) and not set(size) - {"height", "width", "shortest_edge"}:
        size, crop = dict.fromkeys(size, pictures), dict.fromkeys(crop, pictures)
    return {"image_processor_type": name, **({"size": size} if size else {}), **({"crop_size": crop} if crop else {})}


def _of_sound(config: Mapping[str, Any]) -> dict[str, Any] | None:
    from transformers.models.auto import feature_extraction_auto

    auto: Any = feature_extraction_auto
    name = _named(auto.FEATURE_EXTRACTOR_MAPPING_NAMES, config)
    if name is None:
        return None
    settings = {each: config[each] for each in _SAME if each in config}
    if "num_mel_bins" in settings:
        settings["feature_size"] = settings["num_mel_bins"]
    if config.get("feat_extract_norm") == "layer":  # wav2vec 2.0 and its like: those are trained with a mask
        settings["return_attention_mask"] = True
    return {"feature_extractor_type": name, **settings}


def _named(names: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    return names.get(str(config.get("model_type")))


def _plain(size: Any) -> dict[str, int]:
    said = size if isinstance(size, Mapping) else getattr(size, "__dict__", {})
    return {side: value for side, value in said.items() if isinstance(value, int)}

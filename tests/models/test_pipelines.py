"""The shipped pipelines: parts have their published counts of parameters, a folder has all that its index names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.models.pipelines import is_shipped, pipelines
from memfit.models.presets import find_preset

PUBLISHED = {
    ("stable-diffusion-v1-5/stable-diffusion-v1-5", "unet"): 859_520_964,
    ("CompVis/stable-diffusion-v1-4", "unet"): 859_520_964,
    ("stable-diffusion-v1-5/stable-diffusion-inpainting", "unet"): 859_535_364,
    ("stabilityai/stable-diffusion-2-1", "unet"): 865_910_724,
    ("stabilityai/stable-diffusion-xl-base-1.0", "unet"): 2_567_463_684,
    ("stabilityai/stable-diffusion-xl-base-1.0", "text_encoder_2"): 694_659_840,
    ("madebyollin/sdxl-vae-fp16-fix", ""): 83_653_863,
    ("black-forest-labs/FLUX.1-schnell", "transformer"): 11_891_178_560,
    ("black-forest-labs/FLUX.1-dev", "transformer"): 11_901_408_320,
    ("black-forest-labs/FLUX.1-dev", "text_encoder_2"): 4_762_310_656,
    ("stabilityai/stable-diffusion-3-medium-diffusers", "transformer"): 2_028_328_000,
    ("stabilityai/stable-diffusion-3.5-large", "transformer"): 8_056_627_520,
    ("stabilityai/stable-diffusion-3.5-medium", "transformer"): 2_243_171_520,
}


def parameters_of(config: dict[str, Any]) -> int:
    if "_class_name" in config:
        diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
        with torch.device("meta"):
            model = getattr(diffusers, config["_class_name"]).from_config(config)
    else:
        import transformers

        settings = {key: value for key, value in config.items() if key != "model_type"}
        made = transformers.CONFIG_MAPPING[config["model_type"]](**settings)
        with torch.device("meta"):
            model = getattr(transformers, config["architectures"][0])(made)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "part"), PUBLISHED)
def test_a_part_of_a_pipeline_has_its_published_parameter_count(name: str, part: str) -> None:
    assert parameters_of(dict(pipelines()[name].parts[part])) == PUBLISHED[name, part]


@pytest.mark.parametrize("name", pipelines())
def test_the_folder_of_a_pipeline_has_every_part_that_its_index_names(name: str, tmp_path: Path) -> None:
    pipeline = pipelines()[name]
    folder = pipeline.written_to(tmp_path)
    assert all((folder / each).is_file() for each in pipeline.files())
    assert is_shipped(str(folder))
    if pipeline.kind:
        index = json.loads((folder / "model_index.json").read_text())
        assert index.pop("_class_name") == pipeline.kind
        assert index and all((folder / part).is_dir() for part in index)


def test_no_pipeline_has_the_name_of_a_model() -> None:
    assert [name for name in pipelines() if find_preset(name) is not None] == []

"""Pipelines of diffusers by name: where a program names one that memfit ships, it finds a folder with its configs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from memfit.models.pipelines import pipelines

_LOADERS = (
    ("diffusers.configuration_utils", "ConfigMixin", "load_config"),
    ("diffusers.models.modeling_utils", "ModelMixin", "from_pretrained"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "from_pretrained"),
)


def folder_of(name: Any, tracer: Any, folder: Path) -> Any:
    """`name` itself, where it is none that memfit ships, or a folder of the program's own."""
    found = pipelines().get(str(name))
    if found is None or tracer.stopped is not None or Path(str(name)).is_dir():
        return name
    tracer.assume(f"{name}: the configs of its parts as memfit ships them")
    return str(found.written_to(folder))


def file_of(name: Any, file: Any, within: str | None, tracer: Any, folder: Path) -> str | None:
    place = folder_of(name, tracer, folder)
    found = Path(str(place), within or "", str(file))
    return str(found) if place is not name and found.is_file() else None


def patches_of_pipelines(tracer: Any, folder: Path, done: set[str]) -> list[Any]:
    replaced = []
    for module, kind_name, name in _LOADERS:
        kind = getattr(sys.modules.get(module), kind_name, None)
        if kind is not None and kind_name not in done:
            done.add(kind_name)
            instead: Any = classmethod(_in_folder(kind.__dict__[name].__func__, tracer, folder))
            replaced.append(mock.patch.object(kind, name, instead))
    hub: Any = sys.modules.get("huggingface_hub")
    if hub is not None and "model_info" not in done:
        done.add("model_info")
        replaced.append(mock.patch.object(hub, "model_info", _told(hub.model_info, hub)))
    return replaced


def _in_folder(load: Callable[..., Any], tracer: Any, folder: Path) -> Callable[..., Any]:
    def loaded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (folder_of(args[0], tracer, folder), *args[1:])
        elif "pretrained_model_name_or_path" in kwargs:
            kwargs["pretrained_model_name_or_path"] = folder_of(kwargs["pretrained_model_name_or_path"], tracer, folder)
        return load(cls, *args, **kwargs)

    return loaded


def _told(find: Callable[..., Any], hub: Any) -> Callable[..., Any]:
    def model_info(repo_id: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return find(repo_id, *args, **kwargs)
        except OSError:
            found = pipelines().get(str(repo_id))
            if found is None:
                raise
        return hub.ModelInfo(id=str(repo_id), siblings=[{"rfilename": each} for each in found.files()])

    return model_info

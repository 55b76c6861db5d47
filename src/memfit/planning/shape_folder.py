"""A model's settings as a folder with config.json, for a shape that no preset has."""

from __future__ import annotations

import atexit
import hashlib
import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any

from memfit.core.whole_file import written_whole
from memfit.planning.cache import folder as folder_of_traces


def shape_folder(settings: Mapping[str, Any]) -> Path:
    """The same settings have the same folder: beside the traces that are kept, or only for as long as this process
    lives where none are."""
    text = json.dumps(settings, sort_keys=True, indent=1)
    name = f"{settings.get('model_type', 'model')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    traces = folder_of_traces()
    if traces is not None:
        with suppress(OSError):
            return _written(traces.parent / "shapes" / name, text)
    return _written(_of_this_process() / name, text)


def _written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    config = folder / "config.json"
    if not config.is_file() or config.read_text(encoding="utf-8") != text:
        with written_whole(config) as beside:
            beside.write_text(text, encoding="utf-8")
    return folder


@cache
def _of_this_process() -> Path:
    made = tempfile.mkdtemp(prefix="memfit-")
    atexit.register(rmtree, made, ignore_errors=True)
    return Path(made)

"""Models by their names on the Hub, without the Hub: configs that memfit or the cache has, weights without memory."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from memfit.analysis.own_lines import is_own
from memfit.errors import TraceError
from memfit.files import written_whole
from memfit.models.presets import find_preset
from memfit.tracing.stored import without_memory

CONFIG = "config.json"
_FROM_HUB = re.compile(
    r"huggingface\.co|offline|on the Hub|Couldn't (find any data file|find a dataset|reach)", re.IGNORECASE
)
NO_WEIGHTS = "weights that are not on this machine are taken to have the shapes and type that the config says"


@contextmanager
def hub_pretended(tracer: Any) -> Iterator[None]:
    done: set[str] = set()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memfit-")))

        def patch() -> None:
            hub: Any = sys.modules.get("transformers.utils.hub")
            if hasattr(hub, "cached_files") and "files" not in done:
                done.add("files")
                found = _shipped_configs(hub.cached_files, tracer, folder)
                stack.enter_context(mock.patch.object(hub, "cached_files", found))
            models: Any = sys.modules.get("transformers.modeling_utils")
            if hasattr(models, "PreTrainedModel") and "models" not in done:
                done.add("models")
                kind = models.PreTrainedModel
                find, load = _weights_or_none(models._get_resolved_checkpoint_files), kind._load_pretrained_model
                stack.enter_context(mock.patch.object(models, "_get_resolved_checkpoint_files", find))
                made = staticmethod(_weights_made_up(load, tracer))
                stack.enter_context(mock.patch.object(kind, "_load_pretrained_model", made))

        patch()
        tracer.after_import.append(patch)
        try:
            yield
        except OSError as error:
            raise _told(error) from error
        finally:
            tracer.after_import.remove(patch)


def _shipped_configs(find: Callable[..., Any], tracer: Any, folder: Path) -> Callable[..., Any]:
    def cached_files(path_or_repo_id: Any, filenames: list[str], **kwargs: Any) -> Any:
        name, missing = str(path_or_repo_id), None
        try:
            if (found := find(path_or_repo_id, filenames, **kwargs)) is not None:
                return found
        except OSError as error:
            missing = error
        preset = find_preset(name) if filenames == [CONFIG] and not os.path.isdir(name) else None
        if preset is not None and preset.storage is None:
            tracer.assume(f"{name}: its config as memfit ships it ({preset.name})")
            path = folder / preset.name / CONFIG
            path.parent.mkdir(exist_ok=True)
            with written_whole(path) as beside:
                beside.write_text(json.dumps({"torch_dtype": "float32", **preset.config}))
            return [str(path)]
        if missing is not None:
            raise missing
        return None

    return cached_files


def _told(error: OSError) -> Exception:
    """A folder's own faults are told by the one who finds them."""
    said = str(error)
    if not _FROM_HUB.search(said):
        return error
    frames, here = traceback.extract_tb(error.__traceback__), str(Path(__file__).parents[1])
    own = [frame for frame in frames if is_own(frame.filename) and not frame.filename.startswith(here)]
    where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return TraceError(
        f"{where}the code loads something from the Hub that is not on this machine, and memfit fetches nothing:"
        f" {(own[-1].line or '').strip() if own else said.splitlines()[0]}",
        hint="`hf download NAME` first, or name a folder; `memfit models` lists models whose configs come with memfit;"
        " --synthetic-data makes up tokenizers and data",
    )


def _weights_or_none(find: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(*args: Any, **kwargs: Any) -> Any:
        try:
            return find(*args, **kwargs)
        except OSError:
            if os.path.isdir(str(kwargs.get("pretrained_model_name_or_path", args[0] if args else ""))):
                raise
            return None, None

    return resolve


def _weights_made_up(load: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    def load_weights(model: Any, state_dict: Any, files: Any, *args: Any, **kwargs: Any) -> Any:
        if state_dict is None and files is None:
            tracer.assume(NO_WEIGHTS)
            tied = getattr(model, "all_tied_weights_keys", None) or {}
            turned = {f"{name}.weight" for name, module in model.named_modules() if _stands_for_conv1d(module)}
            state_dict = {
                name: without_memory(tracer, each.shape[::-1] if name in turned else each.shape, each.dtype)
                for name, each in model.state_dict().items() if name not in tied
            }  # fmt: skip
        return load(model, state_dict, files, *args, **kwargs)

    return load_weights


def _stands_for_conv1d(module: Any) -> bool:
    """A quantised layer in the place of one whose weight the file has the other way round."""
    return getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D"

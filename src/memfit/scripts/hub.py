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

from memfit.analysis.stacks import is_own
from memfit.errors import TraceError
from memfit.files import written_whole
from memfit.models.presets import NOT_COMPARED, Preset, encoders, find_preset
from memfit.scripts.hub_pipelines import file_of, folder_of, patches_of_pipelines
from memfit.scripts.hub_uploads import everywhere, patches_of_uploads
from memfit.scripts.made_up_processors import FILE as PROCESSOR
from memfit.scripts.made_up_processors import settings_made_up, told
from memfit.scripts.watched import folder_for_files
from memfit.tracing.stored import without_memory

CONFIG, GENERATION = "config.json", "generation_config.json"
MULTILINGUAL = 51_865
"""So many tokens has a Whisper that knows more than English."""
_FROM_HUB = re.compile(
    r"huggingface\.co|offline|on the Hub|Couldn't (find any data file|find a dataset|reach)"
    r"|[^/\s]+/[^/\s]+ does not appear to have a file named",
    re.IGNORECASE,
)
_OF_PROCESSORS = re.compile(r"\b(image_processing|feature_extraction|processing)_\w+\.py$")
NO_WEIGHTS = (
    "weights that are not on this machine are taken to have the shapes and type that the config says, fp32 if none"
)


@contextmanager
def hub_pretended(tracer: Any, *, made_up: bool = False) -> Iterator[None]:
    """`made_up`: whether tokenizers and data are."""
    done: set[str] = set()
    missed: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memfit-", dir=folder_for_files())))

        def patch() -> None:
            for each in patches_of_pipelines(tracer, folder, done):
                stack.enter_context(each)
            if "uploads" not in done and (uploads := patches_of_uploads(tracer)):
                done.add("uploads")
                real = sys.modules["huggingface_hub"].hf_hub_download
                for each in uploads + everywhere("hf_hub_download", real, _config_of_one(real, tracer, folder)):
                    stack.enter_context(each)
            hub: Any = sys.modules.get("transformers.utils.hub")
            if hasattr(hub, "cached_files") and "files" not in done:
                done.add("files")
                found = _shipped_configs(hub.cached_files, tracer, folder, missed)
                if made_up:
                    found = _processors_made_up(found, tracer, folder)
                stack.enter_context(mock.patch.object(hub, "cached_files", found))
            models: Any = sys.modules.get("transformers.modeling_utils")
            if hasattr(models, "PreTrainedModel") and "models" not in done:
                done.add("models")
                kind = models.PreTrainedModel
                find, load = _weights_or_none(models._get_resolved_checkpoint_files), kind._load_pretrained_model
                stack.enter_context(mock.patch.object(models, "_get_resolved_checkpoint_files", find))
                if hasattr(models, "_get_dtype"):
                    stack.enter_context(mock.patch.object(models, "_get_dtype", _type_or_fp32(models._get_dtype)))
                made = staticmethod(_weights_made_up(load, tracer))
                stack.enter_context(mock.patch.object(kind, "_load_pretrained_model", made))

            parts: Any = sys.modules.get("diffusers.models.modeling_utils")
            if hasattr(getattr(parts, "ModelMixin", None), "_load_pretrained_model") and "diffusers" not in done:
                done.add("diffusers")
                stack.enter_context(mock.patch.object(parts, "_get_model_file", _file_or_none(parts._get_model_file)))
                load = parts.ModelMixin.__dict__["_load_pretrained_model"].__func__
                of_model = classmethod(_of_the_model(load, tracer))
                stack.enter_context(mock.patch.object(parts.ModelMixin, "_load_pretrained_model", of_model))

            timm: Any = sys.modules.get("timm.models._builder")
            if hasattr(timm, "load_pretrained") and "timm" not in done:
                done.add("timm")
                nothing = lambda *_, **__: tracer.assume(NO_WEIGHTS)  # noqa: E731
                stack.enter_context(mock.patch.object(timm, "load_pretrained", nothing))

        stack.enter_context(_weights_by_address(tracer))
        patch()
        tracer.after_import.append(patch)
        try:
            yield
        except OSError as error:
            raise _told(error, missed, made_up) from error
        finally:
            tracer.after_import.remove(patch)


class WeightsElsewhere(dict[str, Any]):
    """Of a file that is not here: whatever is loaded from it has the shapes of what it is loaded into."""

    def __getitem__(self, _: str) -> Any:
        return self

    def __delitem__(self, _: str) -> None:
        pass

    def pop(self, *_: Any) -> Any:
        return self

    get = pop


@contextmanager
def _weights_by_address(tracer: Any) -> Iterator[None]:
    """`torch.hub.load_state_dict_from_url`, by which torchvision finds its weights too."""
    import torch

    find, load, traced = torch.hub.load_state_dict_from_url, torch.nn.Module.load_state_dict, [True]

    def found_or_elsewhere(*args: Any, **kwargs: Any) -> Any:  # others import it by name, and keep it
        try:
            return find(*args, **kwargs)
        except OSError:
            if not traced[0]:
                raise
        tracer.assume(NO_WEIGHTS)
        return WeightsElsewhere()

    def load_unless_elsewhere(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, WeightsElsewhere):
            state_dict = module.state_dict()
        return load(module, state_dict, *args, **kwargs)

    with (
        mock.patch.object(torch.hub, "load_state_dict_from_url", found_or_elsewhere),
        mock.patch.object(torch.nn.Module, "load_state_dict", load_unless_elsewhere),
    ):
        try:
            yield
        finally:
            traced[0] = False


def _shipped_configs(find: Callable[..., Any], tracer: Any, folder: Path, missed: list[str]) -> Callable[..., Any]:
    def cached_files(path_or_repo_id: Any, filenames: list[str], **kwargs: Any) -> Any:
        name, missing = str(path_or_repo_id), None
        try:
            place = folder_of(path_or_repo_id, tracer, folder)
            if (found := find(place, filenames, **kwargs)) is not None:
                return found
        except OSError as error:
            missing = error
        preset = None if os.path.isdir(name) else find_preset(name)
        if preset is not None and filenames == [GENERATION] and preset.model_type == "whisper":
            return [_written(folder / preset.name / GENERATION, _tokens_of_whisper(preset))]
        if filenames != [CONFIG]:
            preset = None
        if preset is not None and preset.storage is not None:
            raise _quantised_already(name)
        if preset is not None:
            return [_written_as_shipped(name, preset, tracer, folder)]
        if missing is not None:
            missed[:] = [name, *filenames]
            missing.missed = missed  # type: ignore[attr-defined]
            raise missing
        return None

    return cached_files


def _config_of_one(find: Callable[..., Any], tracer: Any, folder: Path) -> Callable[..., Any]:
    """For those who ask the Hub for the file by themselves."""

    def hf_hub_download(repo_id: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return find(repo_id, filename, *args, **kwargs)
        except OSError:
            within = kwargs.get("subfolder")
            if (file := file_of(repo_id, filename, within, tracer, folder)) is not None:
                return file
            preset = find_preset(str(repo_id)) if filename == CONFIG and not within else None
            if preset is None or preset.storage is not None or tracer.stopped is not None:
                raise
        return _written_as_shipped(str(repo_id), preset, tracer, folder)

    return hf_hub_download


def _written_as_shipped(name: str, preset: Preset, tracer: Any, folder: Path) -> str:
    told = f"{name}: its config as memfit ships it ({preset.name})"
    tracer.assume(f"{told}; {NOT_COMPARED}" if preset.note == NOT_COMPARED else told)
    said = {"torch_dtype": "float32", **_architecture(preset), **preset.config}
    return _written(folder / preset.name / CONFIG, said)


def _tokens_of_whisper(preset: Preset) -> dict[str, Any]:
    """Which ids stand for languages and tasks, as OpenAI numbers them; the file has them beside the config."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    said = {name: value for name, value in preset.config.items() if name.endswith("_token_id")} | {"max_length": 448}
    if preset.config["vocab_size"] < MULTILINGUAL:
        return {**said, "is_multilingual": False}
    count = preset.config["vocab_size"] - 51_766
    first, after = 50_259, 50_259 + count
    return {
        **said, "is_multilingual": True, "no_timestamps_token_id": after + 5,
        "lang_to_id": {f"<|{code}|>": first + number for number, code in enumerate(list(LANGUAGES)[:count])},
        "task_to_id": {"translate": after, "transcribe": after + 1},
    }  # fmt: skip


def _processors_made_up(find: Callable[..., Any], tracer: Any, folder: Path) -> Callable[..., Any]:
    """Of a model whose config is here, where the file itself is not."""

    def cached_files(path_or_repo_id: Any, filenames: list[str], **kwargs: Any) -> Any:
        missing = None
        try:
            if (found := find(path_or_repo_id, filenames, **kwargs)) is not None or filenames != [PROCESSOR]:
                return found
        except OSError as error:
            if filenames != [PROCESSOR]:
                raise
            missing = error
        try:
            configs = find(path_or_repo_id, [CONFIG]) or ()
        except OSError:
            configs = ()
        settings = settings_made_up(json.loads(Path(configs[0]).read_text(encoding="utf-8"))) if configs else None
        if settings is not None:
            name = str(path_or_repo_id)
            tracer.assume(f"{name}: {told(settings)}")
            return [_written(folder / name.replace(os.sep, "--") / PROCESSOR, settings)]
        if missing is not None:
            raise missing
        return None

    return cached_files


def _written(path: Path, settings: dict[str, Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    with written_whole(path) as beside:
        beside.write_text(json.dumps(settings))
    return str(path)


def _architecture(preset: Preset) -> dict[str, Any]:
    """As the Hub's own file has it, of a decoder of text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    name = CAUSAL.get(str(preset.config.get("model_type")))
    return {} if name is None or preset in encoders() else {"architectures": [name]}


def _told(error: OSError, missed: list[str], made_up: bool) -> Exception:
    """A folder's own faults are told by the one who finds them, and what memfit has found in memfit's words."""
    if (found := _found_by_memfit(error)) is not None:
        return TraceError(found.message, hint=found.hint)
    said = str(error)
    if not _FROM_HUB.search(said):
        return error
    frames, here = traceback.extract_tb(error.__traceback__), str(Path(__file__).parents[1])
    own = [frame for frame in frames if is_own(frame.filename) and not frame.filename.startswith(here)]
    where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    name, what = (missed[0], ", ".join(missed[1:])) if _is_about_files(error, missed) else ("", "something")
    hint = f"`hf download {name or 'NAME'}{f' {CONFIG}' * (what == CONFIG)}` first, or name a folder"
    if what == CONFIG:
        hint += f" with its {CONFIG}; `memfit models` lists models whose configs come with memfit"
    elif not made_up:
        hint += "; --synthetic-data makes up tokenizers, processors of pictures and sound, and data"
    elif any(_OF_PROCESSORS.search(frame.filename) for frame in frames):
        hint += "; a processor of pictures or sound is made up where the model's config is here"
    return TraceError(
        f"{where}the code loads {what}{f' of {name}' * bool(name)} from the Hub that is not on this machine, and memfit"
        f" fetches nothing: {(own[-1].line or '').strip() if own else said.splitlines()[0]}",
        hint=hint,
    )


def _found_by_memfit(error: BaseException | None) -> TraceError | None:
    """transformers 5.23 makes an OSError of whatever ends the reading of a config."""
    while error is not None and not isinstance(error, TraceError):
        error = error.__cause__ or error.__context__
    return error


def _is_about_files(error: BaseException | None, missed: list[str]) -> bool:
    """Whether it comes from the last files that were not found, and not from a data set."""
    while error is not None and getattr(error, "missed", None) is not missed:
        error = error.__cause__ or error.__context__
    return error is not None


def _weights_or_none(find: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(*args: Any, **kwargs: Any) -> Any:
        try:
            return find(*args, **kwargs)
        except OSError:
            within = (kwargs.get("download_kwargs") or {}).get("subfolder") or kwargs.get("subfolder") or ""
            folder = Path(str(kwargs.get("pretrained_model_name_or_path", args[0] if args else "")), within)
            if folder.is_dir() and not _has_config_alone(folder):
                raise
            return None, None

    return resolve


def _has_config_alone(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not any(map(_is_weights, folder.iterdir()))


def _file_or_none(find: Callable[..., Any]) -> Callable[..., Any]:
    """Of diffusers, which takes what is in a file in place of the file."""

    def get_model_file(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return find(path, *args, **kwargs)
        except OSError:
            if not _has_config_alone(Path(str(path), kwargs.get("subfolder") or "")):
                raise
        return WeightsElsewhere()

    return get_model_file


def _of_the_model(load: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    def load_weights(cls: Any, model: Any, weights: Any, file: Any, name: Any, keys: Any, **kwargs: Any) -> Any:
        if isinstance(weights, WeightsElsewhere):
            if getattr(kwargs.get("hf_quantizer"), "pre_quantized", False):
                raise _quantised_already(str(name))
            tracer.assume(NO_WEIGHTS)
            weights = {each: without_memory(tracer, w.shape, w.dtype) for each, w in model.state_dict().items()}
            keys = list(weights)
        return load(cls, model, weights, file, name, keys, **kwargs)

    return load_weights


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".gguf", ".msgpack", ".h5") or file.name.endswith(".index.json")


def _type_or_fp32(find: Callable[..., Any]) -> Callable[..., Any]:
    """Where neither the config nor weights tell."""

    def get_dtype(dtype: Any, files: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        told = dtype != "auto" or files is not None or getattr(config, "dtype", None) is not None
        return find(dtype if told else "float32", files, config, *args, **kwargs)

    return get_dtype


def _weights_made_up(load: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    def load_weights(model: Any, state_dict: Any, files: Any, *args: Any, **kwargs: Any) -> Any:
        if state_dict is None and files is None:
            how = args[0] if args else kwargs.get("load_config")
            if getattr(getattr(how, "hf_quantizer", None), "pre_quantized", False):
                raise _quantised_already(str(model.config.name_or_path or "the model"))
            tracer.assume(NO_WEIGHTS)
            tied = _tied(model)
            turned = {f"{name}.weight" for name, module in model.named_modules() if _stands_for_conv1d(module)}
            state_dict = {
                name: without_memory(tracer, each.shape[::-1] if name in turned else each.shape, each.dtype)
                for name, each in model.state_dict().items()
                if name not in tied
            }
        return load(model, state_dict, files, *args, **kwargs)

    return load_weights


def _tied(model: Any) -> dict[str, str]:
    """By name, what a checkpoint does not have a second time. That of a T5 has both matrices of words where its config
    says so, and transformers, which ties those of the whole family first, lets them be two as soon as it sees that."""
    tied = getattr(model, "all_tied_weights_keys", None)
    said = _config_of(model)
    if tied and said.get("tie_word_embeddings") is False:
        head = model.get_output_embeddings()
        apart = [f"{name}.weight" for name, module in model.named_modules() if module is head and module is not None]
        for name in apart:
            tied.pop(name, None)
    return tied or {}


def _config_of(model: Any) -> dict[str, Any]:
    """As it is written: what transformers makes of it need not say the same."""
    find: Any = sys.modules["transformers.utils.hub"]
    try:
        files = find.cached_files(str(model.config.name_or_path), [CONFIG])
        said = json.loads(Path(files[0]).read_text(encoding="utf-8")) if files else {}
    except (OSError, ValueError):
        return {}
    return dict(said)


def _quantised_already(name: str) -> TraceError:
    """Which tensors such a file has, only the file says."""
    return TraceError(
        f"{name} is a checkpoint that is quantised already, and its weights are not on this machine",
        hint=f"`hf download {name}` first; or the model that it was made of, with a quantization_config;\n"
        f"`memfit plan lora --model {name}` (forward, generate) plans the checkpoint by itself",
    )


def _stands_for_conv1d(module: Any) -> bool:
    """A quantised layer in the place of one whose weight the file has the other way round."""
    return getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D"

"""Weights in the folder of another program, as the beginning of a run: found, compared with the model, and read.

    found = find_weights(Path("outputs/gsa-512m/step_5000"))        # None where no file looks like weights
    load_weights(found, model)                                      # InputError where they are another model's

A folder that memfit or the Trainer has written is continued (`checkpoints.py`). Any other has weights at best: steps,
optimizer and the order of the data begin anew. Nothing of a pickle is run: tensors are read, or the file is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from memfit.errors import InputError
from memfit.jobs.training.checkpoints import IDENTITY, STATE
from memfit.models.checkpoint import read_header

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
NOT_WEIGHTS = ("optim", "sched", "scaler", "rng", "random", "training_args", "train_state", "training_state")
"""How files begin that hold something else of a run."""
INSIDE = ("", "model", "pytorch_model_fsdp_0")
"""Folders in a checkpoint in which programs put the model."""
HELD_UNDER = ("model", "model_state_dict", "state_dict", "module", "weights", "model_state")
PREFIXES = ("module.", "_orig_mod.", "model.", "base_model.model.")
SHOWN = 3


@dataclass(frozen=True)
class ForeignWeights:
    folder: Path
    files: tuple[Path, ...]
    """Of one kind: shards of safetensors, or pickles of which one is the model."""

    def in_words(self) -> str:
        return ", ".join(each.relative_to(self.folder).as_posix() for each in self.files[:SHOWN])


def find_weights(folder: Path) -> ForeignWeights | None:
    for inside in INSIDE:
        place = folder / inside
        files = [each for each in sorted(place.iterdir()) if each.is_file()] if place.is_dir() else []
        files = [each for each in files if not each.name.lower().startswith(NOT_WEIGHTS)]
        for kinds in ((".safetensors",), PICKLED):
            if found := tuple(each for each in files if each.suffix in kinds):
                return ForeignWeights(folder, found)
    return None


def not_a_checkpoint(said: str, folder: Path) -> InputError:
    there = sorted(f"{each.name}/" if each.is_dir() else each.name for each in folder.iterdir())
    holds = f"it holds {', '.join(there[:6])}{' and more' if len(there) > 6 else ''}" if there else "it is empty"
    return InputError(
        f"resume_from '{said}' is no checkpoint: looked for {STATE} and {IDENTITY}, which memfit writes, for"
        f" checkpoint-N of the Trainer, and for weights (*.safetensors, {', '.join(f'*{each}' for each in PICKLED)});"
        f" {holds}"
    )


# -- against the model -------------------------------------------------------------------------------------------------


def check_weights(found: ForeignWeights, model: nn.Module) -> str:
    """A note on what begins anew. The model may be on meta: nothing but names and shapes is compared."""
    stored = _matched(found, model, device="meta")
    return (
        f"'{found.folder}' has no state of a run: the {len(stored):,} weights in {found.in_words()} are the beginning,"
        " and steps, optimizer, learning rate and the order of the data begin anew"
    )


def load_weights(found: ForeignWeights, model: nn.Module) -> None:
    """In place, in the model's own types."""
    stored = _matched(found, model, device="cpu")
    with torch.no_grad():
        for name, tensor in _weights_of(model).items():
            if name in stored:
                tensor.copy_(stored[name])


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    """By the names of its state dict; of one with adapters the adapters alone, by the names that peft saves."""
    if not hasattr(model, "peft_config"):
        return dict(model.state_dict())
    return {name.replace(".default.", "."): each for name, each in model.state_dict().items() if ".lora_" in name}


def _matched(found: ForeignWeights, model: nn.Module, *, device: str) -> dict[str, Tensor]:
    """What is stored, by the model's own names."""
    wanted = _weights_of(model)
    best: tuple[int, str, dict[str, Tensor]] = (-1, "", {})
    for source, stored in _read(found, device):
        for spelled in _spellings(stored):
            fits = sum(name in wanted and each.shape == wanted[name].shape for name, each in spelled.items())
            if fits > best[0]:
                best = fits, source, spelled
    _, source, stored = best
    tied = _tied(model)
    missing = [
        name for name in wanted if name not in stored and not any(other in stored for other in tied.get(name, ()))
    ]
    other = [name for name in wanted if name in stored and stored[name].shape != wanted[name].shape]
    if missing or other:
        raise _no_match(found, source, stored, wanted, missing, other)
    return {name: each for name, each in stored.items() if name in wanted}


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Names of one and the same weight, as of an embedding that is the head too: one of them is enough."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: group for group in groups.values() if len(group) > 1 for name in group}


def _spellings(stored: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """As they are; without what a wrapper has put before each name; with what one has taken away."""
    yield stored
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in stored):
            yield {name.removeprefix(prefix): each for name, each in stored.items()}
    yield {f"model.{name}": each for name, each in stored.items()}


def _no_match(
    found: ForeignWeights,
    source: str,
    stored: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    missing: list[str],
    other: list[str],
) -> InputError:
    said = [f"{len(wanted) - len(missing) - len(other):,} of {len(wanted):,} weights of this model are there"]
    if missing:
        more = f" and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else ""
        said.append(f"not there: {', '.join(missing[:SHOWN])}{more}")
    if other:
        shapes = (f"{name} {_shape(stored[name])} there and {_shape(wanted[name])} here" for name in other[:SHOWN])
        said.append(f"of another shape: {', '.join(shapes)}")
    strange = [name for name in stored if name not in wanted]
    if strange:
        said.append(f"there instead: {', '.join(strange[:SHOWN])}")
    return InputError(
        f"resume_from '{found.folder}': the weights in {source} are not those of this model: {'; '.join(said)}",
        hint="name the model that they are of, with its settings; or start without resume_from",
    )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "1"


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(found: ForeignWeights, device: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Where it stands and what is in it: all safetensors as one, or a pickle at a time."""
    if found.files[0].suffix == ".safetensors":
        yield found.in_words(), {name: each for path in found.files for name, each in _safetensors(path, device)}
        return
    for path in found.files:
        if stored := _tensors_in(_unpickled(path, device)):
            yield path.name, stored


def _safetensors(path: Path, device: str) -> Iterator[tuple[str, Tensor]]:
    if device == "meta":
        yield from ((each.name, torch.empty(each.shape, device="meta")) for each in read_header(path).tensors)
    else:
        yield from safetensors.torch.load_file(path).items()


def _unpickled(path: Path, device: str) -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, KeyError, AttributeError) as error:
        raise InputError(
            f"resume_from: '{path}' cannot be read as tensors alone, and memfit runs no code out of a file"
            f" ({type(error).__name__})",
            hint="in the program that wrote it: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')",
        ) from error


def _tensors_in(held: Any) -> dict[str, Tensor]:
    """A state dict, or one under a usual name in a dictionary of other things."""
    if not isinstance(held, Mapping):
        return {}
    tensors = {str(name): each for name, each in held.items() if isinstance(each, Tensor)}
    if len(tensors) > len(held) / 2:
        return tensors
    return next((found for name in HELD_UNDER if (found := _tensors_in(held.get(name)))), {})

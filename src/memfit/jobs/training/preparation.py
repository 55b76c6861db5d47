"""Everything that can be wrong with a training job is found here, in seconds, before a GPU is touched."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import InputError, UsageError
from memfit.jobs.source import Source, find_source, load_tokenizer
from memfit.jobs.training.batch_sizes import BatchSizes, resolve_batch
from memfit.jobs.training.checkpoints import (
    check_checkpoint,
    find_checkpoint,
    find_checkpoints,
    has_state,
    step_of,
    steps_done,
)
from memfit.jobs.training.collating import Collator
from memfit.jobs.training.config import DataConfig, TrainConfig, no_effect
from memfit.jobs.training.data import TrainingData, read_training_data
from memfit.jobs.training.examples import is_on_hub, source_of
from memfit.jobs.training.foreign_weights import ForeignWeights, check_weights, find_weights, not_a_checkpoint
from memfit.jobs.training.levers import check_levers
from memfit.jobs.training.order import total_steps
from memfit.jobs.training.processes import processes
from memfit.jobs.training.shapes import POSITIONS, VOCABULARY, is_basics, number_in, shape_of
from memfit.jobs.training.tokenizers import pad_id_of, tokenizer_named, tokenizer_of_shape
from memfit.jobs.training.whole_checkpoint import ADAPTERS, incomplete
from memfit.models.gsa_names import is_gsa


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A job whose every part has been looked at."""

    config: TrainConfig
    batch: BatchSizes
    data: TrainingData
    tokenizer: Any
    pad_id: int
    source: Source | None
    """Where the weights are; None for a model that is trained from scratch."""
    shape: dict[str, Any] | None
    """Its architecture; None where the model is somebody's own code."""
    output_dir: Path
    resume_from: Path | None
    start_from: ForeignWeights | None = None
    """Another program's weights, with which a new run begins."""
    notes: tuple[str, ...] = ()

    @property
    def total_steps(self) -> int:
        samples, rows = len(self.data), self.batch.global_batch_size
        return total_steps(self.config.schedule, samples=samples, global_batch_size=rows)

    @property
    def epochs(self) -> float:
        return self.total_steps * self.batch.global_batch_size / len(self.data)

    @property
    def collate(self) -> Collator:
        return Collator(self.pad_id, mask=not self.data.packed)

    def with_micro_batch(self, rows: int) -> TrainJob:
        """The same job at the same global batch."""
        return dataclasses.replace(self, batch=self.batch.with_micro_batch(rows))

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config.to_json(), "batch": self.batch.to_json(), "data": self.data.summary.to_json(),
            "data_sha256": self.data.fingerprint, "steps": self.total_steps, "output_dir": str(self.output_dir),
            "resume_from": None if self.resume_from is None else str(self.resume_from),
            "start_from": None if self.start_from is None else str(self.start_from.folder), "notes": list(self.notes),
        }  # fmt: skip

    def in_lines(self) -> list[str]:
        config = self.config
        how = config.method.kind if config.method.kind == "full" else f"LoRA of rank {config.method.rank}"
        begun = "from scratch" if self.source is None else "pre-trained"
        if self.start_from is not None:
            begun = f"with the weights in {self.start_from.folder}"
        return [
            f"model: {config.model.name}, {begun}, {how}, {config.precision}",
            *self.data.summary.in_lines(),
            f"batch: {self.batch.in_words()}",
            f"steps: {self.total_steps:,}, {self.epochs:,.2f} epochs",
            f"output: {self.output_dir}" + ("" if self.resume_from is None else f", continued from {self.resume_from}"),
        ]


def prepare_job(
    config: TrainConfig, *, world_size: int | None = None, say: Callable[[str], None] | None = None
) -> TrainJob:
    """Under torchrun the number of processes is in WORLD_SIZE. Nothing is written yet."""
    source_of(config.data)
    batch = resolve_batch(config.batch, processes() if world_size is None else world_size)
    output_dir = Path(os.path.abspath(os.path.expanduser(config.output_dir)))
    resume_from, start_from = find_beginning(config, output_dir)
    check_output(output_dir, resume_from=resume_from)
    check_device(config)
    of_levers = check_levers(config, world_size=batch.world_size)
    source, tokenizer = _model(config, say)
    shape = shape_of(config.model, source)
    _check_positions(config, shape)
    data = read_training_data(config.data, tokenizer)
    _check_vocabulary(config, data, shape)
    notes = [*config.notes(), *of_levers, *notes_on_data(config, batch, data)]
    job = TrainJob(
        config=config, batch=batch, data=data, tokenizer=tokenizer, pad_id=pad_id_of(tokenizer), source=source,
        shape=shape, output_dir=output_dir, resume_from=resume_from, start_from=start_from,
    )  # fmt: skip
    if start_from is not None:
        notes.append(note_on_weights(job, start_from))
    if resume_from is not None:
        notes += check_checkpoint(resume_from, job)
        if (done := steps_done(resume_from)) >= job.total_steps:
            raise UsageError(
                f"'{resume_from}' has {done:,} steps, and this config ends at step {job.total_steps:,}",
                hint="a larger max_steps or epochs goes on from there",
            )
    return dataclasses.replace(job, notes=tuple(notes))


def find_beginning(config: TrainConfig, output_dir: Path) -> tuple[Path | None, ForeignWeights | None]:
    """The checkpoint to continue, or another program's weights to begin with, or neither."""
    said = config.saving.resume_from
    if said is None:
        return None, None
    folder = find_checkpoint(said, output_dir)
    if has_state(folder):
        return folder, None
    found = find_weights(folder)
    if found is None:
        raise not_a_checkpoint(said, folder)
    return None, found


def note_on_weights(job: TrainJob, found: ForeignWeights) -> str:
    """Compared with the model as it would be built, on meta. Raises InputError where they are another's."""
    import torch

    from memfit.jobs.training.model_building import build_for_training

    model = job.config.model
    name = model.name if job.source is None else str(job.source.folder)
    plain = dataclasses.replace(
        job.config, model=dataclasses.replace(model, name=name, from_scratch=True),
        memory=dataclasses.replace(job.config.memory, auto=False, offload=()),
    )  # fmt: skip
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        built = build_for_training(dataclasses.replace(job, config=plain, source=None, start_from=None))
    return check_weights(found, built)


def notes_on_data(config: TrainConfig, batch: BatchSizes, data: TrainingData) -> list[str]:
    notes = []
    if len(data) < batch.global_batch_size:
        few = f"{len(data):,} samples are fewer than one global batch of {batch.global_batch_size:,}"
        notes.append(f"{few}: each step sees some of them more than once")
    if is_gsa(config.model.name) and not data.packed:
        notes.append("GSA takes padding for text when it counts keys: packing: true leaves none")
    return [*notes, *_without_effect(config.data, data)]


def _without_effect(config: DataConfig, data: TrainingData) -> Iterator[str]:
    """Settings that these data do not use."""
    if data.packed:
        yield from no_effect("data", config, ("too_long",), "where samples are packed")
    if not is_on_hub(config.source):
        yield from no_effect("data", config, ("split", "subset"), "with files: they are of data sets on the Hub")
    if data.summary.format == "text":
        yield from no_effect("data", config, ("template", "mask_prompt"), "with running text, which has no prompts")
    else:
        yield from no_effect("data", config, ("text_column",), "with prompts and answers")


def check_output(folder: Path, *, resume_from: Path | None) -> None:
    """It can be written, and no other run's checkpoints are in it, nor later ones of this run: they would count as the
    last, and be kept instead of the new ones."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output_dir '{folder}' is a file")
    there = find_checkpoints(folder)
    if there and resume_from is None:
        raise InputError(
            f"output_dir '{folder}' holds checkpoints of an earlier run, up to {there[-1].name}",
            hint=f"--resume_from {there[-1]} continues it (or `latest`); or another --output_dir",
        )
    if there and resume_from is not None and not _is_same_folder(resume_from.parent, folder):
        raise InputError(
            f"output_dir '{folder}' holds checkpoints of another run than '{resume_from}'", hint="another --output_dir"
        )
    if resume_from is not None and (later := _later(there, steps_done(resume_from))):
        raise InputError(
            f"output_dir '{folder}' holds later checkpoints than {resume_from.name}, up to {later[-1].name}",
            hint=f"--resume_from {later[-1]} goes on from there; to go back, another --output_dir, or move them away",
        )
    there_already = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there_already):
            pass
    except OSError as error:
        raise InputError(f"output_dir '{folder}' cannot be written: {error.strerror}") from error


def _is_same_folder(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _later(checkpoints: list[Path], done: int) -> list[Path]:
    """What is damaged does not count: going back behind it is the way on."""
    after = [each for each in checkpoints if (step_of(each) or 0) > done]
    return [each for each in after if not any(incomplete(each, lora=(each / ADAPTERS).exists()))]


def check_device(config: TrainConfig) -> None:
    if config.device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"device cuda: torch {torch.__version__} finds no GPU here", hint="device: cpu trains without one"
        )


def _model(config: TrainConfig, say: Callable[[str], None] | None) -> tuple[Source | None, Any]:
    model = config.model
    source = None
    if not model.starts_from_scratch:
        source = find_source(model.name, cache_dir=model.cache_dir, say=say)
    if model.tokenizer is not None:
        return source, tokenizer_named(model.tokenizer, cache_dir=model.cache_dir, say=say)
    if source is not None:
        return source, load_tokenizer(source.folder)
    if is_gsa(model.name) or is_basics(model.name):
        raise UsageError(
            f"model.tokenizer: {model.name} has none of its own",
            hint="a folder with tokenizer.json, a hub id, or `bytes`, which needs no file",
        )
    return None, tokenizer_of_shape(model.name, cache_dir=model.cache_dir)


def _check_positions(config: TrainConfig, shape: dict[str, Any] | None) -> None:
    most = number_in(shape, POSITIONS)
    if most is not None and config.data.max_seq_len > most:
        raise UsageError(f"max_seq_len {config.data.max_seq_len:,}: {config.model.name} has {most:,} positions")


def _check_vocabulary(config: TrainConfig, data: TrainingData, shape: dict[str, Any] | None) -> None:
    words = number_in(shape, VOCABULARY)
    if words is not None and data.highest_id >= words:
        raise UsageError(
            f"token {data.highest_id:,} is in the data, and {config.model.name} knows {words:,} tokens",
            hint="model.tokenizer is not the one of this model",
        )

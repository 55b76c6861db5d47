"""Everything that can be wrong with a training job is found here, in seconds, before a GPU is touched."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memfit.errors import InputError, MemfitError, UsageError
from memfit.jobs.training.batch import BatchSizes, is_first, launched, processes, processes_meant, resolve_batch
from memfit.jobs.training.checkpoints import (
    ADAPTERS,
    check_checkpoint,
    find_checkpoint,
    find_checkpoints,
    has_state,
    incomplete,
    step_of,
    steps_done,
)
from memfit.jobs.training.config import ModelConfig, TrainConfig
from memfit.jobs.training.data import Collator, TrainingData, read_training_data, rows_of_full_length, total_steps
from memfit.jobs.training.examples import (
    check_there,
    is_on_hub,
    pad_id_of,
    source_of,
    tokenizer_named,
    tokenizer_of_shape,
)
from memfit.jobs.training.foreign_weights import ForeignWeights, check_weights, find_weights, not_a_checkpoint
from memfit.jobs.training.refusals import check_engine, missing_gpu, missing_packages
from memfit.jobs.training.result import is_written_to
from memfit.jobs.training.shapes import POSITIONS, VOCABULARY, number_in, shape_of
from memfit.models.files import Source, find_here, find_source, load_tokenizer
from memfit.models.gguf import gguf_file
from memfit.models.presets import is_basics, is_gsa
from memfit.models.registry import resolve

Found = TypeVar("Found")


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
    data_read: bool = True
    """If not, which only a plan can do with, `data` is a single row, as long as rows may be."""

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

    @property
    def knows_its_steps(self) -> bool:
        return self.data_read or self.config.schedule.max_steps is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config.to_json(), "batch": self.batch.to_json(),
            "data": self.data.summary.to_json() if self.data_read else None,
            "data_sha256": self.data.fingerprint if self.data_read else None,
            "steps": self.total_steps if self.knows_its_steps else None, "output_dir": str(self.output_dir),
            "resume_from": None if self.resume_from is None else str(self.resume_from),
            "start_from": None if self.start_from is None else str(self.start_from.folder), "notes": list(self.notes),
        }  # fmt: skip

    def in_lines(self) -> list[str]:
        config = self.config
        how = "full" if config.workload.kind == "train" else f"LoRA of rank {config.workload.rank}"
        if (work := config.workload).is_quantised:
            bits = f"{work.quant} weights" if work.stored is None else f"weights stored as {work.stored.in_words()}"
            how += f" on {bits}"
        begun = "from scratch" if config.model.starts_from_scratch else "pre-trained"
        if self.start_from is not None:
            begun = f"with the weights in {self.start_from.folder}"
        rows = f"rows of max_seq_len {config.data.max_seq_len:,}"
        unread = f"data: {config.data.source or 'none named'}, not read: planned for {rows}, the longest"
        steps = f"{self.total_steps:,}" if self.knows_its_steps else "not known until the data are read"
        if self.data_read:
            steps += f", {self.epochs:,.2f} epochs"
        return [
            f"model: {config.model.name}, {begun}, {how}, {config.workload.precision}",
            *(self.data.summary.in_lines() if self.data_read else [unread]),
            f"batch: {self.batch.in_words()}",
            f"steps: {steps}",
            f"output: {self.output_dir}" + ("" if self.resume_from is None else f", continued from {self.resume_from}"),
        ]


def prepare_job(config: TrainConfig, *, say: Callable[[str], None] | None = None, to_run: bool = True) -> TrainJob:
    """Under torchrun the number of processes is in WORLD_SIZE. Nothing is written yet.

    Where the job is only planned (`to_run=False`) nothing is fetched but a tokenizer, and what a run would need of this
    machine is a note."""
    needs = MachineNeeds(to_run)
    has_source = needs.met(lambda: source_of(config.data)) is not None
    batch = resolve_batch(config.batch, _processes(config, needs))
    output_dir = Path(os.path.abspath(os.path.expanduser(config.output_dir)))
    beginning = needs.met(lambda: find_beginning(config, output_dir))
    resume_from, start_from = beginning or (None, None)
    if beginning is not None:
        needs.met(lambda: check_output(output_dir, resume_from=resume_from))
    of_engine = check_engine(config, world_size=batch.world_size)
    needs.report([*missing_packages(config), *missing_gpu(config, world_size=batch.world_size)])
    source = _source(config.model, needs, say)
    tokenizer = needs.met(lambda: _tokenizer(config.model, source, say), unless=_named_wrong(config.model))
    shape = shape_of(config.model, source)
    _check_positions(config, shape)
    if has_source and tokenizer is None:
        check_there(config.data)
    data = None
    if has_source and tokenizer is not None:
        on_disk = not is_on_hub(source_of(config.data))
        data = needs.met(lambda: read_training_data(config.data, tokenizer), unless=on_disk)
    if data is not None:
        _check_vocabulary(config, data, shape)
    notes = [*config.notes(), *of_engine, *(() if data is None else notes_on_data(config, batch, data))]
    job = TrainJob(
        config=config,
        batch=batch,
        data=data or rows_of_full_length(config.data),
        data_read=data is not None,
        tokenizer=tokenizer,
        pad_id=pad_id_of(tokenizer),
        source=source,
        shape=shape,
        output_dir=output_dir,
        resume_from=resume_from,
        start_from=start_from,
    )
    if start_from is not None:
        notes.append(note_on_weights(job, start_from))
    if resume_from is not None and data is not None:
        notes += check_checkpoint(resume_from, job)
        if (done := steps_done(resume_from)) >= job.total_steps:
            raise UsageError(
                f"'{resume_from}' has {done:,} steps, and this config ends at step {job.total_steps:,}",
                hint="a larger max_steps or epochs goes on from there",
            )
    return dataclasses.replace(job, notes=(*notes, *needs.notes))


class MachineNeeds:
    """What a run needs of this machine: an error where the job is to run, a note where it is only planned."""

    def __init__(self, to_run: bool) -> None:
        self.to_run = to_run
        self.notes: list[str] = []

    def met(self, look: Callable[[], Found], *, unless: bool = False) -> Found | None:
        """What `look` finds. `unless` it is wrong on any machine."""
        try:
            return look()
        except MemfitError as error:
            if self.to_run or unless:
                raise
            self.report([error])
            return None

    def report(self, unmet: Iterable[MemfitError]) -> None:
        for error in unmet:
            if self.to_run:
                raise error
            hint = "" if error.hint is None else f"; {' '.join(error.hint.splitlines())}"
            self.notes.append(f"to run it here: {error.message}{hint}")


def _processes(config: TrainConfig, needs: MachineNeeds) -> int:
    meant = None if needs.to_run or launched() else processes_meant(config.batch)
    if meant is None or meant == 1:
        return processes()
    needs.notes.append(
        f"planned as one of {meant} processes, which make up global_batch_size {config.batch.global_batch_size}: start"
        f" it under torchrun --nproc_per_node={meant}"
    )
    return meant


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

    from memfit.jobs.build import build_for_training

    model = job.config.model
    name = model.name if job.source is None else str(job.source.folder)
    plain = job.config.without_offload(dataclasses.replace(model, name=name, from_scratch=True))
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
    return [*notes, *_without_effect(config, data)]


def _without_effect(config: TrainConfig, data: TrainingData) -> Iterator[str]:
    """Settings that these data do not use."""
    if data.packed:
        yield from config.no_effect("data", ("too_long",), "where samples are packed")
    if not is_on_hub(source_of(config.data)):
        yield from config.no_effect("data", ("split", "subset"), "with files: they are of data sets on the Hub")
    if data.summary.format == "text":
        yield from config.no_effect("data", ("template", "mask_prompt"), "with running text, which has no prompts")
    else:
        yield from config.no_effect("data", ("text_column",), "with prompts and answers")


class EarlierRun(InputError):
    """Its checkpoints are where new ones would go."""


def check_output(folder: Path, *, resume_from: Path | None) -> None:
    """It can be written, and no other run's checkpoints are in it, nor later ones of this run: they would count as the
    last, and be kept instead of the new ones."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output_dir '{folder}' is a file")
    there_already = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there_already):
            pass
    except OSError as error:
        raise InputError(f"output_dir '{folder}' cannot be written: {error.strerror}") from error
    if is_first() and is_written_to(folder):
        raise EarlierRun(
            f"another run is writing to output_dir '{folder}'", hint="another --output_dir, or wait until it ends"
        )
    there = find_checkpoints(folder)
    if there and resume_from is None:
        raise EarlierRun(
            f"output_dir '{folder}' holds checkpoints of an earlier run, up to {there[-1].name}",
            hint=f"--resume_from {there[-1]} continues it (or `latest`); or another --output_dir",
        )
    if there and resume_from is not None and resume_from.parent.resolve() != folder.resolve():
        raise InputError(
            f"output_dir '{folder}' holds checkpoints of another run than '{resume_from}'", hint="another --output_dir"
        )
    if resume_from is not None and (later := _later(there, steps_done(resume_from))):
        raise InputError(
            f"output_dir '{folder}' holds later checkpoints than {resume_from.name}, up to {later[-1].name}",
            hint=f"--resume_from {later[-1]} goes on from there; to go back, another --output_dir, or move them away",
        )


def _later(checkpoints: list[Path], done: int) -> list[Path]:
    """What is damaged does not count: going back behind it is the way on."""
    after = [each for each in checkpoints if (step_of(each) or 0) > done]
    return [each for each in after if not any(incomplete(each, lora=(each / ADAPTERS).exists()))]


def _source(model: ModelConfig, needs: MachineNeeds, say: Callable[[str], None] | None) -> Source | None:
    """Where the weights are; None where there are none, or where a plan does without them."""
    if model.starts_from_scratch:
        return None
    on_hub = gguf_file(model.name) is None and not Path(model.name).expanduser().exists()
    if needs.to_run or not on_hub:
        return find_source(model.name, cache_dir=model.cache_dir, say=say)
    try:
        return Source(folder=find_here(model.name, cache_dir=model.cache_dir))
    except InputError as error:
        resolve(model.name)  # where nothing is called so, its error says what is
        needs.report([error])
        return None


def _tokenizer(model: ModelConfig, source: Source | None, say: Callable[[str], None] | None) -> Any:
    if model.tokenizer is not None:
        return tokenizer_named(model.tokenizer, cache_dir=model.cache_dir, say=say)
    if source is not None:
        return load_tokenizer(source.folder)
    if is_gsa(model.name) or is_basics(model.name):
        raise UsageError(
            f"model.tokenizer: {model.name} has none of its own",
            hint="a folder with tokenizer.json, a hub id, or `bytes`, which needs no file",
        )
    return tokenizer_of_shape(model.name, cache_dir=model.cache_dir)


def _named_wrong(model: ModelConfig) -> bool:
    """A tokenizer that can be nowhere else: not named although the model has none, or named by a path."""
    if model.tokenizer is None:
        return is_gsa(model.name) or is_basics(model.name)
    return model.tokenizer.count("/") != 1 or model.tokenizer.startswith((".", "/", "~"))


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

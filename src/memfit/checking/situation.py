"""What is to be checked, and what several checks need of it: looked for once, and only if asked for.

Nothing here fetches anything from the Hub, and nothing starts CUDA in this process: a look must not cost what a run
costs. Of what goes wrong with a shared part, the check whose subject it is reports; the others say that they cannot
tell.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from memfit.errors import InputError, MemfitError
from memfit.gpus import Gpu, find_gpu, is_size
from memfit.jobs.training.batch import BatchSizes, resolve_batch
from memfit.jobs.training.config import FACTORY, DataConfig, TrainConfig
from memfit.jobs.workload import Workload
from memfit.models.files import NotHere, find_here, find_tokenizer_here
from memfit.models.presets import is_basics
from memfit.models.registry import resolve
from memfit.planning.card_here import with_kernels_of
from memfit.recording.machine import GpuDriver, GpuState, NoNvml, read_driver, read_gpus

if TYPE_CHECKING:
    from torch import nn

    from memfit.checking.config import Read
    from memfit.checking.plan import CardPlan
    from memfit.jobs.training.data import TrainingData
    from memfit.jobs.training.examples import Examples
    from memfit.jobs.training.job import TrainJob


Status = Literal["ok", "warning", "failed", "skipped"]
Subject = Literal["machine", "settings", "config", "model", "plan"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    subject: Subject
    name: str
    status: Status
    found: str
    next: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """The figures behind `found`."""

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject, "name": self.name, "status": self.status, "found": self.found, "next": self.next,
            "details": dict(self.details),
        }  # fmt: skip


class CannotTell(Exception):
    """Why a check cannot be made here, in words for a person."""


@dataclass(frozen=True)
class Line:
    """The name of a check, from which its findings are made."""

    subject: Subject
    name: str

    def ok(self, found: str, next: str | None = None, **details: Any) -> Finding:
        return self._made("ok", found, next, details)

    def warning(self, found: str, next: str | None = None, **details: Any) -> Finding:
        return self._made("warning", found, next, details)

    def failed(self, found: str, next: str | None = None, **details: Any) -> Finding:
        return self._made("failed", found, next, details)

    def skipped(self, why: str, next: str | None = None, **details: Any) -> Finding:
        return self._made("skipped", why, next, details)

    def _made(self, status: Status, found: str, next: str | None, details: Mapping[str, Any]) -> Finding:
        step = None if next is None else " ".join(next.splitlines())  # errors may say it on two lines
        return Finding(subject=self.subject, name=self.name, status=status, found=found, next=step, details=details)


def guarded(line: Line, look: Callable[[], Finding | Iterator[Finding]]) -> Iterator[Finding]:
    """What `look` finds; where it stops with an error, that is the finding."""
    try:
        found = look()
        yield from [found] if isinstance(found, Finding) else found
    except CannotTell as why:
        yield line.skipped(str(why))
    except MemfitError as error:
        yield line.failed(error.message, error.hint)
    except ImportError as error:
        missing = error.name or str(error)
        yield line.skipped(f"needs {missing}, which is not installed", f"pip install {missing.split('.')[0]}")


Found = TypeVar("Found")


class Lazy(Generic[Found]):
    def __init__(self, make: Callable[[], Found], *, without: str) -> None:
        """`without` is what a check that needs it says where there is none."""
        self._make, self._without = make, without
        self._found: list[Found] = []
        self._wrong: Exception | None = None

    def get(self) -> Found:
        """Or the error, as it was."""
        if self._wrong is not None:
            raise self._wrong
        if not self._found:
            try:
                self._found.append(self._make())
            except (MemfitError, CannotTell, ImportError) as error:
                self._wrong = error
                raise
        return self._found[0]

    def needed(self) -> Found:
        """For a check that is about something else."""
        try:
            return self.get()
        except (MemfitError, ImportError) as error:
            raise CannotTell(self._without) from error


NO_CARD = "no GPU is here and none is named: --gpu 24GB checks against one"
VISIBLE = "CUDA_VISIBLE_DEVICES"
TOKENIZERS = "model.tokenizer: a folder with tokenizer.json, a hub id, or `bytes`, which needs no file"
MOST_ROWS = 20_000
"""Rows of data that are looked at: what is wrong with them is most often wrong from the start."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """A training config, or a workload as `memfit plan` takes it, or neither: then only the machine is looked at."""

    config: TrainConfig | None = None
    keys: tuple[Read, ...] = ()
    """Of the config's file."""
    workload: Workload | None = None
    gpu: str | None = None
    world_size: int = 1
    load: bool = False

    @property
    def trains(self) -> bool:
        return self.config is not None

    @property
    def job(self) -> Workload | None:
        return self.workload or (None if self.config is None else self.config.workload)


@dataclass(frozen=True, kw_only=True)
class LocalGpu:
    """A GPU of this machine, as a card to plan for: of those that would train, the one with the least free memory."""

    card: Gpu
    state: GpuState

    @property
    def with_what_is_free(self) -> Gpu:
        """What others hold is not there for this job."""
        return dataclasses.replace(self.card, capacity_bytes=min(self.card.capacity_bytes, self.state.free_bytes))


class Situation:
    def __init__(self, asked: CheckRequest, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is what was exported, if some of it is set aside meanwhile."""
        self.asked = asked
        self.environment = os.environ if environment is None else environment
        self.gpus = Lazy(_gpus, without="no GPU is here")
        self.driver = Lazy(_driver, without="no GPU is here")
        self.batch = Lazy(self._batch, without="the batch sizes are wrong")
        self.folder = Lazy(self._folder, without="the model's files are not on this machine")
        self.tokenizer = Lazy(self._tokenizer, without="there is no tokenizer")
        self.examples = Lazy(self._examples, without="the data cannot be read")
        self.data = Lazy(self._data, without="the data cannot be read as samples")
        self.shapes = Lazy(self._shapes, without="the model cannot be built")
        self.plans = Lazy(self._plans, without="the job cannot be predicted")
        self.job = Lazy(self._job, without="the job cannot be prepared")

    @property
    def config(self) -> TrainConfig:
        if self.asked.config is None:
            raise CannotTell("nothing is trained")
        return self.asked.config

    # -- the card

    def gpus_here(self) -> tuple[GpuState, ...]:
        """At least one. The line on GPUs says why there is none, the others only that."""
        if self.here is None:
            raise CannotTell("no GPU is here")
        return self.gpus.get()

    @cached_property
    def here(self) -> LocalGpu | None:
        try:
            gpus, driver = self.gpus.get(), self.driver.get()
        except CannotTell:
            return None
        if not gpus:
            return None
        fullest = min(gpus[: self.asked.world_size], key=lambda gpu: gpu.free_bytes)
        return LocalGpu(card=_card_of(fullest, driver.capabilities[fullest.index]), state=fullest)

    @property
    def named_as(self) -> str | None:
        """`--gpu`, or memory.gpu of the config, as it was typed."""
        return self.asked.gpu or (self.asked.config.memory.gpu if self.asked.config else None)

    @cached_property
    def named(self) -> Gpu | None:
        said = self.named_as
        if said is None:
            return None
        card = find_gpu(said, flag="--gpu" if self.asked.gpu else "memory.gpu")
        return card if self.here is None or not is_size(said) else with_kernels_of(card, self.here.card)

    @property
    def card(self) -> Gpu:
        """The one to check settings against."""
        found = self.named or (None if self.here is None else self.here.card)
        if found is None:
            raise CannotTell(NO_CARD)
        return found

    @property
    def runs_here(self) -> bool:
        """Whether this machine is the one that is meant: without a GPU, and with a card named, it is another."""
        return self.here is not None or self.named is None

    # -- parts of a training job

    @property
    def model_name(self) -> str:
        """As the registry knows it: a GGUF file by the folder that was made of it."""
        config = self.config
        if config.model.starts_from_scratch or FACTORY.fullmatch(config.model.name):
            return config.model.name
        try:
            return str(self.folder.get())
        except (MemfitError, CannotTell):
            return config.model.name

    def _batch(self) -> BatchSizes:
        return resolve_batch(self.config.batch, self.asked.world_size)

    def _folder(self) -> Path:
        model = self.config.model
        if model.starts_from_scratch:
            raise CannotTell("it is trained from scratch: there are no weights to read")
        try:
            return find_here(model.name, cache_dir=model.cache_dir)
        except InputError as error:
            if error.hint is None or isinstance(error, NotHere):
                resolve(model.name)  # where nothing is called so, its error says what is
            raise

    def _tokenizer(self) -> Any:
        from memfit.jobs.training.examples import BYTES, ByteTokenizer
        from memfit.models.files import load_tokenizer

        model = self.config.model
        named = model.tokenizer or model.name
        if named.strip().lower() == BYTES:
            return ByteTokenizer()
        try:
            folder = find_tokenizer_here(named, cache_dir=model.cache_dir)
        except NotHere:
            raise
        except InputError as error:
            if model.tokenizer is None and not model.starts_from_scratch:
                raise CannotTell("there is no such model here") from error
            raise InputError(f"no tokenizer called '{named}'", hint=TOKENIZERS) from error
        return load_tokenizer(folder)

    @cached_property
    def own_tokenizer(self) -> Any:
        """That of the weights; None where there are none here."""
        from memfit.models.files import load_tokenizer

        try:
            return load_tokenizer(self.folder.get())
        except (MemfitError, CannotTell):
            return None

    @property
    def data_config(self) -> DataConfig:
        """All of the data where a checkpoint is to be continued, for that must know the very samples."""
        data = self.config.data
        if self.config.saving.resume_from is not None:
            return data
        return dataclasses.replace(data, max_samples=min(data.max_samples or MOST_ROWS, MOST_ROWS))

    def _examples(self) -> Examples:
        from memfit.jobs.training.examples import is_on_hub, read_examples, source_of

        source = source_of(self.config.data)
        if is_on_hub(source):
            raise CannotTell(f"{source} is a data set on the Hub, which a look does not fetch")
        return read_examples(self.data_config)

    def _data(self) -> TrainingData:
        from memfit.jobs.training.data import read_training_data

        self.examples.needed()
        return read_training_data(self.data_config, self.tokenizer.needed())

    def _shapes(self) -> nn.Module:
        from memfit.checking.model import shapes_only

        self._find_model()
        try:
            return shapes_only(self.config, self.model_name)
        except MemfitError as error:
            if error.message.startswith(f"'{self.model_name}' raised"):  # a factory; with memory it may well work
                raise CannotTell(f"without memory the model cannot be built: {error.message}") from error
            raise

    def _find_model(self) -> None:
        """A wrong name is told once: of weights to be read on their line, else by whoever builds it first."""
        model = self.config.model
        if model.starts_from_scratch:
            if not is_basics(model.name):
                resolve(model.name)
            return
        try:
            self.folder.get()
        except NotHere:
            return  # its shape is known all the same
        except MemfitError as error:
            raise CannotTell("there is no such model here") from error

    def _job(self) -> TrainJob:
        from memfit.jobs.training.examples import pad_id_of
        from memfit.jobs.training.job import TrainJob, find_beginning
        from memfit.jobs.training.shapes import shape_of
        from memfit.models.files import Source

        config, output_dir = self.config, output_folder(self.config)
        tokenizer = self.tokenizer.needed()
        resume_from, start_from = find_beginning(config, output_dir)
        source = None if config.model.starts_from_scratch else Source(folder=self.folder.needed())
        return TrainJob(
            config=config,
            batch=self.batch.needed(),
            data=self.data.needed(),
            tokenizer=tokenizer,
            pad_id=pad_id_of(tokenizer),
            source=source,
            shape=shape_of(config.model, source),
            output_dir=output_dir,
            resume_from=resume_from,
            start_from=start_from,
        )

    def _plans(self) -> list[CardPlan]:
        from memfit.checking.plan import plan_on_cards

        return plan_on_cards(self)


def output_folder(config: TrainConfig) -> Path:
    return Path(config.output_dir).expanduser().absolute()


def _gpus() -> tuple[GpuState, ...]:
    """Those that torch would see, in its order."""
    try:
        found = read_gpus()
    except NoNvml as why:
        raise CannotTell(str(why)) from why
    shown = os.environ.get(VISIBLE)
    if shown is None:
        return found
    seen: list[GpuState] = []
    for name in shown.split(","):
        named = [gpu for gpu in found if name.strip() == str(gpu.index) or _begins_uuid(name.strip(), gpu)]
        if len(named) != 1:  # CUDA reads the list as far as the first name that is no GPU
            break
        seen += named
    return tuple(seen)


def _begins_uuid(name: str, gpu: GpuState) -> bool:
    return name.startswith("GPU-") and gpu.uuid.startswith(name)


def _driver() -> GpuDriver:
    try:
        return read_driver()
    except NoNvml as why:
        raise CannotTell(str(why)) from why


def _card_of(state: GpuState, arch: tuple[int, int]) -> Gpu:
    """By its name; a card that is not in the catalogue by its size."""
    try:
        return find_gpu(state.name)
    except MemfitError:
        return dataclasses.replace(find_gpu(f"{state.total_bytes}B"), name=state.name, arch=arch)

"""The job that ran out of memory: what was given, what a config says, what the log tells, what is missing.

What a person gives wins over a config, and a config over the log. A config's rows are taken as long as it allows; its
data are not read. A workload is made only if nothing that decides its size is left to a default: a prediction of
another job would be worse than none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.errors import MemfitError, UsageError
from memfit.explaining.cause import Account
from memfit.explaining.clues import Clues
from memfit.explaining.message import Oom
from memfit.explaining.place import COMPILED, ENGINES, FailurePlace
from memfit.explaining.tensor import Dimensions, Readings, dimensions_of_model, known_dimensions
from memfit.gpus import Gpu, find_gpu, list_gpus
from memfit.jobs.settings import AS_IN_QLORA, QLORA, TRAININGS, flag, kinds_that_read
from memfit.jobs.workload import Workload
from memfit.units import MiB

_ROWS = ("batch_size", "seq_len")
NEEDED = {"train": _ROWS, "lora": (*_ROWS, "rank"), "forward": _ROWS, "generate": _ROWS, "prune": ()}
"""Settings that decide the size of each kind of job."""
ASSUMED = (
    "precision", "attention", "loop", "outputs", "optimizer", "grad_checkpointing", "grad_accum", "world_size",
    "target_modules", "new_tokens", "decoding", "method", "sparsity", "nsamples",
)  # fmt: skip
WHICH_QUANT = (
    "the text has quantised weights, and not which: nothing is predicted without --quant (nf4, int8; or --kind qlora)"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    workload: Workload | None = None
    models: tuple[Dimensions, ...] = ()
    """One if the model is known, several if only its family is, none otherwise."""
    settings: Mapping[str, object]
    """What is known of it, whether or not it is enough."""
    read: Mapping[str, str]
    """Of settings that were read in the text: the words they were read from."""
    missing: tuple[str, ...] = ()
    """Settings without which nothing is predicted."""
    beyond: str | None = None
    """What is in the text that no prediction has."""
    by_memfit: bool = False
    """Whether memfit itself was running it."""

    @property
    def kind(self) -> str | None:
        value = self.settings.get("kind")
        return value if isinstance(value, str) else None

    @property
    def precision(self) -> str | None:
        value = self.settings.get("precision")
        return value if isinstance(value, str) else None

    @property
    def of_another_pruner(self) -> bool:
        """A program that has the whole model on the GPU: memfit's own has one block at a time."""
        return self.kind == "prune" and not self.by_memfit

    @property
    def assumed(self) -> str | None:
        """Of a job that was read in a text: what stands at its default because the text does not tell it."""
        if self.workload is None or not self.read:
            return None
        made = self.workload.settings()
        left = [
            f"{name.replace('_', '-')} {made[name] if made[name] is not None else 'all linear layers'}"
            for name in ASSUMED
            if name in made and name not in self.settings
        ]
        return ", ".join(left) or None

    def number(self, name: str) -> int | None:
        value = self.settings.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def job_of(
    given: Mapping[str, Any],
    configured: Workload | None,
    clues: Clues,
    place: FailurePlace,
    allocated: int | None = None,
) -> Job:
    """Raises UsageError where what was given is wrong; what was read may be wrong and is then only not used.
    `allocated`: what was alive when it failed."""
    if given:
        _check(given)
    read = {name: clue.said for name, clue in _clues(clues).items()}
    if configured is not None:
        workload = Workload.asked(configured, given)
        return Job(workload=workload, models=_dimensions(workload.model), settings=workload.settings(), read={})
    found: dict[str, Any] = {name: clue.value for name, clue in _clues(clues).items()}
    usual: Mapping[str, Any] = {}
    if given.get("kind") == QLORA:
        usual, given = AS_IN_QLORA, {**given, "kind": "lora"}
    settings = {**usual, **found, **given}
    read = {name: said for name, said in read.items() if name not in given}
    models = _dimensions(str(settings["model"])) if "model" in settings else _family(clues)
    kind = settings.get("kind")
    if "precision" in settings and "precision" not in given:
        settings["precision"] = _precision(str(settings["precision"]), str(kind), models, allocated)
    needed = ("kind", "model", *NEEDED.get(str(kind), _ROWS))
    missing = tuple(name for name in needed if name not in settings)
    beyond = _beyond(clues, place, given, settings)
    if beyond and ("kind" not in given or beyond == WHICH_QUANT):
        return Job(models=models, settings=settings, read=read, beyond=beyond)
    if missing:
        return Job(models=models, settings=settings, read=read, missing=missing, beyond=beyond)
    if clues.grad_checkpointing and kind in TRAININGS:
        settings.setdefault("grad_checkpointing", True)
    paths = [frame.path.replace("\\", "/") for frame in place.frames]
    if any("transformers/trainer.py" in path for path in paths) and kind in TRAININGS:
        settings.setdefault("loop", "trainer")
    if clues.eager:
        settings.setdefault("attention", "eager")
    if place.within(COMPILED) and kind in ("forward", *TRAININGS):
        settings.setdefault("compile", True)
    made = Workload.from_mapping(settings, asked=given)
    own = clues.by_memfit or any("/memfit/" in path for path in paths)
    return Job(workload=made, models=models, settings=settings, read=read, beyond=beyond, by_memfit=own)


def with_length_of(job: Job, found: Readings, given: Mapping[str, Any]) -> Job:
    """Of pruning: with windows as long as the tensor that failed has them, whatever the text says they should be."""
    tensor = found.likeliest
    if job.workload is None or not job.of_another_pruner or "seq_len" in given or tensor is None:
        return job
    length = next((factor.value for factor in tensor.factors if factor.symbol == "tokens"), None)
    if tensor.kind != "calibration" or length is None:
        return job
    return dataclasses.replace(
        job, workload=dataclasses.replace(job.workload, seq_len=length), settings={**job.settings, "seq_len": length},
        read={**job.read, "seq_len": tensor.product},
    )  # fmt: skip


def _precision(said: str, kind: str, models: tuple[Dimensions, ...], allocated: int | None) -> str:
    """bf16=True is autocast over weights in fp32, if there was room for them; else they were loaded in 16 bits."""
    least = min((each.parameters or 0 for each in models), default=0) * 4
    no_room = allocated is not None and 0 < allocated < least
    return said.removeprefix("amp-") if no_room or kind not in TRAININGS else said


def _beyond(clues: Clues, place: FailurePlace, given: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    if place.at(ENGINES):
        return "the engine in the traceback arranges memory its own way, and predictions are of plain torch"
    if clues.quantised and "quant" not in settings and not _is_stored_quantised(settings.get("model")):
        return WHICH_QUANT
    if place.within(COMPILED):
        return "the code was compiled, which takes minutes to predict: --kind tells that it should be"
    if clues.sharded and "parallel" not in given:
        return "the text has a job that is sharded over several cards: --world-size N --parallel fsdp2 tells it"
    return None


def _is_stored_quantised(model: str | None) -> bool:
    try:
        return model is not None and Workload(kind="lora", model=model).stored is not None
    except MemfitError:
        return False


def _clues(clues: Clues) -> dict[str, Any]:
    found: dict[str, Any] = {**clues.numbers, **clues.choices, **clues.pruning}
    for name in ("model", "kind", "precision"):
        clue = getattr(clues, name)
        if clue is not None:
            found[name] = clue
    return found


def _check(given: Mapping[str, Any]) -> None:
    """Where the kind of job is not given, it is one that reads all settings that are."""
    kinds = [given["kind"]] if "kind" in given else kinds_that_read(given)
    if not kinds:
        raise UsageError(f"no kind of job has all of {', '.join(map(flag, given))}", hint="--kind says what it was")
    Workload.from_mapping({"model": "-", **given, "kind": kinds[-1]})


def _dimensions(model: str) -> tuple[Dimensions, ...]:
    found = dimensions_of_model(model)
    return (found,) if found else ()


def _family(clues: Clues) -> tuple[Dimensions, ...]:
    if clues.dimensions is not None:
        return (clues.dimensions,)
    return known_dimensions(clues.family) if clues.family else ()


# -- the card ------------------------------------------------------------------------------------------------------


def card_of(oom: Oom | None, account: Account | None, gpu: str | None) -> Gpu | None:
    """The card asked for, or the one in the message: with what this process could have had of it."""
    if gpu is not None:
        return find_gpu(gpu)
    if oom is None or account is None or oom.capacity is None:
        return None
    alike = [card for card in list_gpus() if oom.capacity.may_be(card.capacity_bytes)]
    try:
        card = alike[0] if len(alike) == 1 else find_gpu(f"{oom.capacity.middle // MiB}MiB")
    except MemfitError:
        return None
    room = account.reachable_bytes if account.others_bytes else None
    usable = min(oom.capacity.middle, room or oom.capacity.middle)
    if oom.allowed is not None:
        usable = min(usable, oom.allowed.middle + card.context_bytes)
    return dataclasses.replace(card, capacity_bytes=usable)


_SMALLER = re.compile(r"with micro_batch_size (\d{1,6}) instead of \d{1,6}")


def workload_of_config(name: str, log: str = "", *, world_size: int = 1) -> Workload:
    """Of a file or a shipped config. Where the log tells that the micro-batch was halved, the last size counts, at the
    same global batch."""
    from memfit.jobs.training.batch import resolve_batch
    from memfit.jobs.training.config_file import load_config
    from memfit.planning.training import workload_of_config as workload_of

    config = load_config(name)
    model = _model(config.model.name, config.model.cache_dir)
    sizes = resolve_batch(config.batch, world_size)
    rows = [int(each[1]) for each in _SMALLER.finditer(log)]
    if rows and rows[-1] in sizes.rungs:
        sizes = sizes.with_micro_batch(rows[-1])
    made = workload_of(config, sizes, model, config.data.max_seq_len)
    return dataclasses.replace(
        made,
        grad_accum=sizes.gradient_accumulation_steps,
        alloc_conf=config.workload.alloc_conf,  # not what is exported on this machine
    )


def _model(name: str, cache_dir: str | None) -> str:
    """A name that the registry knows: a GGUF file is known by the folder that training has made of it."""
    from memfit.models.files import find_source
    from memfit.models.gguf import gguf_file
    from memfit.models.registry import resolve

    if gguf_file(name) is not None:
        return str(find_source(name, cache_dir=cache_dir).folder)
    resolve(name)
    return name

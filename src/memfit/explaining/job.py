"""The job that ran out of memory: what was given, what a config says, what the log tells of it, what is missing.

A log is read, not guessed at: each clue keeps the words it was read from. Only what stands near the error or at the
very beginning of the text is looked at, so a log of 64 MB costs no more than one of 300 KB.

What a person gives wins over a config, and a config over the log. A config's rows are taken as long as it allows; its
data are not read. A workload is made only if nothing that decides its size is left to a default: a prediction of
another job would be worse than none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from memfit.errors import MemfitError, UsageError
from memfit.explaining.cause import Account
from memfit.explaining.message import LocatedOom, Oom
from memfit.explaining.place import COMPILED, ENGINES, FailurePlace
from memfit.explaining.tensor import Dimensions, Readings, dimensions_in_text, dimensions_of_model, known_dimensions
from memfit.explaining.text import Excerpt, passages
from memfit.gpus import Gpu, find_gpu, list_gpus
from memfit.jobs.settings import AS_IN_QLORA, PRUNE_METHODS, QLORA, TRAININGS, flag, kinds_that_read
from memfit.jobs.workload import Workload
from memfit.models.presets import Preset, find_preset, presets
from memfit.units import MiB

# -- what the log tells ------------------------------------------------------------------------------------------------

BEGINNING, NEAR = 64 << 10, 256 << 10
MAX_CANDIDATES = 4000

_VALUE = r"[\"']?\s{0,2}(?:[:=]|\s)\s{0,2}[\"']?"
_NUMBERS: dict[str, tuple[str, ...]] = {
    "batch_size": (
        r"per_device_train_batch_size|per_device_batch_size|train_micro_batch_size_per_gpu|micro_batch_size|"
        r"micro_batch|Instantaneous batch size per device",
        r"train_batch_size|batch[_-]size",
    ),
    "seq_len": (
        r"max_seq_length|max_seq_len|max_sequence_length|cutoff_len|sequence_len|sequence_length|seq[_-]len|seqlen|"
        r"block_size|context[_-]length",
        r"max_length",
        r"model_max_length",
    ),
    "rank": (r"lora_rank|lora_r|lora\.r|rank",),
    "nsamples": (r"nsamples|n_samples|num_calibration_samples",),
    "grad_accum": (
        r"gradient_accumulation_steps|Gradient Accumulation steps|grad_accum|accumulate_grad_batches|"
        r"gradient_accumulation",
    ),
    "new_tokens": (r"max_new_tokens|new[_-]tokens",),
    "world_size": (r"world[_ -]size|WORLD_SIZE|nproc[_-]per[_-]node|num_processes|Num processes",),
}
"""What settings are called, the surest names first: DeepSpeed's train_batch_size is that of all GPUs and steps."""
_NUMBER_PATTERNS = {
    name: [re.compile(rf"(?<![\w.])(?:{names}){_VALUE}(\d{{1,7}})(?![\d.eE])") for names in by_sureness]
    for name, by_sureness in _NUMBERS.items()
}
_MOST = {
    "batch_size": 1 << 16, "seq_len": 1 << 22, "rank": 1 << 14, "nsamples": 1 << 20, "grad_accum": 1 << 16,
    "new_tokens": 1 << 22, "world_size": 1 << 12,
}  # fmt: skip
_WHOLE_BATCH = re.compile(r"Total train batch size \([^)]{1,80}\) = (\d{1,7})\b")
"""As the Trainer prints it: of all processes and micro-steps."""
_LORA_R = re.compile(r"LoraConfig\([^)]{0,400}?\br\s?=\s?(\d{1,5})\b")

_IS = r"[\"']?\s?[=:]\s?[\"']?"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_WEIGHTS = tuple(
    (name, re.compile(rf"(?<!\w)(?:torch_)?dtype{_IS}(?:torch\.)?{dtype}\b")) for name, dtype in _DTYPES.items()
)
_AUTOCAST = tuple((name, re.compile(rf"(?<!\w){name}{_IS}(?:True|true|1|auto)\b")) for name in ("bf16", "fp16"))
"""Of a Trainer: weights stay as they were loaded."""
_TARGETS = re.compile(r"target_modules[\"']?\s?[=:]\s?(?:[\[({]|set\()([\"'\w., ]{1,300})[\])}]")
_OPTIMIZER = re.compile(rf"(?<![\w.])optim(?:izer)?{_IS}(?:OptimizerNames\.)?([a-zA-Z_0-9]{{3,30}})\b")
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw-fused", "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit", "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
_SIGNS = {
    "grad_checkpointing": re.compile(
        r"gradient[_-]checkpointing[\"']?\s?(?:[=:]|\s)\s?[\"']?(?:True|true|1|full|unsloth)\b|"
        r"gradient_checkpointing_enable\(|--gradient[_-]checkpointing\b(?!\s+[Ff]alse)"
    ),
    "quantised": re.compile(
        r"load_in_[48]bit[\"']?\s?[=:]\s?[Tt]rue|\b(?:dequantize_4bit|Linear4bit|Linear8bitLt|MatMul[48][Bb]it|QLoRA)\b|"
        r"[-_](?:bnb[-_]4bit|GPTQ|AWQ)\b|adapter: qlora"
    ),
    "sharded": re.compile(
        r"--fsdp\b|\bfsdp[\"']?\s?[:=]|\bfully_shard\b|FullyShardedDataParallel|--deepspeed\b|/deepspeed/|zero_optimization"
    ),
    "eager": re.compile(r"attn_implementation[\"']?\s?[=:]\s?[\"']?eager|--attention[= ]eager"),
    "expandable": re.compile(
        r"(?<!setting )(?:PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF|alloc_conf)[\"']?\s?\]?\s?[=:]\s?[\"']?[\w:.,]{0,60}?"
        r"expandable_segments:\s?[Tt]rue(?! to avoid fragmentation)"
    ),
    "split_size": re.compile(
        r"(?<!setting )PYTORCH_(?:CUDA_)?ALLOC_CONF[\"']?\s?\]?\s?[=:]\s?[\"']?[\w:.,]{0,60}?max_split_size_mb:\s?\d"
    ),
    "windows": re.compile(
        r"[A-Z]:\\\\?(?:Users|Program|Windows|Python|[\w. -]{1,40}\\)|site-packages\\|/mnt/wslg|microsoft-standard-WSL"
    ),
    "by_memfit": re.compile(r"(?<![\w/.])memfit (?:prune|train)\b|-m memfit\b"),
}
_NCCL_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout|NCCL (?:operation )?time(?:d )?out|"
    r"ProcessGroupNCCL.{0,60}time(?:d )?out|Timeout\(ms\)=\d+\) ran for"
)
_HANDLED = re.compile(
    r"the step is run again with micro_batch_size|[Rr]etrying with (?:a )?(?:smaller |reduced )?batch|"
    r"[Dd]ecreas(?:ing|ed) batch[ _]size|[Rr]educ(?:ing|ed) batch size|[Ss]kipping (?:this )?batch|recovered from OOM"
)

_PRUNING = {
    "method": re.compile(rf"(?<![\w.])prune[_-]method{_VALUE}({'|'.join(PRUNE_METHODS)})\b"),
    "sparsity": re.compile(rf"(?<![\w.])sparsity[_-]ratio{_VALUE}(0?\.\d{{1,6}})(?![\d.eE])"),
    "sparsity_type": re.compile(rf"(?<![\w.])sparsity[_-]type{_VALUE}(unstructured|\d{{1,2}}:\d{{1,2}})(?![\w:])"),
}
_KINDS = tuple(
    (name, re.compile("|".join(map(re.escape, words.split()))))
    for name, words in (
        (
            "prune",
            "prune_method prune-method prune.py prune_wanda prune_sparsegpt sparsity_ratio prepare_calibration_input",
        ),
        ("lora", "LoraConfig peft/ peft\\ get_peft_model lora_r lora_alpha PeftModel QLoRA"),
        ("train", "training_step TrainingArguments .backward( optimizer.step( trainer.train( train_micro_batch"),
        ("generate", ".generate( generation/utils.py"),
    )
)
"""The first that has a word in the text."""

_MODEL_KEY = re.compile(
    r"(?<![\w.-])(?:--model(?:[_-](?:name[_-]or[_-]path|name|path|id))?|(?:pretrained_)?model_name_or_path|model_name|"
    r"_name_or_path|base_model(?:_name_or_path)?|model_id|from_pretrained\()[\"']?\s{0,2}[:=\s(]?\s{0,2}[\"']?"
    r"([\w~/][\w./~-]{2,120}|\.{1,2}/[\w./-]{2,120})"
)
_QUANTISED_NAME = re.compile(
    r"[-_.](?:unsloth-)?(?:bnb-4bit|gptq|awq|gguf|int[48]|[48]bit|fp8)(?![a-z]).*$", re.IGNORECASE
)
_HUB_ID = re.compile(r"(?<![\w./-])([A-Za-z][\w.-]{1,60}/[A-Za-z][\w.-]{1,80})(?![\w/])")
_BARE = re.compile(r"(?<![\w./\\-])([A-Za-z][A-Za-z]{2,15}-?\d[\w.-]{1,40})(?![\w/\\])")
_MODELING = re.compile(
    r"transformers[/\\]models[/\\](\w{2,40})[/\\](?:modeling|modular)_\w{2,40}\.py|\bmodeling_(\w{2,40})\.py"
)


@dataclass(frozen=True, slots=True)
class Clue:
    value: object
    said: str
    """The words that it was read from."""


@dataclass(frozen=True, kw_only=True)
class Clues:
    settings: dict[str, Clue] = field(default_factory=dict)
    """By the names of a workload's; the precision is that of the weights, or (`amp-`) under autocast: which of the two
    bf16=True of a Trainer means does not stand there."""
    models: tuple[Dimensions, ...] = ()
    """Where the model has no name: that of a config which was printed into the log, or all of a family."""
    by_memfit: bool = False
    grad_checkpointing: bool = False
    eager: bool = False
    quantised: bool = False
    sharded: bool = False
    expandable: bool = False
    split_size: bool = False
    windows: bool = False
    after_nccl_timeout: bool = False
    handled: bool = False


def clues_in(text: str, located: LocatedOom | None, place: FailurePlace) -> Clues:
    earlier, after, before = _near(text, located)
    near = f"{earlier} {after}"
    kind, model = _kind(near, place), _model_in(near)
    wanted = None if kind is None else kind.value
    numbers = dict(_numbers(earlier, after, wanted))
    found = {
        **numbers, **_processes(earlier, numbers), **dict(_choices(near, wanted)),
        **(dict(_pruning(near)) if wanted == "prune" else {}),
        "model": model, "kind": kind, "precision": _precision_in(_without_code(near, place)),
    }  # fmt: skip
    return Clues(
        settings={name: clue for name, clue in found.items() if clue is not None},
        models=() if model else _models_in(near, place),
        **{name: bool(pattern.search(near)) for name, pattern in _SIGNS.items()},
        after_nccl_timeout=bool(_NCCL_TIMEOUT.search(before)),
        handled=bool(_HANDLED.search(after)),
    )


def _near(text: str, located: LocatedOom | None) -> tuple[str, str, str]:
    """The beginning of the text with what comes before the message; what comes after it; what is just before it."""
    start = next(iter(passages(Excerpt(text[:BEGINNING])))).flat
    if located is None:
        return start, "", start
    flat = located.passage.flat
    before = flat[max(located.offset - NEAR, 0) : located.offset]
    after = flat[located.offset : located.offset + NEAR]
    return (before if len(text) <= NEAR else f"{start} {before}"), after, before


def _numbers(before: str, after: str, kind: object) -> Iterator[tuple[str, Clue]]:
    """The last that stands before the message: what comes after it is of the next try."""
    for name, patterns in _NUMBER_PATTERNS.items():
        if name == "rank" and kind != "lora":
            continue  # elsewhere it is the number of a process
        for pattern, text in ((pattern, text) for text in (before, after) for pattern in patterns):
            found = [each for each in pattern.finditer(text) if 0 < int(each[1]) <= _MOST[name]]
            if found:
                yield name, Clue(int(found[-1][1]), _words(found[-1][0]))
                break
    lora = _LORA_R.search(before) or _LORA_R.search(after)
    if lora:
        yield "rank", Clue(int(lora[1]), f"LoraConfig(r={lora[1]})")


def _processes(text: str, numbers: Mapping[str, Clue]) -> dict[str, Clue]:
    """How many, where the Trainer tells the rows of all of them."""
    whole = _WHOLE_BATCH.search(text)
    if whole is None or "batch_size" not in numbers:
        return {}
    each = cast("int", numbers["batch_size"].value) * cast("int", numbers.get("grad_accum", Clue(1, "")).value)
    count, left = divmod(int(whole[1]), each)
    return {} if left or count > _MOST["world_size"] else {"world_size": Clue(count, _words(whole[0]))}


def _choices(text: str, kind: object) -> Iterator[tuple[str, Clue]]:
    optimizer = [each for each in _OPTIMIZER.finditer(text) if each[1].lower() in _OPTIMIZERS]
    if optimizer:
        yield "optimizer", Clue(_OPTIMIZERS[optimizer[-1][1].lower()], _words(optimizer[-1][0]))
    targets = _TARGETS.search(text) if kind == "lora" else None
    if targets:
        names = tuple(sorted(name.strip(" \"'") for name in targets[1].split(",") if name.strip(" \"'")))
        yield "target_modules", Clue(names, _words(targets[0]))


def _pruning(text: str) -> Iterator[tuple[str, Clue]]:
    for name, pattern in _PRUNING.items():
        found = pattern.search(text)
        if found:
            yield name, Clue(float(found[1]) if name == "sparsity" else found[1], _words(found[0]))


def _kind(text: str, place: FailurePlace) -> Clue | None:
    return _first(_KINDS, " ".join([text, *(f"{frame.path} {frame.function} {frame.code}" for frame in place.frames)]))


def _without_code(text: str, place: FailurePlace) -> str:
    """The text without the code of the traceback: a softmax in fp32 does not make the job fp32."""
    for frame in place.frames:
        if frame.code and "from_pretrained(" not in frame.code:
            text = text.replace(frame.code, " ")
    return text


def _precision_in(text: str) -> Clue | None:
    return _first([*_WEIGHTS, *((f"amp-{name}", pattern) for name, pattern in _AUTOCAST)], text)


def _first(patterns: Iterable[tuple[str, re.Pattern[str]]], text: str) -> Clue | None:
    found = ((name, pattern.search(text)) for name, pattern in patterns)
    return next((Clue(name, _words(match[0])) for name, match in found if match), None)


def _words(text: str) -> str:
    return " ".join(text.split())[:80]


# -- the model -----------------------------------------------------------------------------------------------------


def _model_in(text: str) -> Clue | None:
    """By a setting that names it; else by the one name of a model that occurs. Two different names are none."""
    for each in _MODEL_KEY.finditer(text):
        preset = _preset(each[1])
        if preset is not None:
            return Clue(preset.name, _words(each[0]))
    for pattern in (_HUB_ID, _BARE):
        found: dict[str, str] = {}
        for number, each in enumerate(pattern.finditer(text)):
            preset = _preset(each[1]) if number < MAX_CANDIDATES else None
            if preset is not None:
                found.setdefault(preset.name, each[1])
        if len(found) == 1:
            return Clue(*next(iter(found.items())))
        if found:
            return None
    return None


def _preset(name: str) -> Preset | None:
    """By its whole name or by the last part of a path, quantised or not; a dot at the end belongs to the sentence."""
    name = _QUANTISED_NAME.sub("", name.rstrip("./,"))
    return find_preset(name) or find_preset(name.rpartition("/")[2])


def _models_in(text: str, place: FailurePlace) -> tuple[Dimensions, ...]:
    printed, family = dimensions_in_text(text), _family_in(text, place)
    return (printed,) if printed else known_dimensions(family) if family else ()


def _family_in(text: str, place: FailurePlace) -> str | None:
    """A model_type of transformers."""
    known = {preset.model_type for preset in presets()}
    for frame in reversed(place.frames):
        found = _MODELING.search(frame.path)
        if found and (name := found[1] or found[2]) in known:
            return name
    named = {each[1] or each[2] for each in _MODELING.finditer(text)} & known
    return named.pop() if len(named) == 1 else None


# -- put together --------------------------------------------------------------------------------------------------

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
    if configured is not None:
        workload = Workload.asked(configured, given)
        return Job(workload=workload, models=_dimensions(workload.model), settings=workload.settings(), read={})
    found: dict[str, Any] = {name: clue.value for name, clue in clues.settings.items()}
    usual: Mapping[str, Any] = {}
    if given.get("kind") == QLORA:
        usual, given = AS_IN_QLORA, {**given, "kind": "lora"}
    settings = {**usual, **found, **given}
    read = {name: clue.said for name, clue in clues.settings.items() if name not in given}
    models = _dimensions(str(settings["model"])) if "model" in settings else clues.models
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


def _check(given: Mapping[str, Any]) -> None:
    """Where the kind of job is not given, it is one that reads all settings that are."""
    kinds = [given["kind"]] if "kind" in given else kinds_that_read(given)
    if not kinds:
        raise UsageError(f"no kind of job has all of {', '.join(map(flag, given))}", hint="--kind says what it was")
    Workload.from_mapping({"model": "-", **given, "kind": kinds[-1]})


def _dimensions(model: str) -> tuple[Dimensions, ...]:
    found = dimensions_of_model(model)
    return (found,) if found else ()


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
    model = _model_of_config(config.model.name, config.model.cache_dir)
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


def _model_of_config(name: str, cache_dir: str | None) -> str:
    """A name that the registry knows: a GGUF file is known by the folder that training has made of it."""
    from memfit.models.files import find_source
    from memfit.models.gguf import gguf_file
    from memfit.models.registry import resolve

    if gguf_file(name) is not None:
        return str(find_source(name, cache_dir=cache_dir).folder)
    resolve(name)
    return name

"""What a log says of the job beside the error: model, rows and tokens, kind of job, settings.

Read, not guessed: each clue keeps the words it was read from. Only what stands near the error or at the very beginning
of the text is looked at, so a log of 64 MB costs no more than one of 300 KB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from memfit.explaining.message import LocatedOom
from memfit.explaining.place import FailurePlace
from memfit.explaining.tensor import Dimensions, dimensions_in_text
from memfit.explaining.text import Excerpt, passages
from memfit.jobs.settings import PRUNE_METHODS
from memfit.models.presets import Preset, find_preset, presets

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
    numbers: dict[str, Clue] = field(default_factory=dict)
    model: Clue | None = None
    """The name of a preset, or of a folder."""
    family: str | None = None
    """A model_type of transformers, where the model itself is not known."""
    dimensions: Dimensions | None = None
    """Of a config that was printed into the log, where the model has no name."""
    kind: Clue | None = None
    precision: Clue | None = None
    """Of the weights, or (`amp-`) under autocast; which the two words bf16=True of a Trainer do not tell."""
    choices: dict[str, Clue] = field(default_factory=dict)
    """Settings that are words: optimizer, target_modules."""
    pruning: dict[str, Clue] = field(default_factory=dict)
    """How: method, sparsity, sparsity_type."""
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

    def number(self, name: str) -> int | None:
        clue = self.numbers.get(name)
        return clue.value if clue is not None and isinstance(clue.value, int) else None


def clues_in(text: str, located: LocatedOom | None, place: FailurePlace) -> Clues:
    earlier, after, before = _near(text, located)
    near = f"{earlier} {after}"
    kind = _kind(near, place)
    numbers = dict(_numbers(earlier, after, kind))
    model = _model(near)
    return Clues(
        dimensions=None if model else dimensions_in_text(near),
        numbers={**numbers, **_processes(earlier, numbers)},
        model=model,
        kind=kind,
        family=None if model else _family(near, place),
        precision=_precision(_settings(near, place)),
        choices=dict(_choices(near, kind)),
        pruning=dict(_pruning(near)) if kind and kind.value == "prune" else {},
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


def _numbers(before: str, after: str, kind: Clue | None) -> Iterator[tuple[str, Clue]]:
    """The last that stands before the message: what comes after it is of the next try."""
    for name, patterns in _NUMBER_PATTERNS.items():
        if name == "rank" and (kind is None or kind.value != "lora"):
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


def _choices(text: str, kind: Clue | None) -> Iterator[tuple[str, Clue]]:
    optimizer = [each for each in _OPTIMIZER.finditer(text) if each[1].lower() in _OPTIMIZERS]
    if optimizer:
        yield "optimizer", Clue(_OPTIMIZERS[optimizer[-1][1].lower()], _words(optimizer[-1][0]))
    targets = _TARGETS.search(text) if kind is not None and kind.value == "lora" else None
    if targets:
        names = tuple(sorted(name.strip(" \"'") for name in targets[1].split(",") if name.strip(" \"'")))
        yield "target_modules", Clue(names, _words(targets[0]))


def _pruning(text: str) -> Iterator[tuple[str, Clue]]:
    for name, pattern in _PRUNING.items():
        found = pattern.search(text)
        if found:
            yield name, Clue(float(found[1]) if name == "sparsity" else found[1], _words(found[0]))


def _kind(text: str, place: FailurePlace) -> Clue | None:
    whole = " ".join([text, *(f"{frame.path} {frame.function} {frame.code}" for frame in place.frames)])
    found = ((name, pattern.search(whole)) for name, pattern in _KINDS)
    return next((Clue(name, _words(match[0])) for name, match in found if match), None)


def _settings(text: str, place: FailurePlace) -> str:
    """The text without the code of the traceback: a softmax in fp32 does not make the job fp32."""
    for frame in place.frames:
        if frame.code and "from_pretrained(" not in frame.code:
            text = text.replace(frame.code, " ")
    return text


def _precision(text: str) -> Clue | None:
    patterns = [*_WEIGHTS, *((f"amp-{name}", pattern) for name, pattern in _AUTOCAST)]
    found = ((name, pattern.search(text)) for name, pattern in patterns)
    return next((Clue(name, _words(match[0])) for name, match in found if match), None)


def _words(text: str) -> str:
    return " ".join(text.split())[:80]


# -- the model -----------------------------------------------------------------------------------------------------


def _model(text: str) -> Clue | None:
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


def _family(text: str, place: FailurePlace) -> str | None:
    known = {preset.model_type for preset in presets()}
    for frame in reversed(place.frames):
        found = _MODELING.search(frame.path)
        if found and (name := found[1] or found[2]) in known:
            return name
    named = {each[1] or each[2] for each in _MODELING.finditer(text)} & known
    return named.pop() if len(named) == 1 else None

"""`--from`: the job file of another tool as a job of memfit, told key by key, and written back once it fits.

    job = read_job("train.yaml")            # LLaMA-Factory, Axolotl, torchtune, TrainingArguments, accelerate, ...
    memfit.predict(job.workload), job.to_json()

Which tool a file belongs to is told from its keys. Nothing in it is run, and no file that it names is opened but a JSON
beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, UnknownName, UsageError
from memfit.files import text_in
from memfit.jobfiles.axolotl import AXOLOTL
from memfit.jobfiles.huggingface import ACCELERATE, DEEPSPEED, HUGGINGFACE
from memfit.jobfiles.keys import JobFormat, KeyValues
from memfit.jobfiles.llamafactory import LLAMAFACTORY
from memfit.jobfiles.torchtune import TORCHTUNE
from memfit.jobs.settings import flag, kinds_that_read
from memfit.jobs.training.config_file import parse_yaml, refuse_python
from memfit.jobs.workload import Workload
from memfit.models.config_check import without_doubles
from memfit.models.registry import names_code

if TYPE_CHECKING:
    import yaml


FORMATS = {each.name: each for each in (LLAMAFACTORY, AXOLOTL, TORCHTUNE, HUGGINGFACE, ACCELERATE, DEEPSPEED)}
TOLD_BY: dict[str, tuple[str, ...]] = {
    "torchtune": ("checkpointer", "metric_logger", "enable_activation_checkpointing"),
    "axolotl": ("base_model",),
    "accelerate": ("compute_environment", "distributed_type"),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    "llamafactory": ("finetuning_type", "stage", "cutoff_len", "lora_target", "quantization_bit"),
    "huggingface": (
        "per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps", "optim", "lr_scheduler_type",
        "max_grad_norm", "logging_steps",
    ),
}  # fmt: skip
"""One of these tells whose file it is; the first tool counts, for LLaMA-Factory has all keys of TrainingArguments."""
OF_OTHER_KINDS = ("dist_config", "peft_config", "init_config")
"""Of LLaMA-Factory's second generation, which has keys of its own."""
MAX_BYTES = 1 << 20
NEEDED = {"model": "which model it trains", "seq_len": "how long its rows are"}


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One job file, or several that go together, as settings of memfit. `to_json()` says what became of each key."""

    files: tuple[Path, ...]
    formats: tuple[JobFormat, ...]
    texts: tuple[str, ...]
    settings: Mapping[str, Any]
    """All of the job's, those of flags too."""
    asked: Mapping[str, Any]
    """Those of flags alone."""
    used: Mapping[str, Any]
    defaults: Mapping[str, Any]
    """Keys that are absent, and what the tool takes for them."""
    idle: tuple[str, ...]
    unknown: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def workload(self) -> Workload:
        for name, what in NEEDED.items():
            if self.settings.get(name) is None:
                raise UsageError(f"{self.where} does not say {what}", hint=f"{flag(name)} does")
        return Workload.from_mapping(self.settings, asked=self.asked)

    @property
    def where(self) -> str:
        return " and ".join(f"'{each}'" for each in self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [str(each) for each in self.files], "formats": [each.name for each in self.formats],
            "used": _plain(self.used), "defaults": _plain(self.defaults), "without_influence": list(self.idle),
            "unknown": list(self.unknown), "left_out": list(self.left_out), "by_flags": _plain(self.asked),
            "notes": list(self.notes),
        }  # fmt: skip

    def in_lines(self) -> Iterator[str]:
        """What a person should know of it beside the figures."""
        yield from self.notes
        for names, what in (
            (self.unknown, "unknown keys, which may mean anything"),
            (self.left_out, "planned as if these keys were not there"),
            (self.idle, "of no influence on memory"),
        ):
            if names:
                yield f"{what}: {', '.join(names)}"

    @property
    def kept(self) -> tuple[str, ...]:
        """Settings that no key of the file could be changed for: a fit leaves them as they are."""
        work, written = self.workload, {"alloc_conf", *self._writable}
        if len(self.files) > 1 or (work.batch_size == 1 and self.formats[0] is AXOLOTL):
            written -= {"seq_len", "batch_size", "grad_accum"} if self.used.get("sample_packing") else set()
        names = [each.name for each in dataclasses.fields(Workload) if each.name not in ("kind", "model")]
        return tuple(name for name in names if name not in written and work.kind in kinds_that_read([name]))

    def write(self, fitted: Workload) -> str:
        """The file with the keys changed that make this job of it. What was given by flags is written too."""
        if len(self.files) > 1:
            raise UsageError("a job of several files is not written back", hint="--emit args or python")
        before, (form,), (text,) = self.workload, self.formats, self.texts
        changed = {n: v for n, v in fitted.settings().items() if v != before.settings().get(n) or n in self.asked}
        edits: dict[str, Any] = {}
        for name, value in changed.items():
            if name in form.written:
                edits |= {
                    form.newer.get(key, key) if form.newer.get(key) in self.used else key: new
                    for key, new in form.edits(name, value).items()
                }
        is_json = _is_json(self.files[0], text)
        made = with_values(text, edits, is_json=is_json, nested=form.nested)
        self._check(made, fitted, set(changed))
        if fitted.alloc_conf in ("", before.alloc_conf) or is_json:
            return made
        return f"# run with PYTORCH_CUDA_ALLOC_CONF={fitted.alloc_conf} in the environment\n{made}"

    def _check(self, text: str, fitted: Workload, changed: set[str]) -> None:
        """It is read again: a file that says another job than the answer is not written."""
        given = {name: value for name, value in self.asked.items() if name not in changed or name not in self._writable}
        again = _read(self.files[0], text, self.formats[0], given, self.left_out)
        made = Workload.from_mapping({**again.settings, "alloc_conf": fitted.alloc_conf}, asked=given)
        same = {**made.settings(), "padding": fitted.padding}  # a file with fewer rows has no mask, and takes less
        wrong = [name for name, value in fitted.settings().items() if same.get(name) != value]
        if wrong:
            raise UsageError(
                f"{self.where}: no key of {self.formats[0].title} says {', '.join(flag(name) for name in wrong)}",
                hint=f"--keep {','.join(name.replace('_', '-') for name in wrong)} does without, or --emit args",
            )

    @property
    def _writable(self) -> set[str]:
        return {name for each in self.formats for name in each.written}


def read_job(*files: str | Path, format: str | None = None, without: Collection[str] = (), **settings: Any) -> JobFile:
    """A job from the files of another tool, read as that tool would. `settings` are those of `memfit.predict` and
    replace the file's; `without` names keys that are taken as if they were not there."""
    if not files:
        raise UsageError("no job file is named")
    if format is not None and format not in FORMATS:
        raise UnknownName("format", format, FORMATS, more=f"formats: {', '.join(FORMATS)}")
    parts = []
    for path in map(Path, files):
        text = _text_of(path)
        document = _parsed(path, text)
        form = FORMATS[format] if format is not None and len(files) == 1 else told_by_keys(document, str(path))
        there = [key for key in without if len(files) == 1 or key.split(".")[0] in document]
        parts.append(_read(path, text, form, settings, there))
    return parts[0] if len(parts) == 1 else _together(parts, settings)


def told_by_keys(document: Mapping[str, Any], where: str) -> JobFormat:
    found = next((name for name, keys in TOLD_BY.items() if any(key in document for key in keys)), None)
    if found is None or any(key in document for key in OF_OTHER_KINDS):
        raise InputError(
            f"'{where}' is no job file that memfit knows",
            hint=f"--from-format says which it is: {', '.join(FORMATS)}; a config of `memfit train` goes to --config",
        )
    return FORMATS[found]


def is_job_file(path: str) -> bool:
    """Of another tool, not of `memfit train`, whose configs have sections and may have some of their keys."""
    place = Path(path)
    if not place.is_file():
        return False
    document = _parsed(place, _text_of(place))
    own = any(isinstance(document.get(name), Mapping) for name in ("data", "method", "batch", "memory", "schedule"))
    tools = [keys for name, keys in TOLD_BY.items() if name != "huggingface"]
    return not own and any(key in document for keys in tools for key in keys)


def _read(path: Path, text: str, form: JobFormat, given: Mapping[str, Any], without: Collection[str]) -> JobFile:
    document = _parsed(path, text)
    values = KeyValues(form, f"'{path}'", document, given, str(path.parent), tuple(without))
    settings = form.settle(values)
    _tell_stage(values, path)
    values.check()
    _refuse_code(settings, given, values.where)
    return JobFile(
        files=(path,), formats=(form,), texts=(text,), settings={**settings, **given}, asked=dict(given),
        used=values.used, defaults={k: v for k, v in values.defaults.items() if v is not None},
        idle=tuple(values.idle), unknown=tuple(values.unknown), left_out=tuple(values.left_out),
        notes=tuple(values.notes),
    )  # fmt: skip


def _refuse_code(settings: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """A file may come from anywhere; what it names is opened as data, and never imported."""
    model = settings.get("model")
    if "model" not in given and isinstance(model, str) and names_code(model):
        raise UsageError(
            f"{where}: the model {model!r} names Python code, which no job file may run",
            hint=f"--model {model} beside the file, if that code is yours",
        )


def _together(parts: list[JobFile], given: Mapping[str, Any]) -> JobFile:
    """What two of them say must agree; which loop it is, the file that names a Trainer knows."""
    settings: dict[str, Any] = {}
    by: dict[str, JobFile] = {}
    own = [each for each in parts if each.formats[0] not in (ACCELERATE, DEEPSPEED)]
    if len(own) > 1:
        raise UsageError(f"{own[0].where} and {own[1].where} are two jobs", hint="beside one, a config of accelerate")
    for part in parts:
        for name, value in part.settings.items():
            launched = part not in own and own and name in ("kind", "precision", "autocast")
            if launched and name in own[0].settings:
                continue
            if name == "grad_checkpointing" and name in settings and name not in given:
                value = _checkpointed(by[name], part)
            elif name in settings and settings[name] != value and name not in given:
                raise UsageError(
                    f"{by[name].where} and {part.where} both say {flag(name)}", hint=f"{flag(name)} decides"
                )
            settings[name], by[name] = value, part
    if own:
        settings |= _autocast_by_launcher(own[0], parts, given)
    lists = ("files", "formats", "texts", "idle", "unknown", "left_out", "notes")
    joined: dict[str, Any] = {name: tuple(each for part in parts for each in getattr(part, name)) for name in lists}
    joined["notes"] = tuple(dict.fromkeys(joined["notes"]))
    for name in ("used", "defaults"):
        joined[name] = {key: value for part in parts for key, value in getattr(part, name).items()}
    return JobFile(**joined, settings=settings, asked=dict(given))


def _checkpointed(one: JobFile, other: JobFile) -> bool:
    """That of FSDP and that of the Trainer are switched on apart; with both, the Trainer does not start. LLaMA-Factory
    has one of its own."""
    said = [each for each in (one, other) if each.settings["grad_checkpointing"]]
    if len(said) == 2 and not any(each.formats[0] is LLAMAFACTORY for each in said):
        raise UsageError(
            f"{one.where} and {other.where} both switch on checkpointing, with which the Trainer does not start",
            hint="leave gradient_checkpointing out, where fsdp_activation_checkpointing is on",
        )
    return bool(said)


def _autocast_by_launcher(own: JobFile, parts: list[JobFile], given: Mapping[str, Any]) -> dict[str, Any]:
    """TrainingArguments read accelerate's mixed_precision from the environment (transformers/training_args.py), and
    their own bf16 or fp16 replaces it. Axolotl sets that variable itself."""
    launched = [part.used.get("mixed_precision") for part in parts if part.formats[0] is ACCELERATE]
    region = next((each for each in launched if each in ("bf16", "fp16")), None)
    precision = str(own.settings.get("precision"))
    of_trainer = own.formats[0] in (HUGGINGFACE, LLAMAFACTORY)
    if region is None or not of_trainer or "autocast" in own.settings or precision.startswith("amp-"):
        return {}
    return {"precision": f"amp-{region}"} if "precision" not in given and precision == "fp32" else {"autocast": region}


def _tell_stage(values: KeyValues, path: Path) -> None:
    """Of a DeepSpeed config that lies beside: its stage, for the error."""
    said, problem = values.document.get("deepspeed"), values.problems.get("deepspeed")
    if problem is None or not isinstance(said, str):
        return
    beside = path.parent / Path(said).name
    try:
        stage = _parsed(beside, _text_of(beside))["zero_optimization"]["stage"]
    except (InputError, KeyError, TypeError):
        return
    values.problems["deepspeed"] = dataclasses.replace(problem, why=f"{problem.why} (ZeRO stage {stage!r:.20})")


def _text_of(path: Path) -> str:
    if not os.path.isfile(path):  # which says so of an impossible name too
        raise InputError(f"'{path}' is not a file" if os.path.exists(path) else f"no job file '{path}'")
    refuse_python(path)
    return text_in(path, MAX_BYTES, "a job file")


def _is_json(path: Path, text: str) -> bool:
    return path.suffix.lower() == ".json" or text.lstrip().startswith("{")


def _parsed(path: Path, text: str) -> Mapping[str, Any]:
    if not _is_json(path, text):
        return {str(key): value for key, value in parse_yaml(text, f"'{path}'").items()}
    try:
        document = json.loads(text, object_pairs_hook=without_doubles)
    except InputError:
        raise
    except RecursionError as error:
        raise InputError(f"'{path}' is nested too deeply for a job file") from error
    except ValueError as error:
        why = f"'{path}' is not JSON that can be read: {str(error)[:100]}"
        if path.suffix.lower() == ".json":
            raise InputError(why) from error
        try:  # a mapping of YAML may begin so too
            document = parse_yaml(text, f"'{path}'")
        except InputError as other:
            raise InputError(f"{why}; nor YAML: {other.message}") from error
    if not isinstance(document, dict):
        raise InputError(f"'{path}' is not a mapping of keys to values")
    return document


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it: dates, tuples and what else YAML knows as text."""
    made: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
    return made


Node = Any


def with_values(text: str, values: Mapping[str, Any], *, is_json: bool, nested: bool) -> str:
    """Keys as the format has them, with dots where they stand in sections. None leaves a key out that is not there."""
    if is_json:
        return _in_json(text, values)
    for key, value in values.items():
        text = _with_value(text, key.split(".") if nested else [key], value)
    return text


def _in_json(text: str, values: Mapping[str, Any]) -> str:
    """There are no comments in it."""
    try:
        document = json.loads(text)
    except ValueError:
        raise UsageError("YAML that begins with a brace is not written back", hint="--emit args or python") from None
    document.update({key: value for key, value in values.items() if value is not None})
    second = next((line for line in text.splitlines()[1:] if line.strip()), "")
    indent = len(second) - len(second.lstrip()) or None
    return json.dumps(document, indent=indent, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")


def _with_value(text: str, path: list[str], value: Any) -> str:
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    above, node = _find(root, path)
    if node is not None:
        return _replaced(text, node, value)
    if value is None:
        return text
    if len(path) > 1 and above is None:
        raise UsageError(f"there is no section {'.'.join(path[:-1])} to write {path[-1]} into")
    return _added(text, above, path[-1], value)


def _find(root: yaml.Node, path: list[str]) -> tuple[Node, Node]:
    """(the section, the value in it); None where there is none."""
    section, found = None, root
    for name in path:
        pairs = found.value if isinstance(getattr(found, "value", None), list) else []
        section, found = found, next((value for key, value in pairs if getattr(key, "value", None) == name), None)
    return section, found


def _replaced(text: str, node: Node, value: Any) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    written = text[start:end]
    if start == end:  # `key:` with nothing after it
        return f"{text[:start]}{'' if text[start - 1 : start] == ' ' else ' '}{_yaml(value)}{text[end:]}"
    rest = written[len(written.rstrip()) :]  # a block's end lies behind its last line
    return f"{text[:start]}{_yaml(value)}{rest}{text[end:]}"


def _added(text: str, section: Node, key: str, value: Any) -> str:
    """As the last key of its section."""
    if getattr(section, "flow_style", False):
        place = section.start_mark.index + 1
        return f"{text[:place]}{key}: {_yaml(value)}, {text[place:]}"
    body = text[: section.value[-1][1].end_mark.index].rstrip()
    tail, _, after = text[len(body) :].partition("\n")
    return f"{body}{tail}\n{' ' * section.start_mark.column}{key}: {_yaml(value)}\n{after}"


def _yaml(value: Any) -> str:
    """In one line. What JSON writes is YAML too; plain words need no quotes."""
    if isinstance(value, str) and value.replace("_", "").replace("-", "").replace(".", "").isalnum():
        return value
    return "null" if value is None else json.dumps(value)

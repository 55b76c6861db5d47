"""`--emit`: the fitted job as something to run: a config, flags, or a Python file.

    yaml     a config for `memfit train --config`
    args     flags for a script of the Hugging Face Trainer, or for `memfit prune`
    python   a file that trains with the Hugging Face Trainer, or runs the model; memfit only for its chunked loss

A change for which there is no switch is refused with the form that has one: nothing of the answer is lost on the way.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from memfit.environment import CUDA_VARIABLE
from memfit.errors import MemfitError, UsageError
from memfit.files import check_free, writing, written_whole
from memfit.gpus import Gpu, find_gpu
from memfit.jobs.settings import NO_TARGETS, flag
from memfit.jobs.training.config import keys_of
from memfit.jobs.workload import Workload
from memfit.models.presets import find_preset, is_basics, is_gsa
from memfit.units import gib, in_mib

if TYPE_CHECKING:
    from memfit.fitting.fit import Fitted
    from memfit.jobfiles.file import JobFile

Form = Literal["yaml", "args", "python"]
FORMS: tuple[str, ...] = get_args(Form)


def environment(work: Workload) -> dict[str, str]:
    """What must be set before Python starts."""
    return {CUDA_VARIABLE: work.alloc_conf} if work.alloc_conf else {}


def refuse_what_has_no_switch(work: Workload, form: str) -> None:
    lacking = [f"{what} on the host" for what in work.offload]
    if work.selective_checkpointing:
        lacking.append("selective checkpointing")
    if work.compile_blocks:
        raise UsageError(f"--emit {form}: the HF Trainer has no switch for compiled blocks", hint="--compile has one")
    if lacking:
        raise UsageError(
            f"--emit {form}: the HF Trainer has no switch for {' and '.join(lacking)}",
            hint="--emit yaml writes it for `memfit train`; --keep offload,selective-checkpointing does without",
        )


SAVE = "out/pruned"


def pruning_flags(work: Workload) -> dict[str, str]:
    ratio = {} if work.sparsity is None else {"--sparsity-ratio": str(work.sparsity)}
    limit = {} if work.max_gpu_memory is None else {"--max-gpu-memory": work.max_gpu_memory}
    return {
        "--model": work.model, "--prune-method": work.method, **ratio, "--sparsity-type": work.sparsity_type,
        "--dtype": work.precision, "--nsamples": str(work.nsamples), "--seqlen": str(work.seq_len),
        "--dataset": work.dataset, **limit, "--save": SAVE,
    }  # fmt: skip


def pruning_command(work: Workload) -> str:
    """`memfit prune` with the length and with what is not at its default."""
    usual = pruning_flags(Workload(kind="prune", model=work.model))
    always = ("--model", "--seqlen")
    said = (each for each in pruning_flags(work).items() if each[0] in always or each[1] != usual.get(each[0]))
    return shlex.join(["memfit", "prune", *(word for pair in said for word in pair)])


DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
INDENT = " " * 8


def python_of(work: Workload, headline: str) -> str:
    if work.trains:
        refuse_what_has_no_switch(work, "python")
    if work.is_quantised and (work.stored is not None or work.quant not in ("nf4", "fp4", "int8")):
        raise UsageError("--emit python writes no settings for torchao or for a checkpoint that is quantised already")
    if work.is_quantised and not _hub_id(work.model):
        raise UsageError(f"--emit python: {work.model} has no weights on the hub that could be quantised")
    said = headline.replace("\\", "/").replace('"', "'")
    write = {"train": _training, "lora": _training, "generate": _generation, "forward": _forward, "prune": _prune}
    model = [] if work.kind == "prune" else [*_imports(work), "", "", *_model(work), "", ""]
    return "\n".join([f'"""{said}."""\n', *_environment(work), *model, *write[work.kind](work)]) + "\n"


def _environment(work: Workload) -> Iterator[str]:
    if settings := environment(work):
        yield "import os\n"
        for name, value in settings.items():
            yield f"os.environ[{name!r}] = {value!r}  # before torch is imported\n"


def _imports(work: Workload) -> Iterator[str]:
    yield "import torch"
    names = ["Trainer", "TrainingArguments"] if work.trains else []
    if _hub_id(work.model):
        names.insert(0, "AutoModelForCausalLM")
    if work.is_quantised:
        names.append("BitsAndBytesConfig")
    if names:
        yield f"from transformers import {', '.join(names)}"
    if work.kind == "lora":
        from memfit.jobs.adapters import config_arguments

        yield f"from peft import {config_arguments(work, ())[0].__name__}, get_peft_model"
        if work.is_kbit_prepared:
            yield "from peft import prepare_model_for_kbit_training"
    if work.compile_blocks and not work.trains:
        yield "from accelerate.utils import compile_regions"
    if _shows_buckets(work):
        yield "from accelerate.utils import DistributedDataParallelKwargs"
    if not _hub_id(work.model):
        yield "from memfit.models.registry import build_model, resolve"
    if work.trains and work.loss == "chunked":
        yield "from memfit.jobs.training.chunked_loss import use_chunked_loss"


def _hub_id(model: str) -> str | None:
    """Where transformers finds the weights: a hub id or a folder; None for what memfit itself has as code."""
    preset = find_preset(model)
    if preset is None and model.endswith("config.json"):
        return str(Path(model).parent)
    if preset is None:
        return None if ":" in model else model
    return next((alias for alias in preset.aliases if "/" in alias), None)


def _model(work: Workload) -> Iterator[str]:
    dtype, hub = DTYPES[work.weight_precision], _hub_id(work.model)
    yield "def load_model():"
    if hub:
        yield "    model = AutoModelForCausalLM.from_pretrained("
        yield f"{INDENT}{hub!r}, dtype={dtype}, attn_implementation={work.attention!r},"
        if work.is_quantised:
            yield f'{INDENT}device_map={{"": 0}}, quantization_config={_bits_and_bytes(work)},'
        yield "    )"
    else:
        yield "    model = build_model("
        yield f"{INDENT}resolve({work.model!r}), dtype={dtype}, attention={work.attention!r}, init_weights=True"
        yield "    )"
    if work.is_kbit_prepared:
        checkpointed = f"use_gradient_checkpointing={work.grad_checkpointing}"
        yield f"    model = prepare_model_for_kbit_training(model, {checkpointed})"
    if work.kind == "lora":
        yield from _adapters(work)
    if work.trains and work.loss == "chunked":
        yield f"    use_chunked_loss(model, chunk={work.loss_chunk})"
    if work.trains and work.kind == "lora" and work.grad_checkpointing:
        yield "    model.enable_input_require_grads()  # the embedding is frozen"
    on_gpu = "model" if work.is_quantised else 'model.to("cuda")'
    if work.trains:
        yield "    return model"
    elif work.compile and work.kind == "generate":
        yield f"    model = {on_gpu}.eval()"
        yield "    model.compile()  # torch.compile(model).generate would run the model as it is"
        yield "    return model"
    elif work.is_compiled:
        yield f"    return {'torch.compile' if work.compile else 'compile_regions'}({on_gpu}.eval())"
    else:
        yield f"    return {on_gpu}.eval()"


def _bits_and_bytes(work: Workload) -> str:
    if work.quant == "int8":
        return "BitsAndBytesConfig(load_in_8bit=True)"
    return (
        f"BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type={work.quant!r}, bnb_4bit_use_double_quant="
        f"{work.double_quant}, bnb_4bit_compute_dtype={DTYPES[work.compute_precision]})"
    )


def _adapters(work: Workload) -> Iterator[str]:
    from memfit.jobs.adapters import config_arguments

    kind, made = config_arguments(work, _targets(work))
    settings = ", ".join(f"{name}={value!r}" for name, value in made.items())
    yield f'    config = {kind.__name__}({settings}, task_type="CAUSAL_LM")'
    yield f"    model = get_peft_model(model, config, autocast_adapter_dtype={work.adapter_dtype == 'fp32'})"


def _targets(work: Workload) -> tuple[str, ...]:
    """Those that were planned: what peft itself would take for all linear layers may be others."""
    from memfit.jobs.build import prepare_without_memory

    if work.target_modules or work.adapter in NO_TARGETS:
        return work.target_modules or ()
    return prepare_without_memory(work).workload.target_modules or ()


def _training(work: Workload) -> Iterator[str]:
    from memfit.jobs.training.loops import trainer_settings

    yield 'def training_arguments(output_dir="outputs/fitted"):'
    yield "    return TrainingArguments("
    yield f"{INDENT}output_dir=output_dir,"
    for name, value in trainer_settings(work).items():
        yield f"{INDENT}{name}={value!r},"
    yield "    )"
    yield ""
    yield ""
    yield "def train(dataset, collator=None):"
    yield f'    """dataset: rows of input_ids and labels, at most {work.seq_len} tokens each."""'
    yield "    trainer = Trainer("
    yield f"{INDENT}model=load_model(), args=training_arguments(), train_dataset=dataset, data_collator=collator"
    yield "    )"
    if _shows_buckets(work):
        yield "    trainer.accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)"
    yield "    return trainer.train()"


def _shows_buckets(work: Workload) -> bool:
    return bool(work.trains and work.world_size > 1 and work.parallel == "ddp" and work.gradient_as_bucket_view)


def _forward(work: Workload) -> Iterator[str]:
    yield "@torch.no_grad()"
    yield "def forward(input_ids):"
    yield f'    """In batches of {work.batch_size}; what comes back lies on the host."""'
    yield "    model = load_model()"
    autocast = f", dtype={DTYPES[work.autocast_type]}" if work.autocast_type else ", enabled=False"
    yield f'    with torch.autocast("cuda"{autocast}):'
    yield f'{INDENT}return [model(rows.to("cuda")).logits.cpu() for rows in input_ids.split({work.batch_size})]'


def _generation(work: Workload) -> Iterator[str]:
    choices: dict[str, Any] = {"max_new_tokens": work.new_tokens, "do_sample": work.decoding == "sample"}
    if work.decoding == "beam":
        choices["num_beams"] = work.num_beams
    if work.cache == "static":
        choices["cache_implementation"] = "static"
    yield "def generate(input_ids):"
    yield f'    """Prompts of {work.seq_len} tokens, in batches of {work.batch_size}."""'
    yield "    model = load_model()"
    yield f"    choices = {choices!r}"
    yield f"    batches = input_ids.split({work.batch_size})"
    yield '    return [model.generate(rows.to("cuda"), **choices).cpu() for rows in batches]'


def _prune(work: Workload) -> Iterator[str]:
    yield "import subprocess"
    yield ""
    yield "subprocess.run("
    yield "    ["
    for each in ("memfit", "prune", *(word for pair in pruning_flags(work).items() for word in pair)):
        yield f"{INDENT}{each!r},"
    yield "    ],"
    yield "    check=True,"
    yield ")"


def check_form(form: str | None, job: JobFile | None, force: bool) -> None:
    """One of the forms, the name of the job file's own format, or a file to write."""
    own = [each.name for each in job.formats] if job else []
    if form is None or form in (*FORMS, *own):
        return
    if job is None or not Path(form).suffix:
        files = f", or a file such as fitted{job.files[0].suffix}" if job else ""
        raise UsageError(f"--emit {form!r} is not one of {', '.join([*FORMS, *own])}{files}")
    check_free(Path(form), "--emit", force, inputs=job.files)


def emit_as_file(fitted: Fitted, form: str, job: JobFile | None) -> str | Path:
    """The text in this form; or the job file with only the needed keys changed, as text, or where it was written."""
    if job is None or form in FORMS:
        return emit(fitted, form)
    text, place = job.write(fitted.fitted), Path(form)
    if form in [each.name for each in job.formats]:
        return text
    with writing(place, "--emit"), written_whole(place) as beside:
        beside.write_text(text, encoding="utf-8")
    return place


def emit(fitted: Fitted, form: str) -> str:
    if form not in FORMS:
        raise UsageError(f"--emit {form!r} is not one of {', '.join(FORMS)}")
    if not fitted.fits:
        raise UsageError("nothing fits, so there is nothing to write", hint="without --emit the nearest set is shown")
    if form == "yaml":
        return yaml_of(fitted)
    if form == "python":
        return python_of(fitted.fitted, headline(fitted))
    return args_of(fitted)


def headline(fitted: Fitted) -> str:
    """What the file is, in one line."""
    use = f"predicted {gib(fitted.after.use_bytes)} of {gib(fitted.gpu.capacity_bytes)}"
    names = ", ".join(change.lever.name for change in fitted.changes) or "nothing had to be changed"
    return f"{fitted.workload.kind} of {fitted.workload.model} on {fitted.gpu.name}: {use}; {names}"


def yaml_of(fitted: Fitted) -> str:
    from memfit.jobs.training.config_file import as_yaml, config_from

    if not fitted.fitted.trains:
        raise UsageError(f"--emit yaml: a config is for training, not for {fitted.workload.kind}", hint="--emit args")
    if fitted.fitted.kind == "lora" and (fitted.fitted.adapter != "lora" or fitted.fitted.adapter_config):
        raise UsageError("--emit yaml: `memfit train` has plain LoRA only", hint="--emit python")
    if fitted.fitted.is_compiled:
        raise UsageError("--emit yaml: `memfit train` does not compile", hint="--emit python, or without --try-compile")
    document = config_document(fitted.fitted, fitted.gpu, fitted.margin)
    config_from(document, name="fitted")  # what the engine does not take is said now, not when the file is read
    alone = fitted.fitted.world_size == 1
    launcher = "memfit train" if alone else f"torchrun --nproc_per_node={fitted.fitted.world_size} -m memfit train"
    how = f"# {launcher} --config THIS.yaml --set data.source=my.jsonl\n"
    return f"# {headline(fitted)}.\n{_in_own_loop(fitted)}{how}{as_yaml(document)}"


def _in_own_loop(fitted: Fitted) -> str:
    """The engine behind the config is not the loop that was asked about, so it is predicted too."""
    from memfit.fitting.forecast import Forecasts

    if fitted.fitted.loop == "memfit":
        return ""
    try:
        own = Forecasts(fitted.gpu, fitted.margin).ask(dataclasses.replace(fitted.fitted, loop="memfit"))
    except MemfitError:
        return ""
    return f"# That is a {fitted.fitted.loop} loop; memfit train: predicted {gib(own.device_bytes)}, {own.verdict}.\n"


def config_document(work: Workload, gpu: Gpu | None, margin: float) -> dict[str, Any]:
    """A training as a config has it."""
    from memfit.fitting.forecast import global_batch_of

    keys = keys_of(work)
    if is_gsa(work.model) or is_basics(work.model):
        keys["model"]["tokenizer"] = "bytes"  # they come with none, and this one needs no file
    card = {} if gpu is None else {"gpu": _card(gpu)}
    return {
        "model": keys.pop("model"), "method": keys.pop("method"),
        "data": {"source": "builtin", "max_seq_len": work.seq_len},
        "batch": {"micro_batch_size": work.batch_size, "global_batch_size": global_batch_of(work)},
        "schedule": keys.pop("schedule"), "precision": keys.pop("precision"),
        "memory": {**card, "margin": margin, **keys.pop("memory")},
        **keys,
    }  # fmt: skip


def _card(gpu: Gpu) -> str:
    """The card as text that `--gpu` accepts."""
    for name in (gpu.name, gpu.name.removesuffix(" card")):  # a label, such as 24 GB
        try:
            if find_gpu(name) == gpu:
                return name
        except MemfitError:
            continue
    return in_mib(gpu.capacity_bytes)


def args_of(fitted: Fitted) -> str:
    work = fitted.fitted
    if work.trains:
        refuse_what_has_no_switch(work, "args")
        launcher = f"torchrun --nproc_per_node={work.world_size} train.py" if work.world_size > 1 else "python train.py"
        return _command(fitted, launcher, _trainer_flags(work))
    if work.kind == "prune":
        return _command(fitted, "memfit prune", pruning_flags(work).items())
    return _command(fitted, f"memfit plan {work.kind}", _own_flags(work))


def _command(fitted: Fitted, launcher: str, flags: Iterable[tuple[str, str]]) -> str:
    before = "".join(f"{name}={shlex.quote(value)} " for name, value in environment(fitted.fitted).items())
    words = (f"    {name} {shlex.quote(value)}" if value else f"    {name}" for name, value in flags)
    lines = [f"{before}{launcher}", *words]
    said = "".join(f"# {said}\n" for said in (headline(fitted), *_left_to_the_script(fitted.fitted)))
    return said + " \\\n".join(lines) + "\n"


def _left_to_the_script(work: Workload) -> Iterator[str]:
    """What is no field of TrainingArguments."""
    if not work.trains:
        return
    model = f"dtype {work.weight_precision}, attn_implementation {work.attention}, rows of {work.seq_len} tokens"
    if work.outputs == "kept" and work.loop == "plain":
        yield "predicted for a loop that keeps the model's outputs (--outputs kept): the Trainer drops them"
    if work.is_quantised:
        prepared = "; then prepare_model_for_kbit_training" if work.is_kbit_prepared else ""
        yield f"train.py itself loads with quantization_config={_bits_and_bytes(work)}{prepared}"
    if work.loss == "chunked":
        yield "use_liger_kernel needs the package liger-kernel; its chunks of the loss are its own, not those predicted"
    if work.world_size > 1 and work.parallel == "ddp" and work.gradient_as_bucket_view:
        yield "train.py itself sets trainer.accelerator.ddp_handler, with gradient_as_bucket_view=True (--emit python)"
    rank = "" if work.rank is None else f" of rank {work.rank}"
    name, casts = "LoRA" if work.adapter == "lora" else work.adapter, work.adapter_dtype == "fp32"
    targets = f" on {','.join(_targets(work))}" if work.kind == "lora" and work.adapter not in NO_TARGETS else ""
    adapters = f"; {name}{rank}{targets}, autocast_adapter_dtype={casts}"
    yield f"train.py itself sets: {model}{adapters if work.kind == 'lora' else ''}"


def _trainer_flags(work: Workload) -> Iterator[tuple[str, str]]:
    """As HfArgumentParser reads the fields of TrainingArguments."""
    from memfit.jobs.training.loops import trainer_settings

    own = {"use_liger_kernel": True} if work.loss == "chunked" else {}
    settings: Mapping[str, Any] = {**trainer_settings(work), **own}
    for name, value in settings.items():
        said = json.dumps(value) if isinstance(value, dict) else str(value)
        yield f"--{name}", "" if name == "fsdp" else said  # a word after it would be an option of old


def _own_flags(work: Workload) -> Iterator[tuple[str, str]]:
    for name, value in work.settings().items():
        if name != "kind" and value not in (None, False, "", []):
            yield flag(name), "" if value is True else ",".join(value) if isinstance(value, list) else str(value)

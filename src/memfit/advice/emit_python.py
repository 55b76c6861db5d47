"""The fitted job as a Python file of the reader's own: transformers and peft, and memfit only for its chunked loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.advice.pruning_command import pruning_flags
from memfit.advice.trainer_words import environment, refuse_what_has_no_switch, trainer_settings
from memfit.jobs.workload import Workload
from memfit.models.presets import find_preset

DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
INDENT = " " * 8


def python_of(work: Workload, headline: str) -> str:
    if work.trains:
        refuse_what_has_no_switch(work, "python")
    parts = [f'"""{_safe(headline)}."""\n', *_environment(work), *_imports(work), "", "", *_model(work), "", ""]
    if work.kind == "prune":
        return "\n".join([parts[0], *_environment(work), *_prune(work)]) + "\n"
    body = _training(work) if work.trains else _generation(work) if work.kind == "generate" else _forward(work)
    return "\n".join([*parts, *body]) + "\n"


def _safe(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'")


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
    if names:
        yield f"from transformers import {', '.join(names)}"
    if work.kind == "lora":
        yield "from peft import LoraConfig, get_peft_model"
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
        yield f"{INDENT}{hub!r}, dtype={dtype}, attn_implementation={work.attention!r}"
        yield "    )"
    else:
        yield "    model = build_model("
        yield f"{INDENT}resolve({work.model!r}), dtype={dtype}, attention={work.attention!r}, init_weights=True"
        yield "    )"
    if work.kind == "lora":
        yield from _adapters(work)
    if work.trains and work.loss == "chunked":
        yield f"    use_chunked_loss(model, chunk={work.loss_chunk})"
    if work.trains and work.kind == "lora" and work.grad_checkpointing:
        yield "    model.enable_input_require_grads()  # the embedding is frozen"
    yield "    return model" if work.trains else '    return model.to("cuda").eval()'


def _adapters(work: Workload) -> Iterator[str]:
    targets = list(work.target_modules) if work.target_modules else "all-linear"
    settings = f"r={work.rank}, lora_alpha={2 * work.rank}, lora_dropout={work.lora_dropout}"
    yield f'    config = LoraConfig({settings}, target_modules={targets!r}, task_type="CAUSAL_LM")'
    yield f"    model = get_peft_model(model, config, autocast_adapter_dtype={work.adapter_dtype == 'fp32'})"


def _training(work: Workload) -> Iterator[str]:
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
    autocast = f", dtype={DTYPES[work.autocast]}" if work.autocast else ", enabled=False"
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

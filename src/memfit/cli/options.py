"""The flags of `plan`, `fit` and `check`, made from the fields of `Workload`: there is no second list to keep.

A field is an option of the kinds of job that read it. Its type gives the choices, its default the default; only the
sentence of help is written here. Values are checked by `Workload` alone, so a wrong one is told in the same words on
the command line, in a line of `plan batch` and in Python. Below: flags that many commands have, in the same words.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from memfit.cli import output
from memfit.cli.typed import Command
from memfit.errors import UsageError
from memfit.gpus import find_gpu
from memfit.jobs.spellings import ALIASES, plain_value, setting_types, split_names, without_none
from memfit.jobs.workload import KINDS, QLORA, Workload, flag

HELP = {
    "model": "Preset (`memfit models`), hub id, folder, config.json or module:factory.",
    "batch_size": "Sequences in one forward pass.",
    "seq_len": "Tokens in a sequence.",
    "precision": "Type of the weights; amp is fp32 weights under autocast.",
    "autocast": "Type of the autocast region, whatever the weights are. Default: none, or what an amp precision says.",
    "quant": "Base model's linear layers in 4 or 8 bits, by bitsandbytes or torchao, as from_pretrained loads them; "
    "dequantize makes a quantised checkpoint 16-bit.",
    "double_quant": "Quantise the scales of 4-bit weights too.",
    "quant_compute": "Type in which 4-bit layers compute. Default: that of the other weights.",
    "kbit_prepare": "peft's prepare_model_for_kbit_training: 16-bit weights become fp32. Default: with --quant.",
    "attention": "Fused kernels, or the plain formula.",
    "padding": "Rows of a batch differ in length: the mask forces other attention kernels.",
    "loop": "A bare PyTorch loop, the Hugging Face Trainer, or `memfit train`.",
    "loss": "How logits become a loss; chunked is the same loss, some tokens at a time.",
    "loss_chunk": "Tokens at a time, for --loss chunked.",
    "head": "What the model ends in. Default: what its config.json names.",
    "target_len": "Tokens that an encoder-decoder writes. Default: 128.",
    "images": "Pictures in a row, for a model of pictures and text. Default: 1.",
    "image_size": "WIDTHxHEIGHT of a picture. Default: what the model's processor makes of any.",
    "outputs": "Whether the loop's variable keeps the model's outputs through backward. Default: a plain loop does.",
    "optimizer": "adamw is torch's foreach. Default: what the loop takes by itself.",
    "grad_checkpointing": "Recompute a block's activations in the backward pass.",
    "use_cache": "Leave config.use_cache on: the forward pass also keeps keys and values, as for generation.",
    "selective_checkpointing": "Recompute only what is cheap: matrix products and attention are kept.",
    "compile": "torch.compile the whole model.",
    "compile_blocks": "torch.compile each block by itself (regional compilation).",
    "offload": "What lies in host memory: optimizer, activations, weights (frozen ones).",
    "world_size": "GPUs that train together; the plan is of one of them.",
    "parallel": "How: DDP has all on each, FSDP2 shards.",
    "gradient_as_bucket_view": "Gradients lie in DDP's buckets. Default: what the loop does by itself.",
    "grad_accum": "Forward and backward passes before one optimizer step.",
    "clip_grad": "Clip the norm of the gradients. Default: what the loop does by itself.",
    "adapter": "Which adapter of peft: lora, dora, ia3, loha, lokr, vera, adalora, oft, boft, prefix, prompt, ...",
    "adapter_config": "What else its config says: KEY=VALUE,... or a JSON or YAML file.",
    "rank": "Rank of the adapters. Default: 16 of LoRA, else what peft has.",
    "target_modules": "Modules with adapters: a,b or the flag repeated. Default: all linear layers of a block.",
    "lora_dropout": "Dropout in front of the adapters.",
    "adapter_dtype": "Type of the adapters' weights; fp32 is what peft makes.",
    "new_tokens": "Tokens to generate.",
    "decoding": "How the next token is chosen.",
    "num_beams": "Beams, when decoding by beam.",
    "cache": "How the key-value cache grows.",
    "method": "How weights are chosen that go.",
    "sparsity": "Share of the weights that goes. Default: a half, or what the type says.",
    "sparsity_type": "unstructured, or N:M: N of each M consecutive weights go.",
    "nsamples": "Windows of text to calibrate on.",
    "dataset": "Text to calibrate on; it does not change the memory.",
    "max_gpu_memory": "What may be used of the card, as 16GiB. Default: all of it.",
    "alloc_conf": "What PYTORCH_CUDA_ALLOC_CONF would hold, such as expandable_segments:True.",
}
METAVARS = {int: "N", float: "X", str: "TEXT"}
MOST_CHOICES = 12
NUMBERS = {int: "a whole number", float: "a number"}


def settings_of(kind: str) -> tuple[str, ...]:
    """The settings that a kind of job reads, some of them only beside another one: beams when decoding by beam."""
    plain = Workload(kind=kind, model="-", world_size=2)  # type: ignore[arg-type]
    read = set(plain.settings())
    for name in list(read - {"kind"}):
        if get_origin(setting_types()[name]) is Literal:
            for value in get_args(setting_types()[name]):
                read.update(dataclasses.replace(plain, **{name: value}).settings())
    return tuple(f.name for f in dataclasses.fields(Workload) if f.name in read and f.name != "kind")


def add_kinds(
    group: typer.Typer, ask: Callable[..., int], extra: Mapping[str, tuple[Any, Any]], *, what: Mapping[str, str],
    examples: Mapping[str, str], of_training: Mapping[str, tuple[Any, Any]] | None = None,
) -> None:  # fmt: skip
    """A command for each kind of job, with its settings and some more as flags: `ask(typed, **more)`."""
    for kind in (kind for kind in (*KINDS, QLORA) if kind in what):
        more = {**extra, **((of_training or {}) if kind in ("train", "lora", QLORA) else {})}
        register = group.command(name=kind, cls=Command, help=what[kind], epilog=output.example(examples[kind]))
        register(with_options_of("lora" if kind == QLORA else kind, partial(_ask, ask, kind, tuple(more)), more))


def _ask(ask: Callable[..., int], kind: str, more: tuple[str, ...], **given: Any) -> int:
    asked = {name: given.pop(name) for name in more}
    return ask({"kind": kind, **given}, **asked)


def read_workload(typed: Mapping[str, Any], gpu: str | None = None) -> Workload:
    """The job that was typed. A wrong name of a card or a model is told before anything slow is loaded."""
    made = Workload.from_mapping(read_settings(typed))
    if gpu is not None:
        find_gpu(gpu)
    _ = made.source
    return made


def read_settings(typed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(name, given) for name, given in typed.items()}


def with_options_of(kind: str, run: Callable[..., int], extra: Mapping[str, tuple[Any, Any]]) -> Callable[..., int]:
    """`run(**typed)` as a command: typer reads the options from the signature it is given here. What was not typed is
    not passed, so that `Workload` knows what was asked for."""
    names = settings_of(kind)
    return _command(names, {**{name: _option(name) for name in names}, **extra}, run)


def with_any_option(run: Callable[..., int], extra: Mapping[str, tuple[Any, Any]]) -> Callable[..., int]:
    """The same with the settings of every kind of job, none of them required."""
    names = tuple(field.name for field in dataclasses.fields(Workload) if field.name != "kind")
    return _command(names, {**extra, **{name: _unset(*_option(name)) for name in names}}, run)


def _unset(annotation: Any, _: Any) -> tuple[Any, None]:
    kind, info = get_args(annotation)
    info.show_default, info.rich_help_panel = False, "The job"
    return Annotated[without_none(kind) | None, info], None


Told = tuple[str, str | None, str]
"""Flags, metavar, help."""
YES_OR_NO = inspect.Parameter("flag", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)


def command_of(
    function: Callable[..., object], told: Mapping[str, Mapping[str, Told]], run: Callable[..., int]
) -> Callable[..., int]:  # fmt: skip
    """`run(**settings)` as a command whose options are parameters of a function of the library, by their own types and
    defaults; heading by heading it is `told` which flags, which metavar and which help they have. What the function
    does not know is yes or no."""
    known = inspect.signature(function).parameters
    names = vars(sys.modules[function.__module__])
    made = _command(
        (),
        {
            name: _parameter(_evaluated(known.get(name, YES_OR_NO), names), heading, *words)
            for heading, each in told.items()
            for name, words in each.items()
        },
        run,
    )
    made.__name__, made.__doc__ = function.__name__, run.__doc__
    return made


def _evaluated(known: inspect.Parameter, names: Mapping[str, Any]) -> inspect.Parameter:
    """Alone: what the function returns need not be imported for it."""
    written = known.annotation
    return known.replace(annotation=eval(written, dict(names))) if isinstance(written, str) else known


def _parameter(known: inspect.Parameter, heading: str, flags: str, metavar: str | None, said: str) -> tuple[Any, Any]:
    """Where text will do it is text."""
    kinds, kind, default = get_args(known.annotation), known.annotation, known.default
    if get_origin(kind) is Iterable:
        kind, default = list[str] | None, None
    elif str in kinds:
        kind = str | None if NoneType in kinds else str
    shown = default not in (None, inspect.Parameter.empty)
    info = typer.Option(*flags.split(), help=said, metavar=metavar, show_default=shown, rich_help_panel=heading or None)
    return Annotated[kind, info], default


def _command(
    names: tuple[str, ...], options: Mapping[str, tuple[Any, Any]], run: Callable[..., int]
) -> Callable[..., int]:  # fmt: skip
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]

    def command(context: typer.Context, **given: Any) -> int:
        if context.invoked_subcommand is not None:  # of a group, and that one does it
            return 0
        rest = {name: value for name, value in given.items() if name not in names}
        return run(**{name: given[name] for name in names if _was_typed(context, name)}, **rest)

    command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    return command


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(name: str) -> tuple[Any, Any]:
    """A field as typer wants it: an annotation that holds the flag, and a default."""
    kind, default = setting_types()[name], {f.name: f.default for f in dataclasses.fields(Workload)}[name]
    names = [flag(each) for each in (name, *ALIASES.get(name, ()))]
    if kind is bool and default is not False:  # off has to be sayable too
        names = [f"{each}/--no-{each.removeprefix('--')}" for each in names]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    metavar = "NAME" if len(choices) > MOST_CHOICES else "|".join(choices) or METAVARS.get(kind, "NAMES")
    show = isinstance(default, (int, float, str)) and default is not False and default != ""
    info = typer.Option(*names, help=HELP.get(name), metavar=None if kind is bool else metavar, show_default=show)
    given: Any = bool if kind is bool else list[str] if get_origin(kind) is tuple else str
    if default is dataclasses.MISSING:
        return Annotated[given, info], inspect.Parameter.empty
    if default is None:
        return Annotated[given | None, info], None
    return Annotated[given, info], default if kind is bool else str(default)


def _value(name: str, given: Any) -> Any:
    """What was typed, as the type that the field has; whether it is a sensible value is for `Workload` to say."""
    kind = setting_types()[name]
    if get_origin(kind) is tuple:
        return split_names(given) if given else None
    if kind in NUMBERS and given is not None:
        try:
            return kind(given)
        except ValueError as error:
            raise UsageError(f"{flag(name)} {given!r} is not {NUMBERS[kind]}") from error
    return plain_value(name, given)


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of the report.")]

STEPS_FLAG = typer.Option("--steps", metavar="N", show_default=False, help="Optimizer steps: how long they take.")
TOKENS_FLAG = typer.Option(
    "--tokens", metavar="N", show_default=False, help="Tokens to train on in all: how long that takes, as 300000000."
)
HOW_MUCH: dict[str, tuple[Any, Any]] = {
    "steps": (Annotated[str | None, STEPS_FLAG], None),
    "tokens": (Annotated[str | None, TOKENS_FLAG], None),
}
"""How long a training is."""


def how_much(steps: str | None, tokens: str | None) -> dict[str, int]:
    """What `--steps` or `--tokens` says."""
    given = {name: text for name, text in (("steps", steps), ("tokens", tokens)) if text is not None}
    if len(given) > 1:
        raise UsageError("--steps and --tokens both say how long it trains", hint="give one of them")
    for name, text in given.items():
        number = text.replace(",", "").replace("_", "")
        if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 10**18:
            raise UsageError(f"--{name} {text!r} is not a whole number above 0", hint=f"such as --{name} 5000")
        given[name] = number
    return {name: int(number) for name, number in given.items()}

"""`memfit profile`: a snapshot of a forward pass or a training step, measured on a GPU or predicted without one."""

from __future__ import annotations

from typing import Any

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import FlagText, command_of
from memfit.cli.typed import Group
from memfit.files import writing
from memfit.running.profile import prepare_suite

DOES_NOT_FIT = 1
SIZES = "small|medium|large|xl|2.7B"

profile = typer.Typer(
    help="Snapshot the memory of a forward pass or a training step, on a GPU or predicted.",
    epilog=output.example(
        "memfit profile --model-size 2.7B --profile-type training --device predict --output x.pickle"
    ),
    invoke_without_command=True,
    rich_markup_mode=None,
    cls=Group,
)

SIZE: FlagText = ("--model-size", SIZES, "A CS336 size.")
STEPS: dict[str, FlagText] = {
    "batch_size": ("--batch-size", "N", "Sequences in one forward pass."),
    "warmup_steps": ("--warmup-steps", "N", "Steps before the recording starts."),
    "measure_steps": ("--measure-steps", "N", "Steps that are recorded."),
}
WHERE: dict[str, FlagText] = {
    "device": ("--device", None, "cuda, cuda:1, or predict: no GPU is needed then."),
    "gpu": ("--gpu", None, "With --device predict: a card, for a verdict."),
}
FORCE: FlagText = ("--force -f", None, "Overwrite what is there.")
ONE: dict[str, FlagText] = {
    "model_size": SIZE,
    "model": ("--model", None, "Or any model that `memfit plan` takes."),
    "context_length": ("--context-length --seq-len --seqlen", "N", "Tokens in a sequence."),
    **STEPS,
    "profile_type": ("--profile-type", "forward|training", "What a step is."),
    "use_mixed_precision": ("--use-mixed-precision", None, "Run under autocast; the weights stay fp32."),
    "dtype": ("--dtype", "bf16|fp16", "Of the autocast region. Default: bf16."),
    "output": ("--output -o", "FILE", "The snapshot, .pickle or .json."),
    **WHERE,
    "force": FORCE,
    "json": ("--json", None, "One JSON document on stdout instead of the report."),
}
ALL: dict[str, FlagText] = {
    "part": ("--part", "a|b|c|d|e", "Only these parts; may be repeated."),
    "model_size": SIZE,
    **STEPS,
    **WHERE,
    "output_dir": ("--output-dir", "FOLDER", "Where all files go."),
    "force": FORCE,
}


def _profile(*, json: bool, **settings: Any) -> int:
    """Snapshot the memory of a forward pass or a training step, on a GPU or predicted."""
    with output.working(f"profiling {settings['model_size'] or settings['model']}"):
        found = memfit.profile(**settings)
    output.tell(found, json=json)
    return 0 if found.found.fits else DOES_NOT_FIT


def _suite(**settings: Any) -> int:
    """Make every file of the profiling guide and answer its parts (a) to (e), in words and numbers."""
    whole, wanted = prepare_suite(**settings)
    with output.working(f"profiling {whole.base.model}"), writing(whole.folder, "--output-dir"):
        text = whole.run(wanted)
    output.say(text)
    for path in whole.written:
        output.say(f"wrote {path}")
    return 0 if whole.all_fit else DOES_NOT_FIT


EXAMPLE = output.example("memfit profile suite --device predict --output-dir results/memory_profiling")
profile.callback()(command_of(memfit.profile, {"": ONE}, _profile))
profile.command(name="suite", epilog=EXAMPLE)(command_of(prepare_suite, {"": ALL}, _suite))

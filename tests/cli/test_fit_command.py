"""`memfit fit` as a shell sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("shared_traces")

Run = Callable[..., Any]


def test_the_answer_is_one_json_document(memfit: Run, tiny: str) -> None:
    done = memfit("fit", "train", "--model", tiny, "--seq-len", 64, "--global-batch", 4, "--gpu", "2GiB", "--json")

    assert done.code == 0
    assert done.json["schema"] == "memfit.fit/1"
    assert done.json["answer"] == "fits already"
    assert done.json["global_batch"] == 4
    assert done.json["fitted_workload"]["grad_accum"] == 4


def test_what_has_to_change_is_told_in_order_with_how_to_do_it(memfit: Run, tiny: str) -> None:
    job = ("train", "--model", tiny, "--batch-size", 32, "--seq-len", 256)
    card = memfit("plan", *job, "--json").json["smallest_gpu_bytes"] - (4 << 20)

    done = memfit("fit", *job, "--gpu", f"{card}B", "--margin", 0)

    assert done.code == 0
    assert "change this" in done.out
    assert "why not less" in done.out
    assert "HF Trainer" in done.out


def test_exit_code_1_means_that_nothing_fits(memfit: Run) -> None:
    argv = ("fit", "forward", "--model", "gpt2-xl", "--seq-len", 8, "--gpu", "1GiB", "--keep", "precision,alloc-conf")

    assert memfit(*argv, "--json").code == 1
    done = memfit(*argv)
    assert done.code == 1
    assert "nothing fits" in done.out
    assert "a card with" in done.out


def test_what_is_emitted_stands_alone_on_stdout(memfit: Run, tiny: str) -> None:
    done = memfit("fit", "train", "--model", tiny, "--seq-len", 64, "--gpu", "2GiB", "--emit", "python")

    assert done.code == 0
    compile(done.out, "fitted.py", "exec")
    assert "predicted" in done.err


def test_the_ladder_is_a_document_of_its_own(memfit: Run, tiny: str) -> None:
    asked = ("--model", tiny, "--seq-len", 128, "--global-batch", 4, "--gpu", "2GiB")

    done = memfit("fit", "train", *asked, "--ladder", "--json")

    assert done.json["schema"] == "memfit.ladder/1"
    assert [rung["global_batch"] for rung in done.json["rungs"]] == [4] * len(done.json["rungs"])
    assert "the ladder" in memfit("fit", "train", *asked, "--ladder").out


def test_underscores_and_aliases_are_names_to_keep(memfit: Run, tiny: str) -> None:
    done = memfit(
        "fit", "lora", "--model", tiny, "--seq-len", 64, "--gpu", "2GiB", "--keep", "context_length,rank", "--json"
    )

    assert done.json["keep"] == ["seq_len", "rank"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("fit", "train", "--model", "gpt2"), "--gpu"),
        (("fit", "train", "--model", "gtp2", "--gpu", "8GiB"), "gtp2"),
        (("fit", "train", "--model", "gpt2", "--gpu", "8GiB", "--margin", "much"), "--margin 'much'"),
        (("fit", "train", "--model", "gpt2", "--gpu", "8GiB", "--margin", "2"), "--margin 2.0"),
        (("fit", "train", "--model", "gpt2", "--gpu", "8GiB", "--keep", "seqlne"), "seqlne"),
        (("fit", "train", "--model", "gpt2", "--gpu", "8GiB", "--global-batch", "0"), "--global-batch '0'"),
        (("fit", "train", "--model", "gpt2", "--gpu", "8GiB", "--emit", "toml"), "--emit 'toml'"),
        (("fit", "train", "--model", "gpt2", "--gpu", "8GiB", "--emit", "yaml", "--json"), "--emit and --json"),
        (
            ("fit", "train", "--model", "gpt2", "--gpu", "8GiB", "--batch-size", "3", "--global-batch", "8"),
            "--batch-size 3 does not divide 8",
        ),
    ],
)
def test_wrong_input_is_one_error_and_exit_code_2(memfit: Run, argv: tuple[str, ...], said: str) -> None:
    done = memfit(*argv)

    assert done.code == 2
    assert done.out == ""
    assert said in done.err


@pytest.mark.parametrize("command", ["fit", "plan"])
@pytest.mark.parametrize("flag", ["--compile-blocks", "--try-compile"])
def test_what_is_not_planned_of_a_generation_is_not_offered(memfit: Run, command: str, flag: str) -> None:
    done = memfit(command, "generate", "--model", "gpt2", "--gpu", "24GB", flag)

    assert (done.code, f"no such option: {flag}" in done.err) == (2, True)

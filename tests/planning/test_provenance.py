"""A plan says how it was made, whichever way that was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import LLAMA
from told_points import CORNERS, INSIDE, at

from memfit.jobs.training.config_file import config_from
from memfit.jobs.training.job import prepare_job
from memfit.jobs.workload import Workload
from memfit.planning.own_code import trace_own_code
from memfit.planning.predict import Plan, predict
from memfit.planning.traced import Provenance, TracedShare
from memfit.planning.training import plan_training

ALL = {"blocks": None, "steps": None, "tokens": None, "micro_batches": None, "shapes": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of seven blocks, of which four tell the rest."""
    folder = tmp_path_factory.mktemp("models") / "seven-blocks"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 7}))
    return str(folder)


def planned(model: str, kind: str = "forward", **settings: Any) -> Plan:
    return predict(**{"kind": kind, "model": model, "batch_size": 2, "seq_len": 64, **settings})


def check(plan: Plan, way: str, words: str, *, cached: bool = False, **shares: Any) -> None:
    assert plan.to_json()["how"] == {"way": way, "cached": cached, **ALL, **shares}
    assert plan.notes.count(words) == 1
    assert f"- {words}" in " ".join(str(plan).split())


FOUR = {"traced": 4, "all": 7}


def test_a_forward_pass_is_extended_from_few_blocks(model: str) -> None:
    check(planned(model), "extended", "extended from 4 of 7 blocks: the others repeat them", blocks=FOUR)


@pytest.mark.parametrize(("loop", "steps"), [("plain", 3), ("trainer", 3), ("memfit", 5)])
def test_a_training_is_extended_from_few_blocks_and_steps(model: str, loop: str, steps: int) -> None:
    words = f"extended from 4 of 7 blocks and {steps - 1} of {steps} steps: the others repeat them"
    check(planned(model, "train", loop=loop), "extended", words, blocks=FOUR, steps={"traced": steps - 1, "all": steps})


def test_a_long_generation_is_extended_from_few_blocks_and_tokens(model: str) -> None:
    words = "extended from 4 of 7 blocks and 12 of 40 new tokens: the others repeat them"
    made = planned(model, "generate", new_tokens=40)
    check(made, "extended", words, blocks=FOUR, tokens={"traced": 12, "all": 40})


def test_of_a_short_generation_all_tokens_are_traced(model: str) -> None:
    made = planned(model, "generate", new_tokens=3)
    check(made, "extended", "extended from 4 of 7 blocks: the others repeat them", blocks=FOUR)


def test_a_pruning_is_extended_from_few_blocks_and_micro_batches(model: str) -> None:
    made = predict(kind="prune", model=model, seq_len=512, nsamples=100)
    words = "extended from 4 of 7 blocks and 5 of 7 micro-batches: the others repeat them"
    check(made, "extended", words, blocks=FOUR, micro_batches={"traced": 5, "all": 7})


def test_a_model_of_few_blocks_is_traced_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    check(planned(str(tmp_path)), "traced", "traced whole")


def test_buckets_run_across_blocks_so_all_are_traced(model: str) -> None:
    check(planned(model, "train", world_size=2, parallel="ddp"), "traced", "traced whole")


def test_ones_own_model_and_ones_own_code_are_traced_whole() -> None:
    check(planned("plans:Bigram"), "traced", "traced whole")
    check(trace_own_code(lambda: torch.ones(8, device="cuda")), "traced", "traced whole")


def test_a_batch_size_and_length_among_others_are_interpolated(model: str) -> None:
    work = Workload(kind="forward", model=model, precision="fp32")
    for point in (*CORNERS, *INSIDE):
        assert predict(at(work, point)).how.way == "extended"
    made = predict(at(work, (7, 222)))
    shapes = made.how.shapes or 0
    assert shapes >= 5
    words = f"interpolated between {shapes} traced batch sizes and lengths, each from 4 of 7 blocks"
    check(made, "interpolated", words, blocks=FOUR, shapes=shapes)
    assert predict(at(work, (7, 222)), trace_cache=False).how.way == "extended"


def test_a_plan_from_the_cache_says_so_and_how_that_one_was_made(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    first, again = (planned(model, "lora", rank=2) for _ in range(2))
    shares: dict[str, Any] = {"blocks": FOUR, "steps": {"traced": 2, "all": 3}}
    words = "extended from 4 of 7 blocks and 2 of 3 steps: the others repeat them"
    check(first, "extended", words, **shares)
    check(again, "extended", f"read from the cache: {words}", cached=True, **shares)


def test_the_plan_of_a_training_run_says_it_too(model: str, tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("to be or not to be. " * 400)
    document = {
        "model": {"name": model, "tokenizer": "bytes", "from_scratch": True}, "max_seq_len": 128, "max_steps": 4,
        "data.source": str(tmp_path / "play.txt"), "output_dir": str(tmp_path / "out"), "device": "cpu",
        "precision": "fp32", "global_batch_size": 8, "micro_batch_size": 2,
    }  # fmt: skip
    made = plan_training(prepare_job(config_from(document, name="small"))).to_json()
    assert made["plan"]["how"]["blocks"] == FOUR
    assert "extended from 4 of 7 blocks and 4 of 5 steps: the others repeat them" in made["notes"]


@pytest.mark.parametrize(
    "facts", [{"blocks": [7, 7]}, {"blocks": [0, 7]}, {"blocks": [4]}, {"layers": [4, 7]}, {"blocks": ["x", 7]}]
)
def test_what_a_file_says_of_it_is_not_believed_unread(facts: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Provenance.from_facts(facts)


def test_what_is_kept_of_it_is_found_again() -> None:
    made = Provenance(blocks=TracedShare(4, 28), tokens=TracedShare(13, 128))
    again = Provenance.from_facts(json.loads(json.dumps(made.facts())))
    assert again == dataclasses.replace(made, cached=True)

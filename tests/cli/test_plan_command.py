"""`memfit plan`: flags in, one document or one report out."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.cli.main import main
from memfit.events import Trace
from memfit.jobs.settings import KINDS

Memfit = Callable[..., Any]

KEYS = [
    "schema", "id", "workload", "model", "gpu", "peak", "at_peak", "breakdown", "phases", "verdict", "headroom_bytes",
    "smallest_gpu_bytes", "notes", "seconds",
]  # fmt: skip


def short(kind: str) -> tuple[object, ...]:
    return ("--seq-len", 16, *(("--new-tokens", 2) if kind == "generate" else ()))


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_one_document_on_stdout_and_nothing_else_anywhere(memfit: Memfit, tiny: str, kind: str) -> None:
    ended = memfit("plan", kind, "--model", tiny, *short(kind), "--gpu", "RTX 4090", "--json")
    assert (ended.code, ended.err) == (0, "")
    plan = ended.json
    assert set(KEYS) <= set(plan)
    assert plan["schema"] == "memfit.plan/1"
    assert plan["workload"]["kind"] == kind
    assert sum(plan["breakdown"].values()) == plan["peak"]["allocated_bytes"]
    assert plan["peak"]["device_bytes"] == plan["peak"]["reserved_bytes"] + plan["peak"]["context_bytes"]


def test_underscores_are_hyphens_in_flags_and_in_choices(memfit: Memfit, tiny: str) -> None:
    common = ("plan", "train", "--model", tiny, "--json")
    hyphens = memfit(*common, "--batch-size", 2, "--seq-len", 16, "--grad-checkpointing", "--optimizer", "adamw-single")
    underscores = memfit(
        *common, "--batch_size", 2, "--seq_len", 16, "--grad_checkpointing", "--optimizer", "adamw_single"
    )
    assert hyphens.json["workload"] == underscores.json["workload"]
    assert underscores.json["workload"]["optimizer"] == "adamw-single"
    assert hyphens.json["peak"] == underscores.json["peak"]


@pytest.mark.parametrize("flag", ["--seq-len", "--seqlen", "--context-length", "--context_length", "--seq_len"])
def test_the_length_of_a_sequence_has_several_names(memfit: Memfit, tiny: str, flag: str) -> None:
    assert memfit("plan", "forward", "--model", tiny, flag, 24, "--json").json["workload"]["seq_len"] == 24


@pytest.mark.parametrize(
    "flags",
    [("--target-modules", "q_proj,v_proj"), ("--target-modules", "q_proj", "--target_modules", " v_proj, ")],
    ids=["commas", "repeated"],
)
def test_target_modules_come_with_commas_or_repeated(memfit: Memfit, tiny: str, flags: tuple[str, ...]) -> None:
    plan = memfit("plan", "lora", "--model", tiny, "--seq-len", 16, "--rank", 4, *flags, "--json").json
    assert plan["workload"]["target_modules"] == ["q_proj", "v_proj"]
    q_proj, v_proj = 4 * (64 + 64), 4 * (64 + 32)
    assert plan["model"]["trainable_parameters"] == 2 * (q_proj + v_proj)


def test_flags_reach_the_job(memfit: Memfit, tiny: str) -> None:
    flags = ("--precision", "fp32", "--attention", "eager", "--grad-accum", 2, "--clip-grad", "--optimizer", "sgd")
    work = memfit("plan", "train", "--model", tiny, "--seq-len", 16, *flags, "--json").json["workload"]
    said = {name: work[name] for name in ("precision", "attention", "grad_accum", "clip_grad", "optimizer")}
    assert said == {"precision": "fp32", "attention": "eager", "grad_accum": 2, "clip_grad": True, "optimizer": "sgd"}


def test_the_settings_of_the_allocator_are_obeyed(memfit: Memfit, tiny: str) -> None:
    common = ("plan", "forward", "--model", tiny, "--seq-len", 16, "--json")
    plain = memfit(*common).json["peak"]["reserved_bytes"]
    expandable = memfit(*common, "--alloc-conf", "expandable_segments:True").json["peak"]["reserved_bytes"]
    assert plain % (2 << 20) == 0
    assert expandable != plain


def test_what_is_exported_for_the_allocator_is_obeyed_and_named_unless_a_flag_says_otherwise(
    memfit: Memfit, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    common = ("plan", "train", "--model", tiny, *short("train"), "--json")
    obeyed, otherwise = memfit(*common), memfit(*common, "--alloc-conf", "")
    assert obeyed.json["workload"]["alloc_conf"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is exported" in obeyed.err
    assert (otherwise.json["workload"]["alloc_conf"], otherwise.err) == ("", "")


def test_the_config_file_itself_is_a_model_too(memfit: Memfit, tiny: str) -> None:
    plan = memfit("plan", "forward", "--model", f"{tiny}/config.json", "--seq-len", 16, "--json").json
    assert plan["model"]["name"] == "tiny"


def test_what_a_models_own_code_prints_does_not_spoil_the_document(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chatty.py").write_text(
        "from torch import nn\ndef build():\n    print('building')\n"
        "    return nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100))\n"
    )
    monkeypatch.chdir(tmp_path)
    ended = memfit("plan", "train", "--model", "chatty:build", "--seq-len", 16, "--json")
    assert ended.json["model"]["parameters"] == 100 * 32 + 32 * 100 + 100
    assert ended.err == "building\n"


def test_a_saved_trace_can_be_loaded_again(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "job.trace"
    path.write_text("old")
    common = ("plan", "forward", "--model", tiny, "--seq-len", 16, "--save-trace", path)
    assert memfit(*common, "--force").code == 0
    trace = Trace.load(path)
    assert {mark.phase for mark in trace.marks} >= {"load", "forward"}


def test_the_report_names_the_verdict_first_and_the_next_step_last(memfit: Memfit, tiny: str) -> None:
    ended = memfit("plan", "train", "--model", tiny, "--seq-len", 16, "--gpu", "RTX 4090")
    lines = ended.out.splitlines()
    assert lines[0].startswith("safe: ")
    assert lines[-1] == "next: nothing to change"
    assert all(len(line) <= 100 and line == line.rstrip() for line in lines)


def test_a_plan_has_no_colour_where_it_is_not_a_terminal(memfit: Memfit, tiny: str) -> None:
    assert "\x1b" not in memfit("plan", "forward", "--model", tiny, "--seq-len", 16).out


def test_an_output_that_is_not_unicode_gets_what_it_can_show(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["plan", "forward", "--model", tiny, "--seq-len", "16"]) == 0
    assert b"##" in raw.getvalue()


def test_models_are_listed_with_type_parameters_and_ids(memfit: Memfit) -> None:
    document = memfit("models", "--json").json
    assert document["schema"] == "memfit.models/1"
    gpt2 = next(model for model in document["models"] if model["name"] == "gpt2")
    assert (gpt2["type"], gpt2["parameters"]) == ("gpt2", 124_439_808)
    assert "openai-community/gpt2" in gpt2["hub_ids"]
    shown = memfit("models").out.split()
    assert all(name in shown for model in document["models"] for name in model["hub_ids"]), "each whole, to be copied"
    table = memfit("models").out
    assert "openai-community/gpt2" in table
    assert table.count("\n") >= len(document["models"])


def test_cards_are_listed_with_memory_and_source(memfit: Memfit) -> None:
    document = memfit("gpus", "--json").json
    assert document["schema"] == "memfit.gpus/1"
    card = next(card for card in document["gpus"] if card["name"] == "RTX 4090")
    assert (card["capacity_bytes"], card["compute_capability"]) == (24081 << 20, "8.9")
    assert "reported" in card["source"]
    assert "RTX 4090" in memfit("gpus").out
    assert "23.52 GiB" in memfit("gpus").out


def test_the_workload_of_a_plan_is_a_line_for_the_batch(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    plan = memfit("plan", "lora", "--model", tiny, "--seq-len", 16, "--gpu", "24GB", "--json").json
    (tmp_path / "again.jsonl").write_text(json.dumps(plan["workload"]))
    (again,) = memfit("plan", "batch", tmp_path / "again.jsonl").lines
    del plan["seconds"], again["seconds"]
    assert again == plan


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("--gpu", "A100", "--gpu", "RTX 4090"), "--gpu"),
        (("--seq-len", 16, "--context_length", 32), "--seq-len"),
        (("--clip-grad", "--no-clip-grad"), "--clip-grad"),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(memfit: Memfit, tiny: str, flags: tuple[str, ...], name: str) -> None:
    ended = memfit("plan", "train", "--model", tiny, *flags)
    assert (ended.code, ended.out) == (2, "")
    assert f"error: {name} is given 2 times" in ended.err


def test_a_switch_that_is_given_twice_is_on(memfit: Memfit, tiny: str) -> None:
    assert memfit("plan", "forward", "--model", tiny, "--seq-len", 16, "--json", "--json").code == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("plan", "generate", "--num-beams", 4), "--num-beams 4 has no effect: greedy decoding has no beams"),
        (("plan", "train", "--loss", "full", "--loss-chunk", 16), "--loss-chunk 16 has no effect"),
        (("fit", "train", "--loss-chunk", 256, "--gpu", "24GB"), "--loss-chunk 256 has no effect"),
        (("check", "generate", "--num-beams", 8), "--num-beams 8 has no effect"),
    ],
)
def test_a_flag_that_changes_nothing_is_refused(memfit: Memfit, tiny: str, command: Any, said: str) -> None:
    ended = memfit(*command, "--model", tiny)
    assert (ended.code, ended.out) == (2, "")
    assert f"error: {said}" in ended.err

"""`plan prune`: the engine itself, traced, against what it took on an H200 and against its whole self."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from plans import document
from support.quick import quick

from memfit.errors import InputError, UsageError
from memfit.jobs.workload import Workload
from memfit.models.registry import resolve
from memfit.planning import pruning
from memfit.planning.few import blocks_of
from memfit.planning.predict import Plan, predict
from memfit.platform import platform_of
from memfit.units import GiB, MiB

PLATFORM = platform_of(None)
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
GEMMA = {**CONFIG, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 16, "num_hidden_layers": 26}

MEASURED = [
    ("llama-3.2-1b", {}, 1_694_008_320),
    ("llama-3.2-1b", {"sparsity_type": "2:4"}, 1_694_008_320),
    ("llama-3.2-1b", {"method": "sparsegpt"}, 2_038_665_216),
    ("llama-2-7b", {}, 3_498_493_440),
    ("llama-3.3-70b", {"max_gpu_memory": 16 * GiB}, 8_987_427_840),
]
"""Allocated on an H200 (torch 2.11), 128 x 2,048 tokens, fp16, random weights; of the 70B shape two blocks were run."""


def folder(where: Path, config: dict[str, Any] = CONFIG, **changes: Any) -> str:
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps(config | changes))
    return str(where)


def planned(model: str, **settings: Any) -> Plan:
    return predict(kind="prune", model=model, trace_cache=False, **settings)


@pytest.mark.parametrize(
    ("model", "settings", "measured"),
    [case if case[0] == "llama-3.2-1b" else pytest.param(*case, marks=pytest.mark.slow) for case in MEASURED],
)
def test_the_peak_is_the_one_that_was_measured(model: str, settings: dict[str, Any], measured: int) -> None:
    made = planned(model, precision="fp16", gpu="H200", **settings)
    assert made.peak.allocated_bytes == pytest.approx(measured, rel=1e-4)


def peaks(model: str, *, blocks: bool, few: int | None, **settings: Any) -> tuple[int, int]:
    from memfit.replay.alloc_config import AllocatorConfig
    from memfit.replay.replay import replay

    work = Workload(kind="prune", model=model, seq_len=64, **settings)
    found = blocks_of(resolve(model), "sdpa")[0] if blocks else None
    made, _ = pruning._run(work, PLATFORM, found, few)
    timeline = replay(made.trace, AllocatorConfig.parse(""))
    return timeline.peak_allocated, timeline.peak_reserved


@pytest.mark.parametrize("method", quick(["sparsegpt"], ["wanda", "sparsegpt", "magnitude"]))
def test_few_blocks_and_micro_batches_tell_all(method: str, tmp_path: Path) -> None:
    model = folder(tmp_path)
    settings = {"method": method, "nsamples": 1000, "max_gpu_memory": GiB}
    assert peaks(model, blocks=True, few=4, **settings) == peaks(model, blocks=False, few=None, **settings)


def test_a_pattern_of_blocks_is_told_by_its_period(tmp_path: Path) -> None:
    model = folder(tmp_path, GEMMA)
    made = planned(model, seq_len=64)
    assert made.how.blocks == (20, 26)
    assert (made.peak.allocated_bytes, made.peak.reserved_bytes) == peaks(model, blocks=False, few=None)


def test_a_last_micro_batch_that_is_smaller_is_looked_at_too(tmp_path: Path) -> None:
    made = planned(folder(tmp_path), seq_len=512, nsamples=100)  # six of 16 windows, and four windows
    assert "7 micro-batches of 16 windows; hidden states on the device" in made.notes
    assert made.how.micro_batches == (5, 7)


def test_the_breakdown_names_weights_hidden_states_and_activations_and_sums_to_the_peak(tmp_path: Path) -> None:
    made = planned(folder(tmp_path), seq_len=64, nsamples=1000).to_json()
    breakdown = made["breakdown"]
    assert sum(breakdown.values()) == made["peak"]["allocated_bytes"]
    assert breakdown["calibration"] >= 1000 * 64 * 128 * 2
    assert min(breakdown["weights"], breakdown["activations"]) > 0
    assert breakdown["gradients"] == breakdown["optimizer"] == breakdown["kv_cache"] == 0
    names = {phase["name"] for phase in made["phases"]}
    assert {"embed", "load", "statistics", "select", "store", "propagate"} <= names


def test_a_small_budget_puts_the_hidden_states_into_host_memory(tmp_path: Path) -> None:
    model = folder(tmp_path)
    roomy = planned(model, seq_len=512, nsamples=4000).to_json()
    tight = planned(model, seq_len=512, nsamples=4000, max_gpu_memory="400MiB").to_json()
    hidden = 4000 * 512 * 128 * 2
    assert roomy["placement"]["hidden_states_on"] == "device"
    assert tight["placement"]["hidden_states_on"] == "host"
    assert roomy["peak"]["allocated_bytes"] - tight["peak"]["allocated_bytes"] > hidden * 0.9
    assert tight["host"]["hidden_states_bytes"] == hidden
    assert tight["host"]["peak_bytes"] - roomy["host"]["peak_bytes"] >= hidden
    assert roomy["host"]["peak_bytes"] < 160 * MiB


def test_a_card_that_is_too_small_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a block of this model needs about"):
        planned(folder(tmp_path), seq_len=512, max_gpu_memory="64MiB")


def test_seventy_billion_parameters_are_pruned_on_sixteen_gibibytes() -> None:
    made = planned("llama-3.3-70b", gpu="16GiB").to_json()
    assert made["verdict"] == "safe"
    assert made["host"]["peak_bytes"] < GiB
    told = {guide["guide"]: guide["gib"] for guide in made["guides"]}
    assert told == {
        "memory debugging guide": pytest.approx(136.42, abs=0.01),
        "requirements guide": pytest.approx(263.8, abs=0.1),
    }


def test_the_formulas_are_those_of_the_documents() -> None:
    """Worked out by hand for 1.2e9 parameters, as the guides do."""
    from memfit.guides.claims import pruning_formulas

    first, second = pruning_formulas({"nsamples": 128, "seq_len": 2048}, 1_200_000_000, 2048)
    assert first["gib"] == pytest.approx(2.235 + 1.0 + 1.0, abs=0.001)
    assert second["gib"] == pytest.approx((2.4 + 2.4 + 1.0) * 1e9 / 2**30, abs=0.001)


def test_mixtures_of_experts_are_planned(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    made = planned(folder(tmp_path, **experts), seq_len=64)
    assert made.peak.allocated_bytes > 0
    assert made.how.blocks == (4, 7)


def test_windows_longer_than_the_model_takes_are_cut_as_a_run_cuts_them(tmp_path: Path) -> None:
    made = planned(folder(tmp_path), seq_len=4096)
    assert made.workload["seq_len"] == 512
    assert "--seqlen 4096 is more than the model's 512 positions: 512 is taken" in made.notes


def test_autocast_and_encoders_and_factories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pruning has no autocast"):
        planned(folder(tmp_path), precision="amp-bf16")
    with pytest.raises(InputError, match="is an encoder"):
        planned(folder(tmp_path, model_type="bert"))
    with pytest.raises(UsageError, match="a factory's model is not pruned"):
        planned("collections:OrderedDict")


def test_settings_are_shown_as_resolved() -> None:
    work = Workload(kind="prune", model="gpt2", sparsity_type="1:4", max_gpu_memory="2GiB")
    assert work.settings() == {
        "kind": "prune", "model": "gpt2", "seq_len": 2048, "precision": "bf16", "attention": "sdpa", "method": "wanda",
        "sparsity": 0.25, "sparsity_type": "1:4", "nsamples": 128, "dataset": "wikitext2",
        "max_gpu_memory": "2GiB", "alloc_conf": "",
    }  # fmt: skip
    assert dataclasses.replace(work, nsamples=1).sparsity == 0.25


def test_a_line_of_a_batch_may_be_a_pruning(tmp_path: Path) -> None:
    from memfit.planning.many import answer

    line = {
        "kind": "prune",
        "model": folder(tmp_path),
        "prune_method": "ria",
        "sparsity_ratio": 0.6,
        "seqlen": 64,
        "id": 5,
    }
    document = answer(json.dumps(line).encode()).to_json()
    assert (document["id"], document["workload"]["method"], document["workload"]["sparsity"]) == (5, "ria", 0.6)


def test_a_plan_from_the_cache_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    model = folder(tmp_path / "model")
    one, other = (predict(kind="prune", model=model, seq_len=64) for _ in range(2))
    assert list((tmp_path / "cache").glob("*.npz"))
    assert (one.how.cached, other.how.cached) == (False, True)
    assert document(one) == document(other)


def test_the_guides_spellings_are_taken_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from memfit.cli.main import main

    asked = ["--prune_method", "sparsegpt", "--sparsity_ratio", "0.5", "--sparsity_type", "2:4", "--seqlen", "64"]
    assert main(["plan", "prune", "--model", folder(tmp_path), *asked, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["workload"]["method"] == "sparsegpt"
    assert made["workload"]["sparsity_type"] == "2:4"


def test_a_limit_that_nobody_asked_for_is_not_shown_as_one(tmp_path: Path) -> None:
    made = planned(folder(tmp_path), seq_len=64, gpu="8GiB")
    assert made.workload["max_gpu_memory"] is None
    assert "max-gpu-memory" not in str(made)


def test_a_limit_is_shown_as_it_was_typed(tmp_path: Path) -> None:
    made = planned(folder(tmp_path), seq_len=64, max_gpu_memory="0.5GiB", gpu="8GiB")
    assert made.workload["max_gpu_memory"] == "0.5GiB"
    assert "max-gpu-memory 0.5GiB" in str(made)
    assert predict(**made.workload).peak == made.peak

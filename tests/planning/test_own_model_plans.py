"""Plans of the models that come with memfit as code: GSA on both of its paths, and the CS336 course's Transformer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import MemfitError
from memfit.models.presets import GSA_SIZES
from memfit.planning.predict import Plan, predict
from memfit.units import GiB

pytestmark = pytest.mark.usefixtures("shared_traces")

SAFE: dict[str, Any] = {
    "kind": "train", "precision": "amp-bf16", "grad_checkpointing": True, "batch_size": 2, "seq_len": 1024,
    "grad_accum": 2,
}  # fmt: skip
LEVERS = {"loss": "chunked", "optimizer": "adamw-fused"}


@cache
def safe(model: str, *, levers: bool) -> Plan:
    """The pre-training guide's "Safe" rung; more accumulation than two micro-steps adds nothing."""
    return predict(model=model, **SAFE, **(LEVERS if levers else {}))


def test_the_guide_s_safe_rung_takes_less_than_6_gib_with_the_levers_on() -> None:
    plan = safe("gsa-512m", levers=True)

    assert plan.peak.device_bytes < 6 * GiB
    assert plan.parameters == plan.trainable_parameters == 183_662_144


def test_the_published_path_takes_three_times_as_much_for_the_keys_and_values_that_it_copies() -> None:
    gather, masked = safe("gsa-512m-gather", levers=False), safe("gsa-512m", levers=True)
    tokens, keys, width = 2 * 1024, 1024, 512

    copied = tokens * keys * width * (4 + 2)  # keys in fp32, values in bf16
    assert gather.report.breakdown["activations"] > copied
    assert gather.peak.allocated_bytes > 3 * masked.peak.allocated_bytes


def test_blocks_are_told_from_a_few_of_them() -> None:
    assert not any("one by one" in note for note in safe("gsa-512m", levers=True).notes)


def test_a_file_that_says_gsa_is_planned_like_the_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gsa", **GSA_SIZES["gsa-512m"]}))

    plan = predict(model=str(tmp_path), **SAFE, **LEVERS)

    assert plan.peak == safe("gsa-512m", levers=True).peak


def test_the_masked_path_s_memory_hardly_grows_with_the_batch() -> None:
    large = predict(model="gsa-512m", **{**SAFE, "batch_size": 8, "seq_len": 2048}, **LEVERS)

    assert large.peak.device_bytes < 6 * GiB


@pytest.mark.parametrize("kind", ["forward", "train"])
def test_a_size_of_the_course_is_planned_like_the_module_that_it_is(kind: str) -> None:
    settings: dict[str, Any] = {"kind": kind, "precision": "fp32", "batch_size": 4, "seq_len": 256}

    preset, factory = (predict(model=name, **settings) for name in ("basics-small", "memfit.models.basics:small"))

    assert preset.peak == factory.peak
    assert preset.report.breakdown == factory.report.breakdown


def test_the_course_s_model_is_planned_in_16_bit_too() -> None:
    plan = predict(kind="train", model="basics-small", seq_len=128)
    weights, state = plan.report.breakdown["weights"], plan.report.breakdown["optimizer"]

    assert plan.parameters == 128_625_408
    assert 2 * plan.parameters <= weights < 2.1 * plan.parameters
    assert 4 * plan.parameters <= state < 4.2 * plan.parameters, "two moments in 16 bit"


@pytest.mark.parametrize(("settings", "why"), [
    ({"kind": "train", "model": "gsa-512m", "seq_len": 8193}, "8192 positions"),
    ({"kind": "train", "model": "basics-small", "seq_len": 2049}, "2048 positions"),
    ({"kind": "train", "model": "basics-small", "loop": "trainer"}, "computes no loss of its own"),
    ({"kind": "train", "model": "basics-small", "loss": "chunked"}, "causal language model of transformers"),
    ({"kind": "train", "model": "basics-small", "attention": "eager"}, "is its own"),
    ({"kind": "train", "model": "gsa-512m", "attention": "eager"}, "is its own"),
    ({"kind": "lora", "model": "basics-small"}, "no linear layer that peft could adapt"),
    ({"kind": "prune", "model": "basics-small"}, "no model of transformers"),
    ({"kind": "generate", "model": "gsa-512m"}, "does not generate text"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_these_models_cannot_do_is_said(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(MemfitError, match=why):
        predict(**settings)


def test_gsa_is_pruned_like_any_other_decoder() -> None:
    plan = predict(kind="prune", model="gsa-512m", seq_len=512, nsamples=4)

    assert plan.report.breakdown["calibration"] == 4 * 512 * 512 * 2, "windows, tokens, width, bf16"
    assert 0 < plan.report.breakdown["weights"] < plan.parameters, "not all of them at once"

"""The guide's `estimate_memory`: its keys, right numbers, and its own beside them."""

from __future__ import annotations

import math

import pytest

import memfit
from memfit.errors import UsageError
from memfit.fitting.claims import llama_of_size
from memfit.guides.claims import rule_of_thumb
from memfit.models.registry import load_config, resolve

KEYS = {"model", "activations", "overhead", "total", "recommended_gpu"}


def test_the_guides_keys_exist_and_add_up() -> None:
    made = memfit.estimate_memory(1.2, seqlen=2048)

    assert set(made) >= KEYS
    assert made["total"] == pytest.approx(made["model"] + made["activations"] + made["overhead"])


def test_the_guides_own_values_are_those_of_its_code() -> None:
    assert rule_of_thumb(1.2) == pytest.approx(
        {"model": 2.4, "activations": 2.4, "overhead": 1.0, "total": 5.8, "recommended_gpu": 8.7}
    )
    assert set(memfit.estimate_memory(1.2)["guide"]) == KEYS


def test_tensors_are_what_the_public_code_was_measured_to_hold() -> None:
    made = memfit.estimate_memory(7)

    assert made["model"] + made["activations"] == pytest.approx(20.015927808, rel=1e-5)


def test_windows_count_for_which_the_guide_had_no_term() -> None:
    few, many = memfit.estimate_memory(1.2, nsamples=64), memfit.estimate_memory(1.2, nsamples=128)
    two_buffers = 2 * 64 * 2048 * 2048 * 2 / 1e9

    assert many["activations"] - few["activations"] == pytest.approx(two_buffers, rel=0.01)
    assert many["guide"] == few["guide"]


def test_the_recommended_card_is_the_smallest_that_leaves_a_tenth() -> None:
    assert memfit.estimate_memory(1.2)["recommended_gpu"] == 8
    assert memfit.estimate_memory(7)["recommended_gpu"] == 24


def test_streaming_is_told_beside_it() -> None:
    made = memfit.estimate_memory(7)

    assert made["streamed"] < made["total"] / 4


@pytest.mark.parametrize(("billions", "name"), [(1.2, "llama-3.2-1b"), (3.2, "llama-3.2-3b"), (30, "llama-30b")])
def test_a_size_is_the_shipped_llama_that_people_call_so(billions: float, name: str) -> None:
    with llama_of_size(billions * 1e9) as (model, said):
        assert model == name
        assert name in said


@pytest.mark.parametrize("billions", [0.2, 0.5, 2.4, 10, 20, 45, 200])
def test_between_two_llamas_the_shape_has_the_size_that_was_asked_for(billions: float) -> None:
    with llama_of_size(billions * 1e9) as (model, _):
        config = load_config(resolve(model))
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    block = config.hidden_size * (2 * config.hidden_size + 2 * keys * config.head_dim + 3 * config.intermediate_size)
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)

    assert heads % keys == 0
    assert config.num_hidden_layers * block + tables == pytest.approx(billions * 1e9, rel=0.04)


@pytest.mark.parametrize("billions", [0, -1, math.nan, math.inf, True, "7", None, 0.001, 5000])
def test_a_size_that_no_model_has_is_refused(billions: object) -> None:
    with pytest.raises(UsageError):
        memfit.estimate_memory(billions)  # type: ignore[arg-type]

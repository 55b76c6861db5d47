"""Which tensor has the size that failed: the worked examples, and that nothing is claimed where several fit."""

from __future__ import annotations

import pytest

from memfit.explaining.explain import explain
from memfit.explaining.message import exact_interval, parse_size, segment_intervals
from memfit.explaining.tensor import (
    Dimensions,
    Reading,
    Readings,
    RunClues,
    dimensions_in_text,
    dimensions_of_model,
    preset_dimensions,
    readings,
)
from memfit.units import GiB, MiB


def of(printed: str, model: str | None = None, **run: object) -> Readings:
    size = parse_size(*printed.split())
    assert size is not None
    models = []
    if model is not None:
        found = preset_dimensions(model)
        assert found is not None
        models = [found]
    return readings(segment_intervals(size), tuple(models), RunClues(**run))  # type: ignore[arg-type]


def products(found: Readings) -> list[str]:
    return [each.product for each in found.candidates]


def likeliest(found: Readings) -> Reading:
    assert found.likeliest is not None, products(found)
    return found.likeliest


LOSS = {"phase": "loss", "hints": frozenset({"logits"})}
CALIBRATION = {"phase": "calibration", "hints": frozenset({"calibration"})}


def test_1_16_gib_is_fp32_logits_of_one_sequence_of_2048() -> None:
    found = likeliest(of("1.16 GiB", "qwen2.5-7b", batch_size=1, seq_len=2048))
    assert (found.kind, found.nbytes) == ("logits", 1_245_708_288)
    assert found.product == "1 row x 2,048 tokens x 152,064 vocabulary x 4 bytes"
    assert found.tensor.startswith("fp32 logits")


def test_1_16_gib_without_the_length_has_it_first_but_claims_nothing() -> None:
    found = of("1.16 GiB", "qwen2.5-7b", **LOSS)
    assert found.likeliest is None
    assert products(found)[:2] == [
        "2,048 tokens x 152,064 vocabulary x 4 bytes", "4,096 tokens x 152,064 vocabulary x 2 bytes"
    ]  # fmt: skip


def test_17_37_gib_is_fp32_logits_of_30688_tokens() -> None:
    found = of("17.37 GiB", "qwen2.5-1.5b", **LOSS)
    assert products(found)[0] == "30,688 tokens x 151,936 vocabulary x 4 bytes"


@pytest.mark.parametrize(
    ("printed", "model", "product"),
    [
        ("64.00 GiB", "llama-3.2-1b", "128 samples x 131,072 tokens x 2,048 hidden x 2 bytes"),
        ("128.00 GiB", "llama-3.1-8b", "128 samples x 131,072 tokens x 4,096 hidden x 2 bytes"),
        ("32.00 GiB", "mistral-7b-v0.1", "128 samples x 32,768 tokens x 4,096 hidden x 2 bytes"),
    ],
)
def test_a_calibration_buffer_at_the_largest_position_is_recognised(printed: str, model: str, product: str) -> None:
    assert likeliest(of(printed, model, **CALIBRATION)).product == product
    assert product in products(of(printed, model))


def test_in_an_fp32_job_nothing_has_two_bytes() -> None:
    found = of("96.00 MiB", "smollm2-135m", batch_size=2, seq_len=512, precision="fp32")
    assert likeliest(found).product == "512 tokens x 49,152 vocabulary x 4 bytes"


def test_7_45_gib_of_no_model_is_a_thousand_cubed() -> None:
    found = of("7.45 GiB")
    assert products(found)[0] == "1,000 x 1,000 x 1,000 x 8 bytes"
    assert found.likeliest is None


def test_2_gib_is_fp32_scores_of_32_heads_over_4096_tokens() -> None:
    found = likeliest(of("2.00 GiB", "llama-2-7b", seq_len=4096, batch_size=1, hints=frozenset({"attention"})))
    assert found.tensor == "attention scores"
    assert found.product == "1 row x 4,096 tokens x 4,096 tokens x 32 heads x 4 bytes"


def test_112_mib_is_ambiguous_between_logits_and_a_matrix_and_the_phase_decides() -> None:
    weight = "4,096 hidden x 14,336 intermediate x 2 bytes"
    unknown = of("112.00 MiB")
    assert unknown.likeliest is None and weight in products(unknown)
    assert of("112.00 MiB", "llama-3.1-8b").likeliest is None
    stepping = of("112.00 MiB", "llama-3.1-8b", phase="optimizer step", hints=frozenset({"weights"}))
    assert likeliest(stepping).product == weight
    logits = next(each for each in of("112.00 MiB", "qwen2.5-7b", **LOSS).candidates if each.kind == "logits")
    tokens = logits.factors[0]
    assert tokens.least is not None and tokens.most is not None and tokens.least <= 193 <= tokens.most
    assert logits.itemsize == 4 and logits.factors[1].value == 152_064


def test_446_mib_is_the_embedding_of_a_1_5b_model() -> None:
    found = likeliest(of("446.00 MiB", "qwen2.5-1.5b", phase="backward"))
    assert (found.kind, found.nbytes) == ("weights", 151_936 * 1_536 * 2)
    assert "151,936 vocabulary x 1,536 hidden x 2 bytes" in products(of("446.00 MiB"))


@pytest.mark.parametrize("printed", ["20.00 MiB", "2.00 MiB"])
def test_a_shared_segment_is_not_factored(printed: str) -> None:
    found = of(printed, "qwen2.5-7b", batch_size=1, seq_len=2048)
    assert not found.candidates and "share a segment" in found.why_none


# -- what was asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "intervals"),
    [
        ("512 bytes", [(512, 512)]),
        ("2.00 MiB", [(1, MiB)]),
        ("20.00 MiB", [(MiB + 1, 10 * MiB - 1), (18 * MiB + 1, 20 * MiB)]),
        ("112.00 MiB", [(110 * MiB + 1, 112 * MiB)]),
        ("1024.00 MiB", [(1022 * MiB + 1, 1024 * MiB)]),
    ],
)
def test_a_printed_segment_stands_for_these_requests(printed: str, intervals: list[tuple[int, int]]) -> None:
    size = parse_size(*printed.split())
    assert size is not None and list(segment_intervals(size)) == intervals


def test_a_segment_in_gib_is_ten_mib_wide_and_two_more_below() -> None:
    size = parse_size("1.16", "GiB")
    assert size is not None
    ((low, high),) = segment_intervals(size)
    assert abs(high - 1.165 * GiB) < 2 and abs(low - (1.155 * GiB - 2 * MiB)) < 3


def test_a_recorded_request_is_known_to_its_block() -> None:
    (found,) = (each for each in readings(
        exact_interval(48 * MiB), (preset_dimensions("gpt2"),),  # type: ignore[list-item]
        RunClues(batch_size=32, seq_len=512, phase="forward", hints=frozenset({"attention-output"})),
    ).candidates if each.kind == "attention-output" and each.itemsize == 4)  # fmt: skip
    assert found.product == "32 rows x 512 tokens x 768 in all heads x 4 bytes"


# -- the model's numbers ---------------------------------------------------------------------------------------------


def test_families_spell_their_sizes_differently() -> None:
    gpt2, opt = preset_dimensions("gpt2"), preset_dimensions("opt-350m")
    assert gpt2 is not None and (gpt2.hidden, gpt2.intermediate, gpt2.heads, gpt2.positions) == (768, 3072, 12, 1024)
    assert opt is not None and (opt.hidden, opt.intermediate) == (1024, 4096)


def test_a_factory_has_no_numbers_before_it_is_run() -> None:
    assert dimensions_of_model("my_module:build") is None


def test_dimensions_may_be_partly_unknown() -> None:
    found = readings(((1 << 30, 1 << 30),), (Dimensions(model="x", family="", vocabulary=32_768),), RunClues())
    assert products(found)[0] == "8,192 tokens x 32,768 vocabulary x 4 bytes"


def test_a_config_in_the_log_gives_the_numbers_of_a_model_without_a_name() -> None:
    text = 'Model config MyConfig {\n "vocab_size": 64000,\n "hidden_size": 5120,\n "num_attention_heads": 40\n}'
    found = dimensions_in_text(text)
    assert found is not None and (found.vocabulary, found.hidden, found.head_dim) == (64_000, 5120, 128)
    assert dimensions_in_text(text + ' {"vocab_size": 32000}') is None


def test_a_lora_matrix_is_recognised_by_its_rank() -> None:
    model = preset_dimensions("qwen2.5-7b")
    assert model is not None
    run = RunClues(rank=512, phase="optimizer step", hints=frozenset({"weights"}))
    found = readings(exact_interval(512 * 18_944 * 4), (model,), run)
    assert products(found)[0] == "512 rank x 18,944 wide x 4 bytes"


# -- really failed on an H200 under a cap, torch 2.11: LoRA of Qwen2.5-7B, rank 128 ------------------------------------

JOB = {"kind": "lora", "model": "qwen2.5-7b", "batch_size": 1, "seq_len": 2048, "rank": 128}


def test_a_real_failure_in_the_mlp_of_a_lora_job_is_named() -> None:
    """fp32 adapters make fp32 activations."""
    text = (
        "CUDA out of memory. Tried to allocate 148.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which "
        "75.73 GiB is "
        "free. Including non-PyTorch memory, this process has 23.88 GiB memory in use. Process 444 has 680.00 "
        "MiB memory "
        "in use. Process 438 has 16.24 GiB memory in use. Process 435 has 5.36 GiB m"
    )
    found = explain(text, predict=False, **JOB).readings  # type: ignore[arg-type]
    assert likeliest(found).product == "1 row x 2,048 tokens x 18,944 intermediate x 4 bytes"
    assert likeliest(found).nbytes == 148 * MiB


def test_a_real_failure_while_loading_is_the_output_head() -> None:
    text = (
        'Traceback (most recent call last):\n  File "accuracy/measure.py", line 7, in load\n    model.to("cuda")\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of "
        "139.80 GiB of "
        "which 76.00 GiB is free. Process 440 has 14.97 GiB memory in use. Including non-PyTorch memory, this "
        "process has "
        "15.16 GiB memory in use. Process 444 has 680.00 MiB memory in use. Process 438 has 13.73 GiB me"
    )
    told = explain(text, predict=False, **JOB)  # type: ignore[arg-type]
    assert told.place.phase == "loading"
    assert likeliest(told.readings).product == "152,064 vocabulary x 3,584 hidden x 2 bytes"


def test_a_copy_of_a_4_bit_weight_is_told_by_the_line_that_makes_it() -> None:
    place = '  File "/x/site-packages/bitsandbytes/autograd/_functions.py", line 320, in forward\n'
    line = "    output = linear(A, F.dequantize_4bit(B, quant_state).to(A.dtype).t(), bias)\n"
    full = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total capacity of 7.78"
        " GiB of which 60.00 MiB is free. Including non-PyTorch memory, this process has 7.70 GiB memory in use. Of the"
        " allocated memory 7.10 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated."
    )
    document = explain(f"Traceback (most recent call last):\n{place}{line}{full}").to_json()
    assert document["answer"].endswith("a product with packed weights, which makes a 16-bit copy of one of them.")
    told = document["tensor"]["readings"]
    assert told[0]["tensor"] == "MLP matrix: copy of a 4-bit weight, for one product"
    without = explain(full).to_json()
    plain = without["tensor"]["readings"]
    assert "packed weights" not in without["answer"]
    assert not any("4-bit" in each["tensor"] for each in plain)

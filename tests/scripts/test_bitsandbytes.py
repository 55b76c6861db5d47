"""Scripts that use bitsandbytes: its own code allocates what it does on a GPU, its kernels do nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.planning.predict import Plan

bitsandbytes = pytest.importorskip("bitsandbytes")

MEASURED = Path(__file__).parents[2] / "accuracy" / "measured" / "quantised.jsonl"
LAYER = """
import bitsandbytes as bnb, torch
layer = bnb.nn.{layer}.cuda()
kept = (type(layer.weight), layer.weight.dtype, layer.weight.shape)
x = torch.randn(8, 128, 1024, device="cuda", dtype=torch.float16, requires_grad=True)
y = layer(x)
layer.to("cuda")  # y holds the weight
y.sum().backward()
assert kept == (type(layer.weight), layer.weight.dtype, layer.weight.shape)
"""
LOADED = """
import sys, torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                            bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", dtype=torch.bfloat16, device_map={"": 0},
                                             quantization_config=config)
model.config.use_cache = False
for _ in range(2):
    with torch.no_grad():
        ids = torch.randint(0, 50257, (2, 512), device="cuda")
        model.eval()(input_ids=ids).logits.shape
"""
OPTIMIZER = """
import bitsandbytes as bnb, torch
layer = torch.nn.Linear(4096, 4096, bias=False).cuda()
optimizer = bnb.optim.{optimizer}(layer.parameters())
for _ in range(3):
    layer(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHT = 4 * 4096 * 4096


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(script: str) -> Plan:
    Path("train.py").write_text(script)
    return memfit.trace_script("train.py", gpu="H200")


def measured(name: str) -> dict[str, Any]:
    return next(run for run in map(json.loads, MEASURED.read_text().splitlines()) if run["id"] == name)


def test_a_checkpoint_that_is_quantised_while_it_loads_takes_what_was_measured() -> None:
    plan, run = planned(LOADED), measured("r14")
    assert plan.peak.allocated_bytes == run["peak_allocated"]
    assert plan.peak.reserved_bytes == run["peak_reserved"]
    assert plan.parameters == 124_439_808  # gpt2's, not the bytes that they are packed into


@pytest.mark.parametrize(
    "layer", ["Linear4bit(1024, 2048, compute_dtype=torch.float16)", "Linear8bitLt(1024, 2048, has_fp16_weights=False)"]
)
def test_a_packed_layer_runs_both_ways_and_stays_what_it_is(layer: str) -> None:
    plan = planned(LAYER.format(layer=layer))
    assert plan.peak.allocated_bytes > 8 * 128 * (1024 + 2048) * 2


def test_outliers_of_an_8_bit_product_are_taken_not_to_be_there_and_that_is_said() -> None:
    plan = planned(LAYER.format(layer="Linear8bitLt(1024, 2048, has_fp16_weights=False, threshold=6.0)"))
    assert any("8-bit products" in note for note in plan.notes)


def test_states_of_8_bits_take_a_quarter_and_paged_ones_nothing_that_torch_knows_of() -> None:
    wide = planned(OPTIMIZER.format(optimizer="AdamW32bit")).peak.allocated_bytes
    small = planned(OPTIMIZER.format(optimizer="AdamW8bit")).peak.allocated_bytes
    paged = planned(OPTIMIZER.format(optimizer="PagedAdamW32bit"))
    assert 1.45 * WEIGHT < wide - small < 1.5 * WEIGHT
    assert 1.95 * WEIGHT < wide - paged.peak.allocated_bytes < 2.05 * WEIGHT
    assert any("128.00 MiB of managed memory" in note for note in paged.notes)


def test_afterwards_the_package_has_its_own_library_again() -> None:
    from bitsandbytes import cextension, functional

    planned(LAYER.format(layer="Linear4bit(1024, 2048, compute_dtype=torch.float16)"))
    assert functional.lib is cextension.lib
    assert type(functional.lib).__module__ == "bitsandbytes.cextension"


def test_a_plan_by_shapes_is_that_of_the_packages_own_code() -> None:
    eight = LOADED.replace("load_in_4bit=True", "load_in_8bit=True").replace("(2, 512)", "(1, 64)")
    said = memfit.predict(kind="forward", model="gpt2", quant="int8", batch_size=1, seq_len=64, gpu="H200").peak
    assert planned(eight).peak == said

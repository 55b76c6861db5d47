"""Layers of checkpoints that are quantised already, and torchao's: what is kept of a weight, and what stays plain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import InputError, UsageError
from memfit.jobs.build import Prepared, prepare_without_memory
from memfit.jobs.loading import loaded_bytes
from memfit.jobs.quantised import Float8Rows, FourBitLinear, Int4Tiles, Int8Rows
from memfit.jobs.stored import StoredLinear, decompress
from memfit.jobs.training.optimizers import OF_TORCHAO, by_shapes
from memfit.jobs.workload import Workload

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*down_proj"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}}},
}  # fmt: skip
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LINEARS = 2 * 7

Stored = Callable[..., str]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    def made(said: dict[str, Any], **config: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**TINY, **config, "quantization_config": said}))
        return str(tmp_path)

    return made


def prepared(model: str, kind: Any = "forward", **more: Any) -> Prepared:
    return prepare_without_memory(Workload(kind=kind, model=model, seq_len=8, **more))


def names_of(job: Prepared, kind: type) -> list[str]:
    return [name for name, module in job.model.named_modules() if isinstance(module, kind)]


@pytest.mark.parametrize("asked", [
    {"quant_compute": "fp16"}, {"quant_compute": "fp32"}, {"double_quant": False}, {},
    {"quant_compute": "bf16", "double_quant": True},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["lora", "qlora", "forward"])
def test_what_is_asked_beside_a_stored_checkpoint_must_be_what_is_stored(
    stored: Stored, kind: str, asked: dict[str, Any]
) -> None:
    said = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    settings = {"kind": kind, "model": stored({**NF4, **said}), "quant": "nf4", **asked}
    if len(asked) != 1:
        Workload.from_mapping(settings)
        return
    with pytest.raises(UsageError, match="is stored as nf4, double quantisation, compute bf16") as told:
        Workload.from_mapping(settings)
    assert told.value.hint == f"leave --{next(iter(asked)).replace('_', '-')} out"


def test_defaults_of_qlora_are_not_asked_beside_a_stored_checkpoint(stored: Stored) -> None:
    Workload.from_mapping({"kind": "qlora", "model": stored(NF4)})


@pytest.mark.parametrize("said", [GPTQ, AWQ])
def test_all_linear_layers_but_the_head_are_packed(stored: Stored, said: dict[str, Any]) -> None:
    job = prepared(stored(said))
    assert len(names_of(job, StoredLinear)) == LINEARS
    assert "lm_head" not in names_of(job, StoredLinear)
    assert job.notes[0].startswith("not modelled:")
    assert any("planned as it is stored" in note for note in job.notes)


def test_modules_that_are_not_converted_stay_plain(stored: Stored) -> None:
    job = prepared(stored({**AWQ, "modules_to_not_convert": ["model.layers.0.self_attn", "down_proj"]}))
    assert len(names_of(job, StoredLinear)) == LINEARS - 4 - 2
    job = prepared(stored({**NF4, "llm_int8_skip_modules": ["lm_head", "up_proj"]}))
    assert not any("up_proj" in name or name == "lm_head" for name in names_of(job, FourBitLinear))


def test_ignored_layers_of_compressed_tensors_stay_plain(stored: Stored) -> None:
    job = prepared(stored(W4A16))
    assert len(names_of(job, StoredLinear)) == LINEARS - 2
    decompress(job.model)
    layers = [module for module in job.model.modules() if isinstance(module, StoredLinear)]
    assert {each.weight.dtype for each in layers} == {torch.bfloat16}
    assert {tuple(each._buffers) for each in layers} == {("weight_scale", "weight_shape")}


def test_fp8_has_the_layers_of_transformers(stored: Stored) -> None:
    job = prepared(stored(FP8))
    layer: Any = job.model.get_submodule("model.layers.0.mlp.up_proj")
    assert type(layer).__name__ == "FP8Linear"
    assert (layer.weight.dtype, layer.weight_scale_inv.shape) == (torch.float8_e4m3fn, (4, 2))
    assert type(job.model.get_submodule("lm_head")) is nn.Linear


def test_the_experts_of_gpt_oss_have_half_a_byte_and_a_scale_for_32() -> None:
    job = prepare_without_memory(Workload(kind="forward", model="openai/gpt-oss-20b", seq_len=8), layers=2)
    experts: Any = job.model.get_submodule("model.layers.1.mlp.experts")
    weights = 32 * 2880 * 2880 * 3
    packed = experts.gate_up_proj.numel() + experts.down_proj.numel()
    scales = experts.gate_up_proj_scales.numel() + experts.down_proj_scales.numel()
    assert (packed, scales) == (weights // 2, weights // 32)


@pytest.mark.parametrize(("said", "how"), [(FP8, "dequantize"), (W4A16, "dequantize"), (FP8, "plain")])
def test_what_has_no_backward_pass_is_not_adapted(stored: Stored, said: dict[str, Any], how: str) -> None:
    with pytest.raises(UsageError, match=r"has (no backward pass|a backward pass that memfit does not plan)") as caught:
        prepared(stored(said), kind="lora")
    assert "--quant dequantize" in str(caught.value.hint)
    assert prepared(stored(said), kind="lora", quant="dequantize").trainable


@pytest.mark.parametrize(("said", "settings", "why"), [
    (GPTQ, {"quant": "nf4"}, "already quantised"), (GPTQ, {"quant": "dequantize"}, "does not do it to gptq"),
    (NF4, {"quant": "int8"}, "already quantised"), (GPTQ, {"kind": "lora", "loop": "memfit"}, "not planned together"),
])  # fmt: skip
def test_settings_that_a_stored_checkpoint_contradicts_are_refused(
    stored: Stored, said: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        prepared(stored(said), **settings)


def test_weights_that_are_stored_quantised_are_not_trained(stored: Stored) -> None:
    with pytest.raises(InputError, match="neither trained nor pruned"):
        prepared(stored(GPTQ), kind="train")


def test_experts_that_lie_apart_in_the_files_are_refused(stored: Stored) -> None:
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(UsageError, match=r"experts of a Mixtral.* are fused"):
        prepared(stored(GPTQ, **mixture))


def test_transformers_asks_at_once_for_what_packed_layers_have_in_the_files(stored: Stored) -> None:
    model = prepared(stored(GPTQ)).model
    buffers = sum(b.nbytes for m in model.modules() if isinstance(m, StoredLinear) for b in m.buffers())
    assert loaded_bytes(model) == buffers + sum(p.nbytes for p in model.parameters())


def layer_of(kind: type, weight: torch.Tensor, **more: Any) -> Any:
    made = kind(nn.Parameter(weight.clone(), requires_grad=False), None, transposed=False, **more)
    made.pack(weight, [])
    return made


@pytest.mark.parametrize(
    ("kind", "config"), [(Int8Rows, "Int8WeightOnlyConfig"), (Float8Rows, "Float8WeightOnlyConfig")]
)
def test_torchao_keeps_what_the_package_keeps(kind: type, config: str) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(128, 96, bias=False, dtype=torch.bfloat16)
    own = layer_of(kind, linear.weight.data)
    quantization.quantize_(linear, getattr(quantization, config)())
    theirs: Any = linear.weight
    assert (own.weight.shape, own.weight.dtype) == (theirs.qdata.shape, theirs.qdata.dtype)
    assert (own.scales.shape, own.scales.dtype) == (theirs.scale.shape, theirs.scale.dtype)
    rows = torch.randn(4, 128, dtype=torch.bfloat16)
    assert own(rows).shape == linear(rows).shape


@pytest.mark.parametrize("kind", [Int8Rows, Float8Rows, Int4Tiles])
def test_a_stored_layer_of_torchao_is_the_packed_one(kind: type) -> None:
    more = {"group": 128} if kind is Int4Tiles else {}
    weight = torch.randn(96, 256, dtype=torch.bfloat16)
    packed, placed = layer_of(kind, weight, **more), layer_of(kind, weight, **more)
    placed.weight.data = weight
    placed.place("cpu")
    shapes = [
        {name: (b.shape, b.dtype) for name, b in (*each.named_buffers(), ("weight", each.weight.data))}
        for each in (packed, placed)
    ]
    assert shapes[0] == shapes[1]


def test_tiles_of_int4_are_padded_to_1024_columns() -> None:
    layer = layer_of(Int4Tiles, torch.randn(96, 1280, dtype=torch.bfloat16), group=128)
    assert layer.weight.nbytes == 96 * 2048 // 2
    assert layer.scales_and_zeros.shape == (16, 96, 2)


@pytest.mark.parametrize(("name", "numel", "expected"), [
    ("adamw-8bit-torchao", 8192, 2 * (8192 + 4 * 32 + 4 * 256)), ("adamw-8bit-torchao", 1024, 2 * 4 * 1024),
    ("adamw-8bit-torchao", 8191, 2 * 4 * 8191), ("adamw-4bit-torchao", 8192, 2 * (4096 + 4 * 64 + 4 * 16)),
])  # fmt: skip
def test_states_of_torchao(name: str, numel: int, expected: int) -> None:
    weight = nn.Parameter(torch.zeros(numel))
    weight.grad = torch.zeros(numel)
    kind, settings = by_shapes(name)
    made: Any = kind([weight], lr=0.1, **settings)
    made.step()
    assert sum(each.nbytes for each in made.state[weight].values()) == expected


@pytest.mark.parametrize(
    ("name", "their_name"), [("adamw-8bit-torchao", "AdamW8bit"), ("adamw-4bit-torchao", "AdamW4bit")]
)
def test_states_are_those_of_torchao(name: str, their_name: str) -> None:
    package: Any = pytest.importorskip("torchao.optim")
    weight = nn.Parameter(torch.zeros(128, 64))
    theirs = getattr(package, their_name)([weight], lr=0.1)
    made = theirs._new_buffer(weight, True)
    own: Any = by_shapes(name)[0]([weight], lr=0.1, **OF_TORCHAO[name])
    parts = own._made(weight, "exp_avg")
    assert [each.nbytes for each in parts.values()] == [made.codes.nbytes, made.scale.nbytes, made.qmap.nbytes]


def test_files_that_say_something_else_than_the_config_are_refused(stored: Stored, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    name = "model.layers.0.mlp.up_proj.qweight"
    save_file({name: torch.zeros(32, 512, dtype=torch.int32)}, tmp_path / "model.safetensors")
    prepared(stored(GPTQ))
    save_file({name: torch.zeros(64, 512, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        InputError, match=r"up_proj.qweight has the shape \[64, 512\], and by its config.json \[32, 512\]"
    ):
        prepared(stored(GPTQ))

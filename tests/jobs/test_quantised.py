"""Layers of 4 and 8 bits by their shapes: what bitsandbytes keeps of a weight, and which kernel it takes."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.jobs.build import prepare_without_memory
from memfit.jobs.loading import loaded_bytes
from memfit.jobs.quantised import EightBitLinear, FourBitLinear, _rounded
from memfit.jobs.training.optimizers import OF_BITSANDBYTES, SmallStates
from memfit.jobs.workload import Workload
from memfit.tracing.kernels.four_bit import reads_packed
from memfit.tracing.tracer import trace

SIZES = (64, 256, 704, 768, 1024, 1536, 2048, 3072, 4096, 8192, 11008, 14336, 18944, 28672)
ROWS = (1, 4, 5, 7, 8, 12, 16, 17, 32, 33, 64, 65, 128, 129, 320, 321, 512, 513, 1536)
CARDS = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0), (12, 1))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def quantised(kind: str, weight: torch.Tensor, *, double: bool = False) -> Any:
    given = nn.Parameter(weight.clone(), requires_grad=False)
    layer: Any = (
        EightBitLinear(given, None, transposed=False)
        if kind == "int8"
        else FourBitLinear(given, None, transposed=False, compute=torch.bfloat16, double=double)
    )
    layer.pack(weight, [])
    return layer


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_packed_weight_has_the_storage_of_the_package(kind: str, double: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 128, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=double)
    layer = quantised(kind, weight, double=double)
    expected = {"weight": packed, "absmax": state.absmax, "code": state.code}
    if double:
        expected |= {"offset": state.offset, "absmax2": state.state2.absmax, "code2": state.state2.code}
    own = dict(layer.named_buffers()) | {"weight": layer.weight.data}
    assert {name: (each.shape, each.dtype) for name, each in own.items()} == {
        name: (each.shape, each.dtype) for name, each in expected.items()
    }


def test_an_8_bit_weight_has_the_storage_of_the_package() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 128, dtype=torch.float16)
    packed, scales, _ = functional.int8_vectorwise_quant(weight)
    layer = quantised("int8", weight)
    assert (layer.weight.shape, layer.weight.dtype) == (packed.shape, packed.dtype)
    assert (layer.scales.shape, layer.scales.dtype) == (scales.shape, scales.dtype)


def test_an_8_bit_weight_is_loaded_beside_a_copy_in_fp16() -> None:
    """The checkpoint's own type, here of 4 bytes, is there first; what is kept comes last."""
    made = trace(lambda tracer: quantised("int8", torch.empty(96, 128, device=tracer.device)))
    values = 96 * 128
    assert [size for size in made.requested if size > 512] == [4 * values, 4 * values, 2 * values, values]


def test_the_kernel_is_the_one_that_the_package_takes() -> None:
    package = pytest.importorskip("bitsandbytes")
    source = (Path(package.__file__).parent / "backends/cuda/ops.py").read_text()  # needs its CUDA library to be run
    (rule,) = (
        each
        for each in ast.parse(source).body
        if isinstance(each, ast.FunctionDef) and each.name == "_gemm_4bit_use_custom_cuda"
    )
    rule.decorator_list = []
    card: list[int] = []
    names: dict[str, Any] = {
        "torch": torch, "_GEMM_4BIT_CUSTOM_FLOOR_M": 4, "_gpu_dispatch_props": lambda _: tuple(card),
    }  # fmt: skip
    exec(compile(ast.Module([rule], []), "ops.py", "exec"), names)
    draw, types = random.Random(0), {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for _ in range(20_000):
        arch, sms, half = draw.choice(CARDS), draw.randint(20, 190), draw.choice(list(types))
        rows, out, inner = draw.choice(ROWS), draw.choice(SIZES), draw.choice(SIZES)
        card[:] = [sms, *arch]
        theirs = names["_gemm_4bit_use_custom_cuda"](0, types[half], rows, out, inner)
        assert reads_packed(arch, sms, half=half, rows=rows, out=out, inner=inner) == theirs


def test_many_rows_and_odd_lengths_need_a_copy_of_the_weight() -> None:
    assert not reads_packed((9, 0), 132, half="bf16", rows=1537, out=64, inner=64)
    assert not reads_packed((9, 0), 132, half="bf16", rows=1, out=64, inner=96)
    assert reads_packed((9, 0), 132, half="bf16", rows=4, out=64, inner=64)


def test_transformers_asks_at_once_for_half_a_byte_of_each_packed_weight(tiny: str) -> None:
    model = prepare_without_memory(Workload(kind="forward", model=tiny, quant="nf4", seq_len=8)).model
    packed = sum(m.weight.numel() for m in model.modules() if isinstance(m, FourBitLinear))
    others = sum(p.numel() for p in model.parameters()) - packed
    assert packed > 0
    assert loaded_bytes(model) == packed // 2 + 2 * others
    assert type(model.lm_head) is nn.Linear


def test_rounding_several_rows_makes_the_0_that_outliers_are_set_to() -> None:
    """bitsandbytes sets none of a single row."""

    def single_bytes(rows: int) -> int:
        given = (rows, 64)
        made = trace(lambda tracer: _rounded(torch.empty(given, dtype=torch.float16, device=tracer.device)))
        return sum(1 for size in made.requested if size == 1)

    assert (single_bytes(1), single_bytes(2)) == (1, 2)  # the other one: whether any stands out


def test_a_model_of_a_factory_is_not_quantised() -> None:
    work = Workload(kind="forward", model="small_models:bigram", quant="nf4", seq_len=8)
    with pytest.raises(UsageError, match="needs a transformers model"):
        prepare_without_memory(work)


@pytest.mark.parametrize(("name", "numel", "expected"), [
    ("adamw-8bit", 8192, 2 * 8192 + 2 * 4 * 32), ("adamw-8bit", 1024, 2 * 4 * 1024),
    ("paged-adamw-8bit", 8192, 2 * 8192 + 2 * 4 * 32), ("paged-adamw-8bit", 102_400, 2 * 4 * 400),
    ("paged-adamw", 102_400, 0), ("paged-adamw", 8192, 2 * 4 * 8192), ("lion-8bit", 8192, 8192 + 4 * 32),
])  # fmt: skip
def test_states_on_the_device(name: str, numel: int, expected: int) -> None:
    weight = nn.Parameter(torch.zeros(numel))
    weight.grad = torch.zeros(numel)
    optimizer = SmallStates([weight], lr=0.1, **OF_BITSANDBYTES[name])
    optimizer.step()
    kept = [each for each in optimizer.state[weight].values() if isinstance(each, torch.Tensor)]
    assert sum(each.numel() * each.element_size() for each in kept) == expected


def test_states_are_those_of_the_package() -> None:
    optim: Any = pytest.importorskip("bitsandbytes.optim")
    weight = nn.Parameter(torch.zeros(128, 64))
    weight.grad = torch.zeros(128, 64)
    theirs, own = optim.AdamW8bit([weight], lr=0.1), SmallStates([weight], lr=0.1, **OF_BITSANDBYTES["adamw-8bit"])
    theirs.init_state(theirs.param_groups[0], weight, 0, 0)
    own.step()
    shapes = [
        sorted(
            (tuple(v.shape), str(v.dtype)) for k, v in each.state[weight].items() if k.startswith(("state", "absmax"))
        )
        for each in (theirs, own)
    ]
    assert shapes[0] == shapes[1]

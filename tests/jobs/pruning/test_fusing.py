"""Fused kernels are put where the mathematics is the same, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from memfit.jobs.pruning import kernels as fusing

GPU = torch.device("meta")
"""Any device but the CPU."""


def replaced(family: str) -> set[str]:
    block = tiny_model(family).model.layers[0]
    fusing.fuse([block], GPU)
    return {name for name, module in block.named_modules() if "forward" in vars(module)}


def test_llamas_norms_and_mlp_are_fused() -> None:
    assert replaced("llama") == {"input_layernorm", "post_attention_layernorm", "mlp"}


def test_qwens_norms_of_heads_are_too() -> None:
    assert {"self_attn.q_norm", "self_attn.k_norm"} <= replaced("qwen3")


def test_gemmas_norm_adds_one_to_its_weight_and_is_left_alone() -> None:
    assert replaced("gemma2") == {"mlp"}


def test_an_mlp_that_is_not_gated_is_left_alone() -> None:
    assert replaced("phi") == set()


def test_on_the_cpu_nothing_is_replaced() -> None:
    block = tiny_model("llama").model.layers[0]
    fusing.fuse([block], torch.device("cpu"))
    assert not any("forward" in vars(module) for module in block.modules())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_modules_say_what_the_models_own_say(family: str) -> None:
    block = tiny_model(family).model.layers[0]
    plain: Any = dict(tiny_model(family).model.layers[0].named_modules())
    fusing.fuse([block], GPU)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        for name in ("input_layernorm", "mlp"):
            torch.testing.assert_close(block.get_submodule(name)(x), plain[name](x))


def test_the_gated_product_takes_no_third_tensor_and_gives_the_same_bits() -> None:
    block = tiny_model("llama").model.layers[0]
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = block.mlp(x)
        fusing.fuse([block], GPU)
        assert torch.equal(block.mlp(x), expected)


def test_gradients_still_flow_through_fused_modules() -> None:
    block = tiny_model("llama").model.layers[0]
    fusing.fuse([block], GPU)
    block.mlp(block.input_layernorm(torch.randn(2, 5, 32))).sum().backward()
    assert block.mlp.gate_proj.weight.grad is not None


def test_the_rotary_embedding_is_replaced_only_while_it_pays() -> None:
    from transformers.models.llama import modeling_llama

    model = tiny_model("llama")
    usual, blocks = modeling_llama.apply_rotary_pos_emb, list(model.model.layers)
    with fusing.compiled(blocks, model.config, GPU, tokens=1000):
        assert modeling_llama.apply_rotary_pos_emb is usual
    with fusing.compiled(blocks, model.config, GPU, tokens=10**12):
        assert modeling_llama.apply_rotary_pos_emb is fusing.rotate_
    assert modeling_llama.apply_rotary_pos_emb is usual


def test_without_a_gpu_the_replacements_are_the_plain_formulas() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, table = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(1, 3, 8)
    with torch.no_grad():
        for made, expected in zip(
            fusing.rotate_(q, k, table, table * 2), apply_rotary_pos_emb(q, k, table, table * 2), strict=True
        ):
            assert torch.equal(made, expected)
        gate, up = torch.randn(5, 6), torch.randn(5, 6)
        expected = torch.nn.functional.silu(gate) * up
        assert torch.equal(fusing.silu_times_(gate, up), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_kernel_that_rounds_less_often_is_the_same_formula_in_every_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for _ in range(50):
        q, k = (torch.empty(1, 8, 3, 64).uniform_(-1, 2).to(dtype) for _ in range(2))
        cos, sin = (torch.empty(1, 3, 64).uniform_(-1, 1).to(dtype) for _ in range(2))
        often = fusing._rotated(q, k, cos, sin)
        once = [each.to(dtype) for each in fusing._rotated(q.float(), k.float(), cos.float(), sin.float())]
        turned_back = fusing._rotated(q, k, cos, -sin)

        assert all(map(fusing._same_but_for_rounding, once, often))
        assert not any(map(fusing._same_but_for_rounding, turned_back, often))

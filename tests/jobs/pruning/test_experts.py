"""Mixtures of experts: every expert is pruned by the tokens that the router sent to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import in_memory
import pytest
import torch
from tiny_models import tiny_folder, tiny_model, tiny_windows
from torch import Tensor
from torch.nn.functional import linear

from memfit.errors import InputError
from memfit.jobs.pruning.decoder import Decoder
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.observation import find_matrices
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.settings import PruneSettings

SIZE, LENGTH = 2, 16


def prune_experts_in_memory(model: Any, windows: Tensor) -> None:
    """The whole model's forward shows what each block's experts are given; whose tokens they are is told by hand."""
    for block in in_memory.blocks_of(model):
        experts = getattr(block.mlp, "experts", None)
        shown: list[tuple[Tensor, Tensor]] = []
        handles = []
        if experts is not None:
            usual = experts.forward

            def forward(hidden: Tensor, chosen: Tensor, shares: Tensor, usual: Any = usual, shown: Any = shown) -> Any:
                shown.append((hidden.clone(), chosen.clone()))
                return usual(hidden, chosen, shares)

            experts.forward = forward
        with torch.no_grad():
            found = in_memory.observed(model, block, windows, SIZE)
            for weights, inputs in found:
                in_memory.wanda(0.5)(weights, inputs)
            if experts is not None:
                del experts.forward
                for expert in range(experts.num_experts):
                    prune_expert(experts, expert, shown)
        for handle in handles:
            handle.remove()


def prune_expert(experts: Any, expert: int, shown: list[tuple[Tensor, Tensor]]) -> None:
    gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
    rows: dict[str, list[Tensor]] = {"in": [], "down": []}
    for hidden, chosen in shown:
        tokens = (chosen == expert).any(-1).nonzero().flatten()
        given = hidden[tokens]
        gate, up = linear(given, gate_up).chunk(2, -1)
        for side, x in (("in", given), ("down", experts.act_fn(gate) * up)):
            of_sequence = [x[tokens // LENGTH == s].double().square().sum(0) for s in range(len(hidden) // LENGTH)]
            rows[side] += of_sequence
    for weight, side in ((gate_up, "in"), (down, "down")):
        squared = (torch.stack(rows[side]).sum(0) / len(rows[side])).float()
        in_memory.zero_lowest(weight, weight.abs() * squared.sqrt(), weight.shape[1] // 2)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_each_expert_is_pruned_by_its_own_tokens(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = tiny_model(family)
    prune_experts_in_memory(expected, tiny_windows())

    decoder = Decoder.open(tiny_folder(tmp_path, family))
    output = OutputFolder.create(tmp_path / "out", decoder, {})
    with Engine(decoder, device="cpu", micro_batch=SIZE) as engine:
        outcome = engine.prune(PruneSettings.asked(model="-"), tiny_windows(), output=output)
        output.finish()

    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert [name for name, weight in expected.state_dict().items() if not torch.equal(made[name], weight)] == []
    assert outcome.sparsity == 0.5
    tokens = [m.tokens for m in outcome.blocks[0].matrices if m.name.endswith(".gate_proj") and m.tokens is not None]
    assert len(tokens) == 4
    assert sum(tokens) == 5 * LENGTH * 2  # every token goes to two experts


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_an_expert_that_saw_no_token_is_named_and_pruned_by_magnitude(method: Any, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # a tie: the router takes the same two of the four for all
    model.save_pretrained(tmp_path / "m")
    with Engine(Decoder.open(tmp_path / "m"), device="cpu", micro_batch=SIZE) as engine:
        outcome = engine.prune(PruneSettings.asked(model="-", method=method), tiny_windows())
    assert outcome.sparsity == 0.5
    assert re.match(r"model\.layers\.0: experts mlp\.experts\.\d, mlp\.experts\.\d saw no token", outcome.notes[0])


def test_routers_are_not_pruned() -> None:
    names = [matrix.name for matrix in find_matrices(tiny_model("qwen3_moe").model.layers[0])]
    assert not any("gate." in f"{name}." for name in names)
    assert "mlp.experts.3.down_proj" in names


def test_experts_in_another_layout_are_refused_in_words(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, vocab_size=96, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        block = AutoModelForCausalLM.from_config(config).model.layers[0]
    with pytest.raises(InputError, match="GptOssExperts are stored in a layout that memfit does not prune"):
        find_matrices(block)

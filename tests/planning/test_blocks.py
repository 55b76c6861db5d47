"""Which blocks of a model are alike, asked of the model itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.models.presets import presets
from memfit.models.registry import resolve
from memfit.planning.few import Blocks, blocks_of, find_blocks


class Block(nn.Module):
    def __init__(self, number: int, width: int = 8, **settings: Any) -> None:
        super().__init__()
        self.layer_idx = number
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 4)
        for name, value in settings.items():
            setattr(self, name, value)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(blocks)


def model_of(pattern: str, **widths: int) -> nn.Module:
    """`abab` is four blocks, those of one letter alike."""
    return Model(*(Block(i, widths.get(letter, ord(letter))) for i, letter in enumerate(pattern)))


# -- periods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "period"),
    [
        ("aaaaaa", 1),
        ("abababababab", 2),
        ("aabaabaabaabaabaab", 3),
        ("aaaaabaaaaabaaaaabaaaaabaaaaab", 6),
        ("aaaaaaabaaaaaaabaaaaaaabaaaaaaabaaaaaaab", 8),
        ("xaaaaaaaaa", 1),  # the first block is traced as it is, so it may be another
        ("xbababababa", 2),
    ],
)
def test_the_shortest_period_is_found(pattern: str, period: int) -> None:
    assert find_blocks(model_of(pattern)) == Blocks("layers", len(pattern), period)


@pytest.mark.parametrize(
    "pattern",
    ["aabaaaaaaaaa", "xxaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaax", "abcdefghijklmnop", "aaaaaaaaabaaaaaaaaabaaaaaaaaab"],
)
def test_blocks_without_a_pattern_have_no_period(pattern: str) -> None:
    assert find_blocks(model_of(pattern)) is None


def test_a_model_without_a_list_of_modules_has_no_blocks() -> None:
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) is None


def test_a_list_of_one_is_no_list_of_blocks() -> None:
    assert find_blocks(Model(Block(0))) is None


def test_a_longer_list_inside_a_block_is_not_the_list_of_blocks() -> None:
    """Experts, or a norm for each head."""
    model = Model(*(Block(i, experts=nn.ModuleList(nn.Linear(4, 4) for _ in range(16))) for i in range(6)))
    assert find_blocks(model) == Blocks("layers", 6, 1)


@pytest.mark.parametrize(
    ("count", "period", "units", "traced", "worthwhile"),
    [
        (4, 1, 4, 4, False), (5, 1, 5, 4, True), (126, 1, 126, 4, True), (7, 2, 4, 7, False), (9, 2, 5, 7, True),
        (10, 2, 5, 8, True), (24, 6, 4, 24, False), (26, 6, 5, 20, True), (30, 6, 5, 24, True), (62, 6, 11, 20, True),
    ],
)  # fmt: skip
def test_three_periods_and_the_last_one_as_it_is_are_traced(
    count: int, period: int, units: int, traced: int, worthwhile: bool
) -> None:
    blocks = Blocks("layers", count, period)
    assert (blocks.units, blocks.traced, blocks.worthwhile) == (units, traced, worthwhile)


# -- what makes two blocks differ --------------------------------------------------------------------------------------


def odd_one_out(odd: nn.Module) -> Blocks | None:
    """Twelve blocks, the third of them another."""
    return find_blocks(Model(*(odd if i == 2 else Block(i) for i in range(12))))


def test_the_number_of_a_block_does_not_tell_it_from_others() -> None:
    assert odd_one_out(Block(2)) == Blocks("layers", 12, 1)


def without_bias() -> nn.Module:
    block = Block(2)
    block.up = nn.Linear(4, 8, bias=False)
    return block


def in_bf16() -> nn.Module:
    return Block(2).to(torch.bfloat16)


def with_a_buffer() -> nn.Module:
    block = Block(2)
    block.register_buffer("table", torch.zeros(3))
    return block


def with_a_module_more() -> nn.Module:
    return Block(2, norm=nn.LayerNorm(4))


def with_another_module() -> nn.Module:
    block = Block(2)
    block.up = nn.Identity()  # type: ignore[assignment]
    return block


@pytest.mark.parametrize(
    "odd",
    [
        lambda: Block(2, width=16), without_bias, in_bf16, with_a_buffer, with_a_module_more, with_another_module,
        lambda: Block(2, sliding_window=16), lambda: Block(2, kind="sliding"), lambda: Block(2, dropout=0.1),
        lambda: Block(2, causal=True), lambda: Block(2, window=None),
    ],
    ids=["width", "bias", "dtype", "buffer", "module", "type", "number", "word", "share", "switch", "nothing"],
)  # fmt: skip
def test_a_block_with_something_of_its_own_breaks_the_pattern(odd: Any) -> None:
    assert odd_one_out(odd()) is None


# -- models by name ----------------------------------------------------------------------------------------------------

PERIODS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
FAMILIES = {preset.model_type: preset for preset in presets()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_every_family_have_their_period(family: str) -> None:
    preset = FAMILIES[family]
    blocks, parameters = blocks_of(resolve(preset.name), "eager" if family == "gpt_oss" else "sdpa")
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = next(preset.config[name] for name in names if name in preset.config)
    assert blocks is not None
    assert (blocks.count, blocks.period) == (layers, PERIODS.get(family, 1))
    assert parameters == preset.parameters


LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_config_that_was_changed_is_read_again(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    assert blocks_of(resolve(str(tmp_path)), "sdpa")[0] == Blocks("model.layers", 6, 1)
    config.write_text(json.dumps(LLAMA | {"num_hidden_layers": 9}))
    os.utime(config, ns=(0, 1))  # however coarse the clock of the file system is
    assert blocks_of(resolve(str(tmp_path)), "sdpa")[0] == Blocks("model.layers", 9, 1)

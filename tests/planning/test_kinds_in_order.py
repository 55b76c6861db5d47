"""The order in which transformers goes through kinds of layers does not depend on the process."""

from __future__ import annotations

from transformers import Gemma3ForCausalLM, Gemma3TextConfig, masking_utils
from transformers.models.gemma3 import modeling_gemma3

from memfit.planning.on_trace import OrderedSet, kinds_in_order

NAMES = [f"kind {(7 * number) % 31}" for number in range(31)]


def small() -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    return Gemma3ForCausalLM(config)


def test_members_come_in_the_order_in_which_they_came_first() -> None:
    assert list(OrderedSet([*NAMES, *reversed(NAMES)])) == NAMES
    assert sorted(OrderedSet(NAMES)) == sorted(NAMES)


def test_it_is_a_set_in_all_else() -> None:
    some = OrderedSet(NAMES[:5])
    some.discard(NAMES[1])
    assert list(some) == [NAMES[0], *NAMES[2:5]]
    assert some - {NAMES[0]} == set(NAMES[2:5]) and NAMES[3] in some and len(some) == 4


def test_the_code_of_the_model_and_of_its_masks_uses_it_and_then_no_longer() -> None:
    with kinds_in_order(small()):
        for module in (masking_utils, modeling_gemma3):
            assert list(vars(module)["set"](NAMES)) == NAMES
    assert "set" not in vars(masking_utils) and "set" not in vars(modeling_gemma3)

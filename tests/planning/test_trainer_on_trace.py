"""transformers on the traced device: the Trainer leaves accelerate as it was, kinds of layers come in one order."""

from __future__ import annotations

import os

import pytest
from plans import plan
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, masking_utils
from transformers.models.gemma3 import modeling_gemma3

from memfit.errors import MemfitError
from memfit.planning.on_trace import OrderedSet, kinds_in_order


def devices() -> list[object]:
    from accelerate.state import AcceleratorState, PartialState

    return [PartialState._shared_state.get("device"), AcceleratorState._shared_state.get("device")]


def test_accelerate_s_device_is_its_own_again_afterwards() -> None:
    before = os.environ.get("ACCELERATE_TORCH_DEVICE")
    made = plan("train", loop="trainer")
    assert devices() == [None, None]
    assert os.environ.get("ACCELERATE_TORCH_DEVICE") == before
    assert made.report.breakdown["optimizer"] > 0


class Stop(Exception):
    pass


def test_accelerate_s_device_is_its_own_again_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer

    def stop(*_: object, **__: object) -> None:
        raise Stop

    monkeypatch.setattr(Trainer, "training_step", stop)
    try:
        with pytest.raises((Stop, MemfitError)):
            plan("train", loop="trainer", trace_cache=False)
        assert devices() == [None, None]
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def test_the_trainer_holds_what_its_own_loop_holds() -> None:
    """Fused AdamW by default: no copy of all parameters in the step, and counters on the GPU."""
    by_trainer, plain = (plan("train", loop=loop, optimizer="adamw-fused") for loop in ("trainer", "plain"))
    state = [made.report.breakdown["optimizer"] for made in (by_trainer, plain)]
    assert state[0] == state[1] > 0
    assert by_trainer.to_json()["workload"]["optimizer"] == "adamw-fused"


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

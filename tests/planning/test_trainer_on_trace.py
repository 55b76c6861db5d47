"""The Hugging Face Trainer on the traced device leaves accelerate as it was."""

from __future__ import annotations

import os

import pytest
from plans import plan

from memfit.errors import MemfitError


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

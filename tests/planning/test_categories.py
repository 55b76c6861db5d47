"""What each block of a traced job is, told by when it was born, when it died and which module made it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.events import Trace
from memfit.planning.traced import label, loss_modules_of


def outliving(phase: str, module: str = "layers.0", category: str = "", loss: tuple[str, ...] = ()) -> str:
    """The label of a block that is born in a phase and outlives it."""
    trace = Trace()
    trace.mark(phase, 1)
    block = trace.alloc(512, module=module, category=category)
    trace.mark("next", 1)
    trace.free(block)
    label(trace, loss)
    return trace.category(block)


@pytest.mark.parametrize(
    ("phase", "category"),
    [
        ("load", "weights"),
        ("forward", "activations"),
        ("backward", "gradients"),
        ("step", "optimizer"),
        ("data", "other"),
    ],
)
def test_what_outlives_its_phase_is_what_the_phase_is_for(phase: str, category: str) -> None:
    assert outliving(phase) == category


@pytest.mark.parametrize("phase", ["load", "forward", "backward", "step", "data"])
def test_what_dies_in_its_phase_is_temporary(phase: str) -> None:
    trace = Trace()
    trace.mark(phase, 1)
    block = trace.alloc(512)
    trace.free(block)
    label(trace)
    assert trace.category(block) == "temporaries"


def test_what_never_dies_outlives_its_phase() -> None:
    trace = Trace()
    trace.mark("step", 1)
    block = trace.alloc(512)
    label(trace)
    assert trace.category(block) == "optimizer"


def test_what_lives_from_one_forward_into_the_next_is_an_activation() -> None:
    trace = Trace()
    trace.mark("forward", 1)
    block = trace.alloc(512)
    trace.mark("forward", 2)
    trace.free(block)
    label(trace)
    assert trace.category(block) == "activations"


def test_a_category_that_is_known_already_stays() -> None:
    assert outliving("forward", category="workspaces") == "workspaces"


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("module", ["", "lm_head"])
def test_what_the_head_and_the_modules_around_it_make_is_the_loss(phase: str, module: str) -> None:
    assert outliving(phase, module, loss=("", "lm_head")) == "loss"


def test_the_head_s_optimizer_state_is_no_loss() -> None:
    assert outliving("step", "lm_head", loss=("", "lm_head")) == "optimizer"


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.decoder = nn.ModuleDict({"head": nn.Linear(2, 2)})

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder["head"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder["head"](self.body(x))


def test_loss_modules_are_the_head_and_what_contains_it() -> None:
    assert loss_modules_of(WithHead()) == {"", "decoder", "decoder.head"}


def test_a_model_without_a_known_head_has_no_loss_modules() -> None:
    assert loss_modules_of(nn.Linear(2, 2)) == frozenset()

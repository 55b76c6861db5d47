"""What each block of a traced job is, told by when it was born, when it died and which module made it."""

from __future__ import annotations

from collections.abc import Container

from memfit.core.events import Action, Mark, Trace

SURVIVORS = {"forward": "activations", "step": "optimizer", "load": "weights", "backward": "gradients"}
LOSS_PHASES = ("forward", "backward")


def label(trace: Trace, loss_modules: Container[str] = ()) -> None:
    """Born and gone within one phase: temporary. What outlives its phase is what that phase is for. What the output
    head and the modules around it make is the loss: logits, their log-softmax, the gradients of both."""
    birth: dict[int, tuple[int, Mark]] = {}
    phase, mark = 0, Mark("", 0)
    died: dict[int, int] = {}
    for action, subject in trace.events():
        if action == Action.MARK:
            phase, mark = phase + 1, trace.marks[subject]
        elif action == Action.ALLOC:
            birth[subject] = (phase, mark)
        elif action in (Action.FREE, Action.FREE_REQUESTED):
            died[subject] = phase
    for block, (born, mark) in birth.items():
        if trace.category(block):
            continue
        if mark.phase in LOSS_PHASES and trace.module(block) in loss_modules:
            category = "loss"
        elif died.get(block) == born:
            category = "temporaries"
        else:
            category = SURVIVORS.get(mark.phase, "other")
        trace.set_category(block, category)


def loss_modules_of(model: object) -> frozenset[str]:
    """The output head, and the modules that contain it: what they make themselves is logits and loss."""
    named = list(model.named_modules())  # type: ignore[attr-defined]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    path = next((name for name, module in named if module is head), None)
    if path is None:
        return frozenset()
    parts = path.split(".")
    return frozenset(".".join(parts[:n]) for n in range(len(parts) + 1))

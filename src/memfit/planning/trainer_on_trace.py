"""What the Hugging Face Trainer and accelerate must believe to run on the traced device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from memfit.tracing.answers import Site, Value

TRAINER_ANSWERS: dict[Site, Value] = {
    Site("transformers/trainer.py", "_maybe_log_save_evaluate"): 1.0,
    Site("transformers/trainer.py", "_inner_training_loop"): False,
}


@contextmanager
def trainer_on(device: str) -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import training_args

    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": device}))
        stack.enter_context(mock.patch.object(training_args, "is_torch_bf16_gpu_available", lambda: True))
        yield
    for state in states:
        state._reset_state()

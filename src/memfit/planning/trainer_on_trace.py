"""What the Hugging Face Trainer and accelerate must believe to run on the traced device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from memfit.tracing.answers import Site, Value

TRAINER_ANSWERS: dict[Site, Value] = {
    Site("transformers/trainer.py", "_run_epoch"): False,  # is the loss NaN or infinite?
    Site("transformers/trainer.py", "_maybe_log_save_evaluate"): 1.0,  # the loss and the gradients' norm, to be logged
    Site("transformers/trainer.py", "_finalize_training"): 1.0,  # the mean loss, to be returned
}


@contextmanager
def trainer_on_cuda() -> Iterator[None]:
    """accelerate is told that there is a CUDA device: in traced code that is the traced device."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import training_args

    states = (AcceleratorState, GradientState, PartialState)
    cuda = torch.device("cuda")
    initialise = Accelerator.__init__

    def initialise_for_cuda(self: Any, *args: Any, **kwargs: Any) -> None:
        """It refuses fp16 on devices that it does not know."""
        with mock.patch.object(Accelerator, "device", property(lambda _: cuda)):
            initialise(self, *args, **kwargs)

    def forget() -> None:
        for state in states:
            state._reset_state()

    forget()
    with ExitStack() as stack:
        stack.callback(forget)
        stack.enter_context(mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": "cuda"}))
        stack.enter_context(mock.patch.object(training_args, "is_torch_bf16_gpu_available", lambda: True))
        stack.enter_context(mock.patch.object(Accelerator, "__init__", initialise_for_cuda))
        yield

"""What the Hugging Face Trainer and accelerate must believe to run on the traced device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from memfit.tracing.answers import Site, Value

if TYPE_CHECKING:
    from memfit.tracing.tracer import Tracer

TRAINER_KNOWN: dict[Site, tuple[Value, str]] = {
    Site("transformers/trainer.py", "_run_epoch"): (False, "the loss is a finite number"),
    Site("transformers/trainer.py", "_maybe_log_save_evaluate"): (
        1.0,
        "the loss and the gradients' norm are logged as 1",
    ),
    Site("transformers/trainer.py", "_finalize_training"): (1.0, "the mean loss is returned as 1"),
    Site("transformers/trainer.py", "store_flos"): (1.0, "the work of all processes is logged as 1"),
}
"""What the Trainer asks of its tensors, whoever runs it, and what the answers mean."""
TRAINER_ANSWERS: dict[Site, Value] = {
    **{site: value for site, (value, _) in TRAINER_KNOWN.items()},
    Site("memfit/jobs/training/together.py", "all_well"): 0,  # the number of processes that ran out of memory
    Site("memfit/jobs/training/trainer_engine.py", "_probe"): True,  # is the gradients' norm finite?
    Site("memfit/jobs/training/trainer_engine.py", "drain_losses"): 1.0,  # the losses of steps, to be reported
    Site("memfit/jobs/training/trainer_engine.py", "<dictcomp>"): 1.0,  # the same, as Python before 3.12 calls it
}


@contextmanager
def trainer_on_cuda() -> Iterator[None]:
    """accelerate is told that there is a CUDA device: in traced code that is the traced device."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
    from transformers import training_args

    states = (AcceleratorState, GradientState, PartialState)
    cuda = torch.device("cuda")
    initialise, prepare_backend = Accelerator.__init__, PartialState._prepare_backend

    def initialise_for_cuda(self: Any, *args: Any, **kwargs: Any) -> None:
        """It refuses fp16 on devices that it does not know."""
        with mock.patch.object(Accelerator, "device", property(lambda _: cuda)):
            initialise(self, *args, **kwargs)

    def backend_for_cuda(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        """It looks for a card before it takes several processes for what they are."""
        many = torch.distributed.is_initialized()
        return ("nccl", DistributedType.MULTI_GPU) if many else prepare_backend(self, *args, **kwargs)

    def forget() -> None:
        for state in states:
            state._reset_state()

    forget()
    with ExitStack() as stack:
        stack.callback(forget)
        stack.enter_context(mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": "cuda"}))
        stack.enter_context(mock.patch.object(training_args, "is_torch_bf16_gpu_available", lambda: True))
        stack.enter_context(mock.patch.object(Accelerator, "__init__", initialise_for_cuda))
        stack.enter_context(mock.patch.object(PartialState, "_prepare_backend", backend_for_cuda))
        for name in ("get_rng_state", "set_rng_state"):  # kept on the host, and nothing here is random
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, **__: torch.empty(0)))
        yield


@contextmanager
def fully_shard_by_accelerate(tracer: Tracer) -> Iterator[None]:
    """accelerate takes a model in host memory."""
    from accelerate import Accelerator

    from memfit.tracing.fully_sharded import OnHost, fully_shard_traced

    prepare = Accelerator._prepare_fsdp2

    def prepare_from_host(self: Any, *args: Any) -> Any:
        with OnHost(tracer):
            return prepare(self, *args)

    with fully_shard_traced(tracer), mock.patch.object(Accelerator, "_prepare_fsdp2", prepare_from_host):
        yield

"""`memfit train`, disturbed on purpose: `python disturbed_run.py train --config ...`, alone or under torchrun.

MEMFIT_TEST_KILL=rank:step     this process is killed with signal 9 in the middle of that step
MEMFIT_TEST_OOM=rank:step:rows  memory runs out in that step's second micro-step while so many rows go at a time
MEMFIT_TEST_SHARD=1            accelerate is made to shard on the CPU, which by itself it does on GPUs only
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType

from memfit.cli.main import main
from memfit.jobs.training.engine import MemfitTrainer

torch.set_num_threads(1)
RANK = int(os.environ.get("RANK", "0"))


def said(name: str) -> list[int]:
    return [int(each) for each in os.environ.get(name, "").split(":") if each]


def reached(trainer: MemfitTrainer, phase: str, step: int, micro_step: int) -> None:
    in_the_plan = not trainer.args.use_cpu
    if phase != "backward" or micro_step != 1 or in_the_plan:
        return
    if said("MEMFIT_TEST_KILL") == [RANK, step]:
        os.kill(os.getpid(), signal.SIGKILL)
    if said("MEMFIT_TEST_OOM") == [RANK, step, trainer.recovery.batch.micro_batch_size]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def shard_on_the_cpu() -> None:
    import memfit.jobs.training.refusals as refusals

    begin = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        plugin = fsdp_plugin or self._shared_state.get("kept_plugin")
        if plugin is not None:
            self._shared_state["kept_plugin"] = self.fsdp_plugin = plugin
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = init
    AcceleratorState.is_fsdp2 = property(lambda self: "kept_plugin" in self._shared_state)
    Accelerator.distributed_type = property(
        lambda self: DistributedType.FSDP if self.state.is_fsdp2 else self.state.distributed_type
    )
    refusals._on_gpu = lambda _: True


if os.environ.get("MEMFIT_TEST_SHARD"):
    shard_on_the_cpu()
MemfitTrainer.reached = reached  # type: ignore[method-assign]
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

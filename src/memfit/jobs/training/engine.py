"""transformers' Trainer with memfit's steps: smaller micro-batches after OOM, exact resume, whole checkpoints.

The Trainer keeps what it is trusted for: DDP and FSDP by accelerate, mixed precision, clipping, schedules, logging. It
is told that a step is one batch; what that batch is cut into, and run again with, is decided here.
What a process reads for a step is its share of the global batch, from any step on.

The rows of a step stay on the host until the step is done. When memory runs out in any process, all of them throw away
what they have of the step, set their random numbers back to its start, and run the very same global batch with a
smaller micro-batch: no sample is lost or seen twice, and the optimizer has not noticed. The smaller size stays.
"""

from __future__ import annotations

import gc
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer

from memfit.errors import RanOut
from memfit.jobs.host import cause_of, is_out_of_memory
from memfit.jobs.training import checkpoints
from memfit.jobs.training.batch import BatchSizes
from memfit.jobs.training.checkpoints import RunState, steps_done, write_identity
from memfit.jobs.training.chunked_loss import IGNORED
from memfit.jobs.training.data import rows_of_step
from memfit.jobs.training.job import TrainJob
from memfit.jobs.training.loops import find_unused_parameters
from memfit.jobs.training.optimizers import begin_anew, configured_optimizer, load_state
from memfit.jobs.training.parallel import ProcessGroup


@dataclass(frozen=True)
class RandomState:
    python: Any
    cpu: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def capture(cls) -> RandomState:
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(random.getstate(), torch.get_rng_state(), gpu)

    def restore(self) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu)


Rows = list[dict[str, Tensor]]
MicroStep = Callable[[Rows, int, bool], Tensor]
"""Given its rows, its number and whether it is the last, its loss."""


@dataclass(frozen=True, kw_only=True)
class HalvedStep:
    """One time that memory ran out, and what was done."""

    step: int
    micro_step: int
    """Of the step, the first being 1."""
    longest_row: int
    rows_before: int
    rows_after: int
    cause: str

    def in_words(self) -> str:
        where = f"step {self.step}" if self.step else "the probe"
        return (
            f"memory ran out in micro-step {self.micro_step} of {where}: {self.cause}; the step is run again "
            f"with micro_batch_size {self.rows_after} instead of {self.rows_before}, at the same global batch"
        )


class Recovery:
    """A step that runs out of memory is run again, the whole of it, with half the rows at a time."""

    def __init__(
        self, batch: BatchSizes, together: ProcessGroup, *, enabled: bool, on_halved: Callable[[HalvedStep], None]
    ) -> None:
        self.batch, self.enabled = batch, enabled
        self._together, self._on_halved = together, on_halved

    def run_step(self, step: int, rows: Rows, micro_step: MicroStep, start_again: Callable[[], None]) -> Tensor:
        """The sum of the micro-steps' losses."""
        begun = RandomState.capture()
        while True:
            loss, failed = self._try(rows, micro_step)
            if failed is None:
                assert loss is not None
                return loss
            number, cause = failed
            start_again()
            _free()
            begun.restore()
            self._halve(step, number, cause, rows)

    def _try(self, rows: Rows, micro_step: MicroStep) -> tuple[Tensor | None, Any]:
        size, total = self.batch.micro_batch_size, None
        count = -(-len(rows) // size)
        for number in range(count):
            part = rows[number * size : (number + 1) * size]
            loss, cause = self._attempt(micro_step, part, number, last=number == count - 1)
            # Asked after every micro-step, so that nobody waits for a process that has given up.
            if not self._together.all_well(cause is None):
                return None, (number, cause)
            assert loss is not None
            total = loss if total is None else total + loss
        return total, None

    def _attempt(
        self, micro_step: MicroStep, rows: Rows, number: int, *, last: bool
    ) -> tuple[Tensor | None, str | None]:
        """The error itself must not leave this function: its traceback holds every tensor of the failed pass."""
        try:
            return micro_step(rows, number, last), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
                raise
            cause = cause_of(error)
            if not self.enabled:
                raise RanOut(f"memory ran out: {cause}", hint="memory.oom_recovery is off") from None
            return None, cause

    def _halve(self, step: int, number: int, cause: str | None, rows: Rows) -> None:
        before, smaller = self.batch, self.batch.smaller()
        longest = max(len(each["input_ids"]) for each in rows)
        cause = self._together.first_of(cause or "") or "no reason was given"
        if smaller is None:
            raise RanOut(
                f"memory ran out with a single row at a time, {longest:,} tokens long: {cause}",
                hint="gradient_checkpointing: full, loss: chunked or a shorter max_seq_len make a row smaller;"
                " checkpoints are as they were",
            )
        self.batch = smaller
        rows_before, rows_after = before.micro_batch_size, smaller.micro_batch_size
        place = {"step": step, "micro_step": number + 1, "longest_row": longest}
        self._on_halved(HalvedStep(**place, rows_before=rows_before, rows_after=rows_after, cause=cause))


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class StepRows(Sampler[list[int]]):
    """Its length is that of the whole run, wherever it starts: the Trainer takes it for the length of an epoch."""

    def __init__(self, job: TrainJob, *, rank: int, first_step: int) -> None:
        self.job, self.rank, self.first_step = job, rank, first_step

    def __len__(self) -> int:
        return self.job.total_steps

    def __iter__(self) -> Iterator[list[int]]:
        job, share, whole = self.job, self.job.batch.rows_per_process, self.job.batch.global_batch_size
        seed, shuffle = job.config.seed, job.config.data.shuffle
        for step in range(self.first_step, job.total_steps):
            rows = rows_of_step(step, samples=len(job.data), global_batch_size=whole, seed=seed, shuffle=shuffle)
            yield rows[self.rank * share : (self.rank + 1) * share].tolist()


def step_loader(job: TrainJob, *, rank: int, first_step: int, pin: bool) -> DataLoader[Any]:
    """Rows as they are: they are made a batch only when it is known how many go through the model at a time."""
    return DataLoader(
        job.data,
        batch_sampler=StepRows(job, rank=rank, first_step=first_step),
        collate_fn=_as_they_are,
        num_workers=job.config.data.num_workers,
        pin_memory=pin,
        generator=torch.Generator().manual_seed(job.config.seed),  # else it draws from the run's random numbers
    )


def _as_they_are(rows: Rows) -> Rows:
    return rows


def learned_tokens(rows: Rows) -> int:
    """The first token of a row is never predicted."""
    return sum(int((each["labels"][1:] != IGNORED).sum()) for each in rows)


PROBE_STEPS = 2
"""The first makes the optimizer's state, the second runs with it."""


class MemfitTrainer(Trainer):  # type: ignore[misc,unused-ignore]
    def __init__(
        self,
        job: TrainJob,
        model: torch.nn.Module,
        args: Any,
        *,
        on_halved: Callable[[HalvedStep], None],
        on_probed: Callable[[int], None],
        on_reached: Callable[[str, int, int], None] | None = None,
        on_note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.job = job
        super().__init__(model=model, args=args, train_dataset=job.data, data_collator=job.collate)
        self.together = ProcessGroup(args.device)
        self.first_step = 0 if job.resume_from is None else steps_done(job.resume_from)
        self.progress = RunState(micro_batch_size=job.batch.micro_batch_size)
        self.recovery = Recovery(
            job.batch,
            self.together,
            enabled=job.config.memory.oom_recovery and not self._sharded,
            on_halved=self._halved,
        )
        self._on_halved, self._on_probed, self._on_reached = on_halved, on_probed, on_reached
        self._on_note = on_note
        self._new_losses: dict[int, Tensor] = {}
        self._place = (0, 0)
        self.current_gradient_accumulation_steps = 1
        self.data_wait_seconds = 0.0
        self.tokens_of_step, self.longest_of_step = 0, 0
        if job.resume_from is not None:
            self._go_on_from(job.resume_from)

    @property
    def _sharded(self) -> bool:
        return bool(self.is_fsdp_enabled)

    @property
    def _own_reduction(self) -> bool:
        """Gradients are averaged once, when all processes have come through the step: inside a backward pass nobody
        could tell the others that it has run out of memory."""
        return self.together.many and self.recovery.enabled

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        from accelerate.utils import DistributedDataParallelKwargs

        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        # Buffers are the same everywhere from the start. Sent around in a forward pass that one process does not
        # finish, they would leave the others waiting.
        built["kwargs_handlers"] = [
            DistributedDataParallelKwargs(
                find_unused_parameters=find_unused_parameters(self.job) and not self.job.config.memory.oom_recovery,
                gradient_as_bucket_view=self.job.config.workload.gradient_as_bucket_view,
                broadcast_buffers=False,
            )
        ]
        return built

    # -- what is trained, and from which data

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(trained))
            self.optimizer = configured_optimizer(self.job.config, trained, decayed)
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        pin = bool(self.args.dataloader_pin_memory)
        return step_loader(self.job, rank=self.together.rank, first_step=self.first_step, pin=pin)

    def get_batch_samples(self, epoch_iterator: Iterator[Rows], num_batches: int, device: Any) -> Any:
        began = time.perf_counter()
        rows = next(epoch_iterator)
        self.data_wait_seconds += time.perf_counter() - began
        return [rows], self._items(rows)

    def _items(self, rows: Rows) -> Tensor:
        """Tokens to be learned in the whole global batch: what the loss is divided by, however the batch is cut up."""
        self.tokens_of_step = sum(len(each["input_ids"]) for each in rows)
        self.longest_of_step = max(len(each["input_ids"]) for each in rows)
        items = torch.tensor(learned_tokens(rows), device=self.args.device)
        return self.together.sum(items).clamp(min=1)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # it expects a dictionary of tensors; the number is for a report that memfit does not make

    # -- one step

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        step = int(self.state.global_step) + 1
        loss = self._run(model, step, inputs, num_items_in_batch)
        self._new_losses[step] = self.together.sum(loss.clone()) / self.together.world_size
        return loss

    def _run(self, model: Any, step: int, rows: Rows, items: Any) -> Tensor:
        own = self._own_reduction

        def micro_step(part: Rows, number: int, last: bool) -> Tensor:
            batch = self.data_collator(part)
            quiet = own or not last
            with self.accelerator.no_sync(model) if quiet and self.together.many else nullcontext():
                self._place = (step, number)
                self.reached("forward", step, number)
                loss: Tensor = super(MemfitTrainer, self).training_step(model, batch, items)
                self.reached("end", step, number)
            return loss

        loss = self.recovery.run_step(step, rows, micro_step, start_again=model.zero_grad)
        if own:
            self.together.mean_of_gradients(model.parameters())
        return loss

    def reached(self, phase: str, step: int, micro_step: int) -> None:
        """Called in every micro-step before `forward`, before `backward` and at its `end`."""
        if self._on_reached is not None:
            self._on_reached(phase, step, micro_step)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model_accepts_loss_kwargs and not return_outputs:
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        else:
            loss = self._loss_of_logits(model, inputs, num_items_in_batch)
        self.reached("backward", *self._place)
        return loss

    def _loss_of_logits(self, model: Any, inputs: Any, items: Any) -> Tensor:
        """Of a model that leaves its loss to others, or that would not divide it by the whole batch's tokens."""
        made = model(inputs["input_ids"])
        logits: Tensor = made if isinstance(made, Tensor) else made.logits
        scores, wanted = logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten()
        total = cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="sum")
        # Processes' gradients are averaged, and each has only its own share of the sum.
        share: Tensor = total / items * self.together.world_size
        return share

    def _halved(self, halved: HalvedStep) -> None:
        self.progress.micro_batch_size = halved.rows_after
        self.progress.halved.append(asdict(halved))
        self._on_halved(halved)

    def drain_losses(self) -> dict[int, float]:
        """Read only now and then: each reading waits for the GPU."""
        new = {step: float(loss) for step, loss in self._new_losses.items()}
        self._new_losses.clear()
        self.progress.losses.update(new)
        return new

    # -- before the first step

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        made = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.together.many:
            torch.manual_seed(self.job.config.seed + self.together.rank)  # dropout that differs between processes
        if self.job.config.memory.probe:
            self._probe(made[0], resume_from_checkpoint)
        return made

    def _probe(self, model: Any, resume_from: Any) -> None:
        """The longest rows first, through two steps of the optimizer at a learning rate of 0, and nothing of it stays:
        0 times an update leaves every weight as it was, and the optimizer's state is made anew or read again."""
        begun, step = RandomState.capture(), int(self.state.global_step)
        sizes = self.job.batch
        longest = self.job.data.longest_first().tolist()
        count = sizes.micro_batch_size * min(2, sizes.gradient_accumulation_steps)
        rows = [self.job.data[longest[number % len(longest)]] for number in range(count)]
        optimizer: Any = self.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        scaler = self.accelerator.scaler
        scaling = None if scaler is None else scaler.state_dict()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(PROBE_STEPS):
            self._run(model, step, rows, self._items(rows))
            norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else self._get_grad_norm(model)
            if not torch.isfinite(torch.as_tensor(norm)):
                for parameter in model.parameters():  # 0 times infinity would not leave a weight as it was
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            optimizer.step()
            model.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        begin_anew(optimizer.optimizer)
        if scaler is not None:
            scaler.load_state_dict(scaling)
        if resume_from is not None:
            self._load_optimizer_and_scheduler(resume_from)
        begun.restore()
        self._on_probed(self.longest_of_step)

    # -- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, output_dir, saving = int(self.state.global_step), self.job.output_dir, self.job.config.saving
        most = saving.save_total_limit
        self.drain_losses()
        failed = self._write_checkpoint(step)
        if failed is not None:
            gone = checkpoints.make_room(output_dir, most, newest=step) if self.together.rank == 0 else []
            if not self.together.all_well(not gone):
                names = ", ".join(each.name for each in gone)
                self._on_note(f"no room for step {step} ({failed}): {names} went before it is written, not after")
                failed = self._write_checkpoint(step)
        if failed is not None:
            raise checkpoints.cannot_save(step, output_dir, failed)
        if self.together.rank == 0:
            checkpoints.keep_last(output_dir, most, newest=step)
        self.together.wait()

    def _write_checkpoint(self, step: int) -> str | None:
        """Why it could not be written, in any of the processes: each asks the others after every part, so that nobody
        waits for one that has given up. Half of it does not stay."""
        first, output_dir = self.together.rank == 0, self.job.output_dir
        beside = output_dir / f"step_{step}{checkpoints.WRITING}"
        parts: tuple[Callable[[], object], ...] = (
            lambda: checkpoints.begin(output_dir, step) if first else None,
            lambda: self.save_model(str(beside), _internal_call=True),
            lambda: self._save_optimizer_and_scheduler(str(beside)),
            lambda: self._save_rest(beside, first=first),
            lambda: checkpoints.finish(beside) if first else None,
        )
        for part in parts:
            why = _why_it_failed(part, output_dir)
            if not self.together.all_well(why is None):
                if first:
                    shutil.rmtree(beside, ignore_errors=True)
                return self.together.first_of(why or "") or "no reason was given"
        return None

    def _save_rest(self, beside: Path, *, first: bool) -> None:
        self._save_scaler(str(beside))
        self._save_rng_state(str(beside))
        if first:
            write_identity(beside, self.job)
            self.progress.write(beside)
            if hasattr(self.job.tokenizer, "save_pretrained"):
                self.job.tokenizer.save_pretrained(str(beside))
            self.state.save_to_json(str(beside / "trainer_state.json"))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        if self.job.config.workload.kind == "lora":
            model = self.accelerator.unwrap_model(self.model)
            # Else peft asks the Hub whether the embedding has been changed.
            model.save_pretrained(output_dir, state_dict=state_dict, save_embedding_layers=False)
        else:
            super()._save(output_dir, state_dict=state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        adapters = Path(resume_from_checkpoint) / "adapter_model.safetensors"
        if self.job.config.workload.kind != "lora" or self._sharded or not adapters.is_file():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        # The Trainer's own way makes fp32 of adapters whatever they were.
        set_peft_model_state_dict(self.model, load_file(adapters))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._sharded or checkpoint is None or not (Path(checkpoint) / "optimizer.pt").is_file():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # On the host first: the Trainer's own way needs room for it twice on each GPU, and fails for many CPUs.
        optimizer: Any = self.optimizer
        schedule: Any = self.lr_scheduler
        load_state(optimizer.optimizer, _read(Path(checkpoint) / "optimizer.pt"))
        schedule.load_state_dict(_read(Path(checkpoint) / "scheduler.pt"))

    def _go_on_from(self, folder: Path) -> None:
        before = RunState.read(folder)
        if before is None:
            return
        self.progress = before
        rows = min(before.micro_batch_size, self.job.batch.micro_batch_size)
        if before.halved and rows in self.job.batch.rungs:
            self.recovery.batch = self.job.batch.with_micro_batch(rows)
        self.progress.micro_batch_size = self.recovery.batch.micro_batch_size


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _why_it_failed(part: Callable[[], object], folder: Path) -> str | None:
    """Of a part of a checkpoint; what has nothing to do with the disk is raised."""
    try:
        part()
    except Exception as error:
        if (why := checkpoints.why_not_written(error, folder)) is None:
            raise
        return why
    return None

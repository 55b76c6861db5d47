"""The loss in chunks beside the full one on a GPU: memory, time and gradients, taken in turns in one process.

    PYTHONPATH=src python3 -m benchmarks.chunked_loss                    # the loss alone, and a LoRA step of a 7B model
    PYTHONPATH=src python3 -m benchmarks.chunked_loss --only alone --json
    PYTHONPATH=src python3 -m benchmarks.chunked_loss --device cpu --only tiny

*alone*: hidden states, output head, labels; forward and backward. Beside it the floor: the matrix products that no way
of computing the loss can do without, alone. *step*: whole steps of the training job, the two losses taking turns.
Memory is what is added at the peak to what was there before; for a step, all of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.aligned import aligned
from benchmarks.device import reset, synchronize
from memfit.jobs.build import prepare
from memfit.jobs.run import outputs_and_loss, token_ids, wanted
from memfit.jobs.training.chunked_loss import chunked_cross_entropy
from memfit.jobs.training.optimizers import choose_optimizer
from memfit.jobs.workload import Workload
from memfit.units import GiB

ROUNDS, WARM_UP = 20, 3
LOSSES = ("full", "chunked")


@dataclass(frozen=True)
class Alone:
    name: str
    tokens: int
    words: int
    width: int
    trained: bool
    dtype: torch.dtype = torch.bfloat16
    amp: bool = False
    """fp32 weights under bf16 autocast."""


@dataclass(frozen=True)
class Step:
    name: str
    workload: dict[str, Any]


QWEN = {
    "kind": "lora", "model": "qwen2.5-7b", "batch_size": 1, "seq_len": 2048, "rank": 128, "grad_checkpointing": True,
    "optimizer": "adamw-fused", "grad_accum": 2,
}  # fmt: skip
GSA = {
    "kind": "train", "model": "gsa-512m", "batch_size": 2, "seq_len": 1024, "precision": "amp-bf16",
    "grad_checkpointing": True, "optimizer": "adamw-fused", "grad_accum": 2,
}  # fmt: skip
CASES: tuple[Alone | Step, ...] = (
    Alone("alone, frozen head", 2048, 152_064, 3584, trained=False),
    Alone("alone, trained head", 2048, 152_064, 3584, trained=True),
    Alone("alone, trained, amp", 2048, 151_936, 512, trained=True, dtype=torch.float32, amp=True),
    Alone("alone, trained, fp32", 2048, 152_064, 512, trained=True, dtype=torch.float32),
    Alone("tiny alone", 64, 500, 32, trained=True, dtype=torch.float32),
    Step("step, qwen2.5-7b lora 128", QWEN),
    Step("step, gsa-512m", GSA),
    Step("tiny step", {**GSA, "model": "smollm2-135m", "precision": "fp32", "batch_size": 1, "seq_len": 16}),
)


@dataclass(kw_only=True)
class Measured:
    name: str
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    reserved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    floor_seconds: float | None = None
    gradients_apart: dict[str, float] = dataclasses.field(default_factory=dict)
    """The largest difference over the largest gradient: between the losses, and from the full loss in fp32."""

    def row(self) -> tuple[str, ...]:
        def gib(found: dict[str, int], loss: str) -> str:
            return f"{found[loss] / GiB:.2f}" if loss in found else "n/a"

        times = {loss: statistics.median(found) for loss, found in self.seconds.items()}
        saved = (self.peak_bytes["full"] - self.peak_bytes["chunked"]) / GiB if self.peak_bytes else None
        apart = ", ".join(f"{what} {value:.1e}" for what, value in self.gradients_apart.items())
        return (
            self.name, *(gib(self.peak_bytes, loss) for loss in LOSSES), "n/a" if saved is None else f"{saved:.2f}",
            *(gib(self.reserved_bytes, loss) for loss in LOSSES), *(f"{1000 * times[loss]:.2f}" for loss in LOSSES),
            f"{times['chunked'] / times['full'] - 1:+.1%}",
            "n/a" if self.floor_seconds is None else f"{1000 * self.floor_seconds:.2f}", apart,
        )  # fmt: skip


HEADINGS = (
    "case", "full GiB", "chunked GiB", "saved GiB", "full reserved", "chunked reserved", "full ms", "chunked ms",
    "time", "products ms", "gradients apart",
)  # fmt: skip


# -- the loss alone ----------------------------------------------------------------------------------------------------


def alone(case: Alone, device: torch.device, rounds: int) -> Measured:
    torch.manual_seed(0)
    hidden = torch.randn(case.tokens, case.width, device=device).to(case.dtype).requires_grad_()
    weight = (torch.randn(case.words, case.width, device=device) * 0.02).to(case.dtype).requires_grad_(case.trained)
    labels = torch.randint(0, case.words, (case.tokens,), device=device)
    given = (hidden, weight)
    runs: dict[str, Callable[[], Any]] = {
        "full": lambda: _taken(_full(hidden, weight, labels, case), given),
        "chunked": lambda: _taken(_chunked(hidden, weight, labels, case), given),
    }
    made = Measured(name=case.name)
    grads = {}
    for loss, run in runs.items():
        made.peak_bytes[loss], grads[loss] = _peak_of(run, device)
    made.gradients_apart["chunked-full"] = _apart(grads["chunked"], grads["full"])
    if case.dtype != torch.float32 or case.amp:
        exact = tuple(each.detach().float().requires_grad_(each.requires_grad) for each in given)
        truth = _taken(_full(exact[0], exact[1], labels, dataclasses.replace(case, amp=False)), exact)
        for loss in LOSSES:
            made.gradients_apart[f"{loss}-fp32"] = _apart(grads[loss], truth)
        del exact, truth
    del grads
    with torch.no_grad():
        floor = _floor(hidden, weight, case)
        made.seconds = _in_turns({**runs, "floor": floor}, device, rounds)
    made.floor_seconds = statistics.median(made.seconds.pop("floor"))
    return made


def _full(hidden: Tensor, weight: Tensor, labels: Tensor, case: Alone) -> Tensor:
    """As a causal model of transformers does it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    with torch.enable_grad(), torch.autocast(hidden.device.type, torch.bfloat16, enabled=case.amp):
        logits = linear(hidden, weight)[None]
        loss: Tensor = ForCausalLMLoss(logits, labels[None], case.words, shift_labels=labels[None])
        return loss


def _chunked(hidden: Tensor, weight: Tensor, labels: Tensor, case: Alone) -> Tensor:
    with torch.enable_grad(), torch.autocast(hidden.device.type, torch.bfloat16, enabled=case.amp):
        return chunked_cross_entropy(hidden, weight, labels)


def _taken(loss: Tensor, given: tuple[Tensor, ...]) -> list[Tensor]:
    loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
    found = [each.grad for each in given if each.grad is not None]
    for each in given:
        each.grad = None
    return found


def _floor(hidden: Tensor, weight: Tensor, case: Alone) -> Callable[[], None]:
    kind = torch.bfloat16 if case.amp else case.dtype
    narrow_hidden, narrow_weight = hidden.to(kind), weight.to(kind)

    def products() -> None:
        logits = linear(narrow_hidden, narrow_weight)
        torch.mm(logits, narrow_weight)
        if case.trained:
            torch.mm(logits.t(), narrow_hidden)

    return products


def _apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(one, other, strict=True)
    )


# -- a whole step ------------------------------------------------------------------------------------------------------


def step(case: Step, device: torch.device, rounds: int) -> Measured:
    made = Measured(name=case.name)
    for loss in LOSSES:
        run = _job(case, loss, device)
        run()
        made.peak_bytes[loss], _ = _peak_of(run, device, all_of_it=True)
        if device.type == "cuda":
            made.reserved_bytes[loss] = torch.cuda.max_memory_reserved()
        del run
        reset(device)
    made.seconds = _in_turns({loss: _job(case, loss, device) for loss in LOSSES}, device, max(1, rounds // 2))
    reset(device)
    return made


def _job(case: Step, loss: str, device: torch.device) -> Callable[[], None]:
    """One step of the optimizer, as `jobs/run.py` makes it, on random weights."""
    with torch.device(device):
        job = prepare(Workload.from_mapping({**case.workload, "loss": loss}))
    job.model.to(device)
    with torch.no_grad():
        for parameter in job.model.parameters():
            nn.init.normal_(parameter, std=0.02)
    optimizer = choose_optimizer(str(job.workload.optimizer))(job.trainable, lr=1e-4)

    def run() -> None:
        for _ in range(job.workload.grad_accum):
            ids = token_ids(job, device)
            outputs_and_loss(job, ids, wanted(job, ids))[1].backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


# -- measuring ---------------------------------------------------------------------------------------------------------


def _peak_of(run: Callable[[], Any], device: torch.device, *, all_of_it: bool = False) -> tuple[int, Any]:
    """What a run adds at its peak, after a first run that loads kernels and workspaces. No GPU: 0."""
    if device.type != "cuda":
        return 0, run()
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = 0 if all_of_it else torch.cuda.memory_allocated()
    made = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, made


def _in_turns(runs: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """One after the other, so that a card that slows down slows down all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_UP + rounds):
        for name, run in runs.items():
            synchronize(device)
            began = time.perf_counter()
            run()
            synchronize(device)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times that each is timed; steps half as often")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    chosen = [case for case in CASES if asked.only in case.name and (asked.only or "tiny" not in case.name)]
    if not chosen:
        parser.error(f"no case has {asked.only!r} in its name")
    made = []
    for case in chosen:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        rounds = asked.rounds
        made.append(alone(case, device, rounds) if isinstance(case, Alone) else step(case, device, rounds))
        reset(device)
    if asked.json:
        print(json.dumps([dataclasses.asdict(each) for each in made], indent=1))
    else:
        print(aligned([HEADINGS, *(each.row() for each in made)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

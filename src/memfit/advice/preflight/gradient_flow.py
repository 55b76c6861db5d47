"""Whether every trained tensor really gets a gradient: the model's first blocks, run on the CPU through two steps.

The model is built as `memfit train` builds it, adapters, checkpointing and loss included; only its weights are random
and its text is short. LoRA's B begins at zero, so that A has no gradient in the first step: the second one counts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.advice.preflight.small_model import few_blocks
from memfit.advice.preflight.trained_weights import ADAPTER
from memfit.errors import MemfitError
from memfit.jobs.training.config import FACTORY, TrainConfig
from memfit.models.gsa_names import is_gsa
from memfit.recording.machine import host_memory
from memfit.units import GiB

if TYPE_CHECKING:
    from torch import Tensor, nn

GRADIENTS, LOSS = Line("model", "gradient flow"), Line("model", "loss")
STEPS = 2
RATE = 1e-2
SHARE_OF_HOST = 0.5
MOST_BYTES = 4 * GiB
"""Of the host's free memory, what a look may take: to fill more than this with random numbers takes minutes."""
SHOWN = 3
INPUT_GRADS = "checkpointing over a frozen embedding: model.enable_input_require_grads(), or use_reentrant=False"
UNREACHED = f"leave layers that nothing depends on out of target_modules; or {INPUT_GRADS}"
GSA_INDEXER = ".indexer."
NO_GRADIENT = "does not require grad"
"""How torch says that nothing in the loss leads back to a trained weight."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    blocks: int
    tensors: int
    loss: float
    without: tuple[str, ...] = ()
    """Trained tensors that got no gradient, or one of zeros."""
    not_finite: tuple[str, ...] = ()


def follow(situation: Situation) -> Flow:
    """Raises CannotTell where the model is too large for this machine, and whatever the model's own code raises."""
    import torch

    situation.shapes.needed()
    host = host_memory()
    most = min(int(SHARE_OF_HOST * (host["total_bytes"] - host["used_bytes"])), MOST_BYTES)
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checkpointing, on inputs without gradients: that is what is looked for
        torch.manual_seed(situation.config.seed)
        model, job, blocks = few_blocks(situation.config, situation.model_name, most_bytes=most)
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if not trained:
            raise CannotTell("no weight is trained")
        loss = _steps(model, _within_vocabulary(model, job.collate([job.data[0]])), list(trained.values()), job.config)
    gradients = {name: each.grad for name, each in trained.items()}
    return Flow(
        blocks=blocks, tensors=len(trained), loss=loss,
        without=tuple(name for name, each in gradients.items() if each is None or not each.count_nonzero()),
        not_finite=tuple(name for name, each in gradients.items() if each is not None and not each.isfinite().all()),
    )  # fmt: skip


def _steps(model: nn.Module, batch: dict[str, Tensor], trained: list[nn.Parameter], config: TrainConfig) -> float:
    """The last step's loss; its gradients stay."""
    import torch

    from memfit.advice.preflight.repeated_weights import ProductsByFp32

    amp = config.precision.startswith("amp-")
    optimizer = torch.optim.SGD(trained, lr=RATE)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        with ProductsByFp32():  # type: ignore[no-untyped-call,unused-ignore]
            with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
                loss = _loss(model, batch)
            torch.autograd.backward(loss)
        if step < STEPS:
            optimizer.step()
    return float(loss.detach())


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    from torch.nn.functional import cross_entropy

    from memfit.jobs.preparing import takes_labels

    if takes_labels(model):
        loss: Tensor = model(**batch).loss
        return loss
    made: Any = model(batch["input_ids"])
    logits = made.logits if hasattr(made, "logits") else made
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def _within_vocabulary(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A factory's model may know fewer words than the rows have."""
    from torch import nn

    tables = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    words = max(tables, default=1 << 31)
    return {name: each.where(each < words, each % words) for name, each in batch.items()}


def gradients(situation: Situation, followed: list[Flow]) -> Iterator[Finding]:
    """What it finds is also put into `followed`, for the checks that come after."""
    try:
        flow = follow(situation)
    except (MemfitError, CannotTell, ImportError):
        raise
    except Exception as error:  # the model may be somebody's own code, which raises what it likes
        yield _stopped(error)
        return
    followed.append(flow)
    yield _of_loss(flow)
    what = _what(situation, flow)
    details: dict[str, Any] = {
        "tensors": flow.tensors, "without_gradient": list(flow.without), "not_finite": list(flow.not_finite),
        "blocks": flow.blocks,
    }  # fmt: skip
    if flow.not_finite:
        yield GRADIENTS.failed(f"{_some(flow.not_finite)} not finite in {what}", "bf16 or fp32", **details)
        return
    adapters = [name for name in flow.without if ADAPTER in name]
    if adapters or len(flow.without) == flow.tensors:
        yield GRADIENTS.failed(
            f"no gradient reaches {len(flow.without)} of {flow.tensors} trained tensors in {what}:"
            f" {_some(flow.without)}",
            INPUT_GRADS if len(flow.without) == flow.tensors else UNREACHED,
            **details,
        )
        return
    if flow.without and is_gsa(situation.model_name) and all(GSA_INDEXER in name for name in flow.without):
        yield GRADIENTS.ok(
            f"{flow.tensors - len(flow.without)} trained tensors get finite gradients other than zero in {what}; the"
            f" {len(flow.without)} of GSA's indexer get none, for a choice of keys has no gradient",
            **details,
        )
        return
    if flow.without:
        yield GRADIENTS.warning(
            f"no gradient reaches {len(flow.without)} of {flow.tensors} trained tensors, which stay as they are:"
            f" {_some(flow.without)}",
            "freeze them, or find out why nothing depends on them", **details,
        )  # fmt: skip
        return
    yield GRADIENTS.ok(f"all {flow.tensors} trained tensors get finite gradients other than zero in {what}", **details)


def _what(situation: Situation, flow: Flow) -> str:
    steps = "two steps on the CPU"
    if FACTORY.fullmatch(situation.model_name):
        return steps
    return f"the first {flow.blocks} block{'s' if flow.blocks > 1 else ''}, {steps}"


def _of_loss(flow: Flow) -> Finding:
    loss = flow.loss
    if not math.isfinite(loss):
        return LOSS.failed(
            f"the loss is {loss} in the second step with random weights", "bf16 or fp32: fp16 ends at 65,504", loss=None
        )
    return LOSS.ok(f"finite ({loss:.2f} with random weights)", loss=loss)


def _stopped(error: Exception) -> Finding:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if NO_GRADIENT in first:
        return GRADIENTS.failed(f"no gradient reaches any trained weight: '{first}'", INPUT_GRADS)
    return GRADIENTS.failed(f"a training step stops on the CPU: {first}", "the same step would stop on the GPU")


def _some(names: tuple[str, ...]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

"""Which weights are trained: those that the config means, and as many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.render.words import count

TRAINED = Line("model", "trained weights")
ADAPTER = "lora_"
SAVED_WHOLE = "modules_to_save"
"""What peft calls a module that is trained beside the adapters because somebody asked for it."""


def trained_weights(situation: Situation) -> Iterator[Finding]:
    model, method = situation.shapes.get(), situation.config.method
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    everything = sum(each.numel() for each in model.parameters())
    mine = sum(each.numel() for _, each in named)
    adapters = [name for name, _ in named if ADAPTER in name]
    base = [(name, each) for name, each in named if ADAPTER not in name and SAVED_WHOLE not in name]
    details: dict[str, Any] = {"trained": mine, "parameters": everything, "tensors": len(named)}
    if not named:
        yield TRAINED.failed("no weight is trained: all are frozen", "requires_grad_(True) on what should learn")
        return
    if adapters and base:
        size = sum(each.numel() for _, each in base)
        yield TRAINED.failed(
            f"{count(size)} weights of the base model are trained beside the adapters, such as {base[0][0]}",
            "freeze the base model before the adapters are added", **details, base=size,
        )  # fmt: skip
        return
    if idle := _targets_without_a_layer(method.target_modules, adapters):
        yield TRAINED.failed(
            f"method.target_modules: no layer is called {', '.join(idle)}",
            f"layers with adapters: {', '.join(sorted(_adapted(adapters)))}", **details,
        )  # fmt: skip
        return
    share = f"{mine:,} of {everything:,} parameters ({mine / everything:.2%})"
    if adapters:
        kinds = ", ".join(sorted(_adapted(adapters)))
        found = f"{share} in {len(adapters) // 2} adapters of {kinds}; the base model is frozen"
        yield TRAINED.ok(found, **details)
        return
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    if frozen:
        yield TRAINED.warning(
            f"{share}; {len(frozen)} tensors are frozen, such as {frozen[0]}", "method: full means all", **details
        )
        return
    yield TRAINED.ok(f"{mine:,} parameters, all of them", **details)


def _adapted(adapters: list[str]) -> set[str]:
    """`...q_proj.lora_A.default.weight` adapts q_proj."""
    return {name.split(f".{ADAPTER}")[0].rpartition(".")[2] for name in adapters}


def _targets_without_a_layer(targets: tuple[str, ...] | None, adapters: list[str]) -> list[str]:
    """peft stops only where none of the names matches."""
    adapted = {name.split(f".{ADAPTER}")[0] for name in adapters}
    return [each for each in targets or () if not any(f".{name}".endswith(f".{each}") for name in adapted)]

"""LoRA's adapters by peft, the same for a plan and for a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn

NOT_TRUE = ("fan_in_fan_out", "The following rank_pattern keys", "The following alpha_pattern keys")
"""peft sets the first right for GPT-2's Conv1D itself; patterns do match experts, which it looks for among modules."""


class Refused(ValueError):
    """peft cannot adapt these layers. `of_experts` are those that it takes for experts'; `meant` asks about a name that
    the model does not have."""

    def __init__(self, why: str, *, of_experts: Sequence[str] = (), meant: str = "") -> None:
        super().__init__(why.splitlines()[0])
        self.of_experts, self.meant = of_experts, meant


@dataclass(frozen=True, kw_only=True)
class Adapters:
    rank: int
    alpha: float
    dropout: float
    targets: Sequence[str]
    dtype: torch.dtype | None
    """None is fp32, as peft makes them whatever the base model has."""
    task: str | None = None
    """Of a model that is no language model: its head is then trained too."""

    def on(self, model: nn.Module) -> tuple[nn.Module, list[str]]:
        """The model with them, and what is to be known of it."""
        from peft import LoraConfig, get_peft_model

        names = [name for name, _ in model.named_modules()]
        whole = float(self.alpha).is_integer()
        config = LoraConfig(
            r=self.rank, lora_alpha=int(self.alpha) if whole else self.alpha,  # type: ignore[arg-type,unused-ignore]
            target_modules=list(self.targets), lora_dropout=self.dropout,
            task_type=self.task or ("CAUSAL_LM" if getattr(model, "can_generate", lambda: False)() else None),
        )  # fmt: skip
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=self.dtype is None)  # type: ignore[arg-type,unused-ignore]
        except ValueError as error:
            self._refuse_unknown(names, config)
            raise Refused(str(error), of_experts=_of_experts(config, self.targets)) from error
        self._refuse_unknown(names, config)
        if self.dtype is not None:
            for parameter in adapted.parameters():  # peft does this itself, but not for a model on meta
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(self.dtype)
        notes = [f"peft: {text}" for w in said if not (text := str(w.message).splitlines()[0]).startswith(NOT_TRUE)]
        if of_experts := _of_experts(config, self.targets):
            notes.append(f"peft adapts every expert by {', '.join(of_experts)}, and no other layer of these names")
        return adapted, notes

    def _refuse_unknown(self, names: Sequence[str], config: object) -> None:
        """peft adapts what it finds and says nothing about the rest."""
        experts = _of_experts(config, self.targets)
        for target in self.targets:
            if target not in experts and not any(f".{name}".endswith(f".{target}") for name in names):
                near = get_close_matches(target, sorted({name.rpartition(".")[2] for name in names}), n=1)
                raise Refused(f"no module is called {target!r}", meant=f"did you mean {near[0]!r}? " if near else "")


def _of_experts(config: object, targets: Sequence[str]) -> list[str]:
    """peft replaces names that older versions of transformers had for experts by those of their 3-D parameters."""
    kept = getattr(config, "target_modules", None) or ()
    return [name for name in targets if name not in kept] if getattr(config, "target_parameters", None) else []

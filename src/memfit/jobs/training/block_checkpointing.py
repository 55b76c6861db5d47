"""Blocks computed again in backward: all of a block, or what is cheap of it; their inputs here or on the host."""

from __future__ import annotations

from typing import Any

from memfit.errors import UsageError
from memfit.jobs.training.offload.activations import ActivationsOnHost


def checkpoint_blocks(
    model: Any, *, setting: str, frozen: bool, selective: bool = False, on_host: ActivationsOnHost | None = None
) -> None:
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise UsageError(f"{setting} needs a transformers model", hint="checkpoint inside your own factory")
    if frozen:
        model.enable_input_require_grads()  # the embedding is frozen: without this no block would have gradients
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        from memfit.jobs.training.selective import selective_contexts

        settings["context_fn"] = selective_contexts(model)
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    except ValueError as error:
        raise UsageError(f"{setting}: {str(error).splitlines()[0]}") from error
    if on_host is not None:
        for module in model.modules():
            function = vars(module).get("_gradient_checkpointing_func")
            if function is not None:
                module._gradient_checkpointing_func = on_host.around(function)

"""An option that there is not, by a name that it has elsewhere: what it is called here, or where it belongs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memfit.jobs.settings import flag, kinds_that_read, setting_types
from memfit.jobs.training.config import KEYS
from memfit.jobs.training.config_file import key_called

OF_BATCHES = {
    "batch.micro_batch_size": "batch_size", "batch.gradient_accumulation_steps": "grad_accum",
    "data.max_seq_len": "seq_len", "memory.gradient_checkpointing": "grad_checkpointing",
}  # fmt: skip
"""Keys of a config that decide more there than one setting of a plan, which is what the name means here."""
WITHOUT_MEMORY = (
    "method.alpha", "schedule.", "logging.", "saving.", "optimizer.beta1", "optimizer.beta2", "optimizer.eps",
)  # fmt: skip
"""Keys of a config that no byte of a plan depends on."""


def said_of(option: str, context: Any, typed: Iterable[str]) -> str | None:
    """What is wrong with it, where that is known; `option` has lost its underscores on the way."""
    words = context.command_path.split()
    if len(words) != 3 or words[1] not in ("plan", "fit"):
        return None
    said = next((each for word in typed if (each := word.split("=")[0]).replace("_", "-") == option), option)
    there = {spelling for each in context.command.params for spelling in each.opts}
    told = _of_prune(option) if words[2] == "prune" else None
    told = told or _of_config(option.lstrip("-").replace("-", "_"), there)
    return None if told is None else f"no such option: {said}; {told}"


def _of_prune(option: str) -> str | None:
    from memfit.cli.running import PRUNE

    flags = [
        each for rows in PRUNE.values() for names, _, _ in rows.values() for each in names.replace("/", " ").split()
    ]
    return "it is of `memfit prune`: leave it out here" if option in flags else None


def _of_config(name: str, there: set[str]) -> str | None:
    key = key_called(name)
    if key is None:
        return None
    setting = OF_BATCHES.get(key) or KEYS.get(key)
    if setting not in setting_types():
        return "it changes nothing in a plan: leave it out" if key.startswith(WITHOUT_MEMORY) else None
    if flag(setting) in there:
        return f"here it is {flag(setting)}"
    kinds = ", ".join(f"`{kind}`" for kind in kinds_that_read([setting]))
    return f"it is {flag(setting)}, and for {kinds} only" if kinds else None

"""`model.generate`: prefill, then one token after the other with a KV cache."""

from __future__ import annotations

from typing import Any

import torch

from memfit.jobs.batches import autocast, model_inputs, token_ids
from memfit.jobs.phases import Phases
from memfit.jobs.preparing import Prepared


def run_generate(job: Prepared, device: torch.device | str, phases: Phases) -> None:
    model, work = job.model, job.workload
    with phases("load"):
        model.to(device)
    with phases("data", 1):
        ids = token_ids(job, device)
        inputs = {"attention_mask": torch.ones_like(ids), **model_inputs(job, ids)}
    options: dict[str, Any] = {
        "max_new_tokens": work.new_tokens, "min_new_tokens": work.new_tokens, "do_sample": work.decoding == "sample",
        "pad_token_id": 0,
    }  # fmt: skip
    if work.decoding == "beam":
        options["num_beams"] = work.num_beams
    if work.cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad(), autocast(job, device), phases("generate", 1):
        model.generate(**inputs, **options)  # type: ignore[operator]

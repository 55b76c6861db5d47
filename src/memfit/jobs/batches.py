"""Batches of random tokens on the device, and the regions a forward pass runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from memfit.jobs.preparing import DTYPES, Prepared


def token_ids(job: Prepared, device: torch.device | str) -> torch.Tensor:
    work = job.workload
    return torch.randint(0, job.vocab_size, (work.batch_size, work.seq_len), device=device)


def model_inputs(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """With padding, half of the last row is not there: its end, or its beginning where text is to be continued."""
    if not job.workload.padding:
        return {"input_ids": ids}
    mask, half = torch.ones_like(ids), ids.shape[1] // 2
    if job.workload.kind == "generate":
        mask[-1, :half] = 0
    else:
        mask[-1, half:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def wanted(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model is to say of the tokens of a batch or of a row; a language model, the tokens themselves."""
    if job.head is None:
        return {"labels": ids}
    rows, config = ids.shape[:-1], job.config
    if job.head.task == "QUESTION_ANS":
        places = {"start_positions", "end_positions"}
        return {place: torch.randint(0, ids.shape[-1], rows, device=ids.device) for place in sorted(places)}
    if job.head.task == "TOKEN_CLS":
        return {"labels": torch.randint(0, config.num_labels, ids.shape, device=ids.device)}
    if config.problem_type == "multi_label_classification":
        return {"labels": torch.rand((*rows, config.num_labels), device=ids.device)}
    if config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1):
        return {"labels": torch.rand(rows, device=ids.device)}
    return {"labels": torch.randint(0, config.num_labels, rows, device=ids.device)}


def autocast(job: Prepared, device: torch.device | str) -> AbstractContextManager[None]:
    kind = torch.device(device).type
    wanted = job.workload.autocast
    region: AbstractContextManager[None] = torch.autocast(
        kind, dtype=DTYPES[wanted] if wanted else None, enabled=wanted is not None
    )
    return region

"""What a job's model is given and asked for: random tokens, texts to be written, pictures, labels."""

from __future__ import annotations

from typing import Any

import torch

from memfit.jobs.build import Prepared
from memfit.models.images import picture

PLAIN_WORDS = 1000
"""Beside pictures the text is of the first words only: special ones stand at the end of a vocabulary."""


def token_ids(job: Prepared, device: torch.device | str) -> torch.Tensor:
    """Of a batch; where a model reads no text, the pictures."""
    work = job.workload
    if job.reads == "pictures":
        _, *pixels = picture(job.config, work.image_size).pixels
        return torch.rand((work.batch_size, *pixels), device=device)
    if job.reads == "pictures and text":
        return torch.cat([_row(job)] * work.batch_size).to(device)
    return torch.randint(0, job.vocab_size, (work.batch_size, work.seq_len), device=device)


def _row(job: Prepared) -> torch.Tensor:
    """On the host, as a processor makes it: the places of the pictures, a word after each, then text."""
    work, one = job.workload, picture(job.config, job.workload.image_size)
    token = image_token(job.config)
    ids = torch.randint(0, min(PLAIN_WORDS, token), (1, work.seq_len), device="cpu")
    for first in range(0, (one.tokens + 1) * int(work.images or 0), one.tokens + 1):
        ids[0, first : first + one.tokens] = token
    return ids


def image_token(config: Any) -> int:
    return int(getattr(config, "image_token_id", None) or config.image_token_index)


def model_inputs(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """With padding, half of the last row is not there: its end, or its beginning where text is to be continued."""
    if job.reads == "pictures":
        return {"pixel_values": ids}
    if not job.workload.padding:
        return {"input_ids": ids}
    mask, half = torch.ones_like(ids), ids.shape[1] // 2
    if job.workload.kind == "generate":
        mask[-1, :half] = 0
    else:
        mask[-1, half:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def beside_ids(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What else a forward pass without labels is given."""
    if job.reads == "text to text":
        return {"decoder_input_ids": _target(job, ids)}
    return _pictures(job, ids) if job.reads == "pictures and text" else {}


def _target(job: Prepared, ids: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, job.vocab_size, (*ids.shape[:-1], int(job.workload.target_len or 0)), device=ids.device)


def _pictures(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of all rows, one after the other."""
    one = picture(job.config, job.workload.image_size)
    count = ids.shape[0] * int(job.workload.images or 0)
    if not count:
        return {}
    first, *rest = one.pixels
    made = {"pixel_values": torch.rand((count * first, *rest), device=ids.device)}
    if one.grid is None:
        return made
    grid = torch.tensor([one.grid] * count, device="cpu").to(ids.device)
    return made | {"image_grid_thw": grid, "mm_token_type_ids": _kinds_of_tokens(job, ids)}


def _kinds_of_tokens(job: Prepared, ids: torch.Tensor) -> torch.Tensor:
    """Of pictures or of text, as Qwen's processor says it."""
    row = (_row(job) == image_token(job.config)).long()
    return torch.cat([row] * ids.shape[0]).to(ids.device)


def wanted(job: Prepared, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model is to say of a batch or of a row; a language model, the tokens themselves."""
    if job.head is None:
        return {"labels": ids}
    if job.reads == "text to text":
        return {"labels": _target(job, ids)}
    if job.reads == "pictures and text":
        return {"labels": ids, **_pictures(job, ids)}
    rows, config = ids.shape[:-3] if job.reads == "pictures" else ids.shape[:-1], job.config
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

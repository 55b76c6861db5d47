"""Samples of different lengths as one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.jobs.training.data import IGNORED


class Collator:
    """Samples as a batch: filled up on the right to the longest of them, and what fills up is never learned."""

    def __init__(self, pad_id: int, *, mask: bool = True) -> None:
        self.pad_id, self.mask = pad_id, mask

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(each["input_ids"]) for each in samples)
        shape = (len(samples), longest)
        batch = {"input_ids": torch.full(shape, self.pad_id), "labels": torch.full(shape, IGNORED)}
        if self.mask:
            batch["attention_mask"] = torch.zeros(shape, dtype=torch.long)
        for row, each in enumerate(samples):
            length = len(each["input_ids"])
            batch["input_ids"][row, :length] = each["input_ids"]
            batch["labels"][row, :length] = each["labels"]
            if self.mask:
                batch["attention_mask"][row, :length] = 1
        return batch

"""A module of one's own, as a user would write it: no config, no labels."""

from __future__ import annotations

import torch
from torch import nn


class Bigram(nn.Module):
    """Token in, logits of the next token out: an embedding, one hidden layer, a head."""

    def __init__(self, vocabulary: int = 50, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.head = nn.Linear(4 * width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.gelu(self.hidden(self.embedding(ids))))

"""A model whose every forward pass takes more than the one before."""

from __future__ import annotations

import torch
from bigram import Bigram


class Growing(Bigram):
    passes = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(ids) * torch.ones(self.passes, 1, 1, 1, device=ids.device)

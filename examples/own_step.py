"""Your own training step on your own module: what would it take on a GPU?

    python examples/own_step.py

`memfit.trace` runs the function as it is; "cuda" in it is a device without memory, so no GPU is needed.
"""

from __future__ import annotations

import torch
from torch import nn

import memfit


def train() -> None:
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = model(torch.randn(512, 4096, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    print(memfit.trace(train, gpu="RTX 4090"))

"""Random weights of a model's real shapes: in host memory, to be pruned and to be put back, and as a folder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memfit.jobs.pruning.decoder import Decoder
from memfit.models.checkpoint import StoredTensor
from memfit.units import MiB

NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
AT_ONCE = 8 * MiB


class MemoryWeights:
    """A model's weights as they lie in host memory, random; and the place that pruned blocks come back to."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.stored: dict[str, StoredTensor] = {}
        self.tensors: dict[str, Tensor] = {}
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in model.named_parameters():
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if parameter.dim() == 1:
                made.fill_(1)
            else:
                made.normal_(0, 0.02, generator=generator)
            self.tensors[name] = made.cpu()
            nbytes = made.numel() * made.element_size()
            self.stored[name] = StoredTensor(name, NAMES[made.dtype], tuple(made.shape), 0, 0, nbytes)
        self.pool = ThreadPoolExecutor(4)

    def read_into(self, name: str, out: memoryview, start: int = 0) -> None:
        self.copy(torch.frombuffer(out, dtype=torch.uint8), self.bytes_of(name)[start : start + len(out)])

    def bytes_of(self, name: str) -> Tensor:
        return self.tensors[name].view(-1).view(torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        parts = zip(torch.split(target, AT_ONCE), torch.split(source, AT_ONCE), strict=True)
        for job in [self.pool.submit(into.copy_, part) for into, part in parts]:
            job.result()


@dataclass
class Back:
    """Pruned blocks go back to where the weights came from."""

    decoder: Decoder
    weights: MemoryWeights

    def write(self, block: int, parts: Any, facts: Any) -> None:
        for piece in self.decoder.layouts[block].pieces:
            target = self.weights.bytes_of(piece.stored.name)
            for start, part in parts(piece):
                source = torch.frombuffer(part, dtype=torch.uint8)
                self.weights.copy(target[start : start + len(source)], source)


def write_folder(model: Any, folder: Path, device: torch.device) -> None:
    """As transformers does: safetensors, an index where there are several, a config."""
    model.save_pretrained(folder, state_dict=MemoryWeights(model, device).tensors, max_shard_size="5GB")

"""What FSDP2's own kernels allocate, as recorded on an H200."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp

from memfit.tracing.tracer import Tracer, trace

LLAMA_BLOCK = ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192), (2048,),
               (2048,))  # fmt: skip
"""Of Llama-3.2-1B."""
LLAMA_ENDS = ((128256, 2048), (2048,))
SMOLLM_BLOCK = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536), (576,), (576,))
"""Of SmolLM2-135M, whose 576 rows are divided by three."""

Shapes = tuple[tuple[int, ...], ...]


def shards(shapes: Shapes, world: int) -> list[int]:
    return [-(-shape[0] // world) * torch.Size(shape[1:]).numel() for shape in shapes]


@pytest.mark.parametrize(
    ("shapes", "world", "dtype", "recorded"),
    [
        (LLAMA_BLOCK, 8, torch.bfloat16, 15160), (LLAMA_ENDS, 8, torch.bfloat16, 32144),
        (SMOLLM_BLOCK, 3, torch.float32, 18744),
    ],
)  # fmt: skip
def test_a_list_says_which_thread_block_copies_which_gathered_weight(
    shapes: Shapes, world: int, dtype: torch.dtype, recorded: int
) -> None:
    def run(tracer: Tracer) -> None:
        sizes = shards(shapes, world)
        gathered = torch.empty(world, sum(sizes), dtype=dtype, device="cuda")
        out = [torch.empty(world, size, dtype=dtype, device="cuda") for size in sizes]
        torch.ops.fsdp.split_with_sizes_copy(gathered, sizes, dim=1, out=out)

    assert list(trace(run).requested)[len(shapes) + 1 :] == [recorded]


@pytest.mark.parametrize(
    ("shapes", "world", "dtype", "recorded"),
    [
        (LLAMA_BLOCK, 8, torch.bfloat16, 119248), (LLAMA_ENDS, 8, torch.bfloat16, 513144),
        (SMOLLM_BLOCK, 3, torch.float32, 18896),
    ],
)  # fmt: skip
def test_a_list_says_which_thread_block_copies_which_gradient(
    shapes: Shapes, world: int, dtype: torch.dtype, recorded: int
) -> None:
    def run(tracer: Tracer) -> None:
        gradients = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        into = torch.empty(world, sum(shards(shapes, world)), dtype=torch.float32, device="cuda")
        torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=world, out=into)

    assert list(trace(run).requested)[len(shapes) + 1 :] == [recorded]

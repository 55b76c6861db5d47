"""The compiled kernels of pruning against the plain formulas, with the time of their first call."""

from __future__ import annotations

import time

import torch

from benchmarks.device import synchronize
from memfit.jobs.pruning import kernels as fusing


def check_kernels(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        q = torch.randn(2, 512, 32, 128, device=device).to(dtype).transpose(1, 2)
        k = torch.randn(2, 512, 8, 128, device=device).to(dtype).transpose(1, 2)
        angle = torch.rand(1, 512, 128, device=device)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        gate, up = (torch.randn(4096, 11008, device=device).to(dtype) for _ in range(2))
        plain = (*fusing._rotated(q, k, cos, sin), torch.nn.functional.silu(gate) * up)
        started = time.perf_counter()
        made = fusing.rotate_(q, k, cos, sin)
        synchronize(device)
        turned = time.perf_counter() - started
        started = time.perf_counter()
        product = fusing.silu_times_(gate, up)
        synchronize(device)
        multiplied = time.perf_counter() - started
        same = [bool(torch.equal(x, y)) for x, y in zip((*made, product), plain, strict=True)]
        apart = max(float((x - y).abs().max()) for x, y in zip((*made, product), plain, strict=True))
        print(f"kernels in {dtype}: equal {same}, apart {apart:.2g}; first calls {turned:.2f} s, {multiplied:.2f} s")
    started = time.perf_counter()
    torch.empty(256 << 20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    print(f"256 MiB of pinned memory: {time.perf_counter() - started:.3f} s")

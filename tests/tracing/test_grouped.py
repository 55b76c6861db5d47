"""Grouped products: one kernel for bf16 on Hopper, a loop of ordinary products for all else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reading import story

from memfit.platform import Platform
from memfit.tracing.tracer import Tracer

H200, A100, B200, RTX4090 = Platform(), Platform(arch=(8, 0)), Platform(arch=(10, 0)), Platform(arch=(8, 9))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def product(dtype: torch.dtype, platform: Platform) -> str:
    def job(_: Tracer) -> None:
        x = torch.empty(64, 32, device="cuda", dtype=dtype)
        experts = torch.empty(4, 16, 32, device="cuda", dtype=dtype)
        ends = torch.empty(4, device="cuda", dtype=torch.int32)
        F.grouped_mm(x, experts.transpose(-2, -1), offs=ends)

    return story(job, platform=platform)


@pytest.mark.parametrize("platform", [H200, B200])
def test_one_kernel_does_all_groups_in_bf16_without_cublas(platform: Platform) -> None:
    arguments, workspace = 4 * (3 * 8 + 3 * 8 + 12), platform.sm_count * 512
    assert product(torch.bfloat16, platform).startswith(
        f"+4096 +4096 +16 +{64 * 16 * 2} +{arguments} +{workspace} -5 -4"
    )


@pytest.mark.parametrize(
    ("dtype", "platform"), [("fp16", H200), ("fp32", H200), ("bf16", A100), ("bf16", RTX4090), ("fp32", A100)]
)
def test_other_dtypes_and_cards_take_cublas_and_its_workspace(dtype: str, platform: Platform) -> None:
    kind = DTYPES[dtype]
    workspace = 32 << 20 if platform.arch == (9, 0) else 8_519_680
    assert f"+{64 * 16 * kind.itemsize} +{workspace}" in product(kind, platform)


def test_rows_of_the_result_begin_at_multiples_of_16_bytes() -> None:
    def job(_: Tracer) -> None:
        x = torch.empty(10, 32, device="cuda")
        experts = torch.empty(2, 32, 5, device="cuda")
        out = F.grouped_mm(x, experts, offs=torch.empty(2, device="cuda", dtype=torch.int32))
        assert (out.shape, out.stride()) == ((10, 5), (8, 1))

    story(job)

"""Whether driver, torch and GPU belong together: the CUDA of the build, the architectures in it, what the card has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.gpus import is_size

BUILD, ABILITIES = Line("machine", "driver and torch"), Line("machine", "what the card can do")
BF16_SINCE, FLASH_SINCE, FP8_SINCE = (8, 0), (8, 0), (8, 9)
"""Compute capabilities: bf16 and flash attention came with Ampere, fp8 with Ada and Hopper."""
INSTALL = "https://pytorch.org/get-started/locally has the build for a driver"
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)[a-z]?")


def build(situation: Situation) -> Iterator[Finding]:
    situation.gpus_here()
    driver = situation.driver.get()
    try:
        said = version("torch")
    except PackageNotFoundError:
        yield BUILD.failed("torch is not installed", INSTALL)
        return
    import torch

    cuda = torch.version.cuda
    details: dict[str, Any] = {
        "driver": driver.version,
        "driver_cuda": list(driver.cuda),
        "torch": said,
        "torch_cuda": cuda,
    }
    if cuda is None:
        yield BUILD.failed(f"torch {said} is built without CUDA, and a GPU is here", INSTALL, **details)
        return
    newest = ".".join(map(str, driver.cuda))
    found = f"torch {said} for CUDA {cuda}; driver {driver.version} serves CUDA up to {newest}"
    if int(cuda.split(".")[0]) > driver.cuda[0]:
        yield BUILD.failed(f"{found}: the driver is too old for this build", f"a newer driver; or {INSTALL}", **details)
        return
    archs = torch.cuda.get_arch_list()
    for capability in dict.fromkeys(driver.capabilities):
        if archs and not runs_on(archs, capability):
            spelled = f"sm_{capability[0]}{capability[1]}"
            yield BUILD.failed(
                f"torch {said} has no kernels for this GPU ({spelled}); it has {', '.join(archs)}", INSTALL, **details
            )
            return
    if not torch.cuda.is_available():
        yield BUILD.failed(f"{found}; but torch finds no GPU", "CUDA_VISIBLE_DEVICES may hide it", **details)
        return
    yield BUILD.ok(found, **details)


def runs_on(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Machine code runs within its major version from its minor on; PTX (`compute_90`) on anything newer."""
    for each in archs:
        match = _ARCH.fullmatch(each)
        if match is None:
            continue
        kind, built = match[1], (int(match[2]), int(match[3]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def abilities(situation: Situation) -> Iterator[Finding]:
    card = situation.card
    major, minor = card.arch
    words = [
        f"bf16 {'yes' if card.arch >= BF16_SINCE else 'only by emulation'}",
        f"flash attention {'yes' if card.arch >= FLASH_SINCE else 'no'}",
        f"fp8 {'yes' if card.arch >= FP8_SINCE else 'no'}",
    ]
    details: dict[str, Any] = {
        "card": card.name, "capability": [major, minor], "bf16": card.arch >= BF16_SINCE,
        "flash_attention": card.arch >= FLASH_SINCE, "fp8": card.arch >= FP8_SINCE,
    }  # fmt: skip
    said, level = situation.named_as, f"compute capability {major}.{minor}: {', '.join(words)}"
    if situation.here is None and said is not None and is_size(said):
        yield ABILITIES.ok(
            f"a size names no card; one of {level}", "--gpu 'RTX 3090': what that card can do", **details
        )
    else:
        yield ABILITIES.ok(f"{card.name}, {level}", **details)

"""What cannot lie on the host, said before anything is built."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import UsageError

ON_HOST = ("adamw", "adamw-fused", "adamw-single")


def check_offload(
    offload: Sequence[str], *, setting: str, optimizer: str, sharded: bool, checkpointing: bool
) -> None:  # fmt: skip
    """`setting` is how the user said it; `sharded`: by fsdp2."""
    if "optimizer" in offload and optimizer not in ON_HOST:
        raise UsageError(
            f"{setting} optimizer is AdamW on the host, and the optimizer is {optimizer}", hint=", ".join(ON_HOST)
        )
    if not sharded:
        return
    for name in ("optimizer", "weights"):
        if name in offload:
            raise UsageError(
                f"{setting} {name} does not go with fsdp2, which shards what would lie on the host",
                hint="more GPUs make the shards smaller, or train with ddp",
            )
    if "activations" in offload and not checkpointing:
        raise UsageError(
            f"{setting} activations with fsdp2 needs checkpointing: without it the gathered weights would go out too",
            hint="gradient_checkpointing: full, or --grad-checkpointing",
        )

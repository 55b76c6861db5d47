"""A pruning job as the flags of `memfit prune`."""

from __future__ import annotations

import shlex

from memfit.jobs.workload import Workload

SAVE = "out/pruned"


def pruning_flags(work: Workload) -> dict[str, str]:
    ratio = {} if work.sparsity is None else {"--sparsity-ratio": str(work.sparsity)}
    limit = {} if work.max_gpu_memory is None else {"--max-gpu-memory": work.max_gpu_memory}
    return {
        "--model": work.model, "--prune-method": work.method, **ratio, "--sparsity-type": work.sparsity_type,
        "--dtype": work.precision, "--nsamples": str(work.nsamples), "--seqlen": str(work.seq_len),
        "--dataset": work.dataset, **limit, "--save": SAVE,
    }  # fmt: skip


def pruning_command(work: Workload) -> str:
    """`memfit prune` with the length and with what is not at its default."""
    usual = pruning_flags(Workload(kind="prune", model=work.model))
    said = {
        name: value
        for name, value in pruning_flags(work).items()
        if name in ("--model", "--seqlen") or value != usual.get(name)
    }
    return shlex.join(["memfit", "prune", *(word for pair in said.items() for word in pair)])

"""A pruning job as the flags of `memfit prune`."""

from __future__ import annotations

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

"""`memfit.prune`: one-shot pruning, and beside what it took what a plan says of the same run."""

from __future__ import annotations

from collections.abc import Callable
from os.path import abspath, expanduser
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError, UsageError
from memfit.jobs.listener import Listener
from memfit.jobs.pruning.settings import PruneSettings, RunOptions
from memfit.jobs.workload import Workload

if TYPE_CHECKING:
    from memfit.jobs.pruning.result import Planned, Prediction, PruneResult


def prune(
    model: str,
    *,
    prune_method: str = Workload.method,
    sparsity_ratio: float | None = None,
    sparsity_type: str = Workload.sparsity_type,
    use_variant: bool = False,
    allocation: str = PruneSettings.allocation,
    reconstruct: bool = False,
    dtype: str = PruneSettings.dtype,
    dataset: str = Workload.dataset,
    nsamples: int = Workload.nsamples,
    seqlen: int = Workload.seq_len,
    seed: int = PruneSettings.seed,
    evaluate: bool | None = None,
    eval_dataset: str | None = None,
    eval_windows: int | None = None,
    eval_seqlen: int | None = None,
    eval_zero_shot: bool = False,
    save: str | None = None,
    save_model: str | None = None,
    resume: bool = False,
    force: bool = False,
    log_memory: bool = False,
    device: str = PruneSettings.device,
    max_gpu_memory: str | int | None = None,
    cache_dir: str | None = None,
    listener: Listener | None = None,
) -> PruneResult:
    """Prune a language model in one shot, one block of it in memory at a time; on a GPU, or on the CPU.

    Settings are the flags of `memfit prune`. Without `save` nothing is written. `evaluate`: perplexity before and
    after; by default if there is text for it. Raises a `MemfitError` with what helps where memory does not suffice."""
    settings = PruneSettings.asked(
        model=str(model), method=prune_method.lower(), sparsity=sparsity_ratio, sparsity_type=sparsity_type,
        use_variant=use_variant, allocation=allocation.lower(), reconstruct=reconstruct, dtype=dtype.lower(),
        dataset=str(dataset), nsamples=nsamples, seqlen=seqlen, seed=seed, eval=evaluate is not False,
        save=_path(save_model or save), resume=resume, log_memory=log_memory, device=device,
        max_gpu_memory=max_gpu_memory,
    )  # fmt: skip
    if evaluate is False and (eval_dataset, eval_windows, eval_seqlen) != (None, None, None):
        raise UsageError("--no-eval leaves nothing to do for --eval-dataset, --eval-windows and --eval-seqlen")
    options = RunOptions(
        must_evaluate=evaluate is True,
        eval_dataset=_path(eval_dataset),
        eval_windows=eval_windows,
        eval_seqlen=eval_seqlen,
        zero_shot=eval_zero_shot,
        cache_dir=_path(cache_dir),
        force=force,
        results_also_in=None if save_model is None or _absolute(save) == _absolute(save_model) else _path(save),
    )
    told = listener or Listener()
    with told.working(f"loading {settings.workload.model}"):
        from memfit.jobs.pruning.run import run
    return run(settings, options, told, predict=_prediction(told.remark) if log_memory else None)


def _path(place: object) -> str | None:
    return None if place is None else str(place)


def _absolute(place: str | None) -> str | None:
    return None if place is None else abspath(expanduser(place))


def _prediction(remark: Callable[[str], None]) -> Callable[[Planned], Prediction | None]:
    """What `memfit plan prune` says of this run, on this card and with the memory that was free."""

    def predicted(planned: Planned) -> Prediction | None:
        from memfit.gpus import find_gpu
        from memfit.jobs.pruning.result import Prediction
        from memfit.planning.predict import predict

        settings = planned.settings
        if settings.use_variant or settings.reconstruct or settings.allocation != "uniform":
            return None  # not planned yet
        try:
            gpu = find_gpu(planned.gpu.removeprefix("NVIDIA ")).name
            budget = None if planned.budget is None else str(planned.budget)
            found: dict[str, Any] = {"model": str(planned.folder), "precision": planned.dtype}
            plan = predict(settings.workload, gpu=gpu, seq_len=planned.seqlen, max_gpu_memory=budget, **found)
        except MemfitError as error:
            remark(f"note: no prediction beside the measurement: {error.message}")
            return None
        return Prediction(
            gpu_allocated_bytes=plan.peak.allocated_bytes,
            gpu_reserved_bytes=plan.peak.reserved_bytes,
            host_bytes=plan.trace.facts["host"]["peak_bytes"],
        )

    return predicted

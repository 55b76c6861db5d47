"""`memfit.prune`: one-shot pruning, and beside what it took what a plan says of the same run."""

from __future__ import annotations

from collections.abc import Callable
from os.path import abspath, expanduser
from typing import TYPE_CHECKING

from memfit.errors import MemfitError, UsageError
from memfit.jobs.listener import Listener
from memfit.jobs.pruning.settings import PruneSettings, Sparsity
from memfit.units import parse_bytes

if TYPE_CHECKING:
    from memfit.jobs.pruning.result import Planned, Prediction, PruneResult


def prune(
    model: str,
    *,
    prune_method: str = "wanda",
    sparsity_ratio: float | None = None,
    sparsity_type: str = "unstructured",
    use_variant: bool = False,
    allocation: str = "uniform",
    reconstruct: bool = False,
    dtype: str = "auto",
    dataset: str = "wikitext2",
    nsamples: int = 128,
    seqlen: int = 2048,
    seed: int = 0,
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
    device: str = "auto",
    max_gpu_memory: str | int | None = None,
    cache_dir: str | None = None,
    listener: Listener | None = None,
) -> PruneResult:
    """Prune a language model in one shot, one block of it in memory at a time; on a GPU, or on the CPU.

    Settings are the flags of `memfit prune`. Without `save` nothing is written. `evaluate`: perplexity before and
    after; by default if there is text for it. Raises a `MemfitError` with what helps where memory does not suffice."""
    settings = PruneSettings(
        model=str(model),
        method=prune_method.lower(),  # type: ignore[arg-type]
        sparsity=Sparsity.parse(sparsity_type, sparsity_ratio),
        use_variant=use_variant,
        allocation=allocation.lower(),  # type: ignore[arg-type]
        reconstruct=reconstruct,
        dtype=dtype.lower(),  # type: ignore[arg-type]
        dataset=str(dataset),
        nsamples=nsamples,
        seqlen=seqlen,
        seed=seed,
        eval=evaluate is not False,
        save=_path(save_model or save),
        resume=resume,
        log_memory=log_memory,
        device=device,
        max_gpu_memory=None if max_gpu_memory is None else parse_bytes(str(max_gpu_memory), flag="--max-gpu-memory"),
    )
    if evaluate is False and (eval_dataset, eval_windows, eval_seqlen) != (None, None, None):
        raise UsageError("--no-eval leaves nothing to do for --eval-dataset, --eval-windows and --eval-seqlen")
    from memfit.jobs.pruning.result import RunOptions

    options = RunOptions(
        must_evaluate=evaluate is True,
        eval_dataset=_path(eval_dataset),
        eval_windows=eval_windows,
        eval_seqlen=eval_seqlen,
        zero_shot=eval_zero_shot,
        cache_dir=_path(cache_dir),
        force=force,
        results_also_in=_path(save) if save_model is not None and not _same_path(save, save_model) else None,
    )
    told = listener or Listener()
    with told.working(f"loading {settings.model}"):
        from memfit.jobs.pruning.run import run
    return run(settings, options, told, predict=_prediction(told.remark) if log_memory else None)


def _path(place: object) -> str | None:
    return None if place is None else str(place)


def _same_path(one: str | None, other: str) -> bool:
    return one is not None and abspath(expanduser(one)) == abspath(expanduser(other))


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
            plan = predict(
                kind="prune",
                model=str(planned.folder),
                gpu=gpu,
                method=settings.method,
                precision=planned.dtype,
                sparsity=settings.sparsity.ratio,
                sparsity_type=settings.sparsity.kind,
                nsamples=settings.nsamples,
                seq_len=planned.seqlen,
                max_gpu_memory=None if planned.budget is None else str(planned.budget),
            )
        except MemfitError as error:
            remark(f"note: no prediction beside the measurement: {error.message}")
            return None
        return Prediction(
            gpu_allocated_bytes=plan.peak.allocated_bytes,
            gpu_reserved_bytes=plan.peak.reserved_bytes,
            host_bytes=plan.trace.facts["host"]["peak_bytes"],
        )

    return predicted

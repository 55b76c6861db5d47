"""`memfit prune`, whole: check everything, prune block by block, evaluate, save, log memory at nine checkpoints.

Whatever can be wrong with what was asked is found before any weight is fetched or read: the device, the folder to save
to and who else writes there, packages, the model's settings and tokenizer, the text, the room on the disk; and before
the first block, weights that are not numbers. After that only the machine can fail, and then what is done is on disk
for `--resume`.

Where memory runs out, only what makes that stage smaller is named. In this engine the device holds one block, the
statistics of its inputs, and hidden states, which move to the host when they do not fit. So a smaller model, an empty
cache or gradient checkpointing, which people advise, would not help.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from memfit.errors import InputError, RanOut, UsageError
from memfit.jobs.host import cause_of, is_out_of_memory, on_the_host
from memfit.jobs.listener import Listener
from memfit.jobs.pruning import evaluation, saved_runs
from memfit.jobs.pruning.calibration import Windows, calibration_windows
from memfit.jobs.pruning.decoder import Decoder, read_settings
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.evaluation import OnWindow, evaluation_windows, perplexity_of_model, perplexity_of_states
from memfit.jobs.pruning.output import OutputFolder, identity_of, leave
from memfit.jobs.pruning.placement import Team
from memfit.jobs.pruning.result import (
    FILE,
    BlockProgress,
    BlockReport,
    Perplexity,
    Planned,
    Predict,
    PruneResult,
    PruningOutcome,
    write_result,
)
from memfit.jobs.pruning.saved_runs import absolute, check_room, is_same_disk, writing_to
from memfit.jobs.pruning.selection import check_files
from memfit.jobs.pruning.settings import PruneSettings, RunOptions
from memfit.jobs.texts import Texts, find_texts
from memfit.jobs.workload import Workload
from memfit.models.checkpoint import WeightStore
from memfit.models.config_check import PRECISIONS
from memfit.models.files import Source, bytes_to_fetch, cache_folder, find_source, load_tokenizer, look_at_source
from memfit.recording.machine import publish, published
from memfit.recording.memory_log import MemoryLog, predicted_and_measured
from memfit.recording.sampler import CudaMemory, GpuReading
from memfit.units import format_bytes


def device_of(name: str) -> torch.device:
    """auto is the GPU of this process, or the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name!r} is not a device", hint="auto, cpu, cuda or cuda:1") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = "finds no GPU" if torch.version.cuda else "was built without CUDA"
            raise UsageError(f"--device {name}: this torch ({torch.__version__}) {built}", hint="--device cpu works")
        index = local if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise UsageError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise UsageError(f"--device {name}: memfit prunes on cuda and cpu")
    return device


def described(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"device": str(device), "name": name, "threads": torch.get_num_threads()}


def give_back_freed_memory() -> None:
    """To the system, what malloc keeps for later. Without this a run on the CPU, whose tensors are malloc's, seems to
    grow block by block: glibc returns memory only from the end of its heap."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


AFTER_PRUNING, AFTER_EVALUATION = "04_after_pruning", "06_after_eval"
"""Checkpoints of the log; a stage is called by the one that it ends at."""


def ran_out(stage: str, settings: PruneSettings, error: BaseException, budget: int | None) -> RanOut:
    """On the way to a checkpoint; the hint is what makes that stage smaller."""
    where = "host memory" if on_the_host(error) else "GPU memory"
    helps = "\n".join(fixes(stage, settings, error, budget))
    return RanOut(f"{where} ran out before {stage}: {cause_of(error)}", hint=helps)


def fixes(stage: str, settings: PruneSettings, error: BaseException, budget: int | None = None) -> list[str]:
    """Lines for a person, the most likely help first. `budget` is what the run had reckoned with."""
    if on_the_host(error):
        return _for_the_host(stage, settings.workload)
    if stage == AFTER_PRUNING:
        return _for_pruning(settings, budget)
    if stage == AFTER_EVALUATION:
        return _for_evaluation(settings, budget)
    return ["close other programs on this GPU (`memfit watch` shows them), or choose another with --device cuda:1"]


def _less(budget: int | None) -> str:
    room = "8GiB" if budget is None else format_bytes(budget * 3 // 4).translate({32: None, 44: None})
    room = room.replace(".00", "")
    return f"--max-gpu-memory {room}: hidden states move to the host and fewer windows run at a time"


def _for_pruning(settings: PruneSettings, budget: int | None) -> list[str]:
    lines, work = [_less(budget)], settings.workload
    if work.seq_len > 512:
        lines.append(f"--seqlen {work.seq_len // 2}: halves what a window takes on its way through a block")
    if work.method == "sparsegpt":
        lines.append("--prune-method wanda or ria: no X^T X of each input on the device")
    if settings.reconstruct:
        lines.append("without --reconstruct: no gradients and optimizer state of a block")
    if work.nsamples > 32:
        lines.append(f"--nsamples {work.nsamples // 2}: half of the hidden states")
    return [*lines, "--device cpu: slow, but needs no GPU memory"]


def _for_evaluation(settings: PruneSettings, budget: int | None) -> list[str]:
    lines, work = [_less(budget)], settings.workload
    if work.seq_len > 512:
        lines.append(f"--seqlen {work.seq_len // 2}: shorter windows (perplexity is then of that length)")
    lines.append("--no-eval: prune without perplexity")
    return [f"{line}, with --resume" if settings.save and "seqlen" not in line else line for line in lines]


def _for_the_host(stage: str, work: Workload) -> list[str]:
    lines = [f"--nsamples {max(1, work.nsamples // 2)}: half of the hidden states"]
    if stage == AFTER_EVALUATION:
        lines = ["--eval-windows 40: fewer hidden states at a time"]
    if work.seq_len > 512:
        lines.append(f"--seqlen {work.seq_len // 2}: halves them too")
    return lines


LOG_FILE = "memory_log.csv"
STARS = "*" * 30


def run(
    settings: PruneSettings,
    options: RunOptions | None = None,
    listener: Listener | None = None,
    predict: Predict | None = None,
) -> PruneResult:
    """Everything. Raises `RanOut` with what helps where memory did not suffice."""
    return _PruningRun(settings, options or RunOptions(), listener or Listener(), predict).whole()


class _PruningRun:
    def __init__(
        self, settings: PruneSettings, options: RunOptions, listener: Listener, predict: Predict | None
    ) -> None:
        self.settings, self.work, self.options, self.predict = settings, settings.workload, options, predict
        self.device = device_of(settings.device)
        self.team = Team.from_environment(self.device)
        self.listener = listener if self.team.leads else Listener()
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}
        self.budget: int | None = None

    def whole(self) -> PruneResult:
        with ExitStack() as stack:
            stack.callback(self.team.leave)
            if self.team.leads:
                for folder in (self.settings.save, self.options.results_also_in):
                    stack.enter_context(saved_runs.held(folder, self._note))
            if (finished := self._check_asked()) is not None:
                self.listener.remark(f"'{self.settings.save}' is complete already: nothing is left to resume")
                return PruneResult.of_document(finished, self.settings)
            return self._logged()

    def _check_asked(self) -> dict[str, Any] | None:
        settings, options = self.settings, self.options
        if settings.resume and self.team.size > 1:
            raise UsageError(
                "--resume works in one process", hint="without torchrun; the result is the same, to the byte"
            )
        if options.zero_shot:
            evaluation.check(settings.save)
        if self.team.leads:
            finished = saved_runs.check(settings, force=options.force)
            if finished is not None:
                lacks = options.zero_shot and finished.get("zero_shot") is None
                if lacks or (options.must_evaluate and finished.get("evaluation") is None):
                    raise InputError(
                        f"--save '{settings.save}' is complete already, without the evaluation that is asked for",
                        hint="without --resume the run is done again, with it",
                    )
                return finished
            saved_runs.check_results(options.results_also_in, settings, force=options.force)
        return None

    def _logged(self) -> PruneResult:
        settings = self.settings
        gpu = CudaMemory(self.device.index) if self.device.type == "cuda" else None
        quiet = not (settings.log_memory and self.team.leads)
        began = time.perf_counter()
        log = MemoryLog(quiet=quiet, say=self.listener.say, gpu=gpu)
        try:
            with published(f"memfit prune --model {self.work.model}"), log:
                return self._stages(log, began)
        except Exception as error:
            if is_out_of_memory(error):
                raise ran_out(log.points[-1].name, settings, error, self.budget) from error
            raise

    def _stages(self, log: MemoryLog, began: float) -> PruneResult:
        say = self.listener.say
        log.checkpoint("01_start")
        with self._timed("data"):
            text = self._text()
            self._check_room()
        say(f"loading llm model {self.work.model}")
        with self._timed("load"), log.until("02_model_loaded"):
            source = self._source()
            decoder = Decoder.open(source.folder, dtype=self.settings.dtype)
            engine = self._engine(decoder)
        say(f"use device  {self.device}")
        with engine:
            result = self._work(log, source, engine, text)
        log.checkpoint("09_end")
        self.seconds["total"] = time.perf_counter() - began
        self._fill(result, log)
        self._compare(result, log, source, decoder)
        if result.saved is not None and self.team.leads:
            self._write_last(result, Path(result.saved))
        return result

    def _work(self, log: MemoryLog, source: Source, engine: Engine, text: _Text) -> PruneResult:
        say = self.listener.say
        say("pruning starts")
        windows, evaluated = text.windows, text.evaluated
        result = PruneResult(
            settings=self.settings,
            seqlen=text.seqlen,
            device=described(self.device),
            model=self._model(source, engine),
            data=None if windows is None else windows.fingerprint,
        )
        output = self._output(engine, text)
        try:
            with log.until("03_before_pruning"):
                if isinstance(engine.decoder.weights, WeightStore) and self.team.leads:
                    check_files(engine.decoder.weights)
                if output is not None and self.settings.log_memory:
                    log.write_to(output.working / LOG_FILE, append=self.settings.resume)
            with self._timed("prune"), log.until(AFTER_PRUNING):
                outcome = self._prune(log, engine, windows, output, evaluated)
            self._tell_sparsity(result, outcome)
            if evaluated is not None:
                log.checkpoint("05_before_eval")
                with self._timed("evaluate"), log.until(AFTER_EVALUATION):
                    result.perplexity = self._evaluate(engine, evaluated, outcome, output)
            if output is not None:
                self._save(log, result, output)
        finally:
            if output is not None:
                leave(output)
        if self.options.zero_shot and result.saved is not None and self.team.leads:
            with self._timed("zero_shot"):
                result.zero_shot = evaluation.evaluate(Path(result.saved), self.device)
        return result

    # -- before any work -------------------------------------------------------------------------------------------

    def _source(self) -> Source:
        return find_source(self.work.model, cache_dir=self.options.cache_dir, say=self.listener.remark)

    def _check_room(self) -> None:
        """For weights that are on the Hub still: in the cache, and for the pruned ones."""
        cache, save = self.options.cache_dir, self.settings.save
        coming = bytes_to_fetch(self.work.model, cache_dir=cache)
        if coming == 0:
            return
        there = cache_folder(cache)
        check_room(there, coming, said=f"the cache '{there}'")
        if save is not None and self.settings.dtype == "auto":
            check_room(absolute(save), coming * (1 + is_same_disk(there, absolute(save))), said=f"--save '{save}'")

    def _length(self, config: Any, flag: str, asked: int) -> int:
        longest = getattr(config, "max_position_embeddings", None)
        if not isinstance(longest, int) or asked <= longest:
            return asked
        self._note(f"{flag} {asked} is more than the model's {longest} positions: {longest} is taken")
        return longest

    def _engine(self, decoder: Decoder) -> Engine:
        budget = self.work.gpu_budget_bytes
        if budget is not None and self.device.type != "cuda":
            self._note("--max-gpu-memory has no effect without a GPU")
            budget = None
        engine = Engine(decoder, device=self.device, budget=budget, team=self.team)
        self.budget = engine.budget
        self._check_groups(engine)
        return engine

    def _check_groups(self, engine: Engine) -> None:
        sparsity = self.settings.sparsity
        for matrix in chain.from_iterable(engine.matrices):
            if sparsity.group is not None and matrix.columns % sparsity.group:
                raise InputError(
                    f"--sparsity-type {sparsity.kind}: {matrix.name} has {matrix.columns:,} columns, "
                    f"which cannot be cut into groups of {sparsity.group}"
                )

    def _text(self) -> _Text:
        """Windows to calibrate on and to evaluate on. Of the model, no more is read than its settings and its
        tokenizer; a GGUF file has these only once it is converted, which then comes after the text."""
        settings, say = self.settings, self.listener.say
        folder = look_at_source(self.work.model, cache_dir=self.options.cache_dir)
        config = None if folder is None else read_settings(folder)[1]
        tokenizer = None if folder is None else self._tokenizer(folder)
        calibrated, evaluated = self._texts()
        if folder is None:
            folder = self._source().folder
            config, tokenizer = read_settings(folder)[1], self._tokenizer(folder)
        text = _Text(seqlen=self._length(config, "--seqlen", self.work.seq_len))
        if calibrated is not None:
            say("loading calibration data")
            text.windows = calibration_windows(calibrated, tokenizer, self.work.nsamples, text.seqlen, settings.seed)
            self._look_at(text.windows, config)
            say("dataset loading complete")
        if evaluated is not None:
            text.evaluated = self._evaluated(evaluated, tokenizer, config, text.seqlen)
        return text

    def _tokenizer(self, folder: Path) -> Any:
        return load_tokenizer(folder) if self.settings.needs_data or self.settings.eval else None

    def _texts(self) -> tuple[Texts | None, Texts | None]:
        """Read, or fetched; not yet cut into windows."""
        settings = self.settings
        calibrated = find_texts(self.work.dataset, "calibration") if settings.needs_data else None
        if not settings.eval:
            return calibrated, None
        builtin = self.work.dataset.strip().lower() == "builtin"
        name = self.options.eval_dataset or ("builtin" if builtin else "wikitext2")
        with self._unless_asked_for():
            return calibrated, find_texts(name, "evaluation")
        return calibrated, None

    def _evaluated(self, texts: Texts, tokenizer: Any, config: Any, seqlen: int) -> Windows | None:
        options = self.options
        length = seqlen if options.eval_seqlen is None else self._length(config, "--eval-seqlen", options.eval_seqlen)
        evaluated = None
        with self._unless_asked_for():
            evaluated = evaluation_windows(texts, tokenizer, length, options.eval_windows)
        if evaluated is not None:
            self._look_at(evaluated, config)
        return evaluated

    @contextmanager
    def _unless_asked_for(self) -> Iterator[None]:
        """Where nobody insists on perplexity and there is no text for it, there is none."""
        try:
            yield
        except InputError as error:
            if self.options.must_evaluate or self.options.eval_dataset is not None:
                raise
            self._note(f"no perplexity: {error.message}; --eval-dataset builtin needs nothing")

    def _look_at(self, windows: Windows, config: Any) -> None:
        for note in windows.notes:
            self._note(note)
        largest = int(windows.ids.max())
        if largest >= int(config.vocab_size):
            raise InputError(
                f"the tokenizer gives token {largest:,}, but the model has only {int(config.vocab_size):,}",
                hint="the tokenizer in the model's folder is another model's",
            )

    def _output(self, engine: Engine, text: _Text) -> OutputFolder | None:
        settings = self.settings
        if settings.save is None or not self.team.leads:
            return None
        asked = settings.to_json()
        names = (
            "method", "sparsity_ratio", "sparsity_type", "seed", "use_variant", "allocation", "reconstruct", "dtype",
        )  # fmt: skip
        key = {name: asked[name] for name in names} | {"device": self.device.type}
        if text.windows is not None:
            key |= {"nsamples": self.work.nsamples, "seqlen": text.seqlen, "data": text.windows.fingerprint.sha256}
        replace = self.options.force
        if replace:  # what an unfinished run has left goes; a finished result stays until the new one is whole
            with writing_to(settings.save):
                saved_runs.discard(absolute(settings.save))
        elif saved_runs.holds_same_run(settings.save, {**key, "source": identity_of(engine.decoder)}):
            self._note(f"'{settings.save}' holds the result of this very run: it is replaced when this one is whole")
            replace = True
        return OutputFolder.create(settings.save, engine.decoder, key, resume=settings.resume, replace=replace)

    # -- the work --------------------------------------------------------------------------------------------------

    def _prune(
        self,
        log: MemoryLog,
        engine: Engine,
        windows: Windows | None,
        output: OutputFolder | None,
        evaluated: Windows | None,
    ) -> PruningOutcome:
        total = len(engine.decoder.blocks)
        done = 0

        def tell(host_bytes: int, peak: int | None = None) -> None:
            self.listener.progress(
                BlockProgress(what="block", done=done, total=total, gpu_peak_bytes=peak, host_bytes=host_bytes)
            )

        def on_block(report: BlockReport) -> None:
            nonlocal done
            done += 1
            for matrix in report.matrices:
                self.listener.say(f"pruning layer {report.index} name {matrix.name}")
            if self.device.type == "cpu":
                give_back_freed_memory()
            part = log.part(f"block {report.index}")
            self._publish(f"block {report.index}", part.gpu, done, total)
            tell(part.host.used_bytes, None if part.gpu is None else part.gpu.stretch_peak_bytes)

        # What is not saved is gone when its block goes, and other processes do not see the folder: then the windows
        # for perplexity go along with the pruning.
        along = evaluated.ids if evaluated is not None and (output is None or self.team.size > 1) else None
        tell(log.peak_host_bytes)
        ids = None if windows is None else windows.ids
        return engine.prune(self.settings, ids, output=output, on_block=on_block, pruned=along)

    def _tell_sparsity(self, result: PruneResult, outcome: PruningOutcome) -> None:
        say = self.listener.say
        result.blocks, result.ratios = outcome.blocks, outcome.ratios
        result.placement = {
            "micro_batch": outcome.micro_batch, "hidden_states_on": outcome.hidden_on, "processes": self.team.size,
            "host_buffers_peak_bytes": outcome.host_peak_bytes,
        }  # fmt: skip
        for note in outcome.notes:
            self._note(note)
        say(STARS)
        for block in outcome.blocks:
            say(f"layer {block.index} sparsity {block.sparsity:.6f}")
        say(f"sparsity sanity check {outcome.sparsity:.4f}")
        say(STARS)

    def _evaluate(
        self, engine: Engine, evaluated: Windows, outcome: PruningOutcome, output: OutputFolder | None
    ) -> Perplexity:
        say, ids, data = self.listener.say, evaluated.ids, evaluated.fingerprint
        say(f"evaluating on {data.dataset}")
        say(f"nsamples {len(ids)}")
        on_window: OnWindow = lambda number: say(f"sample {number}")  # noqa: E731
        if outcome.pruned_states is not None:
            pruned = perplexity_of_states(engine, outcome.pruned_states, ids, on_window)
        else:
            pruned = perplexity_of_model(engine, ids, on_window, output)
        say(f"{'wikitext' if data.dataset == 'wikitext2' else data.dataset} perplexity {pruned}")
        dense = None
        if self.options.eval_dense:
            dense = perplexity_of_model(engine, ids)
            say(f"perplexity on {data.dataset} before pruning {dense}")
        return Perplexity(data=data, dense=self._a_number(dense, "dense"), pruned=self._a_number(pruned, "pruned"))

    def _a_number(self, perplexity: float | None, which: str) -> float | None:
        """A model whose logits overflow has no perplexity; that is no reason to lose the run."""
        if perplexity is None or math.isfinite(perplexity):
            return perplexity
        self._note(f"the {which} model's perplexity is not a number: values overflow; --dtype bf16 or fp32 holds more")
        return None

    def _save(self, log: MemoryLog, result: PruneResult, output: OutputFolder) -> None:
        log.checkpoint("07_before_save_model")
        with self._timed("save"), log.until("08_after_save_model"):
            result.saved, result.run = str(output.save), output.journal.key
            self._fill(result, log)
            with writing_to(self.settings.save):
                write_result(output.working, result)
            log.moved_to(output.finish() / LOG_FILE)

    def _write_last(self, result: PruneResult, saved: Path) -> None:
        """The model is whole by now, with its results up to the last checkpoint: a full disk does not undo that."""
        try:
            write_result(saved, result)
        except OSError as error:
            self._note(f"the last figures are not in '{saved / FILE}': {error.strerror}")
        with writing_to(self.options.results_also_in):
            saved_runs.copy_results(saved, self.options.results_also_in)

    # -- what came of it -------------------------------------------------------------------------------------------

    def _fill(self, result: PruneResult, log: MemoryLog) -> None:
        result.seconds = dict(self.seconds)
        result.peak_gpu_bytes, result.peak_host_bytes = log.peak_gpu_bytes, log.peak_host_bytes
        result.points, result.parts = list(log.points), list(log.parts)
        result.notes = list(dict.fromkeys(self.notes))

    def _compare(self, result: PruneResult, log: MemoryLog, source: Source, decoder: Decoder) -> None:
        """Predicted beside measured, where there is a GPU to measure. A plan knows of pruning alone: not of windows
        that go along for perplexity."""
        alone = result.perplexity is None or self.settings.save is not None
        if self.predict is None or self.device.type != "cuda" or self.team.size > 1 or not alone:
            return
        dtype, gpu = PRECISIONS[str(decoder.dtype).removeprefix("torch.")], str(result.device["name"])
        planned = Planned(
            settings=self.settings, seqlen=result.seqlen, folder=source.folder, dtype=dtype, budget=self.budget, gpu=gpu
        )
        result.predicted = self.predict(planned)
        if result.predicted is not None:
            pruned = next(point for point in log.points if point.name == AFTER_PRUNING)
            rows = (
                ("GPU allocated while pruning", result.predicted.gpu_allocated_bytes, pruned.stretch_peak_bytes),
                ("host buffers", result.predicted.host_bytes, result.placement["host_buffers_peak_bytes"]),
            )
            self.listener.say(f"\n{predicted_and_measured(rows)}")

    def _model(self, source: Source, engine: Engine) -> dict[str, Any]:
        decoder = engine.decoder
        weights = sum(matrix.rows * matrix.columns for found in engine.matrices for matrix in found)
        return {
            **source.describe(), "type": decoder.config.model_type, "blocks": len(decoder.blocks),
            "prunable_weights": weights, "dtype": str(decoder.dtype).removeprefix("torch."),
            "attention": getattr(decoder.config, "_attn_implementation", None),
        }  # fmt: skip

    def _publish(self, at: str, gpu: GpuReading | None, done: int, total: int) -> None:
        """For `memfit watch` in another terminal."""
        numbers = {"done": done, "total": total}
        if gpu is not None:
            numbers |= {"allocated_bytes": gpu.allocated_bytes, "peak_bytes": gpu.peak_bytes}
            numbers["capacity_bytes"] = gpu.total_bytes
        publish(f"memfit prune --model {self.work.model}", at, **numbers)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.listener.remark(f"note: {text}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - began


@dataclass(kw_only=True)
class _Text:
    seqlen: int
    windows: Windows | None = None
    evaluated: Windows | None = None

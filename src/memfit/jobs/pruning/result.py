"""What comes of a pruning run: what each block came to, `result.json` and its log, how far it is, what was predicted.

`result.json` has everything a run was asked, found and reached; `log_{method}.txt`, two lines that scripts read.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError
from memfit.files import written_whole
from memfit.jobs.pruning.settings import PruneSettings
from memfit.recording.memory_log import LogMoment, StagePart
from memfit.versions import recorded_version

if TYPE_CHECKING:
    from memfit.jobs.pruning.calibration import Fingerprint
    from memfit.jobs.pruning.placement import HiddenStates, Where


@dataclass(frozen=True, kw_only=True)
class MatrixReport:
    name: str
    rows: int
    columns: int
    zeros: int
    tokens: int | None = None
    """How many of them an expert saw; None for what every token goes through."""

    @property
    def sparsity(self) -> float:
        return self.zeros / (self.rows * self.columns)


@dataclass(frozen=True, kw_only=True)
class BlockReport:
    index: int
    matrices: tuple[MatrixReport, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    resumed: bool = False
    """Found finished by an earlier run."""

    @property
    def weights(self) -> int:
        return sum(matrix.rows * matrix.columns for matrix in self.matrices)

    @property
    def zeros(self) -> int:
        return sum(matrix.zeros for matrix in self.matrices)

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> BlockReport:
        """As the journal of an earlier run has it, or a result, which has shares beside counts."""
        matrices = facts["matrices"]
        return cls(
            index=int(facts["index"]),
            matrices=tuple(MatrixReport(**{k: v for k, v in each.items() if k != "sparsity"}) for each in matrices),
            seconds=float(facts["seconds"]),
            notes=tuple(facts["notes"]),
            resumed=True,
        )


@dataclass(frozen=True, kw_only=True)
class PruningOutcome:
    blocks: tuple[BlockReport, ...]
    ratios: tuple[float, ...]
    """What was asked of each block."""
    micro_batch: int
    hidden_on: Where
    host_peak_bytes: int
    notes: tuple[str, ...] = ()
    pruned_states: HiddenStates | None = None

    @property
    def sparsity(self) -> float:
        return sum(block.zeros for block in self.blocks) / sum(block.weights for block in self.blocks)


SCHEMA = "memfit.prune/1"
FILE = "result.json"
PACKAGES = ("memfit", "torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    data: Fingerprint
    dense: float | None
    pruned: float | None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan of this very run said; made by whoever starts the run."""

    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(kw_only=True, repr=False)
class PruneResult:
    """What `memfit.prune` answers: everything a run was asked, found and reached. `print` shows it in a line."""

    settings: PruneSettings
    seqlen: int
    """As taken: not more than the model's positions."""
    model: dict[str, Any]
    device: dict[str, Any]
    data: Fingerprint | None = None
    blocks: Sequence[BlockReport] = ()
    ratios: Sequence[float] = ()
    placement: dict[str, Any] = field(default_factory=dict)
    perplexity: Perplexity | None = None
    zero_shot: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peak_gpu_bytes: int | None = None
    peak_host_bytes: int | None = None
    predicted: Prediction | None = None
    points: Sequence[LogMoment] = ()
    parts: Sequence[StagePart] = ()
    notes: list[str] = field(default_factory=list)
    saved: str | None = None
    run: dict[str, Any] | None = None
    """What makes a saved run the same as another: settings, text and model."""
    document: dict[str, Any] | None = None
    """Of a run that was done before, as it stands in its folder."""

    @classmethod
    def of_document(cls, document: dict[str, Any], settings: PruneSettings) -> PruneResult:
        """A finished run, read from its result.json."""
        try:
            return cls._read(document, settings)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{settings.save}/{FILE} is not as memfit wrote it: {type(error).__name__}: {error}",
                hint="--force, without --resume, does the run again",
            ) from error

    @classmethod
    def _read(cls, document: dict[str, Any], settings: PruneSettings) -> PruneResult:
        from memfit.jobs.pruning.calibration import Fingerprint

        evaluation = document["evaluation"]
        dense, pruned = document["perplexity_dense"], document["perplexity_pruned"]
        return cls(
            settings=settings,
            seqlen=document["settings"]["seqlen"],
            model=document["source"],
            device=document["device"],
            data=None if document["data"] is None else Fingerprint(**document["data"]),
            blocks=[BlockReport.from_json({**each, "notes": ()}) for each in document["layers"]],
            ratios=[each["asked"] for each in document["layers"]],
            placement=document["placement"],
            perplexity=evaluation and Perplexity(data=Fingerprint(**evaluation), dense=dense, pruned=pruned),
            zero_shot=document["zero_shot"],
            seconds=document["seconds"],
            peak_gpu_bytes=document["peaks"]["gpu_allocated_bytes"],
            peak_host_bytes=document["peaks"]["host_bytes"],
            notes=document["notes"],
            saved=document["saved"],
            run=document["run"],
            document=document,
        )

    @property
    def sparsity(self) -> float:
        """Zeros among the weights of the blocks' matrices; embedding, head and norms do not count."""
        return sum(block.zeros for block in self.blocks) / max(1, sum(block.weights for block in self.blocks))

    def __repr__(self) -> str:
        return f"<PruneResult: {self}>"

    def __str__(self) -> str:
        parts = [f"{self.settings.workload.method}: {100 * self.sparsity:.2f} % of the blocks' weights are zero"]
        if self.perplexity is not None:
            dense, pruned = (_number(value) for value in (self.perplexity.dense, self.perplexity.pruned))
            data = self.perplexity.data
            parts.append(
                f"perplexity {dense} before and {pruned} after ({data.dataset}, {data.windows} x {data.seqlen})"
            )
        parts.append(f"{self.seconds.get('total', 0):.1f} s")
        return "; ".join(parts) + (f"; saved to {self.saved}" if self.saved else "; not saved")

    def to_json(self) -> dict[str, Any]:
        if self.document is not None:
            return self.document
        ppl, work = self.perplexity, self.settings.workload
        return {
            "schema": SCHEMA,
            "model": work.model,
            "method": work.method,
            "sparsity": self.sparsity,
            "perplexity_dense": None if ppl is None else ppl.dense,
            "perplexity_pruned": None if ppl is None else ppl.pruned,
            "saved": self.saved,
            "run": self.run,
            "settings": {**self.settings.to_json(), "seqlen": self.seqlen, "seqlen_asked": work.seq_len},
            "source": self.model,
            "device": self.device,
            "data": None if self.data is None else asdict(self.data),
            "evaluation": None if ppl is None else asdict(ppl.data),
            "zero_shot": self.zero_shot,
            "placement": self.placement,
            "versions": versions(),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "peaks": self._peaks(),
            "layers": [_layer(block, ratio) for block, ratio in zip(self.blocks, self.ratios, strict=True)],
            "checkpoints": [_checkpoint(point) for point in self.points],
            "notes": self.notes,
        }  # fmt: skip

    def _peaks(self) -> dict[str, Any]:
        """Measured in this process; null where it could not be."""
        return {
            "gpu_allocated_bytes": self.peak_gpu_bytes,
            "host_bytes": self.peak_host_bytes,
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "parts": [_part(part) for part in self.parts],
        }


def versions() -> dict[str, str | None]:
    torch = sys.modules.get("torch")
    installed = {name: recorded_version(name) for name in PACKAGES}
    cuda = None if torch is None else torch.version.cuda
    return {"python": platform.python_version(), **installed, "cuda": cuda}


def write_result(folder: Path, result: PruneResult) -> None:
    """Both files, each put in its place when it is whole; nothing in the folder is younger than the document."""
    ppl = None if result.perplexity is None else result.perplexity.pruned
    method = result.settings.workload.method
    row = f"{method}\t{result.sparsity:.4f}\t{_number(ppl)}"
    _put(folder / f"log_{method}.txt", f"method\tactual_sparsity\tppl_test\n{row}\n")
    _put(folder / FILE, json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n")


def is_result(folder: Path) -> bool:
    """Whether a folder is what an earlier run of memfit has written."""
    return bool(document_in(folder).get("schema") == SCHEMA)


def document_in(folder: Path) -> dict[str, Any]:
    """Empty where there is none that can be read."""
    try:
        document = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _put(path: Path, text: str) -> None:
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")


def _layer(block: BlockReport, asked: float) -> dict[str, Any]:
    matrices = [{**asdict(matrix), "sparsity": round(matrix.sparsity, 6)} for matrix in block.matrices]
    return {
        "index": block.index, "asked": asked, "sparsity": round(block.sparsity, 6), "zeros": block.zeros,
        "weights": block.weights, "seconds": round(block.seconds, 3), "resumed": block.resumed, "matrices": matrices,
    }  # fmt: skip


def _checkpoint(point: LogMoment) -> dict[str, Any]:
    gpu = point.gpu
    return {
        "name": point.name, "time": point.at.isoformat(timespec="seconds"), "failed": point.failed,
        "gpu_allocated_bytes": None if gpu is None else gpu.allocated_bytes,
        "gpu_reserved_bytes": None if gpu is None else gpu.reserved_bytes,
        "gpu_peak_bytes": None if gpu is None else gpu.peak_bytes,
        "gpu_peak_since_last_bytes": point.stretch_peak_bytes, "host_used_bytes": point.host.used_bytes,
    }  # fmt: skip


def _part(part: StagePart) -> dict[str, Any]:
    gpu = part.gpu
    return {
        "stage": part.stage, "name": part.name, "seconds": round(part.seconds, 3),
        "gpu_peak_bytes": None if gpu is None else gpu.stretch_peak_bytes, "host_used_bytes": part.host.used_bytes,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Planned:
    """All that a plan of this very run needs to know."""

    settings: PruneSettings
    seqlen: int
    folder: Path
    dtype: str
    budget: int | None
    gpu: str


Predict = Callable[[Planned], Prediction | None]
"""What a plan says of a run. A job does not know how to plan: whoever starts it does."""


@dataclass(frozen=True, kw_only=True)
class BlockProgress:
    what: str
    done: int
    total: int
    gpu_peak_bytes: int | None
    host_bytes: int

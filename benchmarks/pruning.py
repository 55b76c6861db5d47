"""Times and peaks of pruning on a GPU, with random weights of real shapes, beside the floor of the arithmetic.

    PYTHONPATH=src python3 -m benchmarks.pruning                   # all cases that fit the card
    PYTHONPATH=src python3 -m benchmarks.pruning --only wanda --profile
    PYTHONPATH=src python3 -m benchmarks.pruning --device cpu --only tiny

Two times. *alone*: from weights in host memory to pruned weights in host memory. *files*: from a folder of safetensors
to another one, beside the longer of that computing and of moving the same bytes without it. The first run in a process
also loads kernels; `again` is a second one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device import capped, left_behind, peak, profiled, reset, synchronize
from benchmarks.pruning_kernels import check_kernels
from benchmarks.random_weights import Back, MemoryWeights, write_folder
from memfit.jobs.pruning.decoder import Decoder
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.settings import PruneSettings
from memfit.models.registry import build_model, resolve
from memfit.units import GiB

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model: str
    method: str = "wanda"
    kind: str = "unstructured"
    samples: int = 128
    length: int = 2048
    layers: int | None = None
    cap: int | None = None
    files: bool = False
    limit_seconds: float | None = None
    limit_gib: float | None = None
    rounds: int = 2


CASES = (
    Case(name="1B wanda", model="llama-3.2-1b", limit_seconds=3.0, limit_gib=1.7, rounds=3),
    Case(name="1B wanda 2:4", model="llama-3.2-1b", kind="2:4", limit_seconds=3.0, limit_gib=1.7),
    Case(name="1B magnitude", model="llama-3.2-1b", method="magnitude"),
    Case(name="1B sparsegpt", model="llama-3.2-1b", method="sparsegpt", limit_seconds=15.0),
    Case(name="7B wanda", model="llama-2-7b", limit_seconds=14.0, limit_gib=3.3),
    Case(name="70B block wanda 16 GiB", model="llama-3.3-70b", layers=2, cap=16 * GiB, rounds=1),
    Case(
        name="70B block sparsegpt 16 GiB", model="llama-3.3-70b", method="sparsegpt", layers=2, cap=16 * GiB, rounds=1
    ),
    Case(name="1B wanda files", model="llama-3.2-1b", files=True, rounds=1),
    Case(name="7B wanda files", model="llama-2-7b", files=True, rounds=1),
    Case(name="tiny wanda", model="tiny", samples=8, length=64),
    Case(name="tiny wanda files", model="tiny", samples=8, length=64, files=True),
)


@dataclass(kw_only=True)
class Measured:
    name: str
    first_seconds: float
    again_seconds: float | None
    peak_bytes: int
    reserved_bytes: int
    host_bytes: int
    floor_seconds: float
    sparsity: float
    micro_batch: int
    hidden_on: str
    predicted_bytes: int | None = None
    move_seconds: float | None = None
    compute_seconds: float | None = None
    limit_seconds: float | None = None
    limit_gib: float | None = None


# -- measuring ---------------------------------------------------------------------------------------------------------


def decoder_of(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, MemoryWeights]:
    weights = MemoryWeights(model_of(case, dtype), device)
    return Decoder(model_of(case, dtype), weights), weights


def model_of(case: Case, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return build_model(source_of(case.model), dtype=dtype, layers=case.layers)


def source_of(model: str) -> Any:
    if model != "tiny":
        return resolve(model)
    path = Path("/tmp/memfit-bench-tiny.json")
    path.write_text(json.dumps(TINY))
    return resolve(str(path))


def settings_of(case: Case) -> PruneSettings:
    return PruneSettings.asked(
        model=case.model, method=case.method, sparsity_type=case.kind, nsamples=case.samples, seqlen=case.length
    )


def windows_of(case: Case, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (case.samples, case.length), generator=torch.Generator().manual_seed(0))


def alone(case: Case, device: torch.device, dtype: torch.dtype, rate: float, profile: bool) -> Measured:
    decoder, weights = decoder_of(case, device, dtype)
    times, outcome, peaks = [], None, (0, 0)
    for number in range(case.rounds + profile):
        decoder = Decoder(model_of(case, dtype), weights)
        with capped(case.cap, device), profiled(number == case.rounds, device):
            reset(device)
            started = time.perf_counter()
            with Engine(decoder, device=device, budget=case.cap) as engine:
                sink = Back(decoder, weights)
                outcome = engine.prune(settings_of(case), windows_of(case, decoder.vocab_size), sink=sink)
                synchronize(device)
            seconds = time.perf_counter() - started
        del engine, sink
        left_behind(case.name, device)
        if number < case.rounds:
            times.append(seconds)
            peaks = peak(device)
    assert outcome is not None
    return Measured(
        name=case.name, first_seconds=times[0], again_seconds=min(times[1:], default=None), peak_bytes=peaks[0],
        reserved_bytes=peaks[1], host_bytes=outcome.host_peak_bytes, floor_seconds=flops(case, decoder) / rate,
        sparsity=outcome.sparsity, micro_batch=outcome.micro_batch, hidden_on=outcome.hidden_on,
        limit_seconds=case.limit_seconds, limit_gib=case.limit_gib,
    )  # fmt: skip


def predicted(case: Case, dtype: torch.dtype, device: torch.device) -> int | None:
    """What `memfit plan prune` says of the same job."""
    if device.type != "cuda" or case.model == "tiny":
        return None
    from memfit.planning.predict import predict

    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    plan = predict(
        kind="prune", model=case.model, method=case.method, sparsity_type=case.kind, nsamples=case.samples,
        seq_len=case.length, precision=names[dtype], max_gpu_memory=case.cap, gpu="H200", trace_cache=False,
    )  # fmt: skip
    return plan.peak.allocated_bytes


def with_files(case: Case, device: torch.device, dtype: torch.dtype, rate: float, folder: Path) -> Measured:
    """The source is dropped from the page cache where the system lets us."""
    computing = alone(case, device, dtype, rate, False)
    source = folder / "source"
    write_folder(model_of(case, dtype), source, device)
    decoder = Decoder.open(source)
    drop_caches()
    started = time.perf_counter()
    move(source, folder / "moved")
    moving = time.perf_counter() - started
    shutil.rmtree(folder / "moved")
    drop_caches()
    reset(device)
    started = time.perf_counter()
    output = OutputFolder.create(folder / "pruned", decoder, {})
    with Engine(decoder, device=device, budget=case.cap) as engine:
        outcome = engine.prune(settings_of(case), windows_of(case, decoder.vocab_size), output=output)
    output.finish()
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "pruned")
    shutil.rmtree(source)
    allocated, reserved = peak(device)
    return Measured(
        name=case.name, first_seconds=seconds, again_seconds=None, peak_bytes=allocated, reserved_bytes=reserved,
        host_bytes=outcome.host_peak_bytes, floor_seconds=max(moving, computing.first_seconds),
        sparsity=outcome.sparsity, micro_batch=outcome.micro_batch, hidden_on=outcome.hidden_on, move_seconds=moving,
        compute_seconds=computing.first_seconds,
    )  # fmt: skip


def move(source: Path, target: Path) -> None:
    """Read and write the same bytes with nothing in between, on disk at the end."""
    target.mkdir()
    buffer = memoryview(bytearray(32 << 20))
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as reading, (target / path.name).open("wb", buffering=0) as writing:
            while count := reading.readinto(buffer):
                writing.write(buffer[:count])
            os.fsync(writing.fileno())


def drop_caches() -> None:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        print("page cache kept: no right to drop it", file=sys.stderr)


def flops(case: Case, decoder: Decoder) -> float:
    """Of the products that cannot be left out: two passes, the last matrix of pass 1 and the last pass 2 aside, the
    causal half of attention, and X^T X where it is asked for."""
    if case.method == "magnitude":
        return 0.0
    tokens, total = case.samples * case.length, 0.0
    from memfit.jobs.pruning.observation import find_matrices

    config = decoder.config
    for index, block in enumerate(decoder.blocks):
        matrices = find_matrices(block)
        weights = sum(m.rows * m.columns for m in matrices)
        last = matrices[-1].rows * matrices[-1].columns
        width = config.num_attention_heads * (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        attention = 4 * case.length * width / 2
        total += tokens * (2 * (weights - last) + attention)
        if index + 1 < len(decoder.blocks):
            total += tokens * (2 * weights + attention)
        if case.method == "sparsegpt":
            total += sum(tokens * columns**2 for columns in inputs_of(matrices))
    return total


def inputs_of(matrices: list[Any]) -> list[int]:
    """Columns of a Llama block's four inputs; half of the symmetric product is counted."""
    found = {}
    for matrix in matrices:
        name = matrix.name.rpartition(".")[2]
        shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(name, name)
        found[shared] = matrix.columns
    return list(found.values())


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product of random numbers, which is what a GPU can keep up."""
    size, rounds = (8192, 20) if device.type == "cuda" else (512, 3)
    x = torch.randn(size, size, device=device).to(dtype)
    y = torch.randn(size, size, device=device).to(dtype)
    for _ in range(3):
        x @ y
    synchronize(device)
    started = time.perf_counter()
    for _ in range(rounds):
        x @ y
    synchronize(device)
    return 2 * size**3 * rounds / (time.perf_counter() - started)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(rows: list[Measured], rate: float) -> str:
    lines = [
        f"matrix products of random numbers: {rate / 1e12:.0f} TFLOP/s",
        f"{'case':30} {'first s':>8} {'again s':>8} {'floor s':>8} {'limit s':>8} {'peak GiB':>9} {'plan GiB':>9} "
        f"{'limit':>6} {'reserved':>9} {'host GiB':>9} {'q':>3} {'hidden':>7} {'zeros':>7}",
    ]
    for row in rows:
        again = "n/a" if row.again_seconds is None else f"{row.again_seconds:.2f}"
        limit = "n/a" if row.limit_seconds is None else f"{row.limit_seconds:.1f}"
        plan = "n/a" if row.predicted_bytes is None else f"{row.predicted_bytes / GiB:.3f}"
        most = "n/a" if row.limit_gib is None else f"{row.limit_gib:.1f}"
        lines.append(
            f"{row.name:30} {row.first_seconds:8.2f} {again:>8} {row.floor_seconds:8.2f} {limit:>8} "
            f"{row.peak_bytes / GiB:9.3f} {plan:>9} {most:>6} {row.reserved_bytes / GiB:9.3f} "
            f"{row.host_bytes / GiB:9.3f} {row.micro_batch:3} {row.hidden_on:>7} {row.sparsity:7.4f}"
        )
        if row.move_seconds is not None and row.compute_seconds is not None:
            over = row.first_seconds / max(row.move_seconds, row.compute_seconds) - 1
            lines.append(
                f"    moving the bytes {row.move_seconds:.2f} s, computing {row.compute_seconds:.2f} s; "
                f"together {100 * over:.0f} % over the longer (limit 20 %)"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pruning", description="Time memfit's pruning.")
    parser.add_argument("--only", default="", help="cases that have one of these words (a,b) in their name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes")
    parser.add_argument("--no-plan", action="store_true", help="leave the predictions out, which take seconds each")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    asked = parser.parse_args(argv)
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    words = [word for word in asked.only.split(",") if word]
    chosen = [c for c in CASES if (any(w in c.name for w in words) if words else c.model != "tiny")]
    rate = matrix_rate(device, dtype)
    rows = []
    for case in chosen:
        try:
            if case.files:
                with TemporaryDirectory(prefix="memfit-bench-") as folder:
                    rows.append(with_files(case, device, dtype, rate, Path(folder)))
            else:
                rows.append(alone(case, device, dtype, rate, asked.profile))
            if not asked.no_plan:
                rows[-1].predicted_bytes = predicted(case, dtype, device)
            print(json.dumps(asdict(rows[-1])), flush=True)
        except Exception as error:  # one case that fails leaves the others
            import traceback

            traceback.print_exc()
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
    if device.type == "cuda":
        with torch.no_grad():
            check_kernels(device)
    print(table(rows, rate))
    if asked.json:
        Path(asked.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

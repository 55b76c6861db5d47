"""Times and peaks of pruning on a GPU, with random weights of real shapes, beside the floor of the arithmetic.

    PYTHONPATH=src python3 benchmarks/pruning.py                   # all cases that fit the card
    PYTHONPATH=src python3 benchmarks/pruning.py --only wanda --profile
    PYTHONPATH=src python3 benchmarks/pruning.py --device cpu --only tiny

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import Tensor, nn

from memfit.jobs.pruning.decoder import Decoder
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.settings import PruneSettings, Sparsity
from memfit.models.checkpoint import Stored
from memfit.models.registry import build_model, resolve

GiB = 1 << 30
NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
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


# -- weights in memory -------------------------------------------------------------------------------------------------


class MemoryWeights:
    """A model's weights as they lie in host memory, random; and the place that pruned blocks come back to."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.stored: dict[str, Stored] = {}
        self.tensors: dict[str, Tensor] = {}
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in model.named_parameters():
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if parameter.dim() == 1:
                made.fill_(1)
            else:
                made.normal_(0, 0.02, generator=generator)
            self.tensors[name] = made.cpu()
            nbytes = made.numel() * made.element_size()
            self.stored[name] = Stored(name, NAMES[made.dtype], tuple(made.shape), 0, 0, nbytes)
        self.pool = ThreadPoolExecutor(4)

    def read_into(self, name: str, out: memoryview, start: int = 0) -> None:
        self._copy([(name, out, start)])

    def _copy(self, wanted: list[tuple[str, memoryview, int]]) -> None:
        step, jobs = 8 << 20, []
        for name, out, start in wanted:
            source = self.tensors[name].view(-1).view(torch.uint8)[start : start + len(out)]
            target = torch.frombuffer(out, dtype=torch.uint8)
            jobs += [
                self.pool.submit(target[a : a + step].copy_, source[a : a + step]) for a in range(0, len(out), step)
            ]
        for job in jobs:
            job.result()


@dataclass
class Back:
    """Pruned blocks go back to where the weights came from."""

    decoder: Decoder
    weights: MemoryWeights

    def write(self, block: int, parts: Any, facts: Any) -> None:
        step = 8 << 20
        for piece in self.decoder.layouts[block].pieces:
            target = self.weights.tensors[piece.stored.name].view(-1).view(torch.uint8)
            for start, part in parts(piece):
                source = torch.frombuffer(part, dtype=torch.uint8)
                jobs = [
                    self.weights.pool.submit(
                        target[start + a : start + a + len(source[a : a + step])].copy_, source[a : a + step]
                    )
                    for a in range(0, len(source), step)
                ]
                for job in jobs:
                    job.result()


# -- measuring ---------------------------------------------------------------------------------------------------------


def decoder_of(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, MemoryWeights]:
    with torch.device("meta"):
        model = build_model(source_of(case.model), dtype=dtype, layers=case.layers)
    weights = MemoryWeights(model, device)
    with torch.device("meta"):
        model = build_model(source_of(case.model), dtype=dtype, layers=case.layers)
    return Decoder(model, weights), weights


def source_of(model: str) -> Any:
    if model != "tiny":
        return resolve(model)
    path = Path("/tmp/memfit-bench-tiny.json")
    path.write_text(json.dumps(TINY))
    return resolve(str(path))


def settings_of(case: Case) -> PruneSettings:
    return PruneSettings(
        model=case.model, method=case.method, sparsity=Sparsity.parse(case.kind), nsamples=case.samples,  # type: ignore[arg-type]
        seqlen=case.length,
    )  # fmt: skip


def windows_of(case: Case, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (case.samples, case.length), generator=torch.Generator().manual_seed(0))


def alone(case: Case, device: torch.device, dtype: torch.dtype, rate: float, profile: bool) -> Measured:
    decoder, weights = decoder_of(case, device, dtype)
    times, outcome, peaks = [], None, (0, 0)
    for number in range(case.rounds + profile):
        with torch.device("meta"):
            model = build_model(source_of(case.model), dtype=dtype, layers=case.layers)
        decoder = Decoder(model, weights)
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
    write_folder(case, source, device, dtype)
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


def write_folder(case: Case, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """As transformers would: safetensors of at most 5 GB each, an index, a config."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    with torch.device("meta"):
        model: Any = build_model(source_of(case.model), dtype=dtype, layers=case.layers)
    tensors = MemoryWeights(model, device).tensors
    shards, size = [dict[str, Tensor]()], 0
    for name, tensor in tensors.items():
        if size + tensor.numel() * tensor.element_size() > 5_000_000_000:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.numel() * tensor.element_size()
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = ["model.safetensors"] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        table = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    model.config.save_pretrained(folder)


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
    from memfit.jobs.pruning.matrices import find_matrices

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


# -- the device --------------------------------------------------------------------------------------------------------


def left_behind(name: str, device: torch.device) -> None:
    """What a run should have let go of, said if there is any; then Python's collector is asked to help."""
    import gc

    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if held > 256 << 20:
        print(f"{name}: {held / GiB:.3f} GiB still allocated after the run", flush=True)
        found = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.is_cuda]
        for tensor in sorted(found, key=lambda t: -t.untyped_storage().nbytes())[:6]:
            who = [f"{type(r).__name__}{list(r)[:5] if isinstance(r, dict) else ''}" for r in gc.get_referrers(tensor)]
            print(f"    {tuple(tensor.shape)} {tensor.untyped_storage().nbytes() >> 20} MiB <- {who[:6]}", flush=True)
    gc.collect()


def check_kernels(device: torch.device) -> None:
    """The compiled kernels against the plain formulas, with the time of their first call."""
    from memfit.jobs.pruning import fusing

    for dtype in (torch.float16, torch.bfloat16):
        q = torch.randn(2, 512, 32, 128, device=device).to(dtype).transpose(1, 2)
        k = torch.randn(2, 512, 8, 128, device=device).to(dtype).transpose(1, 2)
        angle = torch.rand(1, 512, 128, device=device)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        gate, up = (torch.randn(4096, 11008, device=device).to(dtype) for _ in range(2))
        plain = (*fusing._rotated(q, k, cos, sin), torch.nn.functional.silu(gate) * up)
        started = time.perf_counter()
        made = fusing.rotate_(q, k, cos, sin)
        synchronize(device)
        turned = time.perf_counter() - started
        started = time.perf_counter()
        product = fusing.silu_times_(gate, up)
        synchronize(device)
        multiplied = time.perf_counter() - started
        same = [bool(torch.equal(x, y)) for x, y in zip((*made, product), plain, strict=True)]
        apart = max(float((x - y).abs().max()) for x, y in zip((*made, product), plain, strict=True))
        print(f"kernels in {dtype}: equal {same}, apart {apart:.2g}; first calls {turned:.2f} s, {multiplied:.2f} s")
    started = time.perf_counter()
    torch.empty(256 << 20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    print(f"256 MiB of pinned memory: {time.perf_counter() - started:.3f} s")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


@contextmanager
def capped(cap: int | None, device: torch.device) -> Iterator[None]:
    if cap is None or device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def profiled(wanted: bool, device: torch.device) -> Iterator[None]:
    if not wanted:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as made:
        yield
    sort = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(made.key_averages().table(sort_by=sort, row_limit=32, max_name_column_width=90))


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
    parser = argparse.ArgumentParser(prog="benchmarks/pruning.py", description="Time memfit's pruning.")
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

"""Every file of the *Memory Profiling Module*, and its parts (a) to (e) answered from profiles.

    results/memory_profiling/
        2.7B_ctx{128,256,512}_{forward,training}_snapshot.pickle
        2.7B_ctx512_{forward,training}_{fp32,bf16}_snapshot.pickle
        peak_memory_summary.txt, mixed_precision_memory_summary.txt, activation_size_analysis.txt, answers.md

"MB" in the summaries is 2^20 bytes, as there and in the course's hand-out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from memfit.analysis.stacks import code_line
from memfit.errors import RanOut
from memfit.files import written_whole
from memfit.jobs.profile import Profiled, ProfileSettings
from memfit.models.presets import SIZES
from memfit.snapshots.schema import Frame
from memfit.snapshots.write import save_snapshot
from memfit.units import MiB, gib

PARTS = ("a", "b", "c", "d", "e")
CONTEXTS = (128, 256, 512)
LONGEST = CONTEXTS[-1]
KINDS = ("forward", "training")
LARGEST = 4
PLACES = 6
ANSWERS, PEAKS, MIXED, ACTIVATIONS = (
    "answers.md", "peak_memory_summary.txt", "mixed_precision_memory_summary.txt", "activation_size_analysis.txt",
)  # fmt: skip
_OWN_FILES = re.compile(rf".*_snapshot(-\d+)?\.(pickle|pkl|json)|{ANSWERS}|{PEAKS}|{MIXED}|{ACTIVATIONS}")
"""What that module and `memfit profile` call their files."""
Profiler = Callable[[ProfileSettings], Profiled]


class Suite:
    """Runs each distinct profile once, whichever parts ask for it."""

    def __init__(self, base: ProfileSettings, profiler: Profiler | None, folder: Path, *, where: str) -> None:
        """`where` says in words what the profiler runs on; part (d) needs none."""
        self.base, self.profiler, self.folder, self.where = base, profiler, folder, where
        self.written: list[Path] = []
        self._runs: dict[tuple[str, int, str | None], Profiled | str] = {}

    def run(self, parts: Iterable[str]) -> str:
        """Write the files of these parts; the answers come back as text, and lie in answers.md."""
        wanted = [part for part in PARTS if part in set(parts)]
        answers = {part: getattr(self, f"part_{part}")() for part in wanted}
        heading = self._heading(wanted)
        whole = dict(sorted((self._answers_there(heading) | answers).items()))
        text, told = ("\n\n".join([heading, "MB are 2^20 bytes.", *each.values()]) + "\n" for each in (whole, answers))
        self._write(ANSWERS, text)
        return told

    @property
    def all_fit(self) -> bool:
        return all(isinstance(run, Profiled) and run.fits for run in self._runs.values())

    # -- what is in the folder already ---------------------------------------------------------------------------

    def not_free(self, parts: Iterable[str]) -> str | None:
        """Why nothing may be written there: foreign files, or results of other settings. Parts may come one by one."""
        if not self.folder.is_dir():
            return None
        there = {path.name for path in self.folder.iterdir()}
        if [name for name in there if not _OWN_FILES.fullmatch(name)]:
            return "is not empty"
        taken = sorted(there & {name for part in parts for name in self._files_of(part)})
        if taken and not self._answers_there(self._heading(parts)):
            return f"has {taken[0]} already, of a single profile or of other settings"
        return None

    def _files_of(self, part: str) -> list[str]:
        named = {
            "a": [self._snapshot_name(kind, LONGEST) for kind in KINDS],
            "b": [PEAKS, *(self._snapshot_name(kind, context) for kind in KINDS for context in CONTEXTS)],
            "c": [MIXED, *(self._snapshot_name(kind, LONGEST, dtype) for kind in KINDS for dtype in ("fp32", "bf16"))],
            "d": [ACTIVATIONS],
        }
        return named.get(part, [])

    def _snapshot_name(self, kind: str, context: int, dtype: str | None = None) -> str:
        return f"{self.base.model}_ctx{context}_{kind}_{f'{dtype}_' if dtype else ''}snapshot.pickle"

    def _answers_there(self, heading: str) -> dict[str, str]:
        """Answers of an earlier run with these settings, by part."""
        text = self._text_there()
        if not text.startswith(f"{heading}\n"):
            return {}
        pieces = re.split(r"^(?=## \(([a-e])\))", text, flags=re.MULTILINE)
        return {part: answer.rstrip() for part, answer in zip(pieces[1::2], pieces[2::2], strict=True)}

    def _text_there(self) -> str:
        try:
            return (self.folder / ANSWERS).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    # -- the parts -----------------------------------------------------------------------------------------------

    def part_a(self) -> str:
        def timeline(kind: str, found: Profiled) -> Iterator[str]:
            self._save(found, self._snapshot_name(kind, LONGEST))
            phases = ", ".join(f"{name} {gib(size)}" for name, size in found.phases.items())
            yield f"- {kind}: peak {gib(found.peak_allocated_bytes)} in {found.peak_phase} ({phases})."
            yield from [f"  {_does_not_fit(found)}"] if not found.fits else []

        shapes = (
            "\nForward alone is a comb: each block's activations rise and fall on top of the weights, for nothing is "
            "kept. In a training step they pile up block by block until the loss, fall as backward consumes them while "
            "gradients rise, and the optimizer's own temporaries make the last hill."
        )
        return "\n".join(["## (a) What the timelines show", *self._of_both_kinds(timeline), shapes])

    def part_b(self) -> str:
        rows = []
        for context in CONTEXTS:
            found = {kind: self._profile(kind, context) for kind in KINDS}
            for kind, profiled in found.items():
                self._save(profiled, self._snapshot_name(kind, context))
            rows.append((str(context), *(_mib(found[kind]) for kind in KINDS)))
        table = _table(("Context Length", "Forward Pass (MB)", "Full Training Step (MB)"), rows)
        self._write(PEAKS, f"{self._title('Peak memory')}\n{table}\n")
        return f"## (b) Peak memory by context length\n\n{table}\n\n{self._why_it_grows()}"

    def part_c(self) -> str:
        rows = []
        for kind in KINDS:
            plain = self._profile(kind, LONGEST)
            for dtype in (None, "bf16"):
                found = self._profile(kind, LONGEST, dtype)
                self._save(found, self._snapshot_name(kind, LONGEST, dtype or "fp32"))
                name = f"{(dtype or 'fp32').upper()} {kind.capitalize()}"
                rows.append((name, _mib(found), "baseline" if dtype is None else _saving(plain, found)))
        table = _table(("Configuration", "Peak Memory (MB)", "Memory Savings vs FP32"), rows)
        self._write(MIXED, f"{self._title('Mixed precision')}\n{table}\n")
        weights = self._parameters() * 2
        return (
            f"## (c) Mixed precision\n\n{table}\n\n"
            f"Autocast keeps the weights in fp32 and, until its region ends, a bf16 copy of every weight it has used: "
            f"up to {gib(weights)} here. A forward pass alone therefore needs more, not less. In training, weights, "
            f"gradients and AdamW's two moments stay fp32 ({gib(self._parameters() * 16)}); only activations shrink, "
            f"so little is saved."
        )

    def part_d(self) -> str:
        size = SIZES[self.base.model]
        batch, context = self.base.workload.batch_size, LONGEST
        nbytes = batch * context * size.d_model * 4
        text = (
            f"One residual-stream activation has batch x context x d_model elements of 4 bytes:\n"
            f"{batch} x {context} x {size.d_model} x 4 B = {nbytes:,} B = {nbytes / MiB:.2f} MB (2^20 bytes)."
        )
        others = "\n".join(f"  {name:50} {count:>8.2f} MB" for name, count in _named_sizes(self.base, context).items())
        self._write(ACTIVATIONS, f"Computed from the model's shape ({size}).\n\n{text}\n\n{others}\n")
        return f"## (d) One activation of the residual stream\n\n{text}"

    def part_e(self) -> str:
        def largest(kind: str, found: Profiled) -> list[str]:
            return [f"\n{kind}, in the measured steps:\n", *(f"- {line}" for line in self._largest(found))]

        return "\n".join(["## (e) The largest allocations", *self._of_both_kinds(largest)])

    # -- what they are made of -----------------------------------------------------------------------------------

    def _of_both_kinds(self, lines: Callable[[str, Profiled], Iterable[str]]) -> Iterator[str]:
        for kind in KINDS:
            found = self._profile(kind, LONGEST)
            yield from [f"- {kind}: {found}"] if isinstance(found, str) else lines(kind, found)

    def _profile(self, kind: str, context: int, dtype: str | None = None) -> Profiled | str:
        key = kind, context, dtype
        if key not in self._runs:
            assert self.profiler is not None
            try:
                self._runs[key] = self.profiler(self.base.of_step(kind, dtype, seq_len=context))
            except RanOut as error:
                self._runs[key] = f"does not fit: {error.message}"
        return self._runs[key]

    def _largest(self, found: Profiled) -> list[str]:
        names = {round(size * MiB): name for name, size in _named_sizes(self.base, LONGEST).items()}
        origins: dict[int, Counter[str]] = defaultdict(Counter)
        for event in found.allocations():
            origins[event["size"]][_origin_of(event)] += 1
        lines = []
        for size in sorted(origins, reverse=True)[:LARGEST]:
            what = f" ({names[size]})" if size in names else ""
            made = [f"{origin} {count} times" for origin, count in origins[size].most_common(PLACES)]
            more = len(origins[size]) - PLACES
            others = f" and {more} more places" if more > 0 else ""
            lines.append(f"{size / MiB:.2f} MB{what}: made by {', '.join(made)}{others}")
        return lines

    def _why_it_grows(self) -> str:
        size, batch = SIZES[self.base.model], self.base.workload.batch_size
        scores = batch * size.num_heads * LONGEST**2 * 4
        return (
            f"Weights take {gib(self._parameters() * 4)} whatever the context. A training step has at least four times "
            f"that (weights, gradients, two moments), and torch's foreach AdamW a fifth list of the same size while it "
            f"steps; at short contexts that is the peak, so it hardly moves. Attention scores grow with the square of "
            f"the context ({gib(scores)} for one such tensor at {LONGEST}), until backward becomes the peak."
        )

    def _parameters(self) -> int:
        return SIZES[self.base.model].parameters

    def _heading(self, parts: Iterable[str]) -> str:
        """Part (d) is told from the shape alone: it goes with answers for the same shape, whatever these ran on."""
        base, there = self.base, self._text_there().partition("\n")[0]
        shape = f"# Memory profile of {base.model}: batch {base.workload.batch_size}, "
        if {*parts} == {"d"} and there.startswith(shape):
            return there
        return f"{shape}{base.warmup_steps} steps to warm up, {base.measure_steps} recorded, {self.where}"

    def _title(self, what: str) -> str:
        runs = [run for run in self._runs.values() if isinstance(run, Profiled)]
        origin = f"{runs[0].origin} ({runs[0].gpu})" if runs else "computed from the model's shape"
        base = self.base
        return f"{what}: {origin}; {base.model}, batch {base.workload.batch_size}. MB are 2^20 bytes.\n"

    def _save(self, found: Profiled | str, name: str) -> None:
        if isinstance(found, str):  # it did not run
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        save_snapshot(found.snapshot, self.folder / name)
        self._note(self.folder / name)

    def _write(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        with written_whole(path) as beside:
            beside.write_text(text, encoding="utf-8")
        self._note(path)

    def _note(self, path: Path) -> None:
        if path not in self.written:
            self.written.append(path)


def _named_sizes(base: ProfileSettings, context: int) -> dict[str, float]:
    """Tensors of the model by name, in MB of 2^20 bytes, fp32."""
    size, batch = SIZES[base.model], base.workload.batch_size
    elements = {
        "attention scores [batch, heads, context, context]": batch * size.num_heads * context**2,
        "feed-forward activation [batch, context, d_ff]": batch * context * size.d_ff,
        "residual stream [batch, context, d_model]": batch * context * size.d_model,
        "logits [batch, context, vocabulary]": batch * context * size.vocab_size,
        "a feed-forward weight or its gradient": size.d_model * size.d_ff,
        "an attention weight or its gradient": size.d_model**2,
        "the embedding or its gradient": size.vocab_size * size.d_model,
    }
    return {name: count * 4 / MiB for name, count in elements.items()}


def _origin_of(event: dict[str, object]) -> str:
    """The innermost line of code that is not torch's own; where a prediction knows none, its module and op."""
    frames = event.get("frames") or []
    assert isinstance(frames, list)
    if not frames:
        return "the backward pass (autograd's own thread has no Python stack)"
    line = code_line([Frame(frame["filename"], frame["line"], frame["name"]) for frame in frames])
    return line or f"{_any_block(frames[0]['filename'])} {frames[0]['name']}".strip()


def _any_block(path: str) -> str:
    """`layers.7.attn` is the same place as `layers.8.attn`."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _mib(found: Profiled | str) -> str:
    if isinstance(found, str):
        return "does not fit"
    return f"{found.peak_allocated_bytes / MiB:.2f}{'' if found.fits else ' (does not fit)'}"


def _does_not_fit(found: Profiled) -> str:
    card = found.on_card
    assert card is not None
    return f"It does not fit {found.gpu}: needs {gib(card.smallest_gpu_bytes)}, has {gib(card.capacity_bytes)}."


def _saving(plain: Profiled | str, found: Profiled | str) -> str:
    if isinstance(plain, str) or isinstance(found, str):
        return "n/a"
    return f"{100 * (1 - found.peak_allocated_bytes / plain.peak_allocated_bytes):+.1f}%"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join([lines[0], "-|-".join("-" * width for width in widths), *lines[1:]])

"""`--gpu`: a card by name or by size, as the numbers a plan needs.

    find_gpu("RTX 4090")    # by name, without regard to case and punctuation
    find_gpu("24GB")        # as cards are labelled: 24 GiB less what the driver keeps
    find_gpu("24GiB")       # exactly that
    find_gpu("A100-SXM4-80GB MIG 3g.40gb")  # a slice, as nvidia-smi prints it

What a card is sold as, what `nvidia-smi` shows and what a program gets are three numbers. An RTX 4090 is sold as 24 GB,
shows 24,564 MiB and gives torch 24,081 MiB: the driver keeps the rest. `capacity_bytes` is the last of them, torch's
`total_memory`, for the allocator and the CUDA context together have to fit into that. It shrinks a little with newer
drivers; `gpus.json` has the newest value found for Linux, with its source and whether it was measured, reported by
others or estimated. On Windows a card gives nearly all that `nvidia-smi` shows.

What CUDA itself takes of it, the context, is measured on the H200 alone. It has two parts. When CUDA starts, it sets
memory aside for every thread that the chip can hold, 1 KiB of it for the stack, so this part goes with the number of
multiprocessors. Then code is loaded, each kernel when it is first used (CUDA_MODULE_LOADING=LAZY, torch's default);
this goes with the job, the wheels and the driver, not with the chip. On other cards both are estimated, as a range,
and verdicts count the upper end.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any, Literal

from memfit.errors import UnknownName, UsageError
from memfit.units import GiB, MiB, TiB, format_bytes, parse_bytes

MAX_THREADS_PER_SM = {
    (7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (10, 3): 2048,
    (12, 0): 1536, (12, 1): 1536,
}  # fmt: skip
"""CUDA C++ programming guide, technical specifications per compute capability."""

# At the start there is a fixed part and one for every thread. Two cards give the line: RTX 3090 (125,952 threads, 256
# MiB) and RTX 6000 Ada (218,112 threads, 426 MiB). The RTX 5090 (261,120 threads, 507 MiB) and the RTX PRO 6000
# (288,768 threads, 555 MiB) lie on it; the H200 (270,336 threads, 619 MiB) lies above it, with the same fixed part.
CONTEXT_FIXED_BYTES = 24 * MiB
CONTEXT_BYTES_PER_THREAD = 1934
CONTEXT_BYTES_PER_THREAD_SINCE_HOPPER = 2307

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_SEVERAL = re.compile(r"\d+\s*[x*]\s*\S+", re.IGNORECASE)
_SLICE = re.compile(r"(.*?)[\s-]*\bMIG[\s-]+((?:\d+c\.)?\d+g\.\d+gb)(\+me)?", re.IGNORECASE)
_LARGEST_LABEL = 1024
_SMALLEST_BYTES, _LARGEST_BYTES = 64 * MiB, 1024 * TiB


ContextBasis = Literal["measured", "reported", "estimated", "assumed"]
"""Measured on this card; its start reported by others; estimated from the chip; as on the H200, as no card is named."""


L2Basis = Literal["measured", "reported", "given", "assumed"]
"""`l2_basis` in `gpus.json` says in words what each is."""


@dataclass(frozen=True)
class Context:
    """What CUDA itself holds once a job's kernels are loaded. Both ends are one where it was measured."""

    low_bytes: int
    high_bytes: int
    """The one that counts."""
    basis: ContextBasis
    source: str = ""
    """In words."""


@dataclass(frozen=True)
class Gpu:
    """One card, or one slice of a card."""

    name: str
    capacity_bytes: int
    arch: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int
    notes: tuple[str, ...]
    source: str
    context_start_bytes: int
    """Right after CUDA starts: the middle of the estimate, where it is one."""
    context_basis: ContextBasis = "assumed"
    context_source: str = ""
    context_seen: tuple[int, int] | None = None
    """The least and the most that others saw on this card after a job, in bytes."""
    l2_bytes: int = 60 * MiB
    """Of its L2 cache: as large is the buffer beside which torch.compile times kernels."""
    l2_basis: L2Basis = "assumed"
    bandwidth: float | None = None
    """Bytes a second of its memory, as the maker gives them; None where unknown, as with the three that follow."""
    flops_16bit: float | None = None
    """Dense products a second in bf16 or fp16 with sums in fp32, by tensor cores."""
    flops_fp32: float | None = None
    """Without tensor cores: torch keeps fp32 products exact unless told otherwise."""
    link_bandwidth: float | None = None
    """Bytes a second to or from the host."""

    @property
    def context_bytes(self) -> int:
        """After a training step with flash attention, which loads most: the end that counts."""
        return self.context_after(training=True, flash=True).high_bytes

    def context_after(self, *, training: bool, flash: bool) -> Context:
        """What CUDA holds once the job's kernels are loaded.

        Kernels are loaded when first used, so the context grows: a backward pass and an optimizer bring more of them,
        and so does attention by flash or cuDNN (16-bit sdpa; fp32 and eager attention do without).
        """
        start, growth = self.context_start_bytes, _growth(training=training, flash=flash)
        if self.context_basis in ("measured", "assumed"):
            return Context(start + growth, start + growth, self.context_basis, self.context_source)
        share = _document()["context_range"]
        low, high = share["start_low"] * start, share["start_high"] * start
        if self.context_basis == "reported":
            low = high = start
        low, high = low + share["growth_low"] * growth, high + share["growth_high"] * growth
        if self.context_seen is not None:
            low, high = min(low, self.context_seen[0]), max(high, self.context_seen[1])
        return Context(int(low), int(high), self.context_basis, self.context_source)


def find_gpu(text: str | Gpu, *, flag: str = "--gpu") -> Gpu:
    """The card that `text` names, or a card of the size that it gives. Ambiguous names are refused, never guessed."""
    if isinstance(text, Gpu):
        return text
    if not isinstance(text, str):
        raise UsageError(
            f"{flag} {text!r} is neither a card nor a size", hint="such as 'RTX 4090', '24GB' or '23.5GiB'"
        )
    wanted = text.strip()
    if not wanted:
        raise UsageError(f"{flag} is empty", hint="give a card such as 'RTX 4090', or a size such as 24GB or 23.5GiB")
    card = _by_key().get(_key(wanted))
    if card is not None:
        return _from_card(card)
    if (match := _SLICE.fullmatch(wanted)) is not None:
        return _slice(text, match[1], match[2].lower(), flag)
    if (choices := _several_sizes().get(_key(wanted))) is not None:
        names = " or ".join(repr(name) for name in choices)
        raise UsageError(f"{flag} {text!r} could be several cards", hint=f"say which: {names}")
    if (match := _SIZE.fullmatch(wanted)) is not None:
        return _of_size(wanted, float(match[1]), match[2].lower(), flag)
    if _SEVERAL.fullmatch(wanted):
        several = "; --world-size says how many there are" if flag == "--gpu" else ""
        raise UsageError(f"{flag} {text!r} names several cards", hint=f"give one{several}")
    _refuse_other_makers(wanted, flag)
    more = "`memfit gpus` lists the cards; a size works too: 24GB as cards are labelled, 23.5GiB exactly"
    raise UnknownName("GPU", text, _names(), more=more)


def is_size(text: str) -> bool:
    """`24GB` and `23.5GiB` name no card: another one's kernels stand in for theirs."""
    wanted = text.strip()
    return _key(wanted) not in _by_key() and _SIZE.fullmatch(wanted) is not None


def name_in_catalogue(name: str) -> str | None:
    """Of a card as the driver or a person calls it; None for a size, and for a card that is not in the catalogue."""
    card = _by_key().get(_key(name))
    return None if card is None else str(card["name"])


def list_gpus() -> tuple[Gpu, ...]:
    """All cards of the catalogue, in its order: GeForce, workstation, data centre."""
    return tuple(_from_card(card) for card in _document()["cards"])


def list_slices() -> tuple[Gpu, ...]:
    """The slices into which MIG cuts cards of the catalogue."""
    return tuple(
        _from_card(_sliced(name, profile)) for name, cut in _document()["mig"].items() for profile in cut["slices"]
    )


def list_labels() -> tuple[float, ...]:
    """The sizes in GB that cards are sold with, growing."""
    return tuple(sorted({float(card["label_gb"]) for card in _document()["cards"]}))


@cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("memfit").joinpath("gpus.json").read_text(encoding="utf-8"))
    return loaded


def _key(name: str) -> str:
    """A card's name without maker, case and punctuation; a size keeps one spelling: `A100 80G` is `a10080gb`."""
    text = re.sub(r"\b(nvidia|geforce|gpu|with max-q design)\b", " ", name.casefold())
    text = re.sub(r"\bmobile\b", "laptop", text)
    text = re.sub(r"(\d+)\s*g(?:i?b)?\b", r"\1gb", text)
    return re.sub(r"[\W_]", "", text)


@cache
def _by_key() -> dict[str, dict[str, Any]]:
    """Every spelling of every card: with and without `RTX` or `Tesla`, with and without its size."""
    found: dict[str, dict[str, Any]] = {}
    for card in _document()["cards"]:
        for name in (card["name"], *card["aliases"]):
            short = re.sub(r"^(geforce )?rtx |^tesla ", "", name, flags=re.IGNORECASE)
            for spelling in (name, short):
                found.setdefault(_key(spelling), card)
                found.setdefault(_key(f"{spelling} {card['label_gb']}GB"), card)
    return found


@cache
def _several_sizes() -> dict[str, list[str]]:
    several: dict[str, list[str]] = _document()["several_sizes"]
    without = {name.removeprefix("RTX "): cards for name, cards in several.items()}
    return {_key(name): cards for name, cards in {**without, **several}.items()}


def _names() -> list[str]:
    """For suggestions, in lower case."""
    return [name.lower() for card in _document()["cards"] for name in (card["name"], *card["aliases"])]


def _refuse_other_makers(wanted: str, flag: str) -> None:
    """A card that is no NVIDIA card has no namesake among them."""
    said = re.sub(r"[\s_-]+", " ", wanted.casefold())
    if "nvidia" in said or "tesla" in said or "quadro" in said:
        return
    for maker, known in _document()["other_makers"].items():
        if not re.search(rf"\b(?:{known['names']})\b", said):
            continue
        key = re.sub(r"\W", "", said)
        gib = next((size for name, size in known["gib"].items() if key.endswith(name)), None)
        such = f"its {gib} GiB are {flag} {gib}GiB" if gib else f"such as {flag} 24GiB"
        hint = f"an exact size works, {such}: that much memory, with the kernels and the context of NVIDIA's H200"
        raise UsageError(f"{flag} {wanted!r} is made by {maker}, and memfit knows only NVIDIA cards", hint=hint)


def _slice(text: str, card: str, profile: str, flag: str) -> Gpu:
    """`A100-SXM4-80GB MIG 3g.40gb`; a card that comes in two sizes is told by the slice, where only one is cut so."""
    mig: dict[str, Any] = _document()["mig"]
    found = _by_key().get(_key(card))
    names = [found["name"]] if found is not None else _several_sizes().get(_key(card), [])
    cut = [name for name in names if profile in mig.get(name, {"slices": ()})["slices"]]
    if len(cut) == 1:
        return _from_card(_sliced(cut[0], profile))
    if len(cut) > 1:
        choices = " or ".join(f"'{name} MIG {profile}'" for name in cut)
        raise UsageError(f"{flag} {text!r} could be a slice of several cards", hint=f"say which: {choices}")
    known = [name for name in names if name in mig] or list(mig)
    slices = "; ".join(f"{name}: {', '.join(mig[name]['slices'])}" for name in known)
    hint = f"known slices: {slices}; any other by its exact size, such as 20GiB"
    raise UsageError(f"{flag} {text!r} is not a MIG slice that memfit knows", hint=hint)


def _sliced(name: str, profile: str) -> dict[str, Any]:
    """A slice as a card: its own memory and multiprocessors, its share of the whole card's speed."""
    card, cut = _by_key()[_key(name)], _document()["mig"][name]
    own = cut["slices"][profile]
    speed = dict(card["speed"])
    speed["bandwidth"] *= own["memory_eighths"] / 8
    for part in ("flops_16bit", "flops_fp32"):
        speed[part] *= own["sm_count"] / card["sm_count"]
    return {
        "name": f"{name} MIG {profile}", "arch": card["arch"], "total_mib": own["total_mib"], "total": "reported",
        "sm_count": own["sm_count"], "l2_mib": _l2_mib(card) * own["memory_eighths"] / 8, "source": cut["source"],
        "speed": speed,
    }  # fmt: skip


def _from_card(card: dict[str, Any]) -> Gpu:
    name, kind = card["name"], card["total"]
    gpu = _gpu(card, name, card["total_mib"] * MiB)
    notes = [f"the capacity of the {name} is estimated: {card['source']}"] if kind == "estimated" else []
    if gpu.context_basis != "measured":
        estimated = gpu.context_basis == "estimated"
        start = "is estimated" if estimated else "at its start is reported by others, the rest estimated"
        told = f"what CUDA itself takes on the {name} {start}, and the upper end counts: {gpu.context_source}"
        notes.append(told)
    source = f"capacity {kind}: {card['source']}; context {gpu.context_basis}: {gpu.context_source}"
    return replace(gpu, notes=tuple(notes), source=source)


def _gpu(card: dict[str, Any], name: str, capacity: int, notes: tuple[str, ...] = (), source: str = "") -> Gpu:
    arch, seen = _arch(card), card.get("context_seen")
    start, basis, context_source = _context(card)
    return Gpu(
        name=name,
        capacity_bytes=capacity,
        arch=arch,
        sm_count=card["sm_count"],
        max_threads_per_sm=MAX_THREADS_PER_SM[arch],
        notes=notes,
        source=source,
        context_start_bytes=start,
        context_basis=basis,
        context_source=context_source,
        context_seen=None if seen is None else (seen["low_mib"] * MiB, seen["high_mib"] * MiB),
        l2_bytes=int(_l2_mib(card) * MiB),
        l2_basis=card.get("l2", "assumed"),
        **_speeds(card),
    )


def _speeds(card: dict[str, Any]) -> dict[str, float | None]:
    """What a size stands for says nothing of speed, but the card that stands for it has one."""
    known: dict[str, float] = card.get("speed", {})
    giga, tera = 1e9, 1e12
    units = {"bandwidth": giga, "flops_16bit": tera, "flops_fp32": tera, "link_bandwidth": giga}
    return {name: known[name] * unit if name in known else None for name, unit in units.items()}


def _l2_mib(card: dict[str, Any]) -> float:
    return float(card.get("l2_mib", _document()["l2_mib_of_arch"][card["arch"]]))


def l2_note(gpu: Gpu | None) -> str:
    """For plans in which the size of the L2 cache matters."""
    card = gpu or find_gpu(REFERENCE)
    size, basis = format_bytes(card.l2_bytes), _document()["l2_basis"][card.l2_basis]
    return f"kernels and products are timed beside a buffer as large as the L2 cache: {size} on {card.name}, {basis}"


def _arch(card: dict[str, Any]) -> tuple[int, int]:
    major, minor = card["arch"].split(".")
    return int(major), int(minor)


def _context(card: dict[str, Any]) -> tuple[int, ContextBasis, str]:
    """Right after CUDA starts, and where that comes from."""
    seen = f"; seen after jobs: {card['context_seen']['source']}" if "context_seen" in card else ""
    if "context_bytes" in card:
        return card["context_bytes"], card["context"], card["context_source"] + seen
    arch = _arch(card)
    start, how = estimate_context_start(arch, card["sm_count"], MAX_THREADS_PER_SM[arch])
    return start, "estimated", f"{how}, and kernels as on the H200{seen}"


def estimate_context_start(arch: tuple[int, int], sm_count: int, threads_per_sm: int) -> tuple[int, str]:
    """What CUDA takes when it starts on a chip of this size, and how that was reckoned."""
    hopper_on = arch[0] >= 9 and threads_per_sm == 2048
    each = CONTEXT_BYTES_PER_THREAD_SINCE_HOPPER if hopper_on else CONTEXT_BYTES_PER_THREAD
    threads = sm_count * threads_per_sm
    how = f"{format_bytes(CONTEXT_FIXED_BYTES)} and {each:,} bytes for each of {threads:,} resident threads"
    return CONTEXT_FIXED_BYTES + threads * each, how


def _growth(*, training: bool, flash: bool) -> int:
    grown = _document()["context_growth_bytes"]
    return int(grown[("training" if training else "inference") + ("_flash" if flash else "")])


def _of_size(text: str, number: float, unit: str, flag: str) -> Gpu:
    if unit in ("kib", "mib", "gib", "tib", "b") or (not unit and number >= GiB):
        return _exact(text, parse_bytes(text, flag=flag), flag)
    if unit not in ("gb", "g", ""):
        hint = "sizes are 24GB as cards are labelled, or 24GiB or 24564MiB exactly"
        raise UsageError(f"{flag} {text!r} is not a size", hint=hint)
    if not 0 < number <= _LARGEST_LABEL:
        hint = f"24GB is a card's label, {text}MiB or {text}GiB an exact size" if not unit else "24GB is a card's label"
        raise UsageError(f"{flag} {text!r} is neither a card nor the size of one", hint=hint)
    return _labelled(number)


def _exact(text: str, size: int, flag: str) -> Gpu:
    if size < _SMALLEST_BYTES:
        digits = re.sub(r"[^\d.]", "", text)
        if parse_bytes(f"{digits}GiB", flag=flag) >= _SMALLEST_BYTES:
            raise UsageError(f"{flag} {text} is {size:,} bytes; did you mean {digits}GiB?")
        raise UsageError(f"{flag} {text[:40]!r} is smaller than any card", hint="sizes look like 24GB or 23.5GiB")
    if size > _LARGEST_BYTES:
        raise UsageError(f"{flag} {text[:40]!r} is larger than any card", hint="sizes look like 24GB or 23.5GiB")
    card = _by_key()[_key(REFERENCE)]
    gpu = _gpu(card, format_bytes(size), size, (_stand_in(card),), "capacity as given")
    return replace(gpu, context_basis="assumed", context_source=f"as on the {REFERENCE}")


REFERENCE = "H200"
"""The card on which memfit's rules were measured: it stands behind a size that says nothing of the card."""


def _labelled(label: float) -> Gpu:
    """A card known by its label only: 24 GB cards give a program 22.0 to 23.6 GiB; the middle one of them is taken."""
    cards = _document()["cards"]
    alike = [card for card in cards if card["label_gb"] == label]
    share = median(card["total_mib"] / (card["label_gb"] * 1024) for card in alike or cards)
    capacity = int(label * 1024 * share) * MiB
    card = _typical(label)
    known = f"the {len(alike)} known cards of that label" if alike else "all known cards, for none has that label"
    why = f"{label:g} GB is read as cards are labelled, {label:g} GiB less what the driver keeps"
    note = f"{why}: {format_bytes(capacity)}, by the middle one of {known}; {label:g}GiB would be exact"
    return _gpu(card, f"{label:g} GB card", capacity, (note, _stand_in(card)), f"capacity estimated: {note}")


def _typical(label: float) -> dict[str, Any]:
    """The card that stands for a size: the usual one of that label, or of the next larger."""
    typical = {float(known): name for known, name in _document()["typical_card_of_label"].items()}
    nearest = min((known for known in typical if known >= label), default=max(typical))
    return _by_key()[_key(typical[nearest])]


def _stand_in(card: dict[str, Any]) -> str:
    major, minor = _arch(card)
    _, basis, _ = _context(card)
    counts = "" if basis == "measured" else ", where the context is estimated and its upper end counts"
    return f"kernels and context as on the {card['name']} (sm {major}.{minor}){counts}; name the card to have its own"

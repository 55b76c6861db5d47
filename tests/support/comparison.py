"""A comparison of two traces as text, for a test that fails."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.analysis.compare import Comparison, Hunk, Item, Lifetime, compare
from memfit.events import Action, Trace
from memfit.units import format_bytes


def first_of(c: Comparison) -> Hunk | Lifetime | None:
    """The earliest difference, in events of a: where to start looking."""
    found: list[Hunk | Lifetime] = [*c.hunks[:1], *c.lifetimes[:1]]
    return min(found, key=lambda difference: difference.event_a) if found else None


def format_comparison(a: Trace, b: Trace, limit: int = 30) -> str:
    """Plain text: what was counted, where it begins, then up to `limit` differences of each kind."""
    c = compare(a, b)
    lines = list(_counted(c, _requested_peak(a), _requested_peak(b)))
    if c.same:
        return "\n".join(["the same, event by event", *lines])
    for hunk in c.hunks[:limit]:
        lines += [
            "",
            f"@ event {hunk.event_a:,} of a, {hunk.event_b:,} of b" + (f", {hunk.phase}" if hunk.phase else ""),
        ]
        lines += _listed("-", hunk.only_a, limit) + _listed("+", hunk.only_b, limit)
    lines += _more(len(c.hunks) - limit, "places")
    for lifetime in c.lifetimes[:limit]:
        lines += _told(lifetime)
    lines += _more(len(c.lifetimes) - limit, "lifetimes") + _more(c.left_out, "places, not kept")
    if c.totals:
        lines += ["", "only on one side, by bytes:"]
    for total in c.totals[:limit]:
        times = f"{total.count:,} x {format_bytes(total.size)}"
        lines.append(f"  {total.side}  {format_bytes(total.nbytes):>12}  = {times}  {total.op}".rstrip())
    lines += _more(len(c.totals) - limit, "kinds")
    return "\n".join(lines)


def _counted(c: Comparison, peak_a: int, peak_b: int) -> Iterator[str]:
    yield f"{'':<12}{'both':>10}{'only a':>10}{'only b':>10}{'moved':>10}"
    for name, counts in (("allocations", c.allocs), ("frees", c.frees)):
        moved = f"{counts.moved:,}" if name == "frees" else ""
        yield f"{name:<12}{counts.both:>10,}{counts.only_a:>10,}{counts.only_b:>10,}{moved:>10}".rstrip()
    difference = peak_b - peak_a
    sign = "+" if difference > 0 else ""
    yield (
        f"requested peak: a {format_bytes(peak_a)}, b {format_bytes(peak_b)}"
        + (f" ({sign}{format_bytes(difference)})" if difference else "")
    )


def _listed(sign: str, items: tuple[Item, ...], limit: int) -> list[str]:
    return [f"  {sign} {_item(item)}" for item in items[:limit]] + _more(len(items) - limit, "allocations")


def _told(lifetime: Lifetime) -> list[str]:
    what = "1 block" if lifetime.count == 1 else f"{lifetime.count:,} blocks"
    other = "b" if lifetime.earlier == "a" else "a"
    lines = ["", f"freed earlier in {lifetime.earlier} than in {other}: {format_bytes(lifetime.nbytes)} in {what}"]
    lines += _listed("=", tuple(pair[0] for pair in lifetime.pairs), 5)
    for side, place in (("a", lifetime.freed_a), ("b", lifetime.freed_b)):
        if place.event is None:
            lines.append(f"    {side}: never")
        else:
            between = f"after {_name(place.after)}, before {_name(place.before)}"
            lines.append(
                f"    {side}: event {place.event:,}" + (f", {place.phase}" if place.phase else "") + f", {between}"
            )
    return lines


def _name(item: Item | None) -> str:
    return (
        "nothing"
        if item is None
        else " ".join(part for part in (format_bytes(item.size), item.op, item.module) if part)
    )


def _more(count: int, what: str) -> list[str]:
    return [f"  ... and {count:,} more {what}"] if count > 0 else []


def _item(item: Item) -> str:
    stream = f"stream {item.stream}" if item.stream else ""
    return "  ".join(
        part for part in (f"{format_bytes(item.size):>12}", item.op, item.module, item.category, stream) if part
    )


def _requested_peak(trace: Trace) -> int:
    born = {block for action, block in trace.events() if action == Action.ALLOC}
    live = {block for block in range(len(trace.requested)) if block not in born}
    peak = now = sum(trace.requested[block] for block in live)
    for action, block in trace.events():
        if action == Action.ALLOC:
            live.add(block)
            now += trace.requested[block]
        elif action in (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED) and block in live:
            live.remove(block)
            now -= trace.requested[block]
        peak = max(peak, now)
    return peak

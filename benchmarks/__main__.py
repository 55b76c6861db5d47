"""Times of predictions, in a table or as JSON.

    python -m benchmarks                 # a few minutes: every case three times after a first call, slow ones once
    python -m benchmarks --only 8b       # the cases whose model or kind has this in its name
    python -m benchmarks --full          # all 1,000 lines of each batch instead of 100 and a calculation
    python -m benchmarks --batches       # the batches alone
    python -m benchmarks --json > times.json

Wall-clock times of one machine: other processes on it lengthen them, so the table says how many cores there are and how
busy they were. `floor` is a bare Python loop over the events, measured in the same process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from typing import Any

from benchmarks import plans, shell
from benchmarks.aligned import aligned
from benchmarks.plans import Timed

HEADINGS = (
    "job", "model", "best s", "median s", "first s", "limit s", "events", "replay ev/s", "replays ms", "host MiB",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time memfit's predictions.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--full", action="store_true", help="run all 1,000 lines of each batch")
    parser.add_argument("--batches", action="store_true", help="only the batches")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only plans whose model or kind has this in its name"
    )
    asked = parser.parse_args(argv)
    chosen = [case for case in plans.cases() if asked.only in f"{case.name} {case.model}" and not asked.batches]
    if not chosen and not asked.batches:
        parser.error(f"no case has {asked.only!r} in its name")

    before = _machine()
    _say(_machine_line(before))
    _warm_up()
    timed = []
    for case in chosen:
        _say(f"{case.name} of {case.model} ...")
        timed.append(plans.measured(case))
    made: dict[str, Any] = {
        "schema": "memfit.bench/1", "machine": before, "plans": [dataclasses.asdict(each) for each in timed],
        "ratio_70b_to_8b": plans.ratios(timed), "batches": {}, "shell": None,
    }  # fmt: skip
    if not asked.only:
        if not asked.batches:
            _say("one plan from the shell ...")
            made["shell"] = shell.one_plan()
        for name, workload in shell.BATCHES.items():
            _say(f"plan batch: {name} ...")
            made["batches"][name] = shell.batch(workload, shell.ALL_LINES if asked.full else shell.BATCH_LINES)
    made["machine"]["load_after"] = os.getloadavg()[0]
    print(json.dumps(made, indent=1) if asked.json else text(made, timed))
    return 0


def _warm_up() -> None:
    """Imports, and what torch and transformers do on first use, are no part of a plan's time."""
    from memfit.planning.predict import predict

    predict(kind="lora", model="gpt2", seq_len=64, grad_checkpointing=True, trace_cache=False)


def _machine() -> dict[str, Any]:
    from importlib.metadata import version

    import memfit.replay.allocator

    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": platform.processor() or platform.machine(), "python": platform.python_version(),
        "compiled": not memfit.replay.allocator.__file__.endswith(".py"),
        "torch": version("torch"), "transformers": version("transformers"), "load_before": os.getloadavg()[0],
    }  # fmt: skip


def _machine_line(machine: dict[str, Any]) -> str:
    allocator = "compiled" if machine["compiled"] else "in Python"
    return (
        f"{machine['cores']} cores ({machine['processor']}), Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, allocator {allocator}; load {machine['load_before']:.1f} before"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- text --------------------------------------------------------------------------------------------------------------


def text(made: dict[str, Any], timed: list[Timed]) -> str:
    machine = made["machine"]
    parts = [
        f"{_machine_line(machine)}, {machine['load_after']:.1f} after (1.0 is this benchmark itself)",
        f"plans in one warm process, no trace cache: best and median of {plans.ROUNDS} after a first call, "
        f"or of 1 where that call takes over {plans.SLOW_SECONDS:.0f} s",
        "",
        *([aligned([HEADINGS, *(_row(each) for each in timed)])] if timed else ()),
    ]
    if made["ratio_70b_to_8b"]:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in made["ratio_70b_to_8b"].items())
        parts += ["", f"llama 70B over 8B (limit 1.5): {ratios}"]
    if made["batches"]:
        parts += ["", *_batch_lines(made["batches"])]
    if made["shell"]:
        parts += ["", *_shell_lines(made["shell"])]
    return "\n".join(parts)


def _row(each: Timed) -> tuple[str, ...]:
    limit = each.limit_seconds
    over = " !" if limit is not None and each.best_seconds > limit else "  "
    return (
        each.name, each.model, f"{each.best_seconds:.2f}{over}", f"{each.median_seconds:.2f}",
        f"{each.first_seconds:.2f}", "n/a" if limit is None else f"{limit:.1f}", f"{each.events:,}",
        f"{each.replay_events_per_second:,.0f}", f"{1000 * each.after_trace_seconds:.1f}",
        f"{each.host_peak_bytes >> 20:,}",
    )  # fmt: skip


def _batch_lines(batches: dict[str, dict[str, Any]]) -> list[str]:
    rows = [("plan batch", "model", "lines", "s", "processor s", "first s", "ms a line", "1,000 lines s", "host MiB")]
    for name, batch in batches.items():
        peak = batch["host_peak_bytes"]
        over = " !" if batch["seconds_for_1000"] > shell.BATCH_LIMIT_SECONDS else "  "
        rows.append((
            name, batch["workload"]["model"], str(batch["lines"]), f"{batch['seconds']:.1f}",
            f"{batch['processor_seconds']:.1f}", f"{batch['first_line_seconds']:.2f}",
            f"{1000 * batch['seconds_a_line_in_second_half']:.0f}", f"{batch['seconds_for_1000']:.0f}{over}",
            "n/a" if peak is None else f"{peak >> 20:,}",
        ))  # fmt: skip
    return [
        f"every batch size and sequence length different, empty trace cache; limit {shell.BATCH_LIMIT_SECONDS:.0f} s "
        "for 1,000 lines, calculated from the second half where fewer were run",
        "",
        aligned(rows),
    ]


def _shell_lines(times: dict[str, float]) -> list[str]:
    return [
        f"from the shell: memfit {' '.join(shell.PLAN)}",
        f"  nothing cached {times['cold_seconds']:.2f} s, cached {times['cached_seconds']:.2f} s "
        f"(limit {shell.CACHED_LIMIT_SECONDS}), cached, with {' '.join(shell.SAME_CLASS)} "
        f"{times['cached_other_card_seconds']:.2f} s",
        f"  memfit --help {times['help_seconds']:.2f} s, python -c pass {times['python_seconds']:.2f} s",
    ]


if __name__ == "__main__":
    sys.exit(main())

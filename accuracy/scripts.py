"""Unmodified programs: what `memfit plan script` says of them beside what they take on a GPU.

    python -m accuracy.scripts plan LIST.json        # here: writes LIST.planned.jsonl
    python -m accuracy.scripts measure LIST.json     # on a GPU: as many steps as were planned; LIST.measured.jsonl
    python -m accuracy.scripts compare LIST.json     # the table
    python -m accuracy.scripts keep LIST.json        # both sides into measured/scripts.jsonl, for docs/accuracy.md

LIST.json has objects of `name`, `from`, `folder`, `command` and, where the program needs it, `path` (for PYTHONPATH);
folders are relative to the list. Each program runs in a process of its own. The programs themselves are other people's
and are not kept here; `from` says where they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent / "measured" / "scripts.jsonl"
PLAN = """
import json, sys, memfit
made = memfit.trace_script(json.loads(sys.argv[1]), gpu="H200")
stopped = [note for note in made.notes if note.startswith("stopped after")]
steps = int(stopped[0].split()[2]) if stopped else 0
peak = made.to_json()["peak"]
notes = [note for note in made.notes if note.startswith("not modelled:")]
found = {"allocated": peak["allocated_bytes"], "reserved": peak["reserved_bytes"], "steps": steps, "notes": notes}
print(json.dumps(found))
"""
MEASURE = """
import json, sys, torch
from types import SimpleNamespace
from memfit.events import Trace
from memfit.scripts.command import read_command
from memfit.scripts.run import run_program
from memfit.scripts.stopping import Steps
untraced = SimpleNamespace(stopped=None, trace=Trace(), assume=lambda _: None, settle_allocator=lambda *_: None)
run_program(read_command(json.loads(sys.argv[1])), Steps(int(sys.argv[2]), untraced), seconds=240, tracer=untraced)
peak = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
print(json.dumps(peak))
"""


def main(what: str, file: str) -> None:
    jobs = json.loads(Path(file).read_text())
    if what in ("compare", "keep"):
        compare(file) if what == "compare" else keep(jobs, file)
        return
    planned = read(file, "planned") if what == "measure" else {}
    out = Path(file).with_suffix(".planned.jsonl" if what == "plan" else ".measured.jsonl")
    with out.open("w") as lines:
        for job in jobs:
            if what == "measure" and "steps" not in planned.get(job["name"], {}):
                continue
            line = {"name": job["name"], **run(job, what, Path(file).resolve().parent, planned)}
            print(json.dumps(line), file=lines, flush=True)
            print(line, flush=True)


def run(job: dict[str, Any], what: str, here: Path, planned: dict[str, Any]) -> dict[str, Any]:
    path = [str(here / each) for each in job.get("path", [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path("src").resolve()), *path])}
    words = [sys.executable, "-c", PLAN if what == "plan" else MEASURE, json.dumps(job["command"])]
    if what == "measure":
        words.append(str(planned[job["name"]]["steps"]))
    done = subprocess.run(words, cwd=here / job["folder"], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else str(done.returncode)}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def read(file: str, what: str) -> dict[str, Any]:
    path = Path(file).with_suffix(f".{what}.jsonl")
    return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}


def compare(file: str) -> None:
    planned, measured = read(file, "planned"), read(file, "measured")
    for name, plan in planned.items():
        seen = measured.get(name, {})
        if "error" in plan or "allocated" not in seen:
            print(f"{name:28} {plan.get('error') or seen}")
            continue
        off = {key: 100 * (plan[key] / seen[key] - 1) for key in ("allocated", "reserved")}
        print(f"{name:28} {plan['steps']:2} steps  allocated {seen['allocated']:14,} {off['allocated']:+.4f} %"
              f"  reserved {seen['reserved']:14,} {off['reserved']:+.4f} %")  # fmt: skip


def keep(jobs: list[dict[str, Any]], file: str) -> None:
    planned, measured = read(file, "planned"), read(file, "measured")
    with KEPT.open("a") as out:
        for job in jobs:
            plan, seen = planned[job["name"]], measured[job["name"]]
            line = {key: job[key] for key in ("name", "from", "command")} | {"allocated": seen["allocated"]}
            if "allocated" in plan:
                line |= {
                    "steps": plan["steps"],
                    "allocated_off_bytes": plan["allocated"] - seen["allocated"],
                    "reserved_off": plan["reserved"] / seen["reserved"] - 1,
                    "note": "; ".join(plan["notes"]),
                }
            else:
                line |= {"steps": 0, "allocated_off_bytes": None, "reserved_off": None, "note": plan["error"]}
            print(json.dumps(line), file=out)


def section() -> Iterator[str]:
    """Of docs/accuracy.md."""
    yield "| program | from | steps | allocated, bytes | off | reserved off | |"
    yield "|---|---|---:|---:|---:|---:|---|"
    for run in map(json.loads, KEPT.read_text().splitlines()):
        missing = run["allocated_off_bytes"] is None
        off = "no answer | " if missing else f"{_off(run)} | {_percent(run['reserved_off'])}"
        yield f"| `{run['command']}` | {run['from']} | {run['steps']} | {run['allocated']:,} | {off} | {run['note']} |"


def _off(run: dict[str, Any]) -> str:
    return _percent(run["allocated_off_bytes"] / run["allocated"])


def _percent(share: float | None) -> str:
    if share is None:
        return "not kept"
    return f"{share:+.4%}" if share else "exact"


if __name__ == "__main__":
    main(*sys.argv[1:])

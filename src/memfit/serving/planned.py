"""What the page asks about a job, answered in a process that may trace: plan, picture, changes, explanation, table."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from memfit.analysis.page import draw_plan
from memfit.errors import MemfitError
from memfit.fitting.durations import estimate
from memfit.fitting.emit import config_document
from memfit.fitting.fit import fit
from memfit.fitting.levers import Lever, levers_for
from memfit.fitting.table import make_table
from memfit.gpus import find_gpu
from memfit.jobs.settings import AS_IN_QLORA, QLORA
from memfit.jobs.training.config_file import as_yaml, config_from
from memfit.jobs.training.refusals import check_offload
from memfit.jobs.workload import Workload
from memfit.planning.card_here import unusual_flags
from memfit.planning.predict import Plan, predict, tracing_more_for
from memfit.render.plan import say_verdict, say_why

Job = Mapping[str, Any]
MARGIN = 0.1
MOST_PLANS = 6
_neighbours: deque[Iterator[None]] = deque(maxlen=1)
"""Of the last plan: batch sizes and lengths by which those that a slider will pass are told without a trace."""


def use_idle_time() -> bool:
    """One trace at most, so that a question waits for no more than that; whether there may be another."""
    if not _neighbours:
        return False
    try:
        next(_neighbours[0])
    except Exception:  # the last one, or what is wrong with a trace that nobody has asked for
        _neighbours.clear()
    return bool(_neighbours)


def warm() -> None:
    """What takes seconds to import, before anybody waits for it."""
    for name in ("torch", "transformers", "peft"):
        import_module(name)


def plan_job(job: Job, gpu: str | None, stamp: object = None) -> dict[str, Any]:
    """The document of `memfit plan --json`, and beside it what the page says of it in words."""
    work = Workload.from_mapping(job)
    made = _predicted(job, gpu)
    document = made.to_json()
    return {
        "plan": document,
        "verdict": say_verdict(document).plain,
        "why": say_why(document).plain,
        "how": made.how.in_words(),
        "levers": switches(job),
        "copies": {"command": command_of(work, gpu), "python": python_of(job, gpu), **_yaml(work, gpu)},
    }


def _predicted(job: Job, gpu: str | None) -> Plan:
    return _planned(json.dumps([job, gpu], sort_keys=True))


@lru_cache(maxsize=MOST_PLANS)
def _planned(key: str) -> Plan:
    """Kept of the last questions: their pictures are asked for next."""
    job, gpu = json.loads(key)
    work = Workload.from_mapping(job)
    made = predict(work, gpu=gpu, few=True)
    _neighbours.append(tracing_more_for(work, gpu))
    return made


MOST_SAMPLES, MOST_BLOCKS = 1_500, 2_000


def draw_job(job: Job, gpu: str | None, stamp: object = None) -> dict[str, Any]:
    """The timeline of the predicted steps, as the page of a report draws it, with fewer samples."""
    return draw_plan(_predicted(job, gpu).report, max_samples=MOST_SAMPLES, max_blocks=MOST_BLOCKS)


# -- switches ----------------------------------------------------------------------------------------------------------


def switches(job: Job) -> list[dict[str, Any]]:
    """Every lever with which there is a job still: of two that do not go together, the page offers one."""
    work = Workload.from_mapping(job)
    levers = _levers(work)
    on = [lever.name for lever in levers if _is_on(lever, work)]
    return [_switch(lever, lever.name in on) for lever in levers if _goes(job, lever, levers, on)]


def _levers(work: Workload) -> list[Lever]:
    """Those that can be switched on, and those that are on: the latter are levers of the same job without them."""
    plain = {"kind": work.kind, "model": work.model, "batch_size": work.batch_size, "seq_len": work.seq_len,
             "loop": work.loop, "precision": work.precision, "world_size": work.world_size}  # fmt: skip
    if work.kind == "prune":
        plain = {name: value for name, value in plain.items() if name in ("kind", "model", "seq_len", "precision")}
    without = [Workload.from_mapping(plain, asked=())]
    if work.kind == "lora" and work.is_quantised:
        without.append(dataclasses.replace(work, kbit_prepare=True))
    return list({lever.name: lever for each in (*without, work) for lever in levers_for(each)}.values())


def _is_on(lever: Lever, work: Workload) -> bool:
    """Weights of 4 bits are that with other scales and another preparation too."""
    names = ("quant",) if lever.group == "quantised" else tuple(lever.settings)
    return all(_holds(getattr(work, name), lever.settings[name]) for name in names)


def _goes(job: Job, lever: Lever, levers: list[Lever], on: list[str]) -> bool:
    """As `pull` of job_form.js does it."""
    made, usual = dict(job), AS_IN_QLORA if job.get("kind") == QLORA else {}
    others = [each for each in levers if each.group == lever.group and each.name in on]
    for each in [lever] if lever.name in on else others:
        for name, value in each.settings.items():
            if isinstance(value, tuple):
                made[name] = [text for text in made.get(name) or () if text not in value]
            elif name in usual and usual[name] == value:
                made[name] = not value if isinstance(value, bool) else getattr(Workload, name)
            else:
                made.pop(name, None)
    if lever.name not in on:
        for name, value in lever.settings.items():
            made[name] = [*(made.get(name) or ()), *value] if isinstance(value, tuple) else value
    try:
        then = Workload.from_mapping({name: value for name, value in made.items() if value != usual.get(name, [])})
        if then.trains:
            check_offload(then, setting="--offload")
    except MemfitError:
        return False
    return True


def _switch(lever: Lever, on: bool) -> dict[str, Any]:
    return {
        "name": lever.name, "group": lever.group, "cost": lever.cost, "says": lever.says, "price": lever.price,
        "risk": lever.risk, "missing": lever.missing, "on": on,
        "settings": {key: [*value] if isinstance(value, tuple) else value for key, value in lever.settings.items()},
    }  # fmt: skip


def _holds(is_set: object, wanted: object) -> bool:
    if isinstance(wanted, tuple):
        return isinstance(is_set, tuple) and {*wanted} <= {*is_set}
    return is_set == wanted


# -- to be taken elsewhere ---------------------------------------------------------------------------------------------


def command_of(work: Workload, gpu: str | None) -> str:
    parts = ["memfit", "plan", work.kind, "--model", work.model, *unusual_flags(work)]
    return shlex.join([*parts, *(() if gpu is None else ("--gpu", gpu))])


def python_of(job: Job, gpu: str | None) -> str:
    said = {"kind": job["kind"], "model": job["model"], **job, **({} if gpu is None else {"gpu": gpu})}
    settings = "".join(f"    {name}={value!r},\n" for name, value in said.items())
    return f"import memfit\n\nplan = memfit.predict(\n{settings})\nprint(plan)\n"


def _yaml(work: Workload, gpu: str | None) -> dict[str, str]:
    """Of a training that `memfit train` can do: its config."""
    if not work.trains or (work.kind == "lora" and work.adapter != "lora"):
        return {}
    try:
        document = config_document(work, None if gpu is None else find_gpu(gpu), MARGIN)
        config_from(document, name="planned")
    except MemfitError:
        return {}
    kept = work.loop == "plain" and work.outputs == "kept"
    less = "# memfit train drops the model's outputs after the loss: planned here with them\n" if kept else ""
    return {"yaml": f"# memfit train --config THIS.yaml --set data.source=my.jsonl\n{less}{as_yaml(document)}"}


# -- what takes longer -------------------------------------------------------------------------------------------------


def time_job(job: Job, gpu: str, stamp: object = None) -> dict[str, Any] | None:
    """`duration` of the plan's document, as `memfit plan` tells it: it counts the operations of a step, which is a
    trace of its own."""
    work = Workload.from_mapping(job)
    time = estimate(work, find_gpu(gpu)) if work.trains else None
    return None if time is None else time.to_json()


def fit_job(job: Job, gpu: str, stamp: object = None) -> dict[str, Any]:
    return fit(Workload.from_mapping(job), gpu=gpu, margin=MARGIN).to_json()


def explain_text(text: str, job: Job, gpu: str | None) -> dict[str, Any]:
    """As bytes: a text is never taken for the name of a file."""
    from memfit.explaining.explain import explain

    return explain(text.encode("utf-8", "replace"), gpu=gpu, **job).to_json()


def table_of(models: list[str], workloads: list[str], gpus: list[str], seq_len: int) -> dict[str, Any]:
    return make_table(models, workloads, gpus, seq_len=seq_len, guides=False).to_json()

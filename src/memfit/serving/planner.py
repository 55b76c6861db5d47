"""The page's questions about jobs: models, cards and settings, a plan, what would make it fit, an error, a table."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from memfit.errors import InputError, UnknownName, UsageError
from memfit.fitting.table import GPUS, MODELS, WORKLOADS
from memfit.gpus import list_gpus, list_labels
from memfit.jobs.settings import AS_IN_QLORA, HELP, KINDS, QLORA, flag, setting_types
from memfit.jobs.workload import Workload, settings_of
from memfit.models.presets import presets, variants
from memfit.models.registry import resolve
from memfit.planning.many import read_object
from memfit.serving.security import can_be_sent, inside
from memfit.serving.workers import Answer, Workers

router = APIRouter()

READ_FILES = ("adapter_config", "dataset")
"""Settings that may name a file: the page has none of them."""
SLOW = ("compile", "compile_blocks")
"""Settings with which a plan takes so long that others must not wait behind it."""
LONGEST_TEXT, MOST_NAMES = 200, 64


async def _read_question(request: Request) -> dict[str, Any]:
    """By the reader of `plan batch`: what is refused there is refused here."""
    kind, body = request.headers.get("content-type", "").partition(";")[0], await request.body()
    if kind.strip().lower() != "application/json":
        raise InputError("this is no question that can be read", hint="an object in JSON, as application/json")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise HTTPException(400, "this is no question that can be read: it is not in UTF-8") from error
    return read_object(body, "JSON")


Asked = Annotated[dict[str, Any], Depends(_read_question)]


@router.get("/api/models")
def models(request: Request) -> dict[str, Any]:
    return {"models": list_models(request.app.state.settings.dir)}


ABOUT_A_CARD = ("duration", "fit")
"""They take longer, too."""


def _question(do: str) -> Callable[[dict[str, Any], Request], Awaitable[Response]]:
    async def ask(asked: Asked, request: Request) -> Response:
        if do in ABOUT_A_CARD and not isinstance(asked.get("gpu"), str):
            raise UsageError("no card is named", hint="choose a card")
        return await answered(request, do, asked)

    return ask


for path, do in {"plan": "plan", "plan/timeline": "timeline", "plan/duration": "duration", "fit": "fit"}.items():
    router.add_api_route(f"/api/{path}", _question(do), methods=["POST"])


async def answered(request: Request, do: str, asked: dict[str, Any]) -> Response:
    """`{"job": {"kind": ..., "model": ...}, "gpu": ..., "client": ...}`, checked as far as it can be without torch."""
    job, stamp = read_job(asked.get("job"), request)
    about = {"job": job, "gpu": short_text("gpu", asked.get("gpu")), "stamp": stamp}
    client = short_text("client", asked.get("client"))
    workers: Workers = request.app.state.workers
    lane = "search" if do in ABOUT_A_CARD or any(job.get(name) for name in SLOW) else "plan"
    answer = await workers.ask(do, about, lane=lane, client=f"{do} {client}" if client else "")
    return answer.response()


def read_job(given: object, request: Request, *, whole: bool = True) -> tuple[dict[str, Any], Any]:
    """The settings of a job, none of which names a file or code; and how its model's folder looks now."""
    if not isinstance(given, dict):
        raise UsageError("a question needs a job", hint='{"job": {"kind": "train", "model": "gpt2"}}')
    known = [name for name in _settings() if name not in READ_FILES]
    may_be_open = [name for name in known if _settings()[name]["default"] is None] if whole else [*given]
    job = {str(name): value for name, value in given.items() if value is not None or name not in may_be_open}
    for name, value in job.items():
        if name not in ("kind", *known):
            raise UnknownName("setting", name[:LONGEST_TEXT], known)
        _check_plain(name, value)
    if "model" not in job:
        if whole:
            raise UsageError("no model is named", hint="`memfit models` lists the presets")
        return job, None
    job["model"], stamp = find_model(request.app.state.settings.dir, str(job["model"]))
    return job, stamp


def short_text(name: str, value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise UsageError(f"{name} is not a short text")
    return value


def _check_plain(name: str, value: object) -> None:
    """What a setting must be is for `Workload` to say; here, that it is no more than a number, a text or names."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    plain = len(values) <= MOST_NAMES and all(isinstance(each, (bool, int, float, str)) for each in values)
    if not plain or any(isinstance(each, str) and len(each) > LONGEST_TEXT for each in values):
        raise UsageError(f"{flag(name)} is neither a number nor a short text")


# -- what there is to choose from --------------------------------------------------------------------------------------


@router.get("/api/planner")
def planner_options() -> dict[str, Any]:
    read = {kind: settings_of("lora" if kind == QLORA else kind) for kind in (*KINDS, QLORA)}
    return {
        "kinds": [*KINDS, QLORA],
        "settings": _settings(),
        "of_kind": {
            kind: [name for name in names if name not in (*READ_FILES, "model")] for kind, names in read.items()
        },
        "qlora": AS_IN_QLORA,
        "cards": [{"name": card.name, "capacity_bytes": card.capacity_bytes} for card in list_gpus()],
        "labels": [f"{label:g}GB" for label in list_labels()],
    }


@cache
def _settings() -> dict[str, dict[str, Any]]:
    """Every setting with its type, choices, default and sentence: the page has no list of its own."""
    defaults = {field.name: field.default for field in dataclasses.fields(Workload)}
    return {
        name: {
            "flag": flag(name), "help": HELP.get(name, ""), **_type_of(kind),
            "default": None if defaults[name] is dataclasses.MISSING else defaults[name],
        }
        for name, kind in setting_types().items()
        if name != "kind"
    }  # fmt: skip


def _type_of(kind: Any) -> dict[str, Any]:
    many = get_origin(kind) is tuple
    one = get_args(kind)[0] if many else kind
    choices = [*get_args(one)] if get_origin(one) is Literal else None
    plain = {bool: "yes or no", int: "whole", float: "number"}.get(kind, "text")
    return {"type": "names" if many else "choice" if choices else plain, "choices": choices}


# -- the views Explain and cards against models: a few rows at a time --------------------------------------------------


MOST = 24
"""Names of one sort."""


@router.post("/api/explain")
async def explain(asked: Asked, request: Request) -> Response:
    """`{"text": ..., "job": {...}, "gpu": ...}`: the job as far as it is known."""
    text = asked.get("text")
    if not isinstance(text, str) or not text.strip():
        raise UsageError("there is no text", hint="paste the message, or the end of the log")
    job, _ = read_job(asked.get("job", {}), request, whole=False)
    about = {"text": text, "job": job, "gpu": short_text("gpu", asked.get("gpu"))}
    answer: Answer = await request.app.state.workers.ask("explain", about, lane="search", keep=False)
    return answer.response()


@router.get("/api/table")
async def table_names() -> dict[str, Any]:
    return {"models": MODELS, "workloads": WORKLOADS, "gpus": GPUS, "seq_len": 2048}


@router.post("/api/table")
async def table(asked: Asked, request: Request) -> Response:
    folder = request.app.state.settings.dir
    length = asked.get("seq_len", 2048)
    if not isinstance(length, int):
        raise UsageError("--seq-len is not a whole number")
    about = {
        "models": [find_model(folder, name)[0] for name in _names("models", asked)],
        "workloads": _names("workloads", asked),
        "gpus": _names("gpus", asked),
        "seq_len": length,
    }
    answer: Answer = await request.app.state.workers.ask("table", about, lane="search")
    return answer.response()


def _names(what: str, asked: dict[str, Any]) -> list[str]:
    given = asked.get(what)
    if not isinstance(given, list) or not 0 < len(given) <= MOST:
        raise UsageError(f"{what}: a list of 1 to {MOST} names")
    return [short_text(what, name) or "" for name in given]


# -- models, and which names the page may give -------------------------------------------------------------------------

FOLDER = "./"
"""How the name of a folder begins."""
_NAME = re.compile(r"[\w-][\w. -]*(/[\w-][\w.-]*)?")
DEEPEST, MOST_FOLDERS, MOST_LOOKED_AT = 4, 200, 20_000
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def find_model(folder: Path, name: str) -> tuple[str, list[int] | None]:
    """The name as it is planned by, and of a folder also when its config was last written. Nothing that could be code
    or a path elsewhere is looked up."""
    if name.startswith(FOLDER):
        config = inside(folder, f"{name.removeprefix(FOLDER)}/config.json")
        if not config.is_file():
            raise UsageError(f"{name!r} has no config.json", hint="a model's folder holds one")
        stats = config.stat()
        return str(inside(folder, name.removeprefix(FOLDER))), [stats.st_mtime_ns, stats.st_size]
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:200]!r} is neither a preset nor a hub id",
            hint=f"a folder below the one that is served is {FOLDER}FOLDER; code is for the command line",
        )
    return name, None


def list_models(folder: Path) -> list[dict[str, Any]]:
    """In the order in which they are offered."""
    return [*_folders(folder), *_shipped(), *_cached()]


def _shipped() -> Iterator[dict[str, Any]]:
    for preset in presets():
        ids = [alias for alias in preset.aliases if "/" in alias]
        yield {"name": preset.name, "parameters": preset.parameters, "from": "preset", "also": ids,
               "quantised": [*variants().get(preset.name, {})]}  # fmt: skip


def _cached() -> Iterator[dict[str, Any]]:
    """Hub ids whose config.json some download has left here."""
    from memfit.models.files import cache_folder

    known = {alias.lower() for preset in presets() for alias in preset.aliases}
    try:
        names = sorted(os.listdir(cache_folder()))
    except OSError:
        return
    for name in names[:MOST_LOOKED_AT]:
        found = CACHED.fullmatch(name)
        hub_id = "/".join(found.groups()) if found else ""
        if found and hub_id.lower() not in known and _has_config(hub_id):
            yield {"name": hub_id, "parameters": None, "from": "Hugging Face cache", "also": [], "quantised": []}


def _has_config(hub_id: str) -> bool:
    try:
        return resolve(hub_id).kind == "hub"
    except ValueError:
        return False


def _folders(folder: Path) -> Iterator[dict[str, Any]]:
    """Breadth first, so that what lies near is found among many; links are not followed."""
    todo, looked_at, found = [(folder, 0)], 0, 0
    while todo and looked_at < MOST_LOOKED_AT and found < MOST_FOLDERS:
        here, depth = todo.pop(0)
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue
        looked_at += len(entries)
        if here != folder and any(entry.name == "config.json" and entry.is_file() for entry in entries):
            found += 1
            name = f"{FOLDER}{here.relative_to(folder).as_posix()}"
            yield {"name": name, "parameters": None, "from": "folder", "also": [], "quantised": []}
        elif depth < DEEPEST:
            below = (entry for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[:1] not in "._")
            todo.extend((Path(entry.path), depth + 1) for entry in below if can_be_sent(entry.name))

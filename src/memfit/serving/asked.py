"""The views Explain and cards against models: `memfit explain`, and `memfit table` a few rows at a time."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from memfit.errors import UsageError
from memfit.fitting.table import GPUS, MODELS, WORKLOADS
from memfit.serving.known_models import find_model
from memfit.serving.planner import Asked, read_job, short_text

router = APIRouter()

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
    answer = await request.app.state.workers.ask("explain", about, lane="search", keep=False)
    return Response(answer.body, answer.status, media_type="application/json")


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
    answer = await request.app.state.workers.ask("table", about, lane="search")
    return Response(answer.body, answer.status, media_type="application/json")


def _names(what: str, asked: dict[str, Any]) -> list[str]:
    given = asked.get(what)
    if not isinstance(given, list) or not 0 < len(given) <= MOST:
        raise UsageError(f"{what}: a list of 1 to {MOST} names")
    return [short_text(what, name) or "" for name in given]

"""The view Explain: a text with an out-of-memory error in it, as `memfit explain` answers it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from memfit.errors import UsageError
from memfit.serving.planner import Asked, read_job, short_text

router = APIRouter()


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

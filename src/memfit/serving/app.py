"""The page's server as one app: a router for each view, the page's own files, and errors in memfit's words."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from memfit.errors import MemfitError
from memfit.render.html import MODULES, asset
from memfit.serving import planner, runs, viewer
from memfit.serving.readers import Readers
from memfit.serving.security import Guard, OutsidePath
from memfit.serving.server import ServeSettings
from memfit.serving.workers import Workers

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def make_app(settings: ServeSettings) -> FastAPI:
    """In `app.state`: the `settings`, `workers` that do what takes long, and `readers` of recordings."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=_with_workers)
    app.state.settings = settings
    app.state.workers = Workers()
    app.state.readers = Readers()
    for view in (planner, runs, viewer):
        app.include_router(view.router)
    app.add_api_route("/", _page)
    app.add_api_route("/assets/{name}", _file)
    app.add_exception_handler(MemfitError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(Guard, token=settings.token, port=settings.port, host=settings.host)
    return app


@asynccontextmanager
async def _with_workers(app: FastAPI) -> AsyncIterator[None]:
    app.state.workers.start()
    yield
    await end_workers(app)


async def end_workers(app: FastAPI) -> None:
    """Who waits for an answer then has one: that this ends."""
    await app.state.workers.stop()
    await app.state.readers.stop()


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, MemfitError):
        status = 403 if isinstance(error, OutsidePath) else 422
        return JSONResponse({"error": error.message, "hint": error.hint}, status)
    if isinstance(error, RequestValidationError):
        return JSONResponse({"error": "this is no question that can be read", "hint": "an object in JSON"}, 422)
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail), "hint": None}, error.status_code)


async def _bug(_: Request, error: Exception) -> Response:
    """The traceback goes to the terminal."""
    document = {"error": f"{type(error).__name__}: {error}", "hint": "this is a bug in memfit, please report it"}
    return JSONResponse(document, 500)


# -- the page's own files ----------------------------------------------------------------------------------------------


async def _page(request: Request) -> Response:
    return _asset("index.html", request)


async def _file(name: str, request: Request) -> Response:
    return _asset(name, request)


def _asset(name: str, request: Request) -> Response:
    try:
        content, tag = _content(name)
    except FileNotFoundError as error:
        raise HTTPException(404, "there is no such file") from error
    headers = {"cache-control": "no-cache", "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[name.rpartition(".")[2]])


SHARED = (*MODULES, "style.css")
"""Files of the page of a report: this one is made of the same."""


@cache
def _content(name: str) -> tuple[bytes, str]:
    own = {entry.name for entry in files(__package__).joinpath("assets").iterdir()}
    if name in SHARED:
        content = asset(name).encode()
    elif name in own and name.rpartition(".")[2] in TYPES:
        content = files(__package__).joinpath("assets", name).read_bytes()
    else:
        raise FileNotFoundError(name)
    return content, f'"{hashlib.sha256(content).hexdigest()[:20]}"'

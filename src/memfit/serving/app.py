"""`memfit serve`: the page as one app, served from a port until Ctrl-C: a router for each view, its own files, and
errors in memfit's words."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from memfit.errors import MemfitError, UsageError
from memfit.render.html import MODULES, asset
from memfit.serving import planner, viewer
from memfit.serving.security import Guard, OutsidePath, new_token
from memfit.serving.workers import Readers, Workers

PORT = 8642
GRACE_SECONDS = 1


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How the page is served: where, to whom, and which folder it may read."""

    dir: Path = Path()
    """Runs, snapshots and models are read from below this folder, and nothing else is."""
    host: str = "127.0.0.1"
    port: int = PORT
    token: str = field(default_factory=new_token)


def serve(settings: ServeSettings, on_ready: Callable[[str], None]) -> None:
    """Until somebody interrupts it. `on_ready` is told the address, once it answers there."""
    if not settings.dir.is_dir():
        raise UsageError(f"--dir {str(settings.dir)!r} is no folder", hint="a folder of runs, snapshots or models")
    with _taken(settings.host, settings.port) as taken:
        settings = replace(settings, port=taken.getsockname()[1])
        app = make_app(settings)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=GRACE_SECONDS, http=Connection,
        )  # fmt: skip

        failed: list[Exception] = []

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    try:
                        on_ready(address(settings))
                    except Exception as error:  # raised from here it would leave the workers behind
                        failed.append(error)
                        self.should_exit = True

            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                with _hangup_as(self.handle_exit), super().capture_signals():
                    yield

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                await end_workers(app)
                await super().shutdown(sockets)

        with suppress(KeyboardInterrupt):  # the usual way to end it
            Server(config).run(sockets=[taken])
        if failed:
            raise failed[0]


@contextmanager
def _hangup_as(end: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A terminal that is closed ends it as Ctrl-C does, which is all that uvicorn listens to; `nohup` ignores it."""
    hangup = getattr(signal, "SIGHUP", None)
    is_main = threading.current_thread() is threading.main_thread()
    if hangup is None or not is_main or signal.getsignal(hangup) == signal.SIG_IGN:
        yield
        return
    before = signal.signal(hangup, end)
    try:
        yield
    finally:
        signal.signal(hangup, before)


Protocol: Any = AutoHTTPProtocol


class Connection(Protocol):  # type: ignore[misc]
    """What is no HTTP is answered once, and its terminal has a line of it."""

    def send_400_response(self, msg: str) -> None:
        """A body may break after its question has begun, and uvicorn would let that be answered a second time."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()


def address(settings: ServeSettings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{settings.port}/?token={settings.token}"


def forwarding(port: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """The line that brings the port to the machine of a person who came here by SSH; None if nobody did."""
    connection = environment.get("SSH_CONNECTION", "").split()
    if len(connection) != 4:
        return None
    user = environment.get("USER") or environment.get("LOGNAME")
    there = connection[2] if user is None else f"{user}@{connection[2]}"
    other = "" if connection[3] == "22" else f" -p {connection[3]}"
    return f"ssh -N -L {port}:127.0.0.1:{port}{other} {there}"


def _taken(host: str, port: int) -> socket.socket:
    """Taken before anything is said of it, so that the port which is printed is the one that answers."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(found[0], socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host!r} is no address of this machine", hint="127.0.0.1, or 0.0.0.0") from error
    try:
        if os.name == "posix":
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(found[4])
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} is taken", hint="--port 0 takes any that is free") from error
        if error.errno == errno.EACCES:
            raise UsageError(f"port {port} may not be taken", hint="ports from 1024 on are anybody's") from error
        raise UsageError(f"--host {host!r}: {error.strerror or error}", hint="an address of this machine") from error
    return taken


TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def make_app(settings: ServeSettings) -> FastAPI:
    """In `app.state`: the `settings`, `workers` that do what takes long, and `readers` of recordings."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=_with_workers)
    app.state.settings = settings
    app.state.workers = Workers()
    app.state.readers = Readers()
    for router in (planner.router, viewer.runs, viewer.router):
        app.include_router(router)
    app.add_api_route("/", _page)
    app.add_api_route("/assets/{name}", _file)
    for refusal in (MemfitError, HTTPException, RequestValidationError):
        app.add_exception_handler(refusal, _refused)
    app.add_exception_handler(ClientDisconnect, _gone)
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


async def _gone(_: Request, error: Exception) -> Response:
    """Nobody reads it: who asked has left before the question was whole."""
    return Response(status_code=400)


async def _bug(_: Request, error: Exception) -> Response:
    """The traceback goes to the terminal."""
    document = {"error": f"{type(error).__name__}: {error}", "hint": "this is a bug in memfit, please report it"}
    return JSONResponse(document, 500)


# -- the page's own files ----------------------------------------------------------------------------------------------


async def _page(request: Request) -> Response:
    return await _file("index.html", request)


async def _file(name: str, request: Request) -> Response:
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

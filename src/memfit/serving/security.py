"""Who may ask this server, and for what: token, Host, Origin, the size of what is sent, paths inside one folder.

A page of somebody else can make a browser send requests to 127.0.0.1, directly or under a name of its own that it lets
point there. So every request must carry the token of the address that `memfit serve` printed (as a cookie, once that
address was opened), be sent to a host that is this machine, and come from this very page.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from functools import cache
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from memfit.errors import UsageError
from memfit.units import GiB, KiB, MiB, format_bytes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MOST_BYTES = {"/api/viewer/": GiB + 16 * MiB, "/api/explain": 8 * MiB}
MOST_OTHERWISE = 64 * KiB
"""What a request may send; uploads lie below `/api/viewer/`."""
NO_TOKEN = "this page needs the token of the address that `memfit serve` printed: open that address"


def new_token() -> str:
    return secrets.token_urlsafe(24)


LONGEST_NAME, LONGEST_PATH = 255, 3_000
"""Bytes. No file system has longer names, and looking for one is an error of its own."""


def can_be_sent(name: str) -> bool:
    """Names on disk are bytes, and not all of them are text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def inside(folder: Path, name: str) -> Path:
    """The one way from a name that a request gives to a path: below the folder, links followed, or refused."""
    if "\0" in name or name.startswith(("/", "\\", "~")) or Path(name).is_absolute():
        raise OutsidePath(name)
    root = folder.resolve()
    try:
        said = os.fsencode(name)
        if len(said) > LONGEST_PATH or max(map(len, said.split(b"/"))) > LONGEST_NAME:
            raise OutsidePath(name)
        found = (root / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise OutsidePath(name) from error
    if found != root and root not in found.parents:
        raise OutsidePath(name)
    return found


class OutsidePath(UsageError):
    """A name that leads out of the folder that is served."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name[:200]!r} is not inside the folder that is served", hint="memfit serve --dir FOLDER")


class Guard:
    """Around the whole app: what it lets through has been checked."""

    def __init__(self, app: ASGIApp, *, token: str, port: int, host: str = "127.0.0.1") -> None:
        self.app, self.token, self.host = app, token, host
        self.cookie = f"memfit-{port}"  # browsers share cookies between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        asked = _Asked(scope)
        answer = self._refused(asked) or self._with_token(asked)
        if answer is not None:
            await answer(scope, receive, _with_headers(send))
            return
        await self.app(scope, _bounded(receive, asked.path), _with_headers(send))

    def _refused(self, asked: _Asked) -> Response | None:
        if not is_this_machine(asked.host, self.host):
            return _error(421, "this server answers only under the address that it printed")
        origin = asked.header("origin")
        if origin is not None and origin != f"http://{asked.host}":
            return _error(403, "requests of other pages are refused")
        if asked.header("sec-fetch-site") in ("cross-site", "same-site") and not asked.opens_page:
            return _error(403, "requests of other pages are refused")
        length = asked.header("content-length") or "0"
        if not length.isascii() or not length.isdigit():
            return _error(400, "Content-Length is not a number")
        if int(length) > _most_bytes(asked.path):
            return _error(413, _too_large(asked.path))
        return None

    def _with_token(self, asked: _Asked) -> Response | None:
        """None lets it through."""
        given = asked.query.get("token")
        if asked.method == "GET" and asked.path == "/" and given is not None:
            if not self._is_token(given[-1]):
                return PlainTextResponse(f"wrong token: {NO_TOKEN}\n", 401)
            rest = urlencode({name: values for name, values in asked.query.items() if name != "token"}, doseq=True)
            opened = RedirectResponse(f"/?{rest}" if rest else "/", 303)
            opened.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return opened
        if self._is_token(asked.cookie(self.cookie)) or self._is_token(asked.bearer):
            return None
        return PlainTextResponse(f"{NO_TOKEN}\n", 401) if asked.path == "/" else _error(401, NO_TOKEN)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


class _Asked:
    """A request, as far as the guard reads it."""

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: dict[bytes, bytes] = {}
        self.doubled = False
        for name, value in scope["headers"]:
            self.doubled |= name in (b"host", b"origin") and name in self._headers
            self._headers[name] = value
        self.query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=200)

    def header(self, name: str) -> str | None:
        value = self._headers.get(name.encode())
        return None if value is None else value.decode("latin-1").strip()

    @property
    def host(self) -> str:
        return "" if self.doubled else (self.header("host") or "").lower()

    @property
    def bearer(self) -> str:
        kind, _, token = (self.header("authorization") or "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""

    @property
    def opens_page(self) -> bool:
        """A link that a person follows may come from anywhere."""
        return self.method == "GET" and self.path == "/" and self.header("sec-fetch-mode") in (None, "navigate")

    def cookie(self, name: str) -> str:
        try:
            found = SimpleCookie(self.header("cookie") or "").get(name)
        except CookieError:
            return ""
        return "" if found is None else found.value


def _bounded(receive: Receive, path: str) -> Receive:
    """A body that says nothing of its length, or not the truth, is counted as it comes."""
    read, most = 0, _most_bytes(path)

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > most:
            raise HTTPException(413, _too_large(path))
        return message

    return counted


def is_this_machine(host: str, bound: str) -> bool:
    """A name that only this machine goes by; any port, for a forwarded one (`ssh -L`) differs."""
    name = _without_port(host)
    if name in ("localhost", "127.0.0.1", "::1"):
        return True
    if _is_loopback(bound):
        return False
    if name == bound.lower() or name in _own_names():
        return True
    return _is_address(name) and ipaddress.ip_address(bound).is_unspecified if _is_address(bound) else False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


@cache
def _own_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset((name, name.partition(".")[0]))


def _most_bytes(path: str) -> int:
    return next((most for prefix, most in MOST_BYTES.items() if path.startswith(prefix)), MOST_OTHERWISE)


def _too_large(path: str) -> str:
    return f"at most {format_bytes(_most_bytes(path))} may be sent here"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message, "hint": None}, status)


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message["headers"]}
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in there]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sent

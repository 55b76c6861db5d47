"""The Hugging Face Hub on this machine: a server of its files and lists, and its cache as it lies on a disk."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """`root/models/ORG/NAME/...` and `root/datasets/ORG/NAME/...`; `asked` has every file that was read of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self.endpoint = ""

    def put(self, kind: str, repo: str, name: str, content: bytes) -> None:
        path = self.root / kind / repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def files(self, kind: str, repo: str) -> list[Path]:
        return sorted(path for path in (self.root / kind / repo).rglob("*") if path.is_file())


@contextmanager
def serving(root: Path) -> Iterator[LocalHub]:
    hub = LocalHub(root)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            if parts[0] == "api":
                kind, repo, what = parts[1], "/".join(parts[2:4]), parts[4] if len(parts) > 4 else "revision"
                self._list(kind, repo, what)
            else:
                kind = parts.pop(0) if parts[0] == "datasets" else "models"
                self._file(kind, "/".join(parts[:2]), "/".join(parts[4:]))

        def _list(self, kind: str, repo: str, what: str) -> None:
            where = hub.root / kind / repo
            found = [(str(path.relative_to(where)), path.stat().st_size) for path in hub.files(kind, repo)]
            if not found:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif what == "tree":
                tree = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in found]
                self._send(200, json.dumps(tree).encode())
            else:
                siblings = [{"rfilename": name, "size": size} for name, size in found]
                about = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
                self._send(200, json.dumps(about).encode())

        def _file(self, kind: str, repo: str, name: str) -> None:
            path = hub.root / kind / repo / name
            if not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                return
            content = path.read_bytes()
            if self.command == "GET":
                hub.asked.append(f"{repo}/{name}")
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self._send(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def put_into_cache(cache: Path, kind: str, repo: str, name: str, content: bytes) -> Path:
    """A file as `huggingface_hub` leaves it: its content under its hash, a link to it under its name and commit."""
    folder = cache / f"{kind}--{repo.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    link = folder / "snapshots" / COMMIT / name
    for parent in (blob.parent, link.parent, folder / "refs"):
        parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    blob.write_bytes(content)
    link.symlink_to(blob)
    return link

"""What the viewer's server answers: files of one folder, uploads within bounds, and plain words for everything else."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("fastapi", reason="memfit[web] is not installed")
from starlette.testclient import TestClient
from support.warm_python import warm_python

from memfit.serving import viewer
from memfit.serving.app import ServeSettings, make_app

DATA = Path(__file__).parents[1] / "data"
HOSTILE = "<img src=x onerror=alert(1)>.pickle"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    inside = root / "inside"
    (inside / "deep" / "er").mkdir(parents=True)
    (inside / ".kept").mkdir()
    hidden = (".snap.pickle", ".kept/snap.pickle")
    for name in ("snap.pickle", HOSTILE, "two\nlines.pickle", "schön ✓.pickle", "deep/er/snap-oom.pickle", *hidden):
        (inside / name).write_bytes((DATA / "snap-oom.pickle").read_bytes())
    (inside / "settings.json").write_text('{"no": "snapshot"}')
    (root / "secret.pickle").write_bytes((DATA / "snap-oom.pickle").read_bytes())
    (inside / "link.pickle").symlink_to(root / "secret.pickle")
    (inside / "way").symlink_to(root)
    return inside


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    app = make_app(ServeSettings(dir=folder, port=1, token="t"))
    with (
        mock.patch("sys.executable", warm_python()),
        TestClient(app, base_url="http://127.0.0.1:1", headers={"authorization": "Bearer t"}) as made,
    ):
        yield made


def opened(client: TestClient, answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    key, state = answer.json()["key"], answer.json()
    for _ in range(2400):  # two minutes, on a busy machine
        if state["state"] != "reading":
            break
        time.sleep(0.05)
        state = client.get(f"/api/viewer/{key}/state").json()
    return {**state, "key": key}


def test_recordings_below_the_folder_are_listed_and_nothing_else(client: TestClient) -> None:
    names = {each["path"] for each in client.get("/api/viewer/files").json()["files"]}

    assert names == {"snap.pickle", HOSTILE, "two\nlines.pickle", "schön ✓.pickle", "deep/er/snap-oom.pickle"}


@pytest.mark.parametrize(
    "name", ["../secret.pickle", "link.pickle", "way/secret.pickle", "/etc/passwd", "deep/../../secret.pickle", "\0"]
)
def test_no_path_leads_out_of_the_folder(client: TestClient, name: str) -> None:
    answer = client.post("/api/viewer/open", json={"path": name})

    assert answer.status_code == 403
    assert "not inside the folder" in answer.json()["error"]


def test_a_file_is_read_once_and_asked_many_times(client: TestClient) -> None:
    state = opened(client, client.post("/api/viewer/open", json={"path": "deep/er/snap-oom.pickle"}))
    assert (state["state"], state["title"]) == ("ready", "deep/er/snap-oom.pickle")

    page = client.post(f"/api/viewer/{state['key']}/page").json()
    assert page["report"]["source"]["path"] == "deep/er/snap-oom.pickle"
    assert page["report"]["ooms"]
    sums = client.post(f"/api/viewer/{state['key']}/sums", json={"axis": "event"}).json()
    assert sums["peak"]["allocated_bytes"] == page["report"]["peak"]["allocated_bytes"]
    again = client.post("/api/viewer/open", json={"path": "deep/er/snap-oom.pickle"}).json()
    assert (again["key"], again["state"]) == (state["key"], "ready")


@pytest.mark.parametrize("name", [HOSTILE, "two\nlines.pickle", "schön ✓.pickle"])
def test_a_strange_name_is_no_hindrance(client: TestClient, name: str) -> None:
    state = opened(client, client.post("/api/viewer/open", json={"path": name}))

    assert state["state"] == "ready"
    assert "\n" not in state["title"]


def test_an_upload_is_read_and_its_file_deleted(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(Path(tempfile.gettempdir()).glob("memfit-*"))
    body = (DATA / "snap-oom.pickle").read_bytes()
    state = opened(client, client.post("/api/viewer/upload", params={"name": "../../<b>"}, content=body))

    assert (state["state"], state["title"]) == ("ready", "../../<b>")
    assert {path for path in Path(tempfile.gettempdir()).glob("memfit-*") if path.is_file()} <= before
    assert client.post(f"/api/viewer/{state['key']}/close").status_code == 200
    assert client.post(f"/api/viewer/{state['key']}/page").status_code == 410


def test_what_is_still_being_read_goes_when_the_server_ends(folder: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob("memfit-*"))
    app = make_app(ServeSettings(dir=folder, port=1, token="t"))
    with TestClient(app, base_url="http://127.0.0.1:1", headers={"authorization": "Bearer t"}) as client:
        body = (DATA / "snap-oom.pickle").read_bytes()
        key = client.post("/api/viewer/upload", content=body).json()["key"]
        reader = app.state.readers.find(key)

    assert reader._process is None or reader._process.returncode is not None
    assert {path for path in Path(tempfile.gettempdir()).glob("memfit-*") if path.is_file()} <= before


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/memfit-was-here",)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"hello", "neither a pickle"),
        (pickle.dumps(Evil()), "asks Python to import"),
        (pickle.dumps({"segments": 5}), "segments"),
        (b"\x80\x04\x95", "middle of a value"),
        (b"PK\x03\x04 not a whole zip", "its end is missing"),
    ],
)
def test_junk_is_refused_in_plain_words_under_its_own_name(client: TestClient, body: bytes, words: str) -> None:
    state = opened(client, client.post("/api/viewer/upload", params={"name": "junk"}, content=body))

    assert state["state"] == "refused"
    assert words in state["error"] and "'junk'" in state["error"]
    assert tempfile.gettempdir() not in state["error"]
    assert client.post(f"/api/viewer/{state['key']}/page").status_code == 422
    assert not Path("/tmp/memfit-was-here").exists()


def test_an_upload_beyond_the_limit_is_413_and_leaves_nothing(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(Path(tempfile.gettempdir()).glob("memfit-*"))
    monkeypatch.setattr(viewer, "MOST_UPLOAD_BYTES", 1 << 20)

    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 16)

    answer = client.post("/api/viewer/upload", content=endless())

    assert (answer.status_code, "at most" in answer.json()["error"]) == (413, True)
    assert set(Path(tempfile.gettempdir()).glob("memfit-*")) <= before
    assert client.post("/api/viewer/upload", content=b"").status_code == 400


def test_an_upload_that_says_it_is_larger_is_refused_before_it_is_read(client: TestClient) -> None:
    assert client.post("/api/viewer/upload", headers={"content-length": str(2 << 30)}, content=b"").status_code == 413


@pytest.mark.parametrize(("body", "status"), [(b"[1]", 400), (b"{", 400), (b"[" * 9000, 400), (b"x" * 99_999, 413)])
def test_a_question_that_is_none_is_refused(client: TestClient, body: bytes, status: int) -> None:
    assert client.post("/api/viewer/open", content=body).status_code == status


def test_few_files_stay_open_and_the_oldest_goes_first(client: TestClient) -> None:
    body = (DATA / "snap-oom.pickle").read_bytes()
    keys = [opened(client, client.post("/api/viewer/upload", content=body))["key"] for _ in range(4)]

    states = [client.get(f"/api/viewer/{key}/state").status_code for key in keys]
    assert states == [410, 200, 200, 200]


def test_a_folder_with_too_many_files_is_listed_in_part_and_that_is_said(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "MAX_ENTRIES", 2)

    assert client.get("/api/viewer/files").json()["more"]

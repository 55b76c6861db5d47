"""Who is let in: the token, the names of this machine, this page alone, bounded bodies, one folder."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="memfit[web] is not installed")
import httpx
from recorded_page import served

from memfit.serving.security import MOST_OTHERWISE, Guard, OutsidePath, inside, is_this_machine
from memfit.serving.viewer import look_below

WITH_TOKEN = {"authorization": "Bearer t"}
JOB = {"job": {"kind": "train", "model": "gpt2"}}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("outer") / "served"
    folder.mkdir()
    (folder.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "link").symlink_to(folder.parent)
    with served(folder) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, headers=WITH_TOKEN, timeout=300) as client:
        yield client


def host_of(address: str) -> str:
    return urlsplit(address).netloc


# -- the token ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/assets/shell.js", "/api/planner", "/api/models", "/nowhere"])
def test_without_the_token_nothing_is_told(address: str, path: str) -> None:
    assert httpx.get(f"{address.rstrip('/')}{path}", timeout=300).status_code == 401


@pytest.mark.parametrize("token", ["", "x", "tt", "t\u00e9"])
def test_a_wrong_token_opens_nothing(address: str, token: str) -> None:
    answer = httpx.get(address, params={"token": token}, timeout=300)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_the_token_of_the_address_becomes_a_cookie_that_no_script_reads_and_the_address_is_clean(address: str) -> None:
    answer = httpx.get(address, params={"token": "t"}, timeout=300)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    with httpx.Client(base_url=address, cookies=answer.cookies, timeout=300) as client:
        assert client.get("/").status_code == 200


def test_every_answer_forbids_what_the_page_does_not_need(client: httpx.Client, address: str) -> None:
    for answer in (client.get("/"), client.get("/assets/shell.js"), httpx.get(address), client.get("/nowhere")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_has_nothing_inline_and_names_no_other_host(client: httpx.Client) -> None:
    page = client.get("/").text
    assert "<style" not in page and "style=" not in page and " on" not in page.replace(" only", "")
    assert page.count("<script") == page.count('<script type="module" src="/assets/')
    assert "http" not in page


# -- other pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "192.168.0.7", ""])
def test_a_name_that_somebody_lets_point_here_is_refused(client: httpx.Client, host: str) -> None:
    assert client.get("/api/planner", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("second", [b"evil.example", b"127.0.0.1"])
def test_two_names_of_a_host_are_none(second: bytes) -> None:
    """Who reads the first and who reads the last would not agree. Not every server refuses it before this."""
    headers = [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer t"), (b"host", second)]
    scope: Any = {"type": "http", "method": "GET", "path": "/api/models", "query_string": b"", "headers": headers}
    sent: list[Any] = []

    async def ask() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        app: Any = None
        await Guard(app, token="t", port=1)(scope, app, send)

    asyncio.run(ask())
    assert sent[0]["status"] == 421


def test_a_forwarded_port_is_answered(client: httpx.Client) -> None:
    assert client.get("/api/planner", headers={"host": "localhost:9999"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"])
def test_a_post_of_another_page_is_refused(client: httpx.Client, origin: str) -> None:
    assert client.post("/api/plan", json=JOB, headers={"origin": origin}).status_code == 403


def test_a_page_on_another_port_of_this_machine_is_another_page(client: httpx.Client) -> None:
    for site in ("same-site", "cross-site"):
        assert client.get("/api/planner", headers={"sec-fetch-site": site}).status_code == 403


def test_a_link_to_the_page_may_stand_anywhere(address: str, client: httpx.Client) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200
    assert client.get("/", headers={**headers, "sec-fetch-mode": "no-cors"}).status_code == 403


def test_the_page_itself_may_ask(client: httpx.Client, address: str) -> None:
    headers = {"origin": f"http://{host_of(address)}", "sec-fetch-site": "same-origin"}
    assert client.post("/api/plan", json={"job": {}}, headers=headers).status_code == 422


@pytest.mark.parametrize(
    ("bound", "host", "is_let_in"),
    [
        ("127.0.0.1", "localhost:1", True),
        ("127.0.0.1", "[::1]:1", True),
        ("127.0.0.1", "10.0.0.1:8642", False),
        ("0.0.0.0", "10.0.0.1:8642", True),
        ("0.0.0.0", "evil.example", False),
        ("10.0.0.1", "10.0.0.1:8642", True),
        ("10.0.0.1", "10.0.0.2:8642", False),
    ],
)
def test_which_names_are_this_machine(bound: str, host: str, is_let_in: bool) -> None:
    assert is_this_machine(host, bound) is is_let_in


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_refused_before_it_is_read(client: httpx.Client) -> None:
    answer = client.post("/api/plan", content=b" " * (MOST_OTHERWISE + 1), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "64.00 KiB" in answer.json()["error"]


def test_a_body_that_says_no_length_is_counted(client: httpx.Client) -> None:
    pieces = (b" " * 4096 for _ in range(MOST_OTHERWISE // 4096 + 2))
    assert client.post("/api/plan", content=pieces, headers={"content-type": "application/json"}).status_code == 413


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"nul", b"{}", b'{"job": []}', b'{"job": {}}', b"\xff"])
def test_a_body_that_is_no_question_is_an_error_in_words(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/api/plan", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == (400 if body == b"\xff" else 422)
    assert answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"job": {"kind": "train", "model": "gpt2", "batch_size": 1, "batch_size": 64}}', "stands in it twice"),
        ('{"job": {"kind": "train", "model": "gpt2"}, "job": {}}', "stands in it twice"),
        ('{"job": {"kind": "train", "model": "gpt2", "batch_size": null}}', "--batch-size None is not a whole number"),
        ('{"job": {"kind": "train", "model": "gpt2", "weight_decay": NaN}}', "NaN is not a number"),
    ],
)
def test_what_plan_batch_refuses_is_refused_here(client: httpx.Client, body: str, said: str) -> None:
    answer = client.post("/api/plan", content=body, headers={"content-type": "application/json"}, timeout=120)
    assert (answer.status_code, said in answer.json()["error"]) == (422, True), answer.text


@pytest.mark.parametrize("job", [
    {"kind": "train", "model": "gpt2", "adapter_config": "/etc/passwd"},
    {"kind": "prune", "model": "gpt2", "dataset": "/etc/passwd"},
    {"kind": "train", "model": "gpt2", "trust_remote_code": True},
    {"kind": "train", "model": "gpt2", "alloc_conf": "x" * 1000},
    {"kind": "train", "model": "gpt2", "target_modules": [{}]},
])  # fmt: skip
def test_a_setting_that_names_a_file_or_is_no_plain_value_is_refused(client: httpx.Client, job: object) -> None:
    assert client.post("/api/plan", json={"job": job}).status_code == 422


# -- which files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [
    "os:getcwd", "memfit.models.gsa:GsaConfig", "/etc", "../x", "~/x", "..", ".", "a/../../b", "a\0b", "C:\\x",
    "http://evil.example/x",
])  # fmt: skip
def test_no_model_is_code_or_a_path_elsewhere(client: httpx.Client, model: str) -> None:
    answer = client.post("/api/plan", json={"job": {"kind": "forward", "model": model}})
    assert answer.status_code == 422
    assert "neither a preset nor a hub id" in answer.json()["error"]


@pytest.mark.parametrize("model", ["./", "./..", "./../outer", "./link", "./link/..", ".//etc", "./a/../../.."])
def test_no_folder_lies_outside_the_one_that_is_served(client: httpx.Client, model: str) -> None:
    answer = client.post("/api/plan", json={"job": {"kind": "forward", "model": model}})
    assert answer.status_code == 403
    assert "inside the folder" in answer.json()["error"]


@pytest.mark.parametrize(
    "name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "app.py", "page.html", "nothing.js", "__init__.py"]
)
def test_only_the_page_s_own_files_are_served(client: httpx.Client, name: str) -> None:
    assert client.get(f"/assets/{name}").status_code == 404


def test_a_name_leads_into_the_folder_or_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert inside(tmp_path, "a/b") == (tmp_path / "a" / "b").resolve()
    assert inside(tmp_path, "a/..") == tmp_path.resolve()
    for name in ("..", "/etc/passwd", "a/../..", "~", "\\x", "a\0"):
        with pytest.raises(OutsidePath):
            inside(tmp_path, name)


def test_names_on_disk_that_are_no_text_hide_nothing_else(tmp_path: Path) -> None:
    for folder in (b"run", b"raw\xff"):
        place = os.fsencode(tmp_path) + b"/" + folder
        try:
            os.mkdir(place)
        except OSError:
            pytest.skip("this file system has text for names")
        for name, text in ((b"memory_log.csv", b""), (b"config.json", b"{}")):
            with open(place + b"/" + name, "wb") as stream:
                stream.write(text)
    with served(tmp_path) as address, httpx.Client(base_url=address, headers=WITH_TOKEN, timeout=300) as client:
        runs, models = client.get("/api/runs"), client.get("/api/models")
    assert (runs.status_code, models.status_code) == (200, 200)
    assert runs.json()["more"] is True
    assert [each["name"] for each in models.json()["models"] if each["from"] == "folder"] == ["./run"]


def test_a_folder_whose_name_is_no_text_and_that_holds_no_run_is_not_more(tmp_path: Path) -> None:
    place = os.fsencode(tmp_path) + b"/raw\xff"
    try:
        os.mkdir(place)
    except OSError:
        pytest.skip("this file system has text for names")
    for name in (b"notes.txt", b"config.json"):
        with open(place + b"/" + name, "wb") as stream:
            stream.write(b"{}")
    assert look_below(tmp_path).more is False

    with open(place + b"/snapshot.json", "wb") as stream:
        stream.write(b'{"segments": []}')
    assert look_below(tmp_path).more is True


@pytest.mark.parametrize("name", ["x" * 5_000, "a/" * 3_000, "x" * 300])
def test_a_name_that_no_file_can_have_is_refused_and_nothing_fails(client: httpx.Client, name: str) -> None:
    assert client.post("/api/viewer/open", json={"path": name}).status_code == 403
    assert client.get("/api/runs/run", params={"name": name}).status_code == 403

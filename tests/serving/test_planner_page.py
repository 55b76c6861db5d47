"""The planner in a real browser, and its answers: documents as on the command line, one trace for many clients."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="memfit[web] is not installed")
pytest.importorskip("playwright", reason="playwright is not installed: no browser to open pages with")
import httpx
from playwright.sync_api import Browser, sync_playwright
from recorded_page import CHROMIUM, Looked, look, served
from support.quick import quick

from memfit.fitting.levers import levers_for
from memfit.jobs.settings import KINDS
from memfit.jobs.workload import Workload, settings_of
from memfit.planning.predict import predict
from memfit.serving.planned import switches

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
JOB = {"kind": "train", "model": "gpt2", "batch_size": 8, "seq_len": 512}
CARD = "8GB"
PLACE = f"planner?kind=train&model=gpt2&batch_size=8&seq_len=512&gpu={CARD}"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 23.52 GiB "
    "of which 512.00 MiB is free. Process 1 has 23.02 GiB memory in use. Of the allocated memory 21.50 GiB is "
    "allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
HEAT = "cards?models=gpt2&gpus=8GB,24GB&workload=train&seq_len=512"
SLOW = 180_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "mine" / "tiny").mkdir(parents=True)
    (folder / "mine" / "tiny" / "config.json").write_text(json.dumps(tiny))
    return folder


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    before = os.environ["MEMFIT_CACHE"]
    os.environ["MEMFIT_CACHE"] = str(tmp_path_factory.mktemp("traces"))  # both processes trace
    try:
        with served(folder) as address:
            yield address
    finally:
        os.environ["MEMFIT_CACHE"] = before


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def planner(browser: Browser, address: str) -> Looked:
    looked = look(browser, address)
    looked.view(PLACE)
    looked.page.wait_for_selector("#verdict", timeout=SLOW)
    return looked


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, headers={"authorization": "Bearer t"}, timeout=SLOW / 1000) as client:
        yield client


def planned(looked: Looked, do: Any) -> str:
    """What the verdict says once the plan that this asks for is there."""
    count = "Number(document.documentElement.dataset.planned || 0)"
    before = looked.page.evaluate(f"() => {count}")
    do()
    end = time.monotonic() + SLOW / 1000
    while looked.page.evaluate(f"() => {count}") == before or looked.page.query_selector(".results.stale"):
        assert time.monotonic() < end
        time.sleep(0.02)
    return looked.page.inner_text("#verdict-line")


def slide(looked: Looked, name: str, key: str) -> str:
    slider = looked.page.locator(f"input[type=range][data-setting={name}]")
    return planned(looked, lambda: slider.press(key))


def no_sideways(looked: Looked) -> bool:
    return bool(looked.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"))


def nothing_cut(looked: Looked, section: str) -> bool:
    wide = "(table) => table.scrollWidth <= table.parentElement.clientWidth"
    return bool(looked.page.eval_on_selector(f"#{section} table", wide))


# -- its answers -------------------------------------------------------------------------------------------------------


def test_a_plan_is_the_document_of_the_command_line(client: httpx.Client) -> None:
    answer = client.post("/api/plan", json={"job": JOB, "gpu": CARD}).json()
    told, expected = answer["plan"], predict(Workload.from_mapping(JOB), gpu=CARD, trace_cache=False).to_json()
    for each in (told, expected):
        each.pop("seconds"), each.pop("how")
        each["notes"] = [note for note in each["notes"] if "of 12 blocks" not in note]
    assert told == expected
    assert answer["verdict"].startswith("tight: 6.93 GiB of")
    assert answer["copies"]["command"] == "memfit plan train --model gpt2 --batch-size 8 --seq-len 512 --gpu 8GB"
    assert "memory:\n  gpu: 8 GB\n" in answer["copies"]["yaml"]
    said = "# memfit train drops the model's outputs"
    assert said in answer["copies"]["yaml"]
    dropped = client.post("/api/plan", json={"job": {**JOB, "outputs": "dropped"}, "gpu": CARD}).json()
    assert said not in dropped["copies"]["yaml"]


def test_what_is_copied_as_python_is_the_same_plan(client: httpx.Client) -> None:
    answer = client.post("/api/plan", json={"job": JOB, "gpu": CARD}).json()
    called: list[dict[str, Any]] = []
    code = answer["copies"]["python"].replace("import memfit\n", "").replace("print(plan)", "")
    exec(code, {"memfit": type("memfit", (), {"predict": staticmethod(lambda **given: called.append(given))})})
    assert called == [{**JOB, "gpu": CARD}]


def test_the_page_offers_every_setting_of_every_kind_but_those_that_name_files(client: httpx.Client) -> None:
    options = client.get("/api/planner").json()
    fields = {field.name for field in dataclasses.fields(Workload)} - {"kind"}
    assert set(options["settings"]) == fields
    assert all(setting["help"] for setting in options["settings"].values())
    for kind in KINDS:
        assert set(options["of_kind"][kind]) == {*settings_of(kind)} - {"model", "adapter_config", "dataset"}


def test_every_lever_of_the_job_is_a_switch(client: httpx.Client) -> None:
    switches = client.post("/api/plan", json={"job": JOB, "gpu": CARD}).json()["levers"]
    assert {switch["name"] for switch in switches} >= {lever.name for lever in levers_for(Workload.from_mapping(JOB))}
    assert not any(switch["on"] for switch in switches)
    job = {**JOB, "grad_checkpointing": True, "offload": ["optimizer"]}
    switches = client.post("/api/plan", json={"job": job, "gpu": CARD}).json()["levers"]
    assert {switch["name"] for switch in switches if switch["on"]} == {"checkpointing", "optimizer on the host"}


@pytest.mark.parametrize(
    ("job", "on", "not_offered"),
    [
        ({"kind": "qlora"}, {"checkpointing"},
         {"selective checkpointing", "optimizer on the host", "weights on the host", "4-bit weights", "8-bit weights"}),
        ({"kind": "lora", "quant": "nf4", "double_quant": True}, {"4-bit weights"}, {"weights on the host"}),
        ({"kind": "lora", "quant": "nf4", "kbit_prepare": False}, {"4-bit weights", "no kbit preparation"}, set()),
        ({"kind": "lora", "offload": ["weights"]}, {"weights on the host"}, {"4-bit weights", "8-bit weights"}),
        ({"kind": "train", "optimizer": "paged-adamw"}, set(), {"optimizer on the host"}),
    ],
    ids=["qlora", "lora of a quantised model", "lora that is not prepared", "lora from the host", "paged optimizer"],
)  # fmt: skip
def test_a_switch_is_offered_where_there_is_a_job_with_it(
    job: dict[str, Any], on: set[str], not_offered: set[str]
) -> None:
    offered = {each["name"]: each for each in switches({"model": "gpt2", "seq_len": 64, **job})}
    assert {name for name, each in offered.items() if each["on"]} == on
    assert not not_offered & {*offered}
    for each in offered.values():
        if each["group"] in ("allocator", "rank", "offload activations") and not each["on"]:
            Workload.from_mapping({"model": "gpt2", "seq_len": 64, **job, **each["settings"]})


def test_a_folder_below_the_one_that_is_served_is_a_model(client: httpx.Client) -> None:
    listed = client.get("/api/models").json()["models"]
    assert listed[0]["name"] == "./mine/tiny"
    assert any("openai-community/gpt2" in model["also"] for model in listed)
    answer = client.post("/api/plan", json={"job": {"kind": "forward", "model": "./mine/tiny", "seq_len": 64}})
    assert answer.json()["plan"]["verdict"] is None
    assert answer.json()["plan"]["model"]["name"] == "tiny"


def test_what_is_wrong_with_a_job_is_said_as_on_the_command_line(client: httpx.Client) -> None:
    answer = client.post("/api/plan", json={"job": {**JOB, "seq_len": 2048}, "gpu": CARD})
    assert answer.status_code == 422
    assert answer.json()["error"] == "--seq-len 2048 is more than the 1024 positions that gpt2 has"
    answer = client.post("/api/plan", json={"job": {**JOB, "model": "gtp2"}, "gpu": CARD})
    assert "did you mean 'gpt2'" in answer.json()["hint"]


def test_the_picture_is_bounded(client: httpx.Client) -> None:
    answer = client.post("/api/plan/timeline", json={"job": JOB, "gpu": CARD})
    assert answer.json()["samples"]["count"] <= 2000
    assert answer.json()["blocks"]["count"] <= 2000
    assert len(answer.content) < 500_000


def test_many_clients_of_one_job_get_one_trace_at_once_and_without_an_error(address: str, client: httpx.Client) -> None:
    """50 clients for a second; `benchmarks/serve.py` does it for a minute, and looks at times and memory."""
    question = {"job": {**JOB, "seq_len": 256}, "gpu": CARD}
    answers: list[tuple[int, bytes]] = []

    async def ask(own: httpx.AsyncClient, number: int, end: float) -> None:
        while True:
            answer = await own.post("/api/plan", json={**question, "client": f"{number}"})
            answers.append((answer.status_code, answer.content))
            if time.monotonic() > end:
                return

    async def load() -> None:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(
            base_url=address, headers={"authorization": "Bearer t"}, timeout=300, limits=limits
        ) as own:
            await asyncio.gather(*(ask(own, number, time.monotonic() + 1) for number in range(50)))

    asyncio.run(load())
    assert len(answers) >= 50
    assert len(set(answers)) == 1 and answers[0][0] == 200


def test_an_explanation_is_that_of_the_command_and_no_text_is_a_path(client: httpx.Client, folder: Path) -> None:
    told = client.post("/api/explain", json={"text": OOM}).json()
    assert told["schema"] == "memfit.explain/1"
    assert told["message"]["sizes"]["requested"]["text"] == "1.16 GiB"
    log = folder / "train.log"
    log.write_text(OOM)
    told = client.post("/api/explain", json={"text": str(log)}).json()
    assert told["cause"]["kind"] == "none"
    assert client.post("/api/explain", json={"text": "  "}).status_code == 422


# -- in the browser ----------------------------------------------------------------------------------------------------


@needs_browser
def test_the_planner_opens_with_its_verdict_and_the_picture(planner: Looked) -> None:
    page = planner.page
    assert page.inner_text("#verdict-line").startswith("tight: 6.93 GiB of")
    assert "predicted: extended from 4 of 12 blocks" in page.inner_text("#verdict")
    page.wait_for_selector("#timeline canvas.main", timeout=SLOW)
    assert planner.drawing()["drawn"] > 10
    assert page.locator("#phases tbody tr").count() == 10
    assert "transformer.wte" in page.inner_text("#largest")
    assert planner.complaints == []


@needs_browser
def test_a_slider_changes_the_picture_and_the_address_and_a_link_brings_it_back(
    planner: Looked, browser: Browser
) -> None:
    before = planner.page.inner_text("#verdict-line")
    after = slide(planner, "batch_size", "ArrowLeft")
    assert after != before and "batch_size=6" in planner.page.url
    other = look(browser, planner.address)
    other.view(planner.page.url.partition("#")[2])
    other.page.wait_for_selector("#verdict", timeout=SLOW)
    assert other.page.inner_text("#verdict-line") == after
    assert other.page.locator("input[type=range][data-setting=batch_size]").get_attribute("aria-valuetext") == "6"
    other.page.close()
    assert slide(planner, "batch_size", "ArrowRight") == before
    exactly = planner.page.locator("input[aria-label='batch, exactly']")
    exactly.fill("2.6")
    planned(planner, lambda: exactly.press("Enter"))
    assert exactly.input_value() == "3" and "batch_size=3" in planner.page.url


@needs_browser
def test_a_change_that_makes_it_fit_is_applied_beside_the_pinned_one(planner: Looked) -> None:
    page = planner.page
    planner.view(PLACE)
    page.wait_for_selector("#fit", timeout=SLOW)
    page.click("#pin")
    assert page.inner_text("#comparison").count("same") >= 3
    said = planned(planner, lambda: page.click("#fit button[data-change='outputs dropped']"))
    assert said.startswith("safe:")
    assert "outputs=dropped" in page.url and "pin=" in page.url
    compared = page.inner_text("#comparison")
    assert "kept" in compared and "dropped" in compared and "\u2212" in compared
    assert page.locator(".track").count() == 2
    assert page.locator(".levers input[data-name='outputs dropped']").is_checked()
    page.click("#unpin")
    assert page.query_selector("#comparison") is None and "pin=" not in page.url


@needs_browser
def test_all_of_it_can_be_done_with_the_keyboard(planner: Looked) -> None:
    page = planner.page
    planner.view(PLACE)
    page.wait_for_selector("#verdict", timeout=SLOW)
    page.focus("input[role=combobox] >> nth=1")
    page.keyboard.type("H200")
    page.keyboard.press("ArrowDown")
    said = planned(planner, lambda: page.keyboard.press("Enter"))
    assert said.startswith("safe:") and "gpu=H200" in page.url
    page.focus(".levers input[data-name='checkpointing']")
    less = planned(planner, lambda: page.keyboard.press("Space"))
    assert less != said and "grad_checkpointing=true" in page.url
    assert page.evaluate("() => document.activeElement.dataset.name") == "checkpointing"
    assert planned(planner, lambda: page.keyboard.press("Space")) == said


@needs_browser
def test_a_switch_that_is_pulled_twice_leaves_the_job_as_it_was(planner: Looked) -> None:
    planner.view("planner?kind=qlora&model=.%2Fmine%2Ftiny&gpu=8GB&seq_len=64")
    planner.page.wait_for_selector("#verdict-line >> text=safe", timeout=SLOW)
    before = planner.page.url
    for name, said in (("fused optimizer", "optimizer=adamw-fused"), ("checkpointing", "grad_checkpointing=false")):
        switch = planner.page.locator(f".levers input[data-name='{name}']")
        planned(planner, switch.click)
        assert said in planner.page.url
        planned(planner, switch.click)
        assert planner.page.url == before


@needs_browser
def test_what_is_wrong_is_said_and_the_old_picture_stays(planner: Looked) -> None:
    page = planner.page
    planner.view(PLACE)
    page.wait_for_selector("#verdict", timeout=SLOW)
    page.fill("input[aria-label='length, exactly']", "2048")
    page.press("input[aria-label='length, exactly']", "Enter")
    page.wait_for_selector(".problem .message.bad", timeout=SLOW)
    assert "more than the 1024 positions that gpt2 has" in page.inner_text(".problem .message.bad")
    assert page.evaluate("() => getComputedStyle(document.querySelector('.problem')).opacity") == "1"
    assert page.query_selector(".results.stale") and page.is_disabled("#copy-command"), (
        "of another job nothing is copied"
    )
    page.click("#pin")
    assert "seq_len%3D512" in page.url.partition("pin=")[2], "pinned is what is seen"
    page.click("#unpin")
    page.fill("input[aria-label='length, exactly']", "-5")
    page.press("input[aria-label='length, exactly']", "Enter")
    assert page.input_value("input[aria-label='length, exactly']") == "2048", (
        "what no job can have is not left standing"
    )
    assert page.query_selector("#verdict-line") is not None
    planner.complaints.clear()  # the browser itself reports an answer that is no 200


@needs_browser
@pytest.mark.parametrize("word", ["__proto__", "constructor"])
def test_an_address_with_names_of_the_language_is_no_harm(planner: Looked, word: str) -> None:
    planner.view(f"planner?kind={word}&{word}=1&model=gpt2&seq_len=512&gpu={CARD}")
    planner.page.wait_for_selector("#verdict", timeout=SLOW)
    assert planner.page.get_attribute(".job .segments input:checked", "value") == "lora"


@needs_browser
def test_every_copy_is_shown(planner: Looked) -> None:
    page = planner.page
    planner.view(PLACE)
    page.wait_for_selector("#timeline canvas.main", timeout=SLOW)
    for what, begins in (
        ("command", "memfit plan train"),
        ("yaml", "# memfit train"),
        ("python", "import memfit"),
        ("link", "http"),
    ):
        page.click(f"#copy-{what}")
        assert page.input_value(".copied textarea").startswith(begins)
    with page.expect_download() as told:
        page.click("#copy-png")
    assert told.value.suggested_filename == "memfit-train-gpt2.png"
    assert Path(told.value.path()).read_bytes().startswith(b"\x89PNG")


@needs_browser
@pytest.mark.parametrize(
    ("view", "theme"),
    quick(
        [("planner", "light"), ("explain", "dark"), ("cards", "light")],
        product(["planner", "explain", "cards"], ["light", "dark"]),
    ),
)
def test_no_view_scrolls_sideways_on_a_phone(browser: Browser, address: str, view: str, theme: str) -> None:
    phone = look(browser, address, theme=theme, width=390)
    phone.view(PLACE if view == "planner" else HEAT if view == "cards" else view)
    if view == "planner":
        phone.page.wait_for_selector("#timeline canvas.main", timeout=SLOW)
        phone.page.wait_for_selector("#fit table", timeout=SLOW)
        for table in ("fit", "phases", "largest"):
            assert nothing_cut(phone, table), table
    if view == "cards":
        phone.page.wait_for_selector(".heat .cell a", timeout=SLOW)
    assert no_sideways(phone)
    dark = phone.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(16, 19, 26)") is (theme == "dark")
    assert phone.complaints == []
    phone.page.close()


@needs_browser
def test_without_the_token_there_is_no_page(browser: Browser, address: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    for token in ("", "?token=wrong"):
        answer = page.goto(f"{address}{token}")
        assert answer is not None and answer.status == 401
        assert "needs the token" in page.inner_text("body")
    context.close()


@needs_browser
def test_a_pasted_message_is_explained(browser: Browser, address: str) -> None:
    looked = look(browser, address)
    looked.view("explain")
    looked.page.fill("#oom", f"<img src=x onerror=document.title='ran'>\n{OOM}")
    looked.page.click("#explain")
    looked.page.wait_for_selector("#answer", timeout=SLOW)
    assert "1.16 GiB" in looked.page.inner_text("#answer")
    assert "23.52 GiB, added up" in looked.page.inner_text("#account")
    assert looked.page.title() == "Explain · memfit" and looked.complaints == []
    looked.page.click(".ask summary")
    looked.page.get_by_role("combobox", name="model").fill("gpt2")
    looked.page.keyboard.press("Enter")
    for label, number in (("batch", "32"), ("length", "512")):
        looked.page.get_by_label(label, exact=True).fill(number)
    looked.page.click(".segments >> text=train")
    looked.page.click("#explain")
    looked.page.click("#fixes summary >> nth=0", timeout=SLOW)
    first = looked.page.inner_text("#fixes tbody tr >> nth=0")
    assert "per_device_train_batch_size=" in first and "plan it" in first and "fits" in first
    looked.page.click("#fixes a >> nth=0")
    looked.page.wait_for_selector("#verdict", timeout=SLOW)
    planner_at = looked.page.url
    looked.page.go_back()
    looked.page.wait_for_selector("#fixes", timeout=SLOW)
    assert "1.16 GiB" in looked.page.input_value("#oom"), "who comes back finds what was pasted"
    looked.page.click("nav >> text=Planner")
    looked.page.wait_for_selector("#verdict", timeout=SLOW)
    assert looked.page.url == planner_at, "a tab opens its view as it was left"
    looked.page.close()


@needs_browser
def test_a_fix_that_is_a_no_stays_one_in_the_planner(browser: Browser, address: str) -> None:
    fix = {
        "name": "4-bit weights", "says": "linear layers in 4 bits", "how": {}, "basis": "predicted",
        "cost": "precision", "price": "none", "saved_bytes": 1 << 30, "after_bytes": 1 << 30, "verdict": "safe",
        "changes": {"quant": "nf4", "double_quant": True, "kbit_prepare": False},
    }  # fmt: skip
    job = {"settings": {"kind": "lora", "model": "gpt2", "seq_len": 64, "offload": [], "rank": None}, "gpu": None}
    told = {
        "answer": "too much", "cause": {"kind": "shortage"}, "phase": {"name": "", "detail": "", "code_line": ""},
        "found": None, "traps": [], "account": {"rows": [], "capacity_bytes": None}, "job": job, "fixes": [fix],
        "tensor": {"readings": [], "why_none": "", "request_bytes": []}, "withheld": [], "notes": [], "next": [],
    }  # fmt: skip
    looked = look(browser, address, width=390)
    looked.page.route("**/api/explain", lambda route: route.fulfill(json=told))
    looked.view("explain")
    looked.page.click("#explain")
    looked.page.wait_for_selector("#fixes table", timeout=SLOW)
    assert nothing_cut(looked, "fixes")
    looked.page.click("#fixes a")
    looked.page.wait_for_selector("#verdict", timeout=SLOW)
    assert "kbit_prepare=false" in looked.page.url and "offload" not in looked.page.url
    assert looked.page.is_checked(".levers input[data-name='no kbit preparation']")
    looked.page.close()


@needs_browser
def test_a_cell_of_cards_against_models_opens_the_planner(browser: Browser, address: str) -> None:
    looked = look(browser, address)
    looked.view(HEAT)
    looked.page.wait_for_selector(".heat .cell a", timeout=SLOW)
    looked.page.click(".heat .cell a >> nth=0")
    looked.page.wait_for_selector("#verdict", timeout=SLOW)
    assert "kind=train" in looked.page.url and "gpu=8GB" in looked.page.url
    looked.page.go_back()
    length = looked.page.get_by_label("length", exact=True)
    length.fill("2048")
    length.press("Enter")
    looked.page.wait_for_selector("text=more than the 1024 positions", timeout=SLOW)
    length.fill("256")
    length.press("Enter")
    looked.page.wait_for_selector(".heat .cell a", timeout=SLOW)
    looked.page.click(".heat .cell a >> nth=0")
    looked.page.wait_for_selector("#verdict", timeout=SLOW)
    assert "seq_len=256" in looked.page.url
    assert looked.page.inner_text("#verdict-line").startswith("safe:")
    looked.page.close()

"""A server of the page on a folder of recordings, and a browser that looks at it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import uvicorn
from playwright.sync_api import Browser, Page
from support.warm_python import warm_python

from memfit.serving.app import ServeSettings, make_app

DATA = Path(__file__).parents[1] / "data"
CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the page, without its token: whoever opens it has the cookie."""
    settings = ServeSettings(dir=folder, port=0, token="t")
    server = uvicorn.Server(uvicorn.Config(make_app(settings), port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    with mock.patch("sys.executable", warm_python()):  # of the processes that it starts
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(20)


@dataclass
class Looked:
    """A page, and everything that it complained of."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)

    def view(self, place: str) -> None:
        self.page.goto(f"{self.address}#{place}")
        self.page.wait_for_selector(f"html[data-ready={place.partition('?')[0]}]", state="attached")

    def until(self, holds: str) -> None:
        """Asked again and again from here: the page's policy lets nobody else run a text as a script."""
        end = time.monotonic() + 180
        while not self.page.evaluate(f"() => {holds}"):
            assert time.monotonic() < end, f"never: {holds}"
            time.sleep(0.03)

    def drawing(self) -> dict[str, float]:
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found: dict[str, str] = self.page.eval_on_selector("canvas.main", "(canvas) => ({...canvas.dataset})")
        return {name: float(value) for name, value in found.items()}

    def place(self, x: float, y: float) -> tuple[float, float]:
        """A point of the timeline, as shares of its width and height."""
        self.page.locator("canvas.main").scroll_into_view_if_needed()
        box: Any = self.page.locator("canvas.main").bounding_box()
        return box["x"] + 74 + x * (box["width"] - 86), box["y"] + 30 + y * (box["height"] - 56)


def look(browser: Browser, address: str, *, theme: Any = "light", width: int = 1300) -> Looked:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    page.set_default_timeout(180_000)  # a machine that is busy is not a wrong answer
    looked = Looked(page, address)
    page.on("console", lambda said: looked.complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: looked.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (looked.complaints.append("a dialog"), dialog.dismiss()))
    page.request.get(f"{address}?token=t")  # the page has the cookie now; a view is not opened yet
    return looked

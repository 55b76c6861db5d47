"""The viewer on a million events, in a real browser: how long a file takes to open, and each frame while one drags.

    PYTHONPATH=src python3 -m benchmarks.viewer                 # a million events, written by memfit itself
    PYTHONPATH=src python3 -m benchmarks.viewer snap.pickle     # another file

Script is timed in the page, around what a frame runs, by the clock of the wall: other processes lengthen it. While the
file is read, the server is asked for its list of files again and again, and the longest it took to answer is told.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memfit.events import Trace
from memfit.replay.alloc_config import AllocatorConfig
from memfit.snapshots.write import placed_snapshot, save_snapshot

EVENTS, LAYERS = 1_000_000, 120
MiB = 1 << 20
COUNT_FRAMES = """() => {
  window.spent = [];
  const next = requestAnimationFrame;
  window.requestAnimationFrame = (draw) => next((now) => {
    const began = performance.now();
    draw(now);
    window.spent.push(performance.now() - began);
  });
}"""


def million(path: Path) -> None:
    """Steps of a training: activations that stay until the backward pass, temporaries, gradients."""
    trace = Trace()
    for layer in range(LAYERS):
        trace.alloc(16 * MiB, category="weights", module=f"h.{layer}")
    for step in range(1, EVENTS):
        trace.mark("forward", step)
        kept = []
        for layer in range(LAYERS):
            for part in range(8):
                block = trace.alloc((part + 1) * MiB + 512 * layer, category="activations", module=f"h.{layer}.{part}")
                if part % 3:
                    kept.append(block)
                else:
                    trace.free(block)
        trace.mark("backward", step)
        gradients = [trace.alloc(16 * MiB, category="gradients", module=f"h.{layer}") for layer in range(LAYERS)]
        for block in (*reversed(kept), *gradients):
            trace.free(block)
        if len(trace) > EVENTS:
            break
    save_snapshot(placed_snapshot(trace, AllocatorConfig()), path)


def main(argv: list[str]) -> int:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.pickle"
        if argv:
            shutil.copy(argv[0], path)
        else:
            million(path)
        print(f"{path.stat().st_size / 1e6:,.0f} MB")
        command = [sys.executable, "-m", "memfit", "serve", "--dir", folder, "--port", "0", "--no-browser"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        found = re.search(r"http\S+", server.stdout.readline())
        assert found is not None
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
                )
                looked = browser.new_page(viewport={"width": 1400, "height": 900})
                looked.goto(found[0])
                measure(looked, found[0].partition("?")[0])
                browser.close()
        finally:
            server.terminate()
            server.wait()
    return 0


def measure(page: Any, address: str) -> None:
    began, waited = time.perf_counter(), 0.0
    page.goto(f"{address}#viewer?file=million.pickle")
    while not page.query_selector("canvas.main"):
        asked = time.perf_counter()
        page.request.get(f"{address}api/viewer/files")
        waited = max(waited, time.perf_counter() - asked)
        page.wait_for_timeout(50)
    print(f"open after {time.perf_counter() - began:.1f} s; the server answered others within {1000 * waited:.0f} ms")
    page.evaluate(COUNT_FRAMES)
    page.locator("canvas.main").scroll_into_view_if_needed()
    for zooms in (0, 4, 8, 10):
        page.focus("canvas.main")
        for _ in range(zooms):
            page.keyboard.press("+")
        page.wait_for_timeout(1000)
        drag(page)


def drag(page: Any) -> None:
    box = page.locator("canvas.main").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 200
    page.evaluate("() => { window.spent.length = 0; }")
    for towards in (5, -5):
        page.mouse.move(x, y)
        page.mouse.down()
        for i in range(60):
            page.mouse.move(x + towards * i, y)
        page.mouse.up()
    spent = sorted(page.evaluate("() => window.spent"))
    shown = page.eval_on_selector("canvas.main", "(canvas) => canvas.dataset.last - canvas.dataset.first")
    print(
        f"window of {int(shown):>9,} events: {len(spent)} frames, script {statistics.median(spent):.1f} ms in the "
        f"middle, {spent[int(0.95 * len(spent))]:.1f} ms at 95 %, {spent[-1]:.1f} ms at most"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

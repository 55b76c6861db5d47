"""`memfit watch`, `memfit gpus`, `memfit models`: this machine's GPUs, live; the cards and the models known by name."""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from memfit.cli import output
from memfit.cli.options import Json
from memfit.errors import UsageError
from memfit.files import continues_log, when_read, writing, written_whole


def watch(
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Time between two looks.")] = 1.0,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Append a line for each GPU at each look.")
    ] = None,
    prometheus: Annotated[
        Path | None, typer.Option("--prometheus", metavar="FILE", help="Rewrite this file for Prometheus at each look.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", metavar="N", help="Stop after so many looks.")] = None,
    json: Annotated[bool, typer.Option("--json", help="A JSON document a line at each look, on stdout.")] = False,
) -> None:
    """Watch the memory of this machine's GPUs, who holds it, and where running memfit jobs are. Ctrl-C ends it."""
    if not 0.05 <= interval <= 86400:
        raise UsageError(f"--interval {interval} is not between 0.05 and 86400 seconds")
    if count is not None and count < 1:
        raise UsageError(f"--count {count} is less than one look")
    from memfit.recording.machine import csv_rows, look, prometheus_text

    with _csv(csv_file) as rows, _view(json) as show:
        done = 0
        while True:
            seen = look()
            rows(list(csv_rows(seen)))
            if prometheus is not None:
                _replace(prometheus, prometheus_text(seen))
            show(seen)
            done += 1
            if count is not None and done >= count:
                return
            time.sleep(interval)


@contextmanager
def _view(json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """In a terminal the view is redrawn in place; elsewhere each look is printed below the last."""
    from rich.console import Console

    from memfit.render.small import show_watch, watch_view

    console = Console(highlight=False, markup=False, emoji=False)
    if json:
        yield lambda seen: output.print_json(seen, indent=None)
    elif not console.is_terminal:
        yield lambda seen: output.show(show_watch, seen)
    else:
        from rich.live import Live

        with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=False) as live:
            yield lambda seen: live.update(watch_view(seen, console.width, console.encoding), refresh=True)


@contextmanager
def _csv(path: Path | None) -> Iterator[Callable[[list[list[Any]]], None]]:
    if path is None:
        yield lambda rows: None
        return
    from memfit.recording.machine import CSV_COLUMNS

    with writing(path, "--csv"):
        continues = continues_log(path, ",".join(CSV_COLUMNS), "log of memfit watch")
    with writing(path, "--csv"), open(path, "a", newline="", encoding="utf-8", opener=when_read) as file:
        writer = csv.writer(file)
        if not continues:
            writer.writerow(CSV_COLUMNS)

        def write(rows: list[list[Any]]) -> None:
            writer.writerows(rows)
            file.flush()

        yield write


def _replace(path: Path, text: str) -> None:
    with writing(path, "--prometheus"):
        continues_log(path, "# HELP memfit_", "file of memfit watch")
    with writing(path, "--prometheus"), written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")


def gpus(json: Json = False) -> None:
    """List the cards that --gpu knows by name, and slices of them.

    Memory is what a card gives to a program, which is less than its label; context is what CUDA itself takes of that
    after a training step. Where that was not measured it is a range, of which verdicts count the upper end.
    """
    from dataclasses import asdict

    from memfit.gpus import list_gpus, list_slices

    document = {
        "schema": "memfit.gpus/1",
        "gpus": [
            {
                "name": card.name, "capacity_bytes": card.capacity_bytes, "context_bytes": card.context_bytes,
                "context": asdict(card.context_after(training=True, flash=True)),
                "compute_capability": ".".join(map(str, card.arch)), "sm_count": card.sm_count,
                "bandwidth_bytes_per_second": card.bandwidth, "flops_16bit": card.flops_16bit,
                "flops_fp32": card.flops_fp32, "link_bytes_per_second": card.link_bandwidth,
                "notes": list(card.notes), "source": card.source,
            }
            for card in (*list_gpus(), *list_slices())
        ],
    }  # fmt: skip
    output.tell_document(document, json=json)


def models(json: Json = False) -> None:
    """List the models that --model knows by name.

    They are hyper-parameters only: nothing is downloaded, for memory does not depend on the values of weights. Those
    that are published quantised too go by the hub ids of such checkpoints (--json has them).
    """
    from memfit.models.presets import encoders, presets, variants

    document = {
        "schema": "memfit.models/1",
        "models": [
            {
                "name": preset.name, "type": preset.model_type, "parameters": preset.parameters,
                "hub_ids": [alias for alias in preset.aliases if "/" in alias],
                "aliases": [alias for alias in preset.aliases if "/" not in alias],
                "quantised": [
                    {"hub_id": name, "storage": each.storage, "quantization_config": each.config["quantization_config"]}
                    for name, each in variants().get(preset.name, {}).items()
                ],
                "source": preset.source, "note": preset.note,
            }
            for preset in (*presets(), *encoders())
        ],
    }  # fmt: skip
    output.tell_document(document, json=json)

"""`memfit mcp`: plan, fit, explain, check and report as tools over stdio, each answering with its `--json` document.

No tool runs code: a model is a preset, a hub id or a folder, never `module:factory`; there are no scripts, nothing is
loaded. No tool writes a file; traces are kept in memfit's own cache, as by every command.

Questions are answered one at a time, in a thread, so that the end of the input is heard amid one of them.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from memfit.checking.check import check as look_over
from memfit.errors import MemfitError
from memfit.explaining.explain import explain as explain_error
from memfit.files import OPEN_ALREADY
from memfit.fitting.fit import fit as make_fit
from memfit.jobfiles.file import read_job
from memfit.jobs.settings import KINDS, QLORA, plain_name, plain_value
from memfit.jobs.workload import Workload
from memfit.models.registry import refuse_code
from memfit.planning.predict import predict
from memfit.render.shown import Shown
from memfit.render.shown import report as report_file

INSTRUCTIONS = (
    "memfit predicts the GPU memory of transformer jobs to the byte, without a GPU. Sizes in answers are bytes. "
    f"A job is `kind` ({', '.join((*KINDS, QLORA))}), `model` (a preset such as llama-3.1-8b, a hub id, "
    "a folder) and `settings` (batch_size, seq_len, precision, rank, optimizer, grad_checkpointing, quant, ...), or "
    "`job_file`, a file of LLaMA-Factory, Axolotl, torchtune or the HF Trainer; settings beside it replace its own."
)
MOST_TEXT = 1 << 20
Settings = dict[str, Any]
_one_at_a_time = threading.Lock()
_thread = ThreadPoolExecutor(max_workers=1)


class StrictServer(MCPServer[Any]):
    """The SDK passes over arguments that a tool does not have: a setting beside `settings` would be no part of the job,
    and nobody would know."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        known = [*inspect.signature(TOOLS[name]).parameters] if name in TOOLS else list(arguments)
        for each in arguments:
            if each not in known:
                put = f'; put it into settings: {{"{each}": ...}}' if "settings" in known else ""
                raise ToolError(f"{name} has no argument {each!r} (it has {', '.join(known)}){put}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if (wrong := getattr(error.__cause__, "errors", None)) is None:
                raise
            raise ToolError("\n".join(_in_words(name, each) for each in wrong())) from None


WANTED = {
    "string": "a text", "int": "a whole number", "list": "a list of texts",
    "dict": "an object of names and values, such as {\"batch_size\": 1}",
}  # fmt: skip


def _in_words(tool: str, wrong: dict[str, Any]) -> str:
    """What pydantic says of one argument."""
    name = ".".join(str(part) for part in wrong["loc"])
    if wrong["type"] == "missing":
        return f"{tool} needs the argument {name!r}"
    wanted = next((words for kind, words in WANTED.items() if wrong["type"].startswith(kind)), wrong["msg"])
    return f"{tool}: {name} {repr(wrong['input'])[:60]} is not {wanted}"


def make_server(version: str) -> MCPServer[Any]:
    """In a process that is to serve and nothing else: it runs no model's code from here on."""
    refuse_code()
    server = StrictServer("memfit", instructions=INSTRUCTIONS, version=version, log_level="WARNING")
    for tool in TOOLS.values():
        server.add_tool(_in_thread(tool))
    return server


def is_answering() -> bool:
    """Also when nobody waits for the answer any more."""
    return _one_at_a_time.locked()


def _in_thread(tool: Callable[..., dict[str, Any]]) -> Callable[..., Awaitable[dict[str, Any]]]:
    @wraps(tool)
    async def ask(**arguments: Any) -> dict[str, Any]:
        return await asyncio.wrap_future(_thread.submit(tool, **arguments))

    return ask


def plan(
    kind: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    settings: Settings | None = None,
    job_file: str | None = None,
    without: list[str] | None = None,
) -> dict[str, Any]:
    """Predict a job's peak GPU memory: allocated, reserved, device; what is alive then; and, with `gpu` ("RTX 4090",
    "24GB"), whether it fits. The answer is a memfit.plan/1 document."""
    return _answer(lambda: predict(_job(kind, model, settings, job_file, without), gpu=gpu))


def fit(
    gpu: str,
    kind: str | None = None,
    model: str | None = None,
    settings: Settings | None = None,
    keep: list[str] | None = None,
    job_file: str | None = None,
    without: list[str] | None = None,
) -> dict[str, Any]:
    """Find the smallest set of changes with which a job fits a card, the cheapest first. `keep` names settings that
    must stay. The answer is a memfit.fit/1 document: `changes` says what to change and how."""
    return _answer(lambda: make_fit(_job(kind, model, settings, job_file, without), gpu=gpu, keep=tuple(keep or ())))


def explain(
    text: str | None = None,
    path: str | None = None,
    gpu: str | None = None,
    kind: str | None = None,
    model: str | None = None,
    settings: Settings | None = None,
    job_file: str | None = None,
) -> dict[str, Any]:
    """Explain an out-of-memory error, from its `text`, or from the `path` of a log, a snapshot or a run's folder. With
    the job, every fix is predicted on it. The answer is a memfit.explain/1 document."""
    if (text is None) == (path is None):
        raise ToolError("give text or path")
    if text is not None and len(text) > MOST_TEXT:
        raise ToolError(f"text has more than {MOST_TEXT:,} characters: give the path of the file")
    if path is not None and (not path.strip() or path.startswith(OPEN_ALREADY)):
        raise ToolError(f"path {path!r} is no file or folder")
    given = _given(kind, model, settings)
    source: Any = text.encode() if text is not None else Path(str(path))
    return _answer(lambda: explain_error(source, gpu=gpu, config=job_file, **given))


def check(
    gpu: str | None = None,
    kind: str | None = None,
    model: str | None = None,
    settings: Settings | None = None,
    job_file: str | None = None,
) -> dict[str, Any]:
    """Look over this machine and, if one is given, a job before it runs: GPUs, drivers, packages, settings, plan. The
    answer is a memfit.check/1 document."""
    named = any(each is not None for each in (kind, model, settings, job_file))
    return _answer(lambda: look_over(_job(kind, model, settings, job_file, None) if named else None, gpu=gpu))


def report(path: str, device: int | None = None) -> dict[str, Any]:
    """Report on a recorded torch memory snapshot, a memfit trace, a memory log or a run's folder: its peak, what was
    alive, why. Files are parsed, never unpickled. The answer is a memfit.report/1 document."""
    if not path.strip():
        raise ToolError("path is empty")
    return _answer(lambda: report_file(path, device=device))


TOOLS: dict[str, Callable[..., dict[str, Any]]] = {
    "plan": plan, "fit": fit, "explain": explain, "check": check, "report": report
}  # fmt: skip


def _answer(ask: Callable[[], Shown]) -> dict[str, Any]:
    """One at a time. Stdout is the protocol's: what a library prints goes to stderr."""
    try:
        with _one_at_a_time, redirect_stdout(sys.stderr):
            return ask().to_json()
    except MemfitError as error:
        raise ToolError("\n".join(part for part in (error.message, error.hint) if part)) from error
    except Exception as error:
        traceback.print_exc()
        raise ToolError(f"{type(error).__name__}: {error}\nthis is a bug in memfit, please report it") from error


def _job(
    kind: str | None, model: str | None, settings: Settings | None, job_file: str | None, without: list[str] | None
) -> Workload:
    given = _given(kind, model, settings)
    if job_file is None:
        return Workload.from_mapping(given)
    return read_job(job_file, without=without or (), **given).workload


def _given(kind: str | None, model: str | None, settings: Settings | None) -> Settings:
    made = {plain_name(name): plain_value(plain_name(name), value) for name, value in (settings or {}).items()}
    return {**made, **({"kind": kind} if kind else {}), **({"model": model} if model else {})}

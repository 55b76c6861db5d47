"""`memfit serve` and `memfit mcp`: memfit as a page on this machine, and as tools for coding agents."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

import memfit
from memfit.cli import output
from memfit.errors import UsageError

NEEDED = ("fastapi", "uvicorn")
USUAL_PORT = 8642
LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="FOLDER", help="Runs, snapshots and models are read from below it only.")
    ] = Path(),
    port: Annotated[int, typer.Option("--port", metavar="N", help="0 takes any that is free.")] = USUAL_PORT,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDR", help="Another address: others can then reach it, with the token.")
    ] = LOCAL[0],
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Open memfit as a page: planner, runs, snapshots, explanations, cards against models. Ctrl-C ends it.

    It answers on this machine only, to whom has the token in the address that is printed; nothing is sent anywhere.
    """
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port} is not between 0 and 65535")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"`memfit serve` needs {' and '.join(missing)}", hint="pip install 'memfit[web]'")
    from memfit.serving.app import ServeSettings, forwarding
    from memfit.serving.app import serve as run

    def tell(address: str) -> None:
        output.say(f"memfit is at {address}")
        if host not in LOCAL:
            output.note(f"note: whoever reaches {host} and has that address can use it; nothing is encrypted")
        line = forwarding(int(address.partition("/?")[0].rpartition(":")[2]))
        if line is not None:
            output.say(f"from your own machine: {line}")
        elif browser:
            import webbrowser

            webbrowser.open(address)
        output.note("Ctrl-C ends it")

    run(ServeSettings(dir=folder, host=host, port=port), tell)


def mcp() -> int:
    """Serve plan, fit, explain, check and report as tools for coding agents, over stdio (Model Context Protocol).

    No tool runs code or writes files. It ends when its input does, or when nobody reads its answers.
    """
    if find_spec("mcp") is None:
        raise UsageError("`memfit mcp` needs mcp", hint="pip install 'memfit[agent]'")
    from memfit.cli.main import abandon, end_where_told
    from memfit.serving.agents import is_answering, make_server

    end_where_told()
    try:
        make_server(memfit.__version__).run("stdio")
    except Exception as error:
        if _is_of_a_broken_pipe(error):
            raise BrokenPipeError from None
        raise
    finally:
        if is_answering():
            abandon("a question of an agent that is gone")
    return 0


def _is_of_a_broken_pipe(error: BaseException) -> bool:
    """The SDK's tasks fail together, as a group of errors, of which Python 3.10 has no name."""
    inside = getattr(error, "exceptions", ())
    return isinstance(error, BrokenPipeError) or (bool(inside) and all(map(_is_of_a_broken_pipe, inside)))

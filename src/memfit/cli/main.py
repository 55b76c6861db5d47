"""`memfit` as the shell calls it, and the one place where what went wrong becomes an exit code.

    0  fine            1  does not fit, or a check failed       2  wrong usage or input, or no room for the output
    70 a bug in memfit 130 interrupted, 143 and 129 by a signal 141 nobody reads the output any more (`| head`)

Nothing is imported here that takes time: a command can be interrupted from its first moment on, without a traceback.
"""

from __future__ import annotations

import os
import sys

from memfit.errors import MemfitError, RanOut

TYPE_CHECKING = False  # typing takes longer to import than all else here
if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from types import FrameType
    from typing import NoReturn
else:
    import _signal as signal  # `signal` itself makes enums of its numbers first

DOES_NOT_FIT, WRONG_INPUT, BUG, INTERRUPTED, NOBODY_READS = 1, 2, 70, 130, 141
LONGEST_CLEANING_SECONDS = 5.0
_heard: list[int] = []
"""Signals that asked for an end."""
_abandoned: list[str] = []
"""What a thread still works on, and nobody waits for."""
ENDED_BY = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Every way in which it can end is a number here."""
    return _when_all_is_out(_ended(list(sys.argv[1:] if argv is None else argv)))


def _ended(typed: list[str]) -> int:
    from memfit.cli import output

    output.print_anything()
    try:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, _interrupt)
        from memfit.cli.app import run_command

        return run_command(typed)
    except MemfitError as error:
        output.complain(error.message, error.hint)
        return DOES_NOT_FIT if isinstance(error, RanOut) else WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return NOBODY_READS
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer leaves with 1 then, which here means "does not fit"
            return NOBODY_READS
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else WRONG_INPUT
    except Exception as error:
        if isinstance(error, OSError) and _why_stdout_fails() is not None:
            return WRONG_INPUT
        output.complain_of_a_bug()
        return BUG


def _when_all_is_out(code: int) -> int:
    """Printing only fills a buffer: what comes of it shows here. An answer that is not whole is none."""
    why = _why_stdout_fails()
    if why is None:
        return code
    from contextlib import suppress

    from memfit.cli import output

    with suppress(OSError, ValueError):  # what is left goes nowhere, or Python would complain about it on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(why, BrokenPipeError):
        return NOBODY_READS if code in (0, 1) else code
    output.complain(f"the output cannot be written: {why.strerror}", "what was printed is not all of it")
    return WRONG_INPUT if code in (0, 1) else code


def _why_stdout_fails() -> OSError | None:
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    except (ValueError, AttributeError):  # a program that calls `main` has closed it, or never had one
        return None
    failed: OSError | None = getattr(sys.stdout, "failed", None)
    return failed


# -- as a process of its own -------------------------------------------------------------------------------------------


def run() -> NoReturn:
    """As the shell calls it. Where torch was not needed nothing has to be taken down, so nobody waits for Python to
    do so: a tenth of a plan whose trace is known."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores it
    if heeds:
        signal.signal(signal.SIGINT, _leave)
    for number in ENDED_BY:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        code = _run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    if _heard and code == INTERRUPTED:
        code = 128 + _heard[0]
    for number in (signal.SIGINT, *ENDED_BY):
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, _leave)
    if _abandoned:
        _clean_up(code)
    elif "torch" in sys.modules:
        raise SystemExit(code)  # a program that was run here may have put anything in the place of sys.exit
    os._exit(code)


def abandon(what: str) -> None:
    """The process then ends without waiting for its threads."""
    _abandoned.append(what)


def end_where_told() -> None:
    """From here on a signal ends the process where it is heard: to unwind would mean to wait for a thread that reads
    its input."""

    def end(signum: int, _: object) -> None:
        _clean_up(128 + signum)
        os._exit(128 + signum)

    for number in (signal.SIGINT, *ENDED_BY):
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, end)


def _clean_up(code: int) -> None:
    """What Python does at its end but for the threads: temporary folders go."""
    import atexit
    import threading

    last = threading.Timer(LONGEST_CLEANING_SECONDS, os._exit, (code,))
    last.daemon = True
    last.start()
    atexit._run_exitfuncs()


def _run() -> int:
    if not _streams_are_open():
        return WRONG_INPUT
    from memfit.cli.output import Stdout

    sys.stdout = Stdout.of_this_process()
    return main()


def _streams_are_open() -> bool:
    """A file that is opened takes the lowest free number: where stdout is closed it would become stdout, and what is
    printed would go into it."""
    has_stdout = sys.stdout is not None
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if not has_stdout:
        from memfit.cli import output

        output.complain("stdout is closed: there is nowhere to write the answer", "> /dev/null discards it")
    return has_stdout


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C while a command runs, or a request to end: what has been begun is cleaned up. Amid an import it would be
    swallowed by some package, or printed and forgotten: the process ends at once."""
    here = frame
    while here is not None:
        if here.f_code.co_filename.startswith("<frozen importlib"):
            undo = getattr(sys.modules.get("memfit.files"), "undo_at_once", None)
            if undo is not None and undo():
                os.write(2, b"error: interrupted\n")
            _leave(signum)
        here = here.f_back
    _heard.append(signum)
    raise KeyboardInterrupt


def _leave(signum: int = 2, _: object = None) -> NoReturn:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a spinner hides the cursor
    os._exit(128 + signum)


if __name__ == "__main__":
    run()

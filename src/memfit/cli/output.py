"""What the commands write and where: results on stdout, everything else on stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from json import dumps  # itself: a script that is planned may put another in its place
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from memfit.render.shown import Renderer, Shown

Item = TypeVar("Item")


def example(command: str) -> str:
    """The last line of a help text."""
    return f"Example:\n\n\b\n  {command}"


def say(text: str) -> None:
    print(text)


def say_all(text: str) -> None:
    """As it was written elsewhere."""
    sys.stdout.write(text)
    sys.stdout.flush()


class Stdout(io.TextIOWrapper):
    """Remembers why it failed: what could not be written is no longer there to be written again."""

    failed: OSError | None = None

    @classmethod
    def of_this_process(cls) -> Stdout:
        stream = sys.stdout
        assert isinstance(stream, io.TextIOWrapper)
        return cls(
            stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )  # fmt: skip

    def write(self, text: str) -> int:
        with self._noting():
            return super().write(text)

    def flush(self) -> None:
        with self._noting():
            super().flush()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = error
            raise


def is_of_this_process() -> bool:
    """Whether the process is a command's own: not that of a program which calls `main`."""
    return isinstance(sys.stdout, Stdout)


def print_anything() -> None:
    """A character that the output cannot encode is written as its number, not as a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def complain(message: str, hint: str | None = None) -> None:
    """`error: ...` and what to do about it, by plain print: rich would wrap it and take `[..]` for markup."""
    note_lines(f"error: {_printable(message)}")
    for line in (hint or "").splitlines():
        note_lines(f"  {_printable(line)}")


def complain_of_a_bug() -> None:
    """The traceback of what is being handled, for us."""
    import traceback

    note_lines(traceback.format_exc().rstrip())
    complain("this is a bug in memfit, not in what you asked for", "please report it with the text above")


def complain_of_usage(error: typer.TyperException, better: str | None = None) -> None:
    """What the option parser found, in the same form as every other error; `better`: in words of our own."""
    text = error.format_message().strip()
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help itself
        note_lines(text)
        return
    first, *rest = text.splitlines()
    message = " ".join([first[:1].lower() + first[1:], *(line.strip() for line in rest)]).rstrip(".")
    hint = f"`{context.command_path} --help` lists the options" if context else None
    if message.endswith("does not take a value"):
        hint = f"write {getattr(error, 'option_name', 'it')} alone: it is on where it stands"
    message = better or message
    words = context.command_path.split() if context else []
    if getattr(error, "option_name", None) == "--from" and len(words) == 3:
        hint = f"`{words[0]} {words[1]} --from FILE`: the file says which kind of job it is"
    complain(message, hint)


def note(text: str) -> None:
    """Something beside the result: where a file was written."""
    note_lines(_printable(text))


def tell(answer: Shown, *, json: bool) -> None:
    """An answer of the library on stdout: its document, or as a person reads it."""
    tell_document(answer.to_json(), json=json)


def tell_document(document: Mapping[str, Any], *, json: bool) -> None:
    from memfit.render.shown import renderer_of

    if json:
        print_json(document)
    else:
        show(renderer_of(document), document)


def each_quietly(answers: Iterator[Item]) -> Iterator[Item]:
    """Stdout is for answers: what a model's own code prints while one is made goes to stderr."""
    while True:
        with redirect_stdout(sys.stderr):
            made = next(answers, None)
        if made is None:
            return
        yield made


def print_json(document: Mapping[str, Any], *, indent: int | None = 1) -> None:
    print(dumps(document, indent=indent, allow_nan=False), flush=True)


def show(render: Renderer, document: Mapping[str, Any]) -> None:
    """A report on stdout. Colour only on a terminal, and not if NO_COLOR is set: rich sees to that."""
    from rich.console import Console

    from memfit.render.plan import as_text

    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        render(document, console)
    else:
        print(as_text(render, document, encoding=console.encoding))


def errors_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


COLUMNS = {
    "spinner": "SpinnerColumn", "bar": "BarColumn", "count": "MofNCompleteColumn", "elapsed": "TimeElapsedColumn",
    "left": "TimeRemainingColumn",
}  # fmt: skip


@contextmanager
def bar(*columns: str, shown: bool = True, **options: Any) -> Iterator[Callable[..., None]]:
    """How far something is, on stderr and only where a person looks on; drawn from the first time that it is told.
    What is no name of a column is a text, with what is told as `state` or `description` in it."""
    if not shown or not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich import progress

    parts = (
        getattr(progress, COLUMNS[each])() if each in COLUMNS else progress.TextColumn(each, markup=False)
        for each in columns
    )
    drawn = progress.Progress(*parts, console=errors_console(), transient=True, **options)
    task: progress.TaskID | None = None

    def tell(**told: Any) -> None:
        nonlocal task
        if task is None:
            drawn.start()
            task = drawn.add_task("", total=None, state="")
        drawn.update(task, **told)

    try:
        yield tell
    finally:
        drawn.stop()


@contextmanager
def working(what: str = "") -> Iterator[Callable[[str], None]]:
    """A spinner while something without a known length runs; what it is may change. What the job's own code prints
    meanwhile goes to stderr: stdout is for the result."""
    with bar("spinner", "{task.description}", "elapsed") as tell, redirect_stdout(sys.stderr):
        if what:
            tell(description=what)
        yield lambda now: tell(description=now)


def note_lines(text: str) -> None:
    """Lines as they are, such as what would be on stdout if a document were not. No command fails because nobody can
    be told."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """No control characters: a file's name must not move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)

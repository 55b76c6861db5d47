"""How a program runs inside a trace: its arguments, folder and environment, and when it has shown enough."""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from memfit.analysis.stacks import is_own
from memfit.environment import COMPILER_READS, VARIABLES, exported
from memfit.errors import InputError, TraceError
from memfit.extrapolation.reused import COMPILED
from memfit.scripts.children import processes_at_home
from memfit.scripts.command import Program, find_module
from memfit.scripts.stopping import EnoughSeen, Steps, ended_in_time
from memfit.scripts.watched import tell_line

OFFLINE = {
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": "", "COMET_MODE": "disabled",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NEPTUNE_MODE": "debug",
}  # fmt: skip
"""Nothing is fetched or sent."""
OF_NO_ACCOUNT = ("_CACHE", "_CACHES", "_CACHE_DIR", "_THREADS", "_DEBUG")
"""How variables of the compiler end on which no plan depends."""
UNSEEN_VARIABLES = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "an allocator that keeps nothing: reserved is planned with torch's own",
    "CUDA_MODULE_LOADING": "kernels that are all loaded at the start: CUDA's own part is planned with lazy loading",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "a workspace that cuBLAS and cuBLASLt share or do not: planned as torch has it",
}
AT_EXIT = "what the program leaves for its end (atexit) is not run"


def run_program(program: Program, steps: Steps, *, seconds: float, tracer: Any, alloc_conf: str = "") -> None:
    """To its end, or to enough steps; an error if neither comes within the time limit. `alloc_conf`: what the user says
    of the allocator, whatever the program does."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    hook = register_optimizer_step_post_hook(steps.count)
    try:
        with (
            _as_started_by_hand(program),
            _variables_set_late_are_told(tracer),
            _allocator_as_the_program_sets_it(tracer, alloc_conf),
            _speaks_on_stderr(),
            _leaves_nothing_for_the_end(tracer.assume),
            _workers_at_home(),
            _host_in_one_thread(),
            processes_at_home(tracer.assume),
            _steps_by_hand(steps),
            ended_in_time(seconds, tracer),
        ):
            _run_as_main(*(_module(program.target) if program.is_module else _file(program.target)))
    except EnoughSeen:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        hook.remove()


LOADED_ONCE = ("sys", "torch", "memfit")


def _run_as_main(code: Any, names: dict[str, Any]) -> None:
    main, before = ModuleType("__main__"), dict(sys.modules)
    main.__dict__.update(names)
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)
    finally:
        gone = [name for name in LOADED_ONCE if sys.modules.get(name) is not before[name]]
        sys.modules.update(before if gone else {"__main__": before["__main__"]})
        if gone:  # whatever came of it
            raise TraceError(
                f"the job itself takes modules that are in use out of sys.modules: {', '.join(gone)}",
                hint="Python would load them a second time, which torch does not survive: leave that line out, or take"
                " out only modules of the program's own",
            )


def _file(path: str) -> tuple[Any, dict[str, Any]]:
    try:
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), {"__file__": path}
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise InputError(
            f"{path}{f':{line}' if line else ''} is no Python: {getattr(error, 'msg', error)}",
            hint=(getattr(error, "text", None) or "").strip() or None,
        ) from None


def _module(name: str) -> tuple[Any, dict[str, Any]]:
    spec = find_module(name)
    loader: Any = spec.loader
    try:
        code = loader.get_code(spec.name)
    except SyntaxError as error:
        raise InputError(f"{error.filename}:{error.lineno} is no Python: {error.msg}") from None
    sys.argv[0] = str(spec.origin)
    return code, {"__file__": spec.origin, "__package__": spec.parent, "__spec__": spec, "__loader__": loader}


@contextmanager
def _as_started_by_hand(program: Program) -> Iterator[None]:
    """Afterwards everything is as before."""
    folder = os.getcwd() if program.is_module else str(Path(program.target).resolve().parent)
    folders = [folder, *program.search_path]
    before, of_python = set(sys.modules), dict(vars(builtins))
    here = os.getcwd()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [program.target, *program.arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [*folders, *sys.path]))
        stack.enter_context(mock.patch.dict(os.environ, {**OFFLINE, **dict(program.environment)}))
        _hub_is_offline(stack)
        stack.enter_context(_accelerate_begins_anew())
        try:
            yield
        finally:
            os.chdir(here)
            vars(builtins).update(of_python)  # a program may print in its own way
            for name in set(sys.modules) - before:
                file = str(getattr(sys.modules[name], "__file__", None) or "")
                # Libraries stay, in a .venv of that folder too: torch cannot be imported twice.
                if is_own(file) and file.startswith(tuple(os.path.join(each, "") for each in folders)):
                    del sys.modules[name]


@contextmanager
def _variables_set_late_are_told(tracer: Any) -> Iterator[None]:
    """torch was imported before the script began, and may have read them already."""
    of_compiler = _read_by_the_compiler()
    try:
        yield
    finally:
        for name, why in UNSEEN_VARIABLES.items():
            if value := os.environ.get(name):
                tracer.assume(f"not modelled: {name}={value}, {why}")
        for name, text in _read_by_the_compiler().items():
            if of_compiler.get(name) != text and tracer.trace.facts.get(COMPILED):
                tracer.answers.refused = tracer.answers.refused or TraceError(
                    f"the script itself sets {name}={text}, which torch's compiler reads before the script begins here",
                    hint=f"say it before the command: memfit plan script -- {name}={text} python ...",
                )


@contextmanager
def _allocator_as_the_program_sets_it(tracer: Any, alloc_conf: str) -> Iterator[None]:
    """`os.environ[...] = ...` calls `os.putenv`."""
    real = os.putenv

    def putenv(name: Any, value: Any) -> None:
        real(name, value)
        if (variable := os.fsdecode(name)) not in VARIABLES:
            return
        text = os.fsdecode(value)
        said = next(iter(exported({**os.environ, variable: text}).values()), "")
        if alloc_conf:
            tracer.assume(f"the script itself sets {variable}={text}: the plan has what --alloc-conf says")
        else:
            tracer.settle_allocator(said, f"the script itself ({variable})")

    with mock.patch.object(os, "putenv", putenv):
        yield


def _read_by_the_compiler() -> dict[str, str]:
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(COMPILER_READS) and not name.endswith(OF_NO_ACCOUNT)
    }


class Given(io.TextIOWrapper):
    """To a program as its outputs: remembers whether the last line has an end."""

    mode = "w"
    is_amid_line = False

    def __init__(self, stream: io.BufferedWriter) -> None:
        super().__init__(stream, errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        written = super().write(text)
        if text and self.is_amid_line is text.endswith("\n"):
            self.is_amid_line = not self.is_amid_line
            tell_line(is_open=self.is_amid_line)
        return written


@contextmanager
def _speaks_on_stderr() -> Iterator[None]:
    """What the program prints is no result of memfit's: it goes where notes go, also what its child processes print.
    It may close what it is given, and put anything in its place. What follows begins a line of its own."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    held: dict[int, int] = {}
    for number in (1, 2):
        with suppress(OSError):
            held[number] = os.dup(number)
    streams = sys.stdout, sys.stderr
    given: Given | None = None
    if 2 in held:
        os.dup2(2, 1)
        sys.stdout = sys.stderr = given = Given(os.fdopen(2, "wb", closefd=False))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr, given):
            with suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        sys.stdout, sys.stderr = streams
        for number, copy in held.items():
            with suppress(OSError):
                os.dup2(copy, number)
                os.close(copy)
        if given is not None and given.is_amid_line:
            given.is_amid_line = False
            with suppress(OSError):
                os.write(2, b"\n")
            tell_line(is_open=False)


@contextmanager
def _leaves_nothing_for_the_end(assume: Callable[[str], None]) -> Iterator[None]:
    """The card is gone when Python ends. What libraries leave for then is theirs."""
    register = atexit.register

    def register_of_libraries(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_own(sys._getframe(1).f_code.co_filename):
            return register(function, *args, **kwargs)
        assume(AT_EXIT)
        return function

    with mock.patch.object(atexit, "register", register_of_libraries):
        yield


def _hub_is_offline(stack: ExitStack) -> None:
    """It reads its variable when it is imported, which may have been long before."""
    constants = importlib.import_module("huggingface_hub.constants")
    stack.enter_context(mock.patch.object(constants, "HF_HUB_OFFLINE", True))


@contextmanager
def _accelerate_begins_anew() -> Iterator[None]:
    """It remembers for the whole process how many others there are, and how precisely they compute."""

    def states() -> list[dict[str, Any]]:
        module = sys.modules.get("accelerate.state")
        kinds = ("AcceleratorState", "GradientState", "PartialState")
        return [] if module is None else [getattr(module, kind)._shared_state for kind in kinds]

    before = [dict(state) for state in states()]
    for state in states():
        state.clear()
    try:
        yield
    finally:
        for state in states():
            state.clear()
        for state, held in zip(states(), before, strict=False):
            state.update(held)


@contextmanager
def _workers_at_home() -> Iterator[None]:
    """Data is read in this process: what workers do is not GPU memory, and a forked trace would be two."""
    from torch.utils.data import DataLoader

    make = DataLoader.__init__

    def make_without_workers(self: Any, *args: Any, **kwargs: Any) -> None:
        args = (*args[:5], 0, *args[6:]) if len(args) > 5 else args
        args = (*args[:7], False, *args[8:]) if len(args) > 7 else args
        unused = (
            "num_workers",
            "pin_memory",
            "prefetch_factor",
            "persistent_workers",
            "multiprocessing_context",
            "timeout",
        )
        make(self, *args, **{name: value for name, value in kwargs.items() if name not in unused})

    with mock.patch.object(DataLoader, "__init__", make_without_workers):
        yield


@contextmanager
def _host_in_one_thread() -> Iterator[None]:
    """As in a worker of a data loader. What is left on the host are many small ops, and where other processes take the
    cores, threads that wait for each other were seen to make them 20 times slower."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(threads if "OMP_NUM_THREADS" in os.environ else 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _steps_by_hand(steps: Steps) -> Iterator[None]:
    import torch

    make, backward = torch.optim.Optimizer.__init__, torch.autograd.backward
    optimizers: list[bool] = []

    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        optimizers.append(True)
        make(self, *args, **kwargs)

    def backward_and_count(*args: Any, **kwargs: Any) -> None:
        if not optimizers and torch._C._current_autograd_node() is None:
            steps.begin_by_hand()
        backward(*args, **kwargs)

    with (
        mock.patch.object(torch.optim.Optimizer, "__init__", make_and_note),
        mock.patch.object(torch.autograd, "backward", backward_and_count),
    ):
        yield

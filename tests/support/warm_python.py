"""A Python that has torch, transformers and memfit imported before it begins: seconds less for every process of a test.

`warm_python()` stands where `sys.executable` would: `[warm_python(), "-m", "memfit", "gpus"]`; `-c`, a file's path and
`PYTHON_EXEC` of torchrun work too. It is a real process, forked from one that did the imports, with its own arguments,
environment, folder, streams and exit code. SIGINT and SIGTERM reach it, and it dies with the small process that stands
for it. Where the imports themselves are the fact, or limits and signals that a process inherits, take `sys.executable`.

One process with the imports stands by for each environment that an import may read, until its folder goes. Of
`PYTHONPATH` that is where memfit comes from: the rest of it is put on the path of the fork.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import hashlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

FOLDER = "MEMFIT_TESTS_FOLDER"
READ_AT_IMPORT = ("HF_", "HOME", "MEMFIT_PURE", "OMP_", "XDG_")
HEAVY = (
    "torch.distributed.run", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "peft", "accelerate",
)  # fmt: skip
IDLE_SECONDS = 1200


def warm_python() -> str:
    command = os.path.join(os.environ[FOLDER], "python")
    if not os.path.exists(command):
        written = f"{command}.{os.getpid()}"
        with open(written, "w") as file:
            file.write(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" "$@"\n')
        os.chmod(written, 0o755)
        os.rename(written, command)
    return command


# -- the small process that stands for it ------------------------------------------------------------------------------


def stand_for_it() -> int:
    with connected() as connection:
        asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [b"%9d" % len(asked)], [0, 1, 2])
        connection.sendall(asked)
        answers = connection.makefile()
        process = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(process, number))
        os.closerange(0, 3)  # a reader waits for the other process only
        code = int(answers.readline())
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def connected() -> socket.socket:
    """To the process with the imports, which is started where there is none."""
    source = next((path for path in paths() if os.path.exists(os.path.join(path, "memfit", "__init__.py"))), "")
    read = sorted((name, text) for name, text in os.environ.items() if name.startswith(READ_AT_IMPORT))
    read.append(("memfit", source))
    address = os.path.join(os.environ[FOLDER], hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16])
    connection = socket.socket(socket.AF_UNIX)
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(OSError):
            connection.connect(address)
            return connection
        with open(f"{address}.log", "a") as log:
            begun = subprocess.Popen(
                [sys.executable, __file__, "stand by", address], cwd=os.environ[FOLDER], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": source},
            )  # fmt: skip
        while begun.poll() is None:
            with suppress(OSError):
                connection.connect(address)
                return connection
            time.sleep(0.02)
    raise SystemExit(f"the imports ended with {begun.returncode}: {address}.log")


def paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


# -- the process with the imports --------------------------------------------------------------------------------------


def stand_by(address: str) -> None:
    """Fork for everyone who connects, and tell them the number and the exit code. In the fork, this returns."""
    import_all()
    freeze_all()  # a collection in a fork would copy all of this memory
    with suppress(FileNotFoundError):
        os.unlink(address)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    events = selectors.DefaultSelector()
    events.register(listening, selectors.EVENT_READ)
    last = time.monotonic()
    while os.path.exists(address):
        ready = events.select(timeout=1)
        if not ready and len(events.get_map()) == 1 and time.monotonic() > last + IDLE_SECONDS:
            leave_if_nobody_comes(address, events)
        for key, _ in ready:
            last = time.monotonic()
            if key.fileobj is not listening:
                end(events, *key.data)
                continue
            connection, _ = listening.accept()
            asked, streams = read_question(connection)
            process = os.fork() if asked else None
            if process == 0:
                listening.close()
                become(*asked, streams)
                return
            for each in streams:
                os.close(each)
            if process is None:
                connection.close()
                continue
            with suppress(OSError):  # it is gone: seen below
                connection.sendall(b"%d\n" % process)
            ended = os.pidfd_open(process)
            for event in (connection, ended):  # that who stands for it is gone, or that it has ended
                events.register(event, selectors.EVENT_READ, (process, connection, ended))
    os._exit(0)


def read_question(connection: socket.socket) -> tuple[list[Any], list[int]]:
    """What to run and where, which is nothing of one that was killed before it had asked, and its three streams."""
    streams: list[int] = []
    with suppress(OSError, ValueError), connection.makefile("rb") as stream:
        size, streams, *_ = socket.recv_fds(connection, 9, 3)
        return json.loads(stream.read(int(size))), streams
    return [], streams


def leave_if_nobody_comes(address: str, events: selectors.BaseSelector) -> None:
    """Whoever connects holds the lock, so while it is held here nobody is lost between the last look and the end."""
    with open(f"{address}.lock", "w") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not events.select(timeout=0):
            os.unlink(address)
            os._exit(0)


def end(events: selectors.BaseSelector, process: int, connection: socket.socket, ended: int) -> None:
    if connection not in events.get_map():
        return  # both at once
    for event in (connection, ended):
        events.unregister(event)
    with suppress(ProcessLookupError):
        if not selectable(ended):
            os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(ended)
    with suppress(OSError), connection:
        connection.sendall(b"%d\n" % code)


def selectable(descriptor: int) -> bool:
    with selectors.DefaultSelector() as events:
        events.register(descriptor, selectors.EVENT_READ)
        return bool(events.select(timeout=0))


def import_all() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # as the command line does before it imports them
    warnings.simplefilter("error")  # as where pytest imports them
    strict = warnings.filters[0]

    import memfit

    rooms = [room.name for room in pkgutil.walk_packages(memfit.__path__, "memfit.")]
    for name in (*HEAVY, *rooms):
        if not name.endswith(("__main__", "triton_kernels")):
            import_module(name)
    warnings.filters.remove(strict)


def freeze_all() -> None:
    """All that is here is not looked through again. Every trace asks whether something is frozen, and to count it takes
    six times as long as an empty trace: 40 ms."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1


def become(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # Those of the process that was forked take its streams for files in which one can seek.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are started without
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [path for path in paths() if path not in sys.path]
    sys.argv[1:] = arguments


def run() -> None:
    """What Python does with its arguments."""
    while sys.argv[1] == "-u":
        sys.argv[1:] = sys.argv[2:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    what, *words = sys.argv[1:]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if what == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(what))
        sys.argv = [what, *words]
        runpy.run_path(what, run_name="__main__")


def exit_code(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def leave(code: int) -> NoReturn:
    """As Python leaves, less the taking apart of every module that was imported, which takes a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] != "stand by":
        sys.exit(stand_for_it())
    sys.path[0] = ""  # not the folder of this file
    stand_by(sys.argv[2])
    leave(exit_code(run))

"""Programs that catch, delay or outlive the end that memfit puts to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.warm_python import warm_python

import memfit
from memfit.errors import MemfitError
from memfit.scripts.watched import sweep

HEAD = """
import atexit, ctypes, os, signal, subprocess, sys, threading, time
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.randn(4096, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IMPATIENT = """
from memfit.cli.main import run
from memfit.scripts import watched
watched.PATIENCE = watched.LEAVES_WITHIN = 0.5
run()
"""
"""memfit, which waits less for what does not end."""
END_PAST_MEMFIT = "ctypes.CDLL(None)._exit(0)\n"
LOOP = "for _ in range(20):\n    step()\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)

    def put(text: str) -> str:
        (tmp_path / "train.py").write_text(HEAD + text)
        return "train.py"

    return put


def plan(*flags: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """Its outputs end with it: a process that it leaves behind would hold them."""
    command = [warm_python(), "-c", IMPATIENT, "plan", "script", "--json", *flags, "--", "train.py"]
    environment = {**os.environ, "TMPDIR": str(Path.cwd() / "tmp")}
    Path("tmp").mkdir(exist_ok=True)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.mark.parametrize("loop", ["for _ in range(20)", "while True"])
def test_a_script_that_catches_everything_is_planned_by_the_steps_looked_at(write, loop: str) -> None:  # type: ignore[no-untyped-def]
    plain = memfit.trace_script(write(LOOP))
    caught = memfit.trace_script(write(f"{loop}:\n    try: step()\n    except BaseException: continue\n"), seconds=120)
    assert caught.peak.allocated_bytes == plain.peak.allocated_bytes
    assert any(note.startswith("stopped after 3 optimizer steps") for note in caught.notes)


@pytest.mark.parametrize(
    "text",
    [
        "while True:\n    try: time.sleep(1000)\n    except BaseException: pass\n",
        "while True:\n    try:\n        while True: pass\n    except Exception: pass\n",
        "signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(0)\nwhile True: time.sleep(0.1)\n",
    ],
)
def test_the_clock_ends_a_script_whatever_it_catches_or_does_with_alarms(write, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MemfitError, match=r"within 1 s \(then at .*train.py:\d+"):
        memfit.trace_script(write(text), seconds=1)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_training_in_a_thread_ends_the_script_without_a_traceback(write, capfd) -> None:  # type: ignore[no-untyped-def]
    text = "def train():\n    while True: step()\nthreading.Thread(target=train).start()\nthreading.Event().wait()\n"
    made = memfit.trace_script(write(text), seconds=120)
    assert any(note.startswith("stopped after 3 optimizer steps") for note in made.notes)
    assert "Traceback" not in capfd.readouterr().err


def test_what_a_script_leaves_for_its_end_is_left_out_and_said(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = plan_of(write("atexit.register(lambda: open('ended', 'w'))\n" + LOOP))
    assert "what the program leaves for its end (atexit) is not run" in made["notes"]
    assert not (tmp_path / "ended").exists()


def plan_of(_: str) -> dict[str, object]:
    run = plan()
    assert run.returncode == 0, run.stderr
    document: dict[str, object] = json.loads(run.stdout)
    return document


@pytest.mark.parametrize(
    "text",
    [
        "os.system('echo mine'); subprocess.run(['echo', 'mine']); os.write(1, b'mine\\n')\n" + LOOP,
        "subprocess.Popen(['sleep', '300'])\n" + LOOP,
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n" + LOOP,
        "threading.Thread(target=time.sleep, args=(300,)).start()\n" + LOOP,
        "sys.stdout.close(); sys.stderr.close(); os.closerange(0, 1000)\n" + LOOP,
        "import json; json.dumps = lambda *_, **__: 'pwned'; sys.exit = None\n" + LOOP,
    ],
)
def test_stdout_holds_one_document_whatever_a_script_prints_closes_or_leaves_running(write, text: str) -> None:  # type: ignore[no-untyped-def]
    assert plan_of(write(text))["schema"] == "memfit.plan/1"  # before what it left running has ended


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ctypes.string_at(0)\n", "ended by the signal SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)\n", "ended by the signal SIGKILL"),
        ("raise KeyboardInterrupt\n", "the script was interrupted, by itself or from outside"),
        (
            "os.execvp('sleep', ['sleep', '300'])\n",
            "train.py:11, in <module>: the code puts another program in its place",
        ),
        ("ctypes.CDLL(None)._exit(0)\n", "ended its process past memfit, with exit code 0"),
        (
            "threading.Thread(target=time.sleep, args=(300,)).start()\n",
            r"a thread that the code started (Thread-1 (sleep)) still runs",
        ),
        (
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\nwhile True: time.sleep(1)\n",
            "within 5 s, and went on when it was told to end",
        ),
    ],
)
def test_a_process_that_ends_or_never_ends_past_memfit_is_told(write, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    write("model(torch.randn(1, 512, device='cuda'))\n" + text)
    run = plan("--seconds", "5" if "within 5 s" in said else "60")  # enough to come so far on a busy machine
    assert (run.returncode, run.stdout) == (2, "") and said in run.stderr
    assert list(Path("tmp").glob("memfit-*")) == []


def test_objects_that_take_long_to_go_do_not_hold_up_the_plan(write) -> None:  # type: ignore[no-untyped-def]
    write("class Slow:\n    def __del__(self): time.sleep(1000)\nkept = Slow()\n"
          "def train():\n    slow = Slow()\n    " + LOOP.replace("\n", "\n    ") + "\ntrain()\n")  # fmt: skip
    run = plan("--seconds", "600", timeout=900)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_script_with_all_that_it_has_begun(write, number: int) -> None:  # type: ignore[no-untyped-def]
    write("open('begun', 'w').close()\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass\n")
    Path("tmp").mkdir()
    command = [warm_python(), "-m", "memfit", "plan", "script", "--", "train.py"]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(Path("tmp").absolute())})
    while not Path("begun").exists():
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(120) == 128 + number
    assert list(Path("tmp").glob("memfit-*")) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux gives orphans to who asks for them")
def test_a_process_that_left_the_group_of_a_script_ends_with_it(write) -> None:  # type: ignore[no-untyped-def]
    write("""left = subprocess.Popen(['sh', '-c', 'sleep 301 & sleep 301'], start_new_session=True)
open('left', 'w').write(str(left.pid))\n""" + LOOP)  # fmt: skip
    assert plan().returncode == 0
    session = Path("left").read_text()
    stats = [each.read_text().rpartition(")")[2].split() for each in Path("/proc").glob("[0-9]*/stat") if each.exists()]
    assert not [stat for stat in stats if stat[3] == session and stat[0] != "Z"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a process with its parent")
def test_a_script_ends_where_who_watches_it_is_killed(write) -> None:  # type: ignore[no-untyped-def]
    write("open('begun', 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)\n")
    process = subprocess.Popen([warm_python(), "-m", "memfit", "plan", "script", "--", "train.py"])
    while not Path("begun").exists() or not Path("begun").read_text():
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    running = Path("/proc") / Path("begun").read_text() / "stat"
    for _ in range(2000):
        if not running.exists() or running.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the script runs on")


def test_folders_of_those_who_were_killed_are_swept_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"memfit-script-{ended.pid}-x", f"memfit-script-{os.getpid()}-x", "memfit-script-someone", "memfit-other"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "answer").touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


@pytest.mark.parametrize(
    "text",
    [
        "class Tee:\n    def write(self, text): pass\nsys.stdout = sys.stderr = Tee()\n",
        "sys.stdout = sys.stderr = None\n",
    ],
)
def test_a_script_may_put_anything_in_the_place_of_its_outputs(write, capfd, text: str) -> None:  # type: ignore[no-untyped-def]
    memfit.trace_script(write("print('before', end='')\n" + text + LOOP))
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "before\nafter\n"


def test_what_follows_a_line_that_the_script_has_not_ended_begins_a_new_one(write, capfd) -> None:  # type: ignore[no-untyped-def]
    memfit.trace_script(write("print('whole')\n" + LOOP))
    assert capfd.readouterr().err == "whole\n"
    write("sys.stdout.write('your name: '); sys.stdout.flush(); " + END_PAST_MEMFIT)
    assert "your name: \nerror: the script ended its process past memfit" in plan().stderr


def test_an_answer_that_cannot_be_written_is_told_with_the_reason_in_one_line(tmp_path: Path) -> None:
    code = """
import resource, shutil, sys
from memfit.errors import MemfitError
from memfit.scripts import watched
def work():
    exec(sys.argv[1])
    print("x" * 10_000)
    return 0
try:
    watched.watch(work)
except MemfitError as error:
    print(error.message, error.hint, sep="|")
"""

    def said(happens: str) -> str:
        command = [sys.executable, "-c", code, happens]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert ended.stderr == ""
        assert not list(tmp_path.iterdir())
        return ended.stdout

    folder, limit = f"cannot write into the folder for temporary files, {tmp_path}", "|a limit that the script"
    assert said("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))").startswith(f"{folder}: File too large{limit}")
    assert said("resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))").startswith(
        f"{folder}: Too many open files{limit}"
    )
    gone = said("shutil.rmtree(watched.folder_for_files())")
    assert gone.startswith("memfit's folder of temporary files, ") and "was removed while the script ran|by the" in gone

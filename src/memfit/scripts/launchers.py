"""Commands that start several processes, as `torchrun` and `accelerate launch`: what the first of them is given.

The launchers' own parsers read the line, and accelerate's own code says which variables it sets.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from memfit.errors import InputError, UsageError

PROGRAMS = {
    "torchrun": "torchrun", "torch.distributed.run": "torchrun", "torch.distributed.launch": "launch",
    "accelerate": "accelerate", "accelerate-launch": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch", "accelerate.commands.accelerate_cli": "accelerate",
}  # fmt: skip
NOT_COVERED = ("deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "ray")
ONE_GPU = "the command does not say how many processes: planned as on a machine with one GPU"


@dataclass(frozen=True)
class Launch:
    words: list[str]
    """What each process runs: `train.py ARGS`, or `-m module ARGS`."""
    environment: tuple[tuple[str, str], ...]
    processes: int
    notes: tuple[str, ...] = ()


def launcher_of(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Which one a command begins with, and what it is given."""
    first = Path(words[0]).name
    if first in NOT_COVERED:
        raise UsageError(
            f"memfit does not cover {first}: it reads lines of torchrun and accelerate launch",
            hint="give the script itself, or the torchrun line that starts the same processes",
        )
    name, rest = (first, list(words[1:])) if first != "-m" or len(words) < 2 else (words[1], list(words[2:]))
    launcher = PROGRAMS.get(name)
    if launcher == "accelerate":
        if rest[:1] != ["launch"]:
            raise UsageError(
                f"accelerate {' '.join(rest[:1])} starts no script".replace("  ", " "),
                hint="memfit plan script -- accelerate launch --num_processes 4 train.py",
            )
        launcher, rest = "accelerate launch", rest[1:]
    return None if launcher is None else (launcher, rest)


def read_launch(launcher: str, words: Sequence[str]) -> Launch:
    with mock.patch.dict(os.environ):  # which torch changes when some of it is imported
        if launcher == "accelerate launch":
            return _of_accelerate(words)
        return _of_torchrun(words, tells_rank=launcher == "launch")


def _of_torchrun(words: Sequence[str], *, tells_rank: bool) -> Launch:
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    parser = get_args_parser()
    if tells_rank:
        parser.add_argument("--use-env", "--use_env", default=False, action="store_true")
    given = _parsed(parser, words, "torchrun")
    if given.no_python:
        raise UsageError("torchrun --no-python runs no Python script", hint="memfit traces Python programs")
    with _told_by("torchrun"):
        machines = parse_min_max_nnodes(given.nnodes)[0]
        counted = given.nproc_per_node in ("gpu", "auto")
        each = 1 if counted else int(given.nproc_per_node)
    if machines < 1 or each < 1:
        raise UsageError(f"torchrun: {machines} x {each} processes", hint="torchrun --nproc_per_node=4 train.py")
    told = ["--local-rank=0"] if tells_rank and not given.use_env else []
    return Launch(
        [*(["-m"] if given.module else []), given.training_script, *told, *given.training_script_args],
        tuple(_as_agent_says(each, machines, given).items()), each * machines, (ONE_GPU,) * counted,
    )  # fmt: skip


def _as_agent_says(each: int, machines: int, given: Any) -> dict[str, str]:
    """local_elastic_agent.py, _start_workers."""
    world, port = str(each * machines), str(getattr(given, "master_port", None) or 29500)
    made = {
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(each), "WORLD_SIZE": world, "GROUP_WORLD_SIZE": str(machines),
        "ROLE_WORLD_SIZE": world, "MASTER_ADDR": str(getattr(given, "master_addr", None) or "127.0.0.1"),
        "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(getattr(given, "rdzv_id", None) or "none"),
        "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    return made if each == 1 or "OMP_NUM_THREADS" in os.environ else {**made, "OMP_NUM_THREADS": "1"}


def _of_accelerate(words: Sequence[str]) -> Launch:
    try:
        from accelerate.commands import launch
        from accelerate.utils import launch as environments
    except ImportError:
        raise InputError("the command needs accelerate, which is not here", hint="pip install accelerate") from None

    given = _parsed(launch.launch_command_parser(), words, "accelerate launch")
    if given.config_file is not None and not Path(given.config_file).is_file():
        raise InputError(f"there is no file '{given.config_file}'", hint="accelerate launch --config_file FILE")
    counted: list[bool] = []
    with _told_by("accelerate launch"), _machine_with_gpus(given.num_processes, counted):
        given, *_ = launch._validate_launch_command(given)
        _check_covered(given)
        several = given.multi_gpu or given.use_fsdp
        prepare = environments.prepare_multi_gpu_env if several else environments.prepare_simple_launcher_cmd_env
        with mock.patch.object(environments, "is_port_in_use", lambda *_: False):
            made = prepare(given)
    variables: dict[str, str] = made if isinstance(made, dict) else made[1]
    processes, machines = (int(given.num_processes), int(given.num_machines)) if several else (1, 1)
    if several:
        variables = {**variables, **_as_agent_says(processes // machines, machines, given)}
    new = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    return Launch(
        [*(["-m"] if given.module else []), given.training_script, *given.training_script_args],
        tuple(new.items()), processes, (ONE_GPU,) * (bool(counted) and processes == 1),
    )  # fmt: skip


def _check_covered(given: Any) -> None:
    what = next((name for name in ("use_deepspeed", "use_megatron_lm", "tpu", "cpu") if getattr(given, name)), None)
    if given.use_fsdp and int(getattr(given, "fsdp_version", 1)) == 1:
        what = "fsdp_version 1"
    if given.no_python:
        what = "no_python"
    if what is not None:
        raise UsageError(
            f"accelerate launch with {what.removeprefix('use_')}: memfit does not cover that for scripts",
            hint="it covers one GPU, several (DDP), and FSDP2: --use_fsdp --fsdp_version 2",
        )


@contextlib.contextmanager
def _machine_with_gpus(processes: int | None, asked: list[bool]) -> Iterator[None]:
    """As many as there are processes to be."""
    import torch

    def count() -> int:
        if processes is None:
            asked.append(True)
        return processes or 1

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", count),
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
    ):
        yield


@contextlib.contextmanager
def _told_by(launcher: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, ConnectionError, AssertionError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{launcher}: {error}", hint=f"{launcher} --help says what it takes") from error


def _parsed(parser: Any, words: Sequence[str], launcher: str) -> Any:
    """argparse prints its errors and ends the program."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parser.parse_args(list(words))
    except SystemExit:
        last = (said.getvalue().strip().splitlines() or [""])[-1].rpartition("error: ")[2]
        raise UsageError(
            f"{launcher}: {last}",
            hint=f"{launcher} --nproc_per_node=4 train.py ARGS"
            if launcher == "torchrun"
            else f"{launcher} --num_processes 4 train.py ARGS",
        ) from None

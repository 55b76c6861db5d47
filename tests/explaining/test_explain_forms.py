"""Messages of every form that torch, its backends and its libraries have printed, as people have them: each number."""

from __future__ import annotations

import json
import random
import textwrap
import time
from pathlib import Path

import pytest
from support.oom_messages import find_oom

from memfit.explaining.explain import explain
from memfit.explaining.message import Oom, find_ooms

ADVICE_1_10 = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
    "documentation "
    "for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
ADVICE_2_1 = (
    " If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.  See "
    "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
ADVICE_2_2 = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
    "to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
ADVICE_2_10 = ADVICE_2_2.replace("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
ADVICE_2_11 = ADVICE_2_2.replace(
    "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables",
    "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
)
OLD = "Tried to allocate 734.00 MiB (GPU 0; 10.73 GiB total capacity; 9.55 GiB already allocated; 215.50 MiB free; "
MODERN = (
    "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 23.64 GiB of which 512.00 MiB "
    "is free. "
    "Including non-PyTorch memory, this process has 22.83 GiB memory in use. "
    "Of the allocated memory 21.93 GiB is allocated by PyTorch, and 300.25 MiB is reserved by PyTorch but unallocated."
)
REAL_H200 = (
    "CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 133.11 "
    "GiB is free. "
    "Including non-PyTorch memory, this process has 6.68 GiB memory in use. 6.00 GiB allowed; Of the allocated memory "
    "5.76 GiB is allocated by PyTorch, and 198.88 MiB is reserved by PyTorch but unallocated." + ADVICE_2_11
)
MANY = " ".join(f"Process {3000 + i} has 1.19 GiB memory in use." for i in range(15))
ASYNC = """torch.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of memory)
Currently allocated     : 77.10 GiB
Requested               : 3.50 GiB
Device limit            : 79.15 GiB
Free (according to CUDA): 17.75 MiB
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB"""

M = {"requested": "1.16 GiB", "capacity": "23.64 GiB", "free": "512.00 MiB", "allocated": "21.93 GiB",
     "unallocated": "300.25 MiB", "own": "22.83 GiB", "device": 0}  # fmt: skip

OLDER = {"form": "cuda", "requested": "734.00 MiB", "capacity": "10.73 GiB", "allocated": "9.55 GiB",
     "free": "215.50 MiB", "reserved": "9.60 GiB", "device": 0}  # fmt: skip

FORMS: dict[str, tuple[str, dict[str, object]]] = {
    # -- CUDA, native, by release
    "1.0": (f"RuntimeError: CUDA out of memory. {OLD}120.25 MiB cached)", {**OLDER, "reserved": "120.25 MiB"}),
    "1.4": (f"RuntimeError: CUDA out of memory. {OLD}9.60 GiB reserved in total by PyTorch)", OLDER),
    "1.8 with a fraction": (
        f"RuntimeError: CUDA out of memory. {OLD}9.66 GiB allowed; 9.60 GiB reserved in total by PyTorch)",
        {**OLDER, "allowed": "9.66 GiB"}),
    "1.10": (f"RuntimeError: CUDA out of memory. {OLD}9.60 GiB reserved in total by PyTorch){ADVICE_1_10}", OLDER),
    "1.13": (
        f"torch.cuda.OutOfMemoryError: CUDA out of memory. {OLD}9.60 GiB reserved in total by PyTorch){ADVICE_1_10}",
        OLDER),
    "2.1, capacty": (f"torch.cuda.OutOfMemoryError: {MODERN.replace('capacity', 'capacty')}{ADVICE_2_1}", M),
    "2.2": (f"torch.cuda.OutOfMemoryError: {MODERN}{ADVICE_2_2}", M),
    "2.3, the device as a byte": (MODERN.replace("GPU 0", "GPU \x00") + ADVICE_2_2, M),
    "2.3, the device as a byte of one": (MODERN.replace("GPU 0", "GPU \x01"), {**M, "device": 1}),
    "2.3, the byte written out": (MODERN.replace("GPU 0", r"GPU \x00"), M),
    "2.3, the byte in JSON": (MODERN.replace("GPU 0", r"GPU \u0000"), {**M, "device": 0}),
    "2.3, the byte lost": (MODERN.replace("GPU 0", "GPU "), {**M, "device": None}),
    "2.3, cut after GPU": ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU ",
                           {"requested": "2.00 GiB", "capacity": None, "free": None, "device": None}),
    "2.4, private pools": (
        MODERN.replace("by PyTorch, and", "by PyTorch, with 1.20 GiB allocated in private pools (e.g., CUDA "
                                          "Graphs), and"),
        {**M, "private_pools": "1.20 GiB"}),
    "2.5, allowed": (MODERN.replace("Of the", "20.00 GiB allowed; Of the"), {**M, "allowed": "20.00 GiB"}),
    "2.10": (f"torch.OutOfMemoryError: {MODERN}{ADVICE_2_10}", M),
    "2.11, really printed on an H200": (
        f"torch.OutOfMemoryError: {REAL_H200}",
        {"requested": "48.00 MiB", "capacity": "139.80 GiB", "free": "133.11 GiB", "allowed": "6.00 GiB",
         "allocated": "5.76 GiB", "unallocated": "198.88 MiB", "own": "6.68 GiB", "device": 0}),
    "2.11, really printed by a training run under a cap": (
        "error: memory ran out with a single row at a time, 512 tokens long: CUDA out of memory. Tried to allocate "
        "96.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 113.89 GiB is free. Process 987 has 7.87 "
        "GiB memory "
        "in use. Process 1926 has 8.65 GiB memory in use. Process 1946 has 6.45 GiB memory in use. Including "
        "non-PyTorch "
        "memory, this process has 2.89 GiB memory in use. 2.20 GiB allowed; Of the allocated memory 2.07 GiB is "
        "allocated "
        "by PyTorch, and 96.84 MiB is reserved by PyTorch but unallocated.",
        {"requested": "96.00 MiB", "capacity": "139.80 GiB", "free": "113.89 GiB", "allowed": "2.20 GiB",
         "allocated": "2.07 GiB", "unallocated": "96.84 MiB", "own": "2.89 GiB", "device": 0,
         "others": {987: "7.87 GiB", 1926: "8.65 GiB", 1946: "6.45 GiB"}}),
    "1EB": ("RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
            {"form": "cuda", "requested": None, "over_an_exabyte": True}),
    # -- processes
    "foreign pid": (MODERN.replace("Including non-PyTorch memory, this process", "Process 91241"),
                    {**M, "own": None, "others": {91241: "22.83 GiB"}}),
    "other before own": (
        MODERN.replace("Including", "Process 7 has 118.00 MiB memory in use. Including"),
        {**M, "others": {7: "118.00 MiB"}}),
    "2^64": (MODERN.replace("Including", "Process 7 has 17179869184.00 GiB memory in use. Including"),
             {**M, "others": {7: None}}),
    "0 bytes": (MODERN.replace("22.83 GiB memory", "0 bytes memory"), {**M, "own": None}),
    "fifteen processes": (MODERN.replace("Including", f"{MANY} Including"),
                          {**M, "others": {3000 + i: "1.19 GiB" for i in range(15)}}),
    "no processes": (MODERN.replace("Including non-PyTorch memory, this process has 22.83 GiB memory in use. ", ""),
                     {**M, "own": None}),
    # -- other backends
    "HIP": (MODERN.replace("CUDA out", "HIP out").replace("by PyTorch, and",
            "by PyTorch, with 12.00 MiB allocated in private pools (e.g., HIP Graphs), and"),
            {**M, "form": "hip", "private_pools": "12.00 MiB"}),
    "XPU": ("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity "
            "of 15.91 GiB "
            "of which 1.02 GiB is free. 12.00 GiB allowed; Of the allocated memory 11.20 GiB is allocated by "
            "PyTorch, and "
            "210.00 MiB is reserved by PyTorch but unallocated. Please use `empty_cache` to release all "
            "unoccupied cached "
            "memory.",
            {"form": "xpu", "device": 1, "requested": "2.50 GiB", "capacity": "15.91 GiB", "free": "1.02 GiB",
             "allowed": "12.00 GiB", "allocated": "11.20 GiB", "unallocated": "210.00 MiB"}),
    "generic header": (MODERN.replace("CUDA out", "Out"), {**M, "form": "cuda"}),
    "cudaMallocAsync": (ASYNC, {"form": "cuda-async", "device": 1, "allocated": "77.10 GiB", "requested": "3.50 GiB",
                                "capacity": "79.15 GiB", "free": "17.75 MiB", "allowed": None}),
    "cudaMallocAsync, really printed on an H200": (
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 2.00 GiB\nRequested               : 1024.00 MiB\nDevice limit            : "
        "139.80 GiB\n"
        "Free (according to CUDA): 114.39 GiB\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 2.80 GiB\n",
        {"form": "cuda-async", "device": 0, "allocated": "2.00 GiB", "requested": "1024.00 MiB",
         "capacity": "139.80 GiB", "free": "114.39 GiB", "allowed": "2.80 GiB"}),
    "MPS": ("RuntimeError: MPS backend out of memory (MPS allocated: 8.87 GiB, other allocations: 1.20 GiB, max "
            "allowed: "
            "18.13 GiB). Tried to allocate 9.50 GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to "
            "disable "
            "upper limit for memory allocations (may cause system failure).",
            {"form": "mps", "allocated": "8.87 GiB", "other_allocations": "1.20 GiB", "allowed": "18.13 GiB",
             "requested": "9.50 GiB"}),
    "MPS, older, no limit": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 15.12 GB, other allocations: 384.00 KB). Tried "
        "to allocate "
        "256.00 MB on shared pool.",
        {"form": "mps", "allocated": "15.12 GB", "other_allocations": "384.00 KB", "allowed": None,
         "requested": "256.00 MB"}),
    "CPU": ("RuntimeError: [enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: can't allocate memory: you "
            "tried to "
            "allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
            {"form": "cpu", "requested": "68719476736 bytes", "where": "host"}),
    "CPU on Windows": ("RuntimeError: [enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough "
                       "memory: you "
                       "tried to allocate 1024 bytes.", {"form": "cpu", "requested": "1024 bytes"}),
    # -- odd units
    "KiB and bytes": ("CUDA out of memory. Tried to allocate 512 bytes. GPU 3 has a total capacity of 1649.76 "
                      "GiB of which "
                      "0 bytes is free. Of the allocated memory 700.50 KiB is allocated by PyTorch, and 1024.00 MiB is "
                      "reserved by PyTorch but unallocated.",
                      {"requested": "512 bytes", "capacity": "1649.76 GiB", "free": "0 bytes",
                       "allocated": "700.50 KiB",
                       "unallocated": "1024.00 MiB", "device": 3}),
    # -- as people have them
    "wrapped at 80 columns": ("\n".join(textwrap.wrap(f"torch.OutOfMemoryError: {MODERN}{ADVICE_2_11}", 80)), M),
    "wrapped in the middle of words": (
        "\n".join((f"torch.OutOfMemoryError: {MODERN}{ADVICE_2_11}")[i : i + 80] for i in range(0, 900, 80)), M),
    "wrapped by markdown": ("\n".join(f"> {line}" for line in textwrap.wrap(MODERN, 60)), M),
    "by rank": ("\n".join(f"[rank1]: {line}" for line in textwrap.wrap(MODERN, 70)), M),
    "by a logger": ("\n".join(f"2025-11-14 10:22:01,123 - ERROR - {line}" for line in textwrap.wrap(MODERN, 90)), M),
    "by srun": ("\n".join(f"3: {line}" for line in textwrap.wrap(MODERN, 70)), M),
    "by mpirun": ("\n".join(f"[1,3]<stderr>: {line}" for line in textwrap.wrap(MODERN, 70)), M),
    "by Ray": ("\n".join(f"(TrainWorker pid=4711, ip=10.0.0.7) {line}" for line in textwrap.wrap(MODERN, 90)), M),
    "by docker compose": ("\n".join(f"trainer-1  | {line}" for line in textwrap.wrap(MODERN, 70)), M),
    "by glog": ("\n".join(f"E1114 10:22:01.123456 4711 worker.py:77] {line}" for line in textwrap.wrap(MODERN, 70)), M),
    "by pytest": ("\n".join(f"E   {line}" for line in textwrap.wrap(MODERN, 70)), M),
    "in a box by rich": ("\n".join(f"│ {line:<90} │" for line in textwrap.wrap(MODERN, 88)), M),
    "in JSON": (json.dumps({"level": "error", "msg": f"Traceback:\n  File \"a.py\", line 1\n{MODERN}"}), M),
    "in JSON in JSON": (json.dumps({"log": json.dumps({"error": MODERN + "\n"})}), M),
    "coloured": (f"\x1b[31m\x1b[1mtorch.OutOfMemoryError\x1b[0m: {MODERN.replace('1.16', chr(27) + '[1m1.16')}", M),
    "with Windows line ends": ("\r\n".join(textwrap.wrap(MODERN, 70)), M),
    "quoted by another error": (f"RayTaskError(OutOfMemoryError): original error: {MODERN} while running task 7", M),
    "spaces collapsed or doubled": (MODERN.replace(" ", "  "), M),
    "truncated in the middle": (MODERN[: MODERN.index("22.83") + 3],
                                {**M, "own": None, "allocated": None, "unallocated": None}),
    "cut by memfit's own log": (f"out-of-memory: memory ran out in micro-step 1 of step 3: {MODERN[:300]}; the "
                                "step is run "
                                "again with micro_batch_size 2 instead of 4", {**M, "unallocated": None}),
    "cut in the number": ("RuntimeError: CUDA out of memory. Tried to allocate "
                          "1.1", {"form": "cuda", "requested": None}),
    "only its first words": ("epoch 3: CUDA out of memory", {"form": "cuda", "requested": None}),
}  # fmt: skip


def numbers(oom: Oom) -> dict[str, object]:
    found: dict[str, object] = {name: size.text if size else None for name, size in oom.sizes().items()}
    found |= {"form": oom.form, "device": oom.device, "over_an_exabyte": oom.over_an_exabyte, "where": oom.where}
    found["own"] = next((use.used.text for use in oom.processes if use.pid is None and use.used), None)
    found["others"] = {use.pid: use.used and use.used.text for use in oom.processes if use.pid is not None}
    return found


@pytest.mark.parametrize("name", FORMS)
def test_every_number_of_this_form_is_read(name: str) -> None:
    text, expected = FORMS[name]
    oom = find_oom(text)
    assert oom is not None
    found = numbers(oom)
    assert {key: found[key] for key in expected} == expected
    invented = {key for key, size in oom.sizes().items() if size is not None} - set(expected)
    assert not invented and ("others" in expected or not found["others"])


def hard_wrapped(text: str, width: int) -> str:
    """As a terminal does it, in the middle of words and numbers."""
    return "\n".join(line[i : i + width] for line in text.splitlines() for i in range(0, len(line), width))


@pytest.mark.parametrize("name", ["1.0", "2.1, capacty", "2.11, really printed on an H200", "XPU", "MPS", "CPU"])
def test_at_whatever_width_a_terminal_breaks_the_message_no_number_changes(name: str) -> None:
    text = f'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n{FORMS[name][0]}'
    whole = find_oom(text)
    assert whole is not None
    for width in range(40, 141):
        for margin in ("", "    "):
            broken = find_oom(textwrap.indent(hard_wrapped(text, width), margin))
            assert broken is not None and numbers(broken) == numbers(whole), width


PREFIXES = [
    "[rank1]: ", " [default0]:", "> ", "│ ", "E   ", "3: ", "[1,3]<stderr>: ", "ERROR:root:", "root - ERROR - ",
    "[10:22:01] ", "10:22:01 INFO  ", "2025-11-14 10:22:01,123 - ERROR - ", "2025-11-14T10:22:01.123Z ",
    "[2025-11-14 10:22:01,123][ERROR] ", "  | 2024-11-28T07:42:15.533Z | ", "trainer-1  | ", "rdma-worker-1: ",
    "2025-11-14 10:22:01 | ERROR    | mod:fn:12 - ", "Nov 14 10:22:01 host python[123]: ", "(TrainWorker pid=4711) ",
    "E1114 10:22:01.123456 4711 worker.py:77] ",
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_loggers_prefix_before_every_line_of_a_wrapped_message_changes_no_number(prefix: str) -> None:
    for name in ("1.13", "2.5, allowed", "fifteen processes", "XPU", "MPS"):
        whole = find_oom(FORMS[name][0])
        assert whole is not None
        for width in (35, 60, 80, 120):
            lines = textwrap.wrap(FORMS[name][0], width)
            broken = find_oom("\n".join(prefix + line for line in lines))
            assert broken is not None and numbers(broken) == numbers(whole), (name, width)


def test_there_are_at_least_forty_forms() -> None:
    assert len(FORMS) >= 40


@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_known_has_a_reason(name: str) -> None:
    oom = find_oom(FORMS[name][0])
    assert oom is not None
    assert all(oom.unknown.get(each) for each, size in oom.sizes().items() if size is None)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_explained_in_the_middle_of_a_log(name: str) -> None:
    text = "step 1, loss 2.31\n" * 50 + FORMS[name][0] + "\n" + "cleaning up\n" * 20
    told = explain(text, predict=False)
    assert told.known and told.cause.sentence.endswith(".")
    json.dumps(told.to_json(), allow_nan=False)


# -- in disguise -----------------------------------------------------------------------------------------------------

DISGUISED = [
    ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously "
     "reported", "certain", "either"),
    ("RuntimeError: CUDA driver error: out of memory", "certain", "gpu"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "certain", "gpu"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "likely", "gpu"),
    ("RuntimeError: OOM trying to allocate workspace for cublaslt", "certain", "gpu"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "likely", "gpu"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "likely", "gpu"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "likely", "gpu"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear", "possible", "gpu"),
    ("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`. If you keep seeing this "
     "error, you may use ... the input may contain NaN", "likely", "gpu"),
    ("node1:77:93 [1] include/alloc.h:185 NCCL WARN Cuda failure 'out of memory'\nDistBackendError: NCCL error in: "
     "ProcessGroupNCCL.cpp:2006, unhandled cuda error", "certain", "gpu"),
    ("node1:77:93 [1] NCCL WARN Failed to CUDA calloc 10485760 bytes", "certain", "gpu"),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, internal error - please "
     "report this "
     "issue", "possible", "gpu"),
    ("Error out of memory at line 380 in file /tmp/bitsandbytes/csrc/pythonInterface.c", "certain", "either"),
    ("Error out of memory at line 67 in file /src/csrc/ops.cu", "certain", "either"),
    ("[64211.5] Out of memory: Killed process 4242 (python) total-vm:219012kB", "certain", "host"),
    ("Pod train-0: Reason: OOMKilled", "certain", "host"),
    ("torch.distributed.elastic: failed (exitcode: -9) local_rank: 2", "likely", "host"),
    ("subprocess.CalledProcessError: Command 'python' returned non-zero exit status 137.", "likely", "host"),
    ("./run.sh: line 12: 31337 Killed                  python train.py --lr 1e-4", "likely", "host"),
    ("Killed", "likely", "host"),
    ("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.", "likely", "host"),
    ("numpy.core._exceptions.MemoryError: Unable to allocate 12.5 GiB for an array", "certain", "host"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "certainty", "where"), DISGUISED)
def test_an_error_in_disguise_says_how_sure_it_is_and_what_to_do(text: str, certainty: str, where: str) -> None:
    told = explain(f"step 4\n{text}\n", predict=False)
    assert told.oom is not None and (told.oom.form, told.oom.certainty, told.oom.where) == (
        "disguised",
        certainty,
        where,
    )
    assert told.fixes and told.fixes[0].says == told.oom.remedy
    assert told.cause.kind == ("host-memory" if where == "host" else "library")


def test_of_two_errors_in_disguise_the_surer_one_is_explained() -> None:
    oom = find_oom("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\nPod train-0: Reason: OOMKilled\n")
    assert oom is not None and oom.where == "host"


def test_a_word_in_a_sentence_is_no_kill() -> None:
    assert find_oom("the hero was Killed in the second act; exit code: 1") is None


def test_a_plain_message_goes_before_a_disguised_one() -> None:
    oom = find_oom(f"CUDA error: out of memory\n{MODERN}\nexit code: 137")
    assert oom is not None and oom.form == "cuda"


# -- long texts ------------------------------------------------------------------------------------------------------


def traceback_of(size: int, message: str) -> str:
    frame = '  File "/opt/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1790, in _call_impl\n' \
            "    return forward_call(*args, **kwargs)\n"  # fmt: skip
    half = frame * (size // (2 * len(frame)))
    return f"Traceback (most recent call last):\n{half}torch.OutOfMemoryError: {message}\n{half}"


def test_a_message_in_the_middle_of_a_traceback_of_2_mb_is_read_in_a_moment() -> None:
    text = traceback_of(2 << 20, MODERN)
    started = time.process_time()
    told = explain(text, predict=False)
    assert time.process_time() - started < 10  # about 0.3 s on an idle machine
    assert told.oom is not None and numbers(told.oom) | M == numbers(told.oom)
    assert told.place.phase == "forward"


def test_first_and_last_of_a_log_of_64_mb_are_found_with_their_lines() -> None:
    line = "2025-11-14 10:22:01,123 - INFO - step 12, loss 2.3100, memory 12.01 GiB reserved\n"
    filler = line * ((32 << 20) // len(line))
    second = MODERN.replace("1.16 GiB", "2.00 GiB")
    text = f"{filler}{MODERN}\n{filler}{second}\n"
    started = time.process_time()
    found = find_ooms(text)
    assert time.process_time() - started < 20  # about 1 s on an idle machine
    assert [each.oom.requested and each.oom.requested.text for each in (found.first, found.last)] == [
        "1.16 GiB",
        "2.00 GiB",
    ]
    lines = (32 << 20) // len(line)
    # The text is a little longer than is read: what is cut off its beginning is not counted.
    assert 0 <= lines + 1 - found.first.line < 40
    assert found.last.line - found.first.line == lines + 1


def test_of_two_messages_both_are_reported_and_the_last_is_explained() -> None:
    told = explain(f"{MODERN}\nretrying with smaller batch\n{MODERN.replace('1.16', '1.58')}", predict=False)
    document = told.to_json()["found"]
    assert (document["count"], document["first"]["requested"], document["last"]["requested"]) == (
        2,
        "1.16 GiB",
        "1.58 GiB",
    )
    assert "1.58 GiB" in told.cause.sentence


# -- mutated texts ---------------------------------------------------------------------------------------------------


def mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 6)):
        if not text:
            return text
        at = rng.randrange(len(text))
        match rng.randrange(8):
            case 0:
                text = text[:at] + text[at + rng.randint(1, 40) :]
            case 1:
                text = text[:at] + rng.choice('\0\n\r\t \\"{}[]()|:;.,%9') * rng.randint(1, 5) + text[at:]
            case 2:
                text = text[:at] + chr(rng.choice((0x7F, 0xA0, 0x2028, 0xFFFD, 0x1F600, 0x1B))) + text[at + 1 :]
            case 3:
                other = rng.choice(TEXTS)
                text = text[:at] + other[rng.randrange(len(other)) :]
            case 4:
                text = text[:at] + str(rng.choice((0, 1, 2**31, 2**63, 2**64, 10**19))) + text[at:]
            case 5:
                text = text[at:] + text[:at]
            case 6:
                text = text.replace(
                    rng.choice(("GiB", "MiB", " ", ".", "memory")),
                    rng.choice(("", "TiB", "\n", "bytes", "&nbsp;", "<br>")),
                )
            case _:
                text = text[:at] * 2
    return text[:20_000]


TEXTS = [text for text, _ in FORMS.values()] + [text for text, _, _ in DISGUISED]
TEXTS.append(
    'Traceback (most recent call last):\n  File "/x/modeling_qwen2.py", line 3, in forward\n    logits = '
    "self.lm_head(h)\n"
    f"--model Qwen/Qwen2.5-7B --max_seq_length 2048 per_device_train_batch_size=1\n{MODERN}"
)


REAL = sorted((Path(__file__).parents[1] / "data" / "ooms").glob("*.txt"))
TEXTS += [path.read_text() for path in REAL if path.stat().st_size < 1700]


@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_texts_are_explained_or_refused_without_a_crash(number: int) -> None:
    rng = random.Random(20251115)
    slowest = 0.0
    for _ in range(number):
        text = mutated(rng.choice(TEXTS), rng)
        begun = time.process_time()
        told = explain(text.encode("utf-8", "surrogatepass"), predict=False)
        slowest = max(slowest, time.process_time() - begun)
        assert told.cause.sentence
    assert slowest < 5  # about 0.05 s


@pytest.mark.parametrize("junk", [b"", b"\0" * 4096, bytes(range(256)) * 64])
def test_binary_junk_has_no_message_in_it(junk: bytes) -> None:
    told = explain(junk, predict=False)
    assert not told.known and told.cause.sentence == "There is no out-of-memory message here."


def test_what_powershell_writes_is_read() -> None:
    told = explain(MODERN.encode("utf-16"), predict=False)
    assert told.oom is not None and numbers(told.oom)["allocated"] == "21.93 GiB"

"""Every number of an out-of-memory message, whatever it is wrapped in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.oom_messages import find_oom

from memfit.explaining.message import parse_size

NEWEST = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of "
    "23.64 GiB of which 512.00 MiB is free. Including non-PyTorch memory, this process has 22.83 GiB memory in"
    " use. Process 1234 has 17179869184.00 GiB memory in use. 20.00 GiB allowed; Of the allocated memory 21.93"
    " GiB is allocated by PyTorch, with 12.00 MiB allocated in private pools (e.g., CUDA Graphs), and 300.25 "
    "MiB is reserved by PyTorch but unallocated."
)
OLDEST = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 7.93 GiB total capacity; 6.65 GiB already "
    "allocated; 12.31 MiB free; 95.22 MiB cached)"
)


def texts(found: object, *names: str) -> list[str | None]:
    return [getattr(getattr(found, name), "text", None) for name in names]


def test_the_newest_form_gives_all_its_numbers() -> None:
    found = find_oom(NEWEST)
    assert found is not None and found.device == 0
    named = texts(found, "requested", "capacity", "free", "allowed", "allocated", "private_pools", "unallocated")
    assert named == ["1.16 GiB", "23.64 GiB", "512.00 MiB", "20.00 GiB", "21.93 GiB", "12.00 MiB", "300.25 MiB"]
    assert found.requested is not None and found.requested.may_be(2048 * 152_064 * 4)


def test_a_size_that_means_not_available_is_unknown_not_huge() -> None:
    found = find_oom(NEWEST)
    assert found is not None
    assert [(use.pid, use.used and use.used.text) for use in found.processes] == [(None, "22.83 GiB"), (1234, None)]


def test_the_oldest_form_gives_all_its_numbers() -> None:
    found = find_oom(OLDEST)
    assert found is not None and found.device == 1
    named = texts(found, "requested", "capacity", "allocated", "free", "reserved")
    assert named == ["20.00 MiB", "7.93 GiB", "6.65 GiB", "12.31 MiB", "95.22 MiB"]


@given(st.integers(1, 60))
def test_line_breaks_and_rank_prefixes_change_nothing(width: int) -> None:
    words, lines, line = NEWEST.split(" "), [], ""
    for word in words:
        line = f"{line} {word}".strip()
        if len(line) > width:
            lines.append(f"[rank3]: {line}")
            line = ""
    lines.append(f"[rank3]: {line}")
    plain, broken = find_oom(NEWEST), find_oom("\n".join(lines))
    assert plain is not None and broken is not None
    assert (broken.requested, broken.allocated, broken.unallocated) == (
        plain.requested, plain.allocated, plain.unallocated,
    )  # fmt: skip


def test_of_several_messages_the_last_one_counts() -> None:
    found = find_oom(f"{OLDEST}\nretrying\n{NEWEST}")
    assert found is not None and found.requested is not None and found.requested.text == "1.16 GiB"


@pytest.mark.parametrize(
    ("text", "certainty"),
    [
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "certain"),
        ("NCCL WARN Cuda failure 'out of memory'", "certain"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "possible"),
        ("subprocess died, exit code: 137", "likely"),
    ],
)
def test_a_disguised_one_says_how_sure_it_is(text: str, certainty: str) -> None:
    found = find_oom(text)
    assert found is not None and (found.form, found.certainty) == ("disguised", certainty)


def test_host_memory_is_told_from_the_gpus() -> None:
    found = find_oom(
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
    )
    assert found is not None and found.form == "cpu" and found.requested is not None and found.requested.high == 64


def test_a_text_without_one_gives_none() -> None:
    assert find_oom("loss 2.31 at step 400") is None


def test_a_printed_size_is_an_interval_of_half_its_last_digit() -> None:
    size = parse_size("1.00", "KiB")
    assert size is not None and (size.low, size.high) == (1019, 1029)


@given(st.text(max_size=400))
def test_any_text_is_read_without_an_error(text: str) -> None:
    find_oom(f"CUDA out of memory. Tried to allocate {text}")

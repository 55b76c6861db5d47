"""Reports of two real recordings of an H200 (torch 2.11), against what torch itself printed then."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from made import DATA

from memfit.analysis.report import report_file
from memfit.render.plan import as_text
from memfit.render.report import show_report
from memfit.units import GiB, MiB


@cache
def document(name: str) -> dict[str, Any]:
    return report_file(DATA / f"{name}.pickle").document


@cache
def text(name: str) -> str:
    return as_text(show_report, document(name))


# -- a training step -------------------------------------------------------------------------------------------------


def test_the_peak_is_the_recorded_one_to_the_byte() -> None:
    peak = document("snap-train")["peak"]

    assert (peak["allocated_bytes"], peak["reserved_bytes"]) == (2_569_738_240, 3_001_024_512)


def test_every_phase_has_the_peaks_that_torch_counted_in_it() -> None:
    """From the machine: the second step's [max_memory_allocated, max_memory_reserved], reset before each phase."""
    rows = [
        (row["name"], row["step"], row["allocated_bytes"], row["reserved_bytes"])
        for row in document("snap-train")["phases"]
    ]

    assert rows == [
        ("forward", 1, 2_517_727_232, 2_896_166_912),
        ("backward", 1, 2_566_918_656, 3_001_024_512),
        ("step", 1, 2_569_738_240, 3_001_024_512),
    ]


def test_the_gradients_alive_at_the_peak_are_those_of_124_million_parameters() -> None:
    gradients = document("snap-train")["breakdown"]["gradients"]

    assert 124_439_808 * 4 <= gradients < 124_439_808 * 4 * 1.02


def test_what_the_recording_cannot_know_is_said_before_the_numbers() -> None:
    first, *_ = text("snap-train").splitlines()

    assert first.startswith("note: GPU 0: recording began after memory was in use: 447 blocks")
    assert document("snap-train")["there_before"]["count"] == 447


def test_the_optimizers_temporaries_are_found_at_the_line_that_steps() -> None:
    first, *_ = document("snap-train")["temporaries"]

    assert (first["name"], first["count"]) == ("measure_more.py:31 train_steps", 149)


# -- out of memory ---------------------------------------------------------------------------------------------------


def test_the_request_that_failed_is_named_with_its_line() -> None:
    (oom,) = document("snap-oom")["ooms"]

    assert oom["requested_bytes"] == 48 * MiB  # "Tried to allocate 48.00 MiB"
    assert oom["code_line"] == "transformers/integrations/sdpa_attention.py:158 sdpa_attention_forward"
    assert oom["stack"][-1] == "measure_more.py:73 <module>"


def test_what_was_alive_and_what_was_cached_are_as_torch_said() -> None:
    (oom,) = document("snap-oom")["ooms"]

    assert f"{oom['allocated_bytes'] / GiB:.2f} GiB" == "5.76 GiB"  # "is allocated by PyTorch"
    assert f"{oom['cached_bytes'] / MiB:.2f} MiB" == "198.88 MiB"  # "reserved by PyTorch but unallocated"
    assert f"{oom['device_free_bytes'] / GiB:.2f} GiB" == "133.11 GiB"  # "of which ... is free"
    assert oom["largest_hole_bytes"] < oom["requested_bytes"]
    assert sum(oom["breakdown"].values()) == oom["allocated_bytes"]
    assert oom["by_code_line"][0]["name"] == "transformers/activations.py:66 forward"


def test_a_report_of_an_error_begins_with_the_error() -> None:
    assert "out of memory: a request of 48.00 MiB at transformers/integrations/sdpa_attention.py:158" in text(
        "snap-oom"
    )
    assert text("snap-oom").index("out of memory") < text("snap-oom").index("peak:")


def test_it_says_why_the_cached_memory_was_of_no_use_and_what_to_try() -> None:
    (said,) = document("snap-oom")["next"]

    assert said == (
        "198.88 MiB were cached, but in pieces of at most 11.00 MiB: try "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )


@pytest.mark.parametrize("name", ["snap-train", "snap-oom"])
def test_the_parts_by_line_of_code_sum_to_the_peak(name: str) -> None:
    found = document(name)

    assert sum(row["allocated_bytes"] for row in found["by_code_line"]) == found["peak"]["allocated_bytes"]

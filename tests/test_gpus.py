"""`--gpu`: cards by name, by label and by exact size, and honest refusals."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import MemfitError, UnknownName, UsageError
from memfit.gpus import MAX_THREADS_PER_SM, find_gpu, list_gpus
from memfit.units import GiB, MiB

CARDS = json.loads(files("memfit").joinpath("gpus.json").read_text())["cards"]


@pytest.mark.parametrize("text", ["RTX 4090", "rtx4090", "4090", "RTX-4090", "NVIDIA GeForce RTX 4090", "4090 24GB"])
def test_a_card_is_found_however_it_is_written(text: str) -> None:
    assert find_gpu(text).name == "RTX 4090"


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 4070 Laptop"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA B300 SXM6 AC", "B300"),
    ],
)
def test_the_names_that_torch_gives_cards_are_known(torch_name: str, name: str) -> None:
    assert find_gpu(torch_name).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3060 (12 GB)", "RTX 3060"),
        ("RTX 3090 (24 GB)", "RTX 3090"),
        ("A5000 (24 GB)", "RTX A5000"),
        ("A100 (40 GB)", "A100 40GB"),
        ("RTX A6000 (48 GB)", "RTX A6000"),
        ("H100 (80 GB)", "H100"),
        ("A100 80GB", "A100 80GB"),
    ],
)
def test_every_card_that_the_guides_name_is_known(text: str, name: str) -> None:
    assert find_gpu(text).name == name


def test_the_h200_is_as_measured() -> None:
    h200 = find_gpu("h200")

    assert h200.capacity_bytes // MiB == 143_156
    assert (h200.arch, h200.sm_count, h200.max_threads_per_sm) == ((9, 0), 132, 2048)
    assert h200.context_start_bytes == 648_871_936
    assert h200.context_bytes == 804_061_184
    assert h200.notes == ()


def test_the_estimate_of_a_context_comes_near_the_three_that_are_known() -> None:
    for card, gpu in zip(CARDS, list_gpus(), strict=True):
        if "context_bytes" in card:
            each = 2307 if gpu.arch == (9, 0) else 1934
            estimate = 24 * MiB + gpu.sm_count * gpu.max_threads_per_sm * each
            assert estimate == pytest.approx(gpu.context_start_bytes, rel=0.01), gpu.name


@pytest.mark.parametrize(
    ("training", "flash", "used"),
    [(False, False, 720_175_104), (False, True, 728_563_712), (True, False, 787_283_968), (True, True, 804_061_184)],
)
def test_the_h200s_context_after_a_job_is_what_was_measured(training: bool, flash: bool, used: int) -> None:
    assert find_gpu("h200").context_after(training=training, flash=flash) == used


def test_a_size_in_gib_is_exact() -> None:
    assert find_gpu("24GiB").capacity_bytes == 24 * GiB
    assert find_gpu("23.5 gib").capacity_bytes == 47 * GiB // 2
    assert find_gpu("24564MiB").capacity_bytes == 24_564 * MiB
    assert find_gpu(str(24 * GiB)).capacity_bytes == 24 * GiB


@pytest.mark.parametrize("text", ["24GB", "24 gb", "24g", "24"])
def test_a_label_is_24_gib_less_what_the_driver_keeps(text: str) -> None:
    gpu = find_gpu(text)

    assert 23 * GiB < gpu.capacity_bytes < 24 * GiB
    assert "less what the driver keeps" in gpu.notes[0]


@pytest.mark.parametrize(("label", "arch"), [("12GB", (8, 6)), ("24GB", (8, 9)), ("40GB", (8, 0)), ("80GB", (9, 0))])
def test_a_label_has_the_kernels_of_the_usual_card_of_that_label(label: str, arch: tuple[int, int]) -> None:
    gpu = find_gpu(label)

    assert gpu.arch == arch
    assert f"sm {arch[0]}.{arch[1]}" in gpu.notes[-1]


def test_a_label_between_two_labels_has_the_kernels_of_the_larger() -> None:
    assert find_gpu("44GB").arch == find_gpu("48GB").arch


@pytest.mark.parametrize("size", ["20GiB", "24GiB", "80GiB", "24564MiB"])
def test_an_exact_size_says_nothing_of_the_card_so_kernels_and_context_are_those_of_the_reference(size: str) -> None:
    gpu, h200 = find_gpu(size), find_gpu("H200")

    assert (gpu.arch, gpu.sm_count, gpu.max_threads_per_sm) == ((9, 0), 132, 2048)
    assert gpu.context_start_bytes == h200.context_start_bytes
    assert "as on the H200 (sm 9.0)" in gpu.notes[-1]


def test_a_label_no_card_has_says_so() -> None:
    gpu = find_gpu("44GB")

    assert gpu.capacity_bytes < 44 * GiB
    assert "none has that label" in gpu.notes[0]


def test_a_label_lies_within_the_cards_that_carry_it() -> None:
    by_label = defaultdict(list)
    for card in CARDS:
        by_label[card["label_gb"]].append(card["total_mib"] * MiB)

    for label, totals in by_label.items():
        assert min(totals) <= find_gpu(f"{label}GB").capacity_bytes <= max(totals)


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("A100", "'A100 40GB' or 'A100 80GB'"),
        ("v100", "'V100 16GB' or 'V100 32GB'"),
        ("4060 Ti", "'RTX 4060 Ti 8GB' or 'RTX 4060 Ti 16GB'"),
        ("RTX 6000", "'Quadro RTX 6000' or 'RTX 6000 Ada' or 'RTX PRO 6000'"),
    ],
)
def test_a_name_shared_by_several_cards_is_refused_with_the_choices(text: str, choices: str) -> None:
    with pytest.raises(UsageError, match="could be several cards") as caught:
        find_gpu(text)

    assert choices in str(caught.value.hint)
    for choice in choices.replace("'", "").split(" or "):
        assert find_gpu(choice).name == choice


def test_an_unknown_card_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="no GPU called 'rtx 4091'") as caught:
        find_gpu("rtx 4091")

    assert "rtx 4090" in caught.value.nearest


def test_bytes_are_taken_at_their_word() -> None:
    with pytest.raises(UsageError, match=r"--gpu 24B is 24 bytes; did you mean 24GiB\?"):
        find_gpu("24B")


@pytest.mark.parametrize("text", ["2x80GB", "8xH100", "2 x A100"])
def test_several_cards_are_a_world_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu(text)

    assert "--world-size" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", " ", "0", "0GB", "-5", "24576MB", "12288", "5000GB", "nan", "1e9GiB", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        find_gpu(text)


def test_the_flag_in_an_error_is_the_callers() -> None:
    with pytest.raises(UsageError, match="capacity '0'"):
        find_gpu("0", flag="capacity")


def test_every_card_is_possible_and_has_its_sources() -> None:
    for card, gpu in zip(CARDS, list_gpus(), strict=True):
        assert 0.85 < gpu.capacity_bytes / (card["label_gb"] * GiB) <= 1, card["name"]
        assert gpu.arch in MAX_THREADS_PER_SM and 10 <= gpu.sm_count <= 200
        assert 48 * MiB < gpu.context_start_bytes < gpu.context_bytes < 1 * GiB
        assert card["total"] in ("measured", "reported", "estimated") and card["source"] in gpu.source
        assert ("estimated" in gpu.source) == bool(gpu.notes)


def test_speeds_are_possible_and_where_there_is_one_there_are_all_four() -> None:
    for card in list_gpus():
        speeds = (card.bandwidth, card.flops_16bit, card.flops_fp32, card.link_bandwidth)
        if card.bandwidth is None:
            assert speeds == (None,) * 4, card.name
            continue
        assert card.flops_16bit and card.flops_fp32 and card.link_bandwidth
        assert 1e11 < card.bandwidth < 1e13, card.name
        assert 1.9 < card.flops_16bit / card.flops_fp32 < 31, card.name  # tensor cores, GeForce to Blackwell
        assert card.link_bandwidth < card.bandwidth, card.name


def test_the_h200_and_the_4090_have_the_figures_of_their_data_sheets() -> None:
    h200, geforce = find_gpu("H200"), find_gpu("RTX 4090")

    assert (h200.bandwidth, h200.flops_16bit, h200.flops_fp32) == pytest.approx((4.8e12, 989.4e12, 66.9e12))
    assert (geforce.bandwidth, geforce.flops_16bit, geforce.link_bandwidth) == pytest.approx((1.008e12, 165.2e12, 32e9))


def test_every_name_and_alias_leads_to_its_own_card() -> None:
    for card in CARDS:
        for name in (card["name"], *card["aliases"]):
            assert find_gpu(name).name == card["name"], name
            assert find_gpu(f"NVIDIA {name.upper()}").name == card["name"], name


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{1,9}(\.[0-9]+)? ?[kmgt]?i?b?", fullmatch=True))
def test_any_text_is_a_card_or_refused(text: str) -> None:
    try:
        assert find_gpu(text).capacity_bytes > 0
    except MemfitError as error:
        assert error.message

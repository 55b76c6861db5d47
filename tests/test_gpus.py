"""`--gpu`: cards by name, by label and by exact size, and honest refusals."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import MemfitError, UnknownName, UsageError
from memfit.gpus import MAX_THREADS_PER_SM, find_gpu, list_gpus, list_slices
from memfit.platform import platform_of
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
        ("NVIDIA GeForce RTX 2060 with Max-Q Design", "RTX 2060"),
        ("NVIDIA GeForce RTX 3050 Ti Laptop GPU", "RTX 3050 Ti Laptop"),
        ("RTX 3070 Ti Mobile", "RTX 3070 Ti Laptop"),
        ("NVIDIA A800 80GB PCIe", "A100 80GB"),
        ("NVIDIA GB200", "GB200"),
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


def test_the_estimate_of_a_context_comes_near_the_five_that_are_known() -> None:
    assert sum("context_bytes" in card for card in CARDS) == 5
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
    context = find_gpu("h200").context_after(training=training, flash=flash)
    assert (context.low_bytes, context.high_bytes, context.basis) == (used, used, "measured")


@pytest.mark.parametrize(
    ("card", "seen"),
    [
        ("T4", [114, 141, 198, 212]),
        ("RTX A6000", [294, 358, 471, 710]),
        ("RTX 3060", [327]),
        ("RTX 3090", [307, 354, 420]),
        ("RTX 4090", [461, 520, 579]),
        ("RTX 5090", [507, 654]),
        ("A100 40GB", [491, 543]),
        ("A100 80GB", [511, 522]),
        ("A100-SXM4-80GB MIG 3g.40gb", [222]),
        ("L4", [251]),
        ("L40S", [495, 514]),
        ("H100", [599, 749]),
    ],
)
def test_what_others_saw_on_a_card_lies_within_its_range(card: str, seen: list[int]) -> None:
    context = find_gpu(card).context_after(training=True, flash=True)

    assert context.basis in ("reported", "estimated")
    assert all(context.low_bytes <= size * MiB <= context.high_bytes for size in seen)


def test_the_upper_end_of_a_range_counts_and_is_no_more_than_half_a_gib_above_the_lower() -> None:
    for card in (*list_gpus(), *list_slices()):
        context = card.context_after(training=True, flash=True)
        assert card.context_bytes == context.high_bytes, card.name
        assert (context.low_bytes == context.high_bytes) == (context.basis == "measured"), card.name
        assert context.high_bytes - context.low_bytes < GiB // 2, card.name


def test_a_job_that_loads_fewer_kernels_has_a_smaller_context_at_both_ends() -> None:
    card = find_gpu("RTX 4070")
    least, most = (card.context_after(training=asked, flash=asked) for asked in (False, True))

    assert least.low_bytes < most.low_bytes
    assert least.high_bytes < most.high_bytes


def test_a_card_whose_context_is_estimated_says_how_and_what_others_saw() -> None:
    [note] = find_gpu("T4").notes

    assert "is estimated, and the upper end counts: 24.00 MiB and 1,934 bytes for each of 40,960 resident" in note
    assert "141 MiB under a current driver (fitcheck-llm)" in note


@pytest.mark.parametrize(
    ("text", "name", "mib", "sm_count"),
    [
        ("A100-SXM4-80GB MIG 3g.40gb", "A100 80GB MIG 3g.40gb", 40_192, 42),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100 40GB MIG 1g.5gb", 4_864, 14),
        ("NVIDIA A100-PCIE-40GB MIG 1g.10gb", "A100 40GB MIG 1g.10gb", 9_856, 14),
        ("NVIDIA A100 80GB PCIe MIG 1g.10gb+me", "A100 80GB MIG 1g.10gb", 9_728, 14),
        ("H100 MIG 1g.10gb", "H100 MIG 1g.10gb", 9_984, 16),
        ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", "H100 MIG 2g.20gb", 20_096, 32),
        ("NVIDIA-H200-MIG-3g.71gb", "H200 MIG 3g.71gb", 71_168, 60),
        ("h200 mig 7g.141gb", "H200 MIG 7g.141gb", 143_104, 132),
        ("A100 MIG 3g.40gb", "A100 80GB MIG 3g.40gb", 40_192, 42),
    ],
)
def test_a_mig_slice_has_its_own_memory_and_multiprocessors(text: str, name: str, mib: int, sm_count: int) -> None:
    gpu = find_gpu(text)

    assert (gpu.name, gpu.capacity_bytes, gpu.sm_count) == (name, mib * MiB, sm_count)
    assert gpu.context_bytes < find_gpu(name.split(" MIG")[0]).context_bytes or sm_count == 132
    assert platform_of(gpu).sm_count == sm_count


def test_a_slice_has_its_share_of_the_cards_speed() -> None:
    whole, part = find_gpu("H200"), find_gpu("H200 MIG 3g.71gb")

    assert part.bandwidth == pytest.approx(whole.bandwidth / 2)
    assert part.flops_16bit == pytest.approx(whole.flops_16bit * 60 / 132)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("A100 MIG 1g.10gb", "say which: 'A100 40GB MIG 1g.10gb' or 'A100 80GB MIG 1g.10gb'"),
        ("H100 MIG 3g.71gb", "known slices: H100: 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb"),
        ("A100-SXM4-40GB MIG 4c.7g.40gb", "by its exact size, such as 20GiB"),
    ],
)
def test_a_slice_that_is_not_cut_so_is_refused_with_those_that_are(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu(text)

    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "maker", "size"),
    [
        ("MI300X", "AMD", "192GiB"),
        ("AMD Instinct MI250X", "AMD", "128GiB"),
        ("RX 7900 XTX", "AMD", "24GiB"),
        ("Radeon Pro W7900", "AMD", "24GiB"),
        ("Arc A770", "Intel", "16GiB"),
        ("Gaudi 3", "Intel", "128GiB"),
        ("Data Center GPU Max 1550", "Intel", "128GiB"),
        ("M3 Max", "Apple", "24GiB"),
        ("Apple M2 Ultra", "Apple", "24GiB"),
        ("TPU v5e", "Google", "16GiB"),
        ("Trainium2", "AWS", "24GiB"),
    ],
)
def test_a_card_of_another_maker_is_not_taken_for_an_nvidia_card(text: str, maker: str, size: str) -> None:
    with pytest.raises(UsageError, match=rf"made by {maker}, and memfit knows only NVIDIA cards") as caught:
        find_gpu(text)

    assert f"--gpu {size}" in str(caught.value.hint)
    assert "the kernels and the context of NVIDIA's H200" in str(caught.value.hint)
    assert "did you mean" not in str(caught.value.hint)


def test_no_card_of_the_catalogue_is_taken_for_another_makers() -> None:
    for card in CARDS:
        for name in (card["name"], *card["aliases"]):
            with pytest.raises(UnknownName):
                find_gpu(f"{name} no such card")


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
        ("NVIDIA RTX A2000", "'RTX A2000 6GB' or 'RTX A2000 12GB'"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "'RTX 3080 Laptop 8GB' or 'RTX 3080 Laptop 16GB'"),
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


@pytest.mark.parametrize("text", ["0GiB", "0.0000001GiB", "0B", "0.0MiB", f"0.{'0' * 400}1GiB"])
def test_what_is_smaller_than_any_card_is_said_to_be_without_a_suggestion_that_is_smaller_still(text: str) -> None:
    with pytest.raises(UsageError, match="is smaller than any card") as caught:
        find_gpu(text)

    assert "did you mean" not in str(caught.value) and len(str(caught.value)) < 100


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
        assert (card["total"] == "estimated" or gpu.context_basis != "measured") == bool(gpu.notes)


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


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card["name"])
def test_each_card_has_an_l2_cache_and_says_how_it_is_known(card: dict[str, Any]) -> None:
    gpu = find_gpu(card["name"])
    assert (MiB <= gpu.l2_bytes <= 128 * MiB) and gpu.l2_bytes % (MiB // 4) == 0
    assert gpu.l2_basis == card.get("l2", "assumed")
    assert ("l2" in card) == ("l2_mib" in card)
    alike = [find_gpu(each["name"]).l2_bytes for each in CARDS if each["arch"] == card["arch"]]
    if gpu.l2_basis == "assumed":
        assert gpu.l2_bytes == max(alike)


def test_a_slice_has_its_share_of_the_l2_cache() -> None:
    assert find_gpu("A100 40GB MIG 3g.20gb").l2_bytes == 20 * MiB

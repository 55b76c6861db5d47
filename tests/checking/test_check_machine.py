"""Machine and settings: GPUs, builds, versions, allocator options, shared memory; what cannot be told is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from check_jobs import llama_folder, only, situation
from packaging.requirements import Requirement

import memfit
from memfit.checking import machine, plan
from memfit.checking.check import _checks
from memfit.checking.machine import COMPILER, check_compiler, conflicts, is_met, look, runs_on, too_new_for
from memfit.checking.situation import CheckRequest, Finding, Line, Situation, guarded
from memfit.errors import UsageError
from memfit.jobs.workload import Workload
from memfit.recording.machine import GpuDriver, GpuState, NoNvml
from memfit.units import GiB
from memfit.versions import release_of

pytestmark = pytest.mark.usefixtures("shared_traces")

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
"""Architectures of a torch wheel for CUDA 12.8."""


@pytest.mark.parametrize(("capability", "runs"), [
    ((9, 0), True), ((8, 9), True), ((7, 5), True), ((12, 1), True), ((7, 0), False), ((6, 1), False), ((10, 3), True),
])  # fmt: skip
def test_code_runs_within_its_major_version_and_ptx_on_newer_cards(capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(WHEEL, capability) is runs


def test_code_without_ptx_does_not_run_on_a_newer_card() -> None:
    assert not runs_on(["sm_80", "sm_90"], (12, 0))
    assert runs_on(["sm_90a"], (9, 0))


def test_without_a_driver_the_lines_on_gpus_say_why_they_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise NoNvml("no NVIDIA driver answers here")

    monkeypatch.setattr("memfit.checking.situation.read_gpus", nothing)
    monkeypatch.setattr("memfit.checking.situation.read_driver", nothing)
    where = Situation(CheckRequest())
    (present,) = guarded(machine.PRESENT, lambda: machine.check_gpus(where))
    assert (present.status, present.found) == ("skipped", "no NVIDIA driver answers here")
    (build,) = guarded(machine.BUILD, lambda: machine.check_build(where))
    assert (build.status, build.found) == ("skipped", "no GPU is here")
    (finding,) = guarded(machine.ABILITIES, lambda: machine.check_abilities(where))
    assert "--gpu 24GB" in finding.found


def test_a_size_names_no_card() -> None:
    if Situation(CheckRequest()).here is not None:
        pytest.skip("a GPU is here, and its kernels count")
    finding = only(machine.check_abilities, Situation(CheckRequest(gpu="24GB")))
    assert finding.found.startswith("a size names no card; one of compute capability")
    assert "RTX 3090" in str(finding.next)


@pytest.mark.parametrize(("card", "words"), [
    ("T4", "bf16 only by emulation, flash attention no, fp8 no"),
    ("A100 80GB", "bf16 yes, flash attention yes, fp8 no"),
    ("H200", "bf16 yes, flash attention yes, fp8 yes"),
])  # fmt: skip
def test_a_card_is_told_by_what_it_can_do(card: str, words: str) -> None:
    assert words in only(machine.check_abilities, Situation(CheckRequest(gpu=card))).found


# -- allocator ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "torch", "unknown"), [
    ("max_split_size_mb:128", "1.9.0", ["max_split_size_mb"]),
    ("max_split_size_mb:128", "1.10.0", []),
    ("garbage_collection_threshold:0.8,max_split_size_mb:128", "1.11", ["garbage_collection_threshold"]),
    ("roundup_power2_divisions:[256:1,512:2,>:4]", "1.11", ["roundup_power2_divisions"]),
    ("roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True", "2.0.1", ["expandable_segments"]),
    ("expandable_segments:True", "2.1.0+cu121", []),
    ("large_segment_size_mb:32", "2.10.0", ["large_segment_size_mb"]),
    ("per_process_memory_fraction:0.5", "2.11.0", []),
])  # fmt: skip
def test_options_are_known_from_their_release_on(text: str, torch: str, unknown: list[str]) -> None:
    assert too_new_for(text, torch) == unknown


def test_an_option_that_no_torch_knows_is_found_with_a_suggestion() -> None:
    (finding,) = look({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}, "2.11.0")
    assert (finding.status, "expandable_segments" in str(finding.next)) == ("failed", True)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONFIG", "PYTORCH_CUDA_ALLOCATOR_CONF", "PYTORCH_CUDA_ALLOC_CNF",
                                  "pytorch_cuda_alloc_conf"])  # fmt: skip
def test_a_variable_that_torch_does_not_read_is_found_with_the_one_that_it_does(name: str) -> None:
    (finding,) = look({name: "expandable_segments:True", "MALLOC_CONF": "x", "PYTHONPATH": "y"}, "2.11.0")
    assert (finding.status, finding.next) == ("warning", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


@pytest.mark.parametrize("text", ["expandable_segments=True", "expandable_segments:true", '"expandable_segments:True"'])
def test_a_setting_that_torch_would_stop_at_is_found(text: str) -> None:
    (finding,) = look({"PYTORCH_CUDA_ALLOC_CONF": text}, "2.11.0")
    assert (finding.status, finding.next is not None) == ("failed", True)


def test_settings_at_which_torch_ends_the_process_are_set_aside_while_a_look_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.11 for CUDA aborts as it is imported; the line still says why, and the rest is looked at."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments=True")
    seen: list[str | None] = []
    found = memfit.check(kind="forward", model="gpt2", seq_len=64, gpu="8GB",
                         on_progress=lambda name: seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF")))  # fmt: skip
    assert (set(seen), os.environ["PYTORCH_CUDA_ALLOC_CONF"]) == ({None}, "expandable_segments=True")
    by_name = {each.name: each for each in found.findings}
    assert (by_name["allocator"].status, by_name["fits"].status) == ("failed", "ok")
    assert "with a colon" in str(by_name["allocator"].next)


SETTINGS_AT_IMPORT = """
import os, sys
from memfit.cli.main import main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os._exit(99 if "PYTORCH_CUDA_ALLOC_CONF" in os.environ else 0)
sys.meta_path.insert(0, Finder())
sys.exit(main(["check", "train", "--model", "gpt2", "--seq-len", "64", "--gpu", "8GB", "--json"]))
"""


def test_nothing_imports_torch_before_they_are_set_aside() -> None:
    there = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments=True"}
    done = subprocess.run([sys.executable, "-c", SETTINGS_AT_IMPORT], env=there, capture_output=True, timeout=300,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]


def test_of_two_variables_the_one_that_torch_reads_is_named() -> None:
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    first, second = look(both, "2.11.0")
    assert (first.status, first.next) == ("warning", "unset PYTORCH_ALLOC_CONF")
    assert second.found.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


def test_the_new_name_is_not_read_before_2_10() -> None:
    first, _ = look({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "2.9.1")
    assert (first.status, first.next) == ("failed", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    (newer,) = look({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "2.10.0")
    assert newer.status == "ok"


def test_a_variable_that_was_set_after_the_start_is_said() -> None:
    pytest.importorskip("torch")
    first, _ = look({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "2.11.0", at_start={})
    assert (first.status, "after this process had started" in first.found) == ("warning", True)


def test_what_is_exported_wins_over_the_config() -> None:
    there = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    first, _ = look(there, "2.11.0", wanted="expandable_segments:True", at_start=there)
    assert "wins over memory.alloc_conf expandable_segments:True" in first.found


def test_an_allocator_that_is_switched_off_is_found() -> None:
    (finding,) = look({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "2.11.0")
    assert finding.status == "failed"


def test_collection_without_a_limit_is_said() -> None:
    (finding,) = look({"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"}, "2.11.0")
    assert (finding.status, "does nothing without a limit" in finding.found) == ("warning", True)


def test_the_environment_of_the_start_is_the_process_s_own() -> None:
    assert (machine.started_with() or dict(os.environ))["PATH"] == os.environ["PATH"]


def test_variables_without_effect_on_the_gpu_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    finding = only(machine.check_variables, Situation(CheckRequest()))
    assert finding.found == "TOKENIZERS_PARALLELISM=false: threads of the host; no effect on GPU memory"


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "have", "unmet"), [
    ("torch>=2.11", "2.13.0+cpu", False), ("torch>=2.11", "2.10.1", True), ("peft (>=0.18,<1)", "0.21.0", False),
    ("numpy!=1.24,>=1.21", "1.24.0", True), ("tokenizers<=0.24,>=0.22", "0.23.3", False), ("a==1.2.*", "1.2.9", False),
    ("a~=1.4.2", "1.5.0", True), ("a~=1.4.2", "1.4.5", False), ("a<2", "2.0", True), ("a", "0", False),
])  # fmt: skip
def test_a_requirement_is_met_or_not(line: str, have: str, unmet: bool) -> None:
    assert is_met(Requirement(line), have) is not unmet


def test_only_what_a_training_here_needs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'peft>=9; extra == "{extra}"' for extra in ("torch", "quality")] + ["peft>=9; python_version < '3.9'"]
    monkeypatch.setattr("memfit.checking.machine.requires", lambda who: lines if who != "memfit" else [])
    assert [who for who, _, _ in conflicts({"transformers": "5", "peft": "1"})] == ["transformers"]


def test_a_local_part_of_a_version_does_not_count() -> None:
    assert release_of(version("torch")) >= (2, 11)
    assert release_of("weird") == ()


# -- the host ----------------------------------------------------------------------------------------------------------


def test_data_workers_that_need_more_shared_memory_than_there_is_are_found(tmp_path: Path) -> None:
    if not machine.SHM.is_dir():
        pytest.skip("no /dev/shm on this system")
    many = situation(tmp_path, num_workers=1024, max_seq_len=1 << 24, micro_batch_size=1, global_batch_size=1 << 14)
    finding = only(machine.check_shared_memory, many)
    assert (finding.status, "--shm-size" in str(finding.next)) == ("failed", True)
    assert only(machine.check_shared_memory, situation(tmp_path)).status == "ok"


def test_a_model_that_the_host_cannot_hold_while_it_loads_is_found(tmp_path: Path) -> None:
    wide = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 32, "num_attention_heads": 2}
    model = {"tokenizer": "bytes", "from_scratch": True, "settings": wide}
    finding = only(machine.check_host_memory, situation(tmp_path, model={**model, "name": llama_folder(tmp_path)}))
    assert (finding.status, "for weights while they load" in finding.found) == ("failed", True)
    assert only(machine.check_host_memory, situation(tmp_path)).status == "ok"


def test_what_is_offloaded_counts_as_memory_of_the_host(tmp_path: Path) -> None:
    finding = only(machine.check_host_memory, situation(tmp_path, method="lora", offload=["optimizer"], gpu="24GB"))
    assert {"weights and gradients for the optimizer", "the optimizer's state"} <= set(finding.details["needed_bytes"])


def test_a_limit_on_locked_memory_is_said(tmp_path: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from memfit.checking.machine import check_locked_memory\n"
        "print(check_locked_memory(None).found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.startswith("64.00 KiB: pinned memory of CUDA is not bound by it")


def test_an_error_of_a_check_is_its_finding_and_a_missing_package_a_reason_to_skip() -> None:
    line = Line("config", "x")

    def wrong() -> None:
        raise UsageError("a is wrong", hint="write b")

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    (failed,) = guarded(line, wrong)  # type: ignore[arg-type]
    assert (failed.status, failed.found, failed.next) == ("failed", "a is wrong", "write b")
    (skipped,) = guarded(line, missing)  # type: ignore[arg-type]
    assert (skipped.status, skipped.next) == ("skipped", "pip install torch")


# -- which GPUs --------------------------------------------------------------------------------------------------------


def state(index: int, free: int) -> GpuState:
    return GpuState(index=index, uuid=f"GPU-{index}a", name="NVIDIA H200", total_bytes=140 * GiB,
                    used_bytes=140 * GiB - free, busy_percent=None, processes=())  # fmt: skip


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What a driver would say of three cards, of which the second is nearly full."""
    states = (state(0, 139 * GiB), state(1, 5 * GiB), state(2, 139 * GiB))
    driver = GpuDriver(version="580.1", cuda=(13, 0), capabilities=((9, 0),) * 3)
    monkeypatch.setattr("memfit.checking.situation.read_gpus", lambda: states)
    monkeypatch.setattr("memfit.checking.situation.read_driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_the_fullest_of_the_gpus_that_would_train_counts(three_gpus: pytest.MonkeyPatch) -> None:
    alone, both = Situation(CheckRequest()), Situation(CheckRequest(world_size=2))
    assert alone.here is not None and both.here is not None
    assert (alone.here.state.index, both.here.state.index) == (0, 1)
    assert both.here.with_what_is_free.capacity_bytes == 5 * GiB
    assert alone.here.with_what_is_free.capacity_bytes == min(139 * GiB, alone.here.card.capacity_bytes)


@pytest.mark.parametrize(("shown", "index"), [("2,0", 2), ("GPU-1", 1), ("1", 1)])
def test_only_gpus_that_torch_would_see_count(three_gpus: pytest.MonkeyPatch, shown: str, index: int) -> None:
    three_gpus.setenv("CUDA_VISIBLE_DEVICES", shown)
    here = Situation(CheckRequest()).here
    assert here is not None
    assert here.state.index == index


@pytest.mark.parametrize("shown", ["", "7,0", "-1", "GPU-9"])
def test_what_hides_every_gpu_is_found_as_cuda_reads_it(three_gpus: pytest.MonkeyPatch, shown: str) -> None:
    """As far as the first name that is no GPU: torch on an H200 sees none under 7,0."""
    three_gpus.setenv("CUDA_VISIBLE_DEVICES", shown)
    finding = only(machine.check_gpus, Situation(CheckRequest()))
    assert (finding.status, finding.next) == ("failed", "unset CUDA_VISIBLE_DEVICES")


def test_names_after_a_wrong_one_are_not_read(three_gpus: pytest.MonkeyPatch) -> None:
    three_gpus.setenv("CUDA_VISIBLE_DEVICES", "2,7,0")
    assert only(machine.check_gpus, Situation(CheckRequest())).details["gpus"] == 1


def test_a_size_says_nothing_of_kernels_which_are_those_of_the_gpu_that_is_here(three_gpus: pytest.MonkeyPatch) -> None:
    where = Situation(CheckRequest(gpu="24GB"))
    assert where.named is not None
    assert (where.named.arch, where.named.capacity_bytes < 24 * GiB) == ((9, 0), True)
    assert "compute capability 9.0" in only(machine.check_abilities, where).found
    assert Situation(CheckRequest(gpu="T4")).card.arch == (7, 5)


def test_a_limit_on_the_process_is_what_a_job_has_to_fit_into(three_gpus: pytest.MonkeyPatch) -> None:
    three_gpus.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.002")
    work = Workload(kind="forward", model="gpt2", seq_len=64, precision="fp32")
    finding = only(plan.check_fit, Situation(CheckRequest(workload=work)))
    assert (finding.status, "what per_process_memory_fraction allows of" in finding.found) == ("failed", True)
    three_gpus.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5")
    assert only(plan.check_fit, Situation(CheckRequest(workload=work))).status == "ok"


def test_more_processes_than_gpus_are_found(three_gpus: pytest.MonkeyPatch) -> None:
    three_gpus.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    finding = only(machine.check_gpus, Situation(CheckRequest(world_size=4)))
    assert (finding.status, finding.next) == ("failed", "torchrun --nproc_per_node=2")
    assert "CUDA_VISIBLE_DEVICES=0,2" in finding.found


def test_a_job_is_planned_on_what_others_leave_free(three_gpus: pytest.MonkeyPatch) -> None:
    three_gpus.setenv("CUDA_VISIBLE_DEVICES", "1")
    work = Workload(kind="forward", model="gpt2", batch_size=64, seq_len=1024, precision="fp32")
    finding = only(plan.check_fit, Situation(CheckRequest(workload=work)))
    assert (finding.status, finding.details["card"]["capacity_bytes"]) == ("failed", 5 * GiB)
    assert "what is free of the H200 here" in finding.found


def test_large_weights_repeat_their_first_rows_and_small_ones_are_drawn_whole() -> None:
    import torch

    from memfit.checking.repeated_weights import DRAWN, RepeatedWeights

    with RepeatedWeights():
        large, small = torch.nn.Linear(1 << 10, 3000), torch.nn.Linear(8, 8)
    rows = DRAWN >> 10
    assert torch.equal(large.weight[rows : 2 * rows], large.weight[:rows])
    assert torch.equal(large.weight[2 * rows :], large.weight[: 3000 - 2 * rows])
    assert len(large.weight[:rows].unique(dim=0)) == rows
    assert large.weight.abs().max() <= (1 << 10) ** -0.5
    assert len(small.weight.unique(dim=0)) == 8


# -- torch.compile -----------------------------------------------------------------------------------------------------


def _compiler(gpu: str) -> Finding:
    asked = CheckRequest(workload=Workload(kind="train", model="gpt2", compile=True), gpu=gpu)
    return only(check_compiler, Situation(asked))


def test_a_compiled_job_is_planned_by_the_torch_that_is_here() -> None:
    found = _compiler("H100")
    assert found.status == "ok"
    assert version("torch") in found.found


@pytest.mark.parametrize(
    ("triton", "gcc", "said"),
    [(True, "/usr/bin/gcc", "here: triton (3.9) and a C compiler (/usr/bin/gcc)"),
     (False, "/usr/bin/gcc", "here triton is missing, which no plan needs"),
     (False, None, "here triton and a C compiler is missing")],
)  # fmt: skip
def test_what_compiled_code_needs_is_looked_for_here_too(
    triton: bool, gcc: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = machine.recorded_version
    monkeypatch.setattr(machine, "find_spec", lambda _: triton or None)
    monkeypatch.setattr(machine, "recorded_version", lambda name: "3.9" if name == "triton" else known(name))
    monkeypatch.setattr(machine.shutil, "which", lambda _: gcc)
    found = _compiler("H100")
    assert found.status == "ok" and said in found.found


def test_without_triton_compiled_code_does_not_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.checking.machine.find_spec", lambda _: None)
    monkeypatch.setattr(Situation, "runs_here", True)
    found = _compiler("H100")
    assert (found.status, "triton" in found.found) == ("failed", True)


def test_a_job_that_is_not_compiled_has_no_line_on_it() -> None:
    checks = [line for _, _, line in _checks(CheckRequest(workload=Workload(kind="forward", model="gpt2")))]
    assert COMPILER not in checks

"""Snapshots, memory logs and run folders explained; and a job that is known, with its fixes predicted."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.quick import quick

import memfit
from memfit.errors import InputError, UsageError
from memfit.explaining.explain import Explanation, explain, next_steps
from memfit.fitting.forecast import global_batch_of
from memfit.fitting.levers import apply, levers_for
from memfit.jobs.settings import flag
from memfit.jobs.training.config_file import dump, load_config
from memfit.jobs.training.engine import HalvedStep, cause_of
from memfit.jobs.training.result import RunLog, TrainEvent
from memfit.jobs.workload import Workload
from memfit.planning.card_here import unusual_flags
from memfit.units import GiB, MiB

pytestmark = pytest.mark.usefixtures("shared_traces")

DATA = Path(__file__).parents[1] / "data"
TINY = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
MESSAGE = (
    "CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 1.00 GiB of which 20.00 MiB "
    "is free. "
    "Including non-PyTorch memory, this process has 0.95 GiB memory in use. Of the allocated memory 520.00 MiB "
    "is allocated "
    "by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


# -- a snapshot ------------------------------------------------------------------------------------------------------


def test_a_snapshot_tells_the_request_to_the_byte_and_who_held_the_memory() -> None:
    told = explain(DATA / "snap-oom.pickle")
    assert told.source.kind == "snapshot" and told.oom is not None and told.oom.requested is not None
    assert told.oom.requested.low == told.oom.requested.high == 48 * MiB
    assert told.holders[0]["name"].endswith("activations.py:66 forward")
    assert told.place.phase == "forward"
    assert "sdpa_attention.py:158" in told.to_json()["phase"]["code_line"]


def test_a_snapshot_has_the_evidence_for_fragmentation_that_the_text_lacks() -> None:
    """The same error: its text says only that enough was cached, the snapshot how large the largest piece was."""
    told = explain(DATA / "snap-oom.pickle")
    assert told.cause.kind == "fragmentation" and told.cause.fragmentation is not None
    assert "198.88 MiB" in told.cause.sentence and "11.00 MiB" in told.cause.sentence
    assert told.fixes[0].name == "expandable segments"
    assert "133.11 GiB" in told.cause.sentence  # and the driver would have had more: the process is limited


def test_a_snapshot_with_its_model_names_the_tensor_by_the_run() -> None:
    told = explain(DATA / "snap-oom.pickle", model="gpt2", batch_size=32, seq_len=512)
    assert told.readings.likeliest is not None
    assert told.readings.likeliest.product == "32 rows x 512 tokens x 768 in all heads x 4 bytes"


def test_a_snapshot_without_a_failed_request_says_so() -> None:
    told = explain(DATA / "snap-train.pickle")
    assert not told.known and "No request failed" in told.cause.sentence


def test_a_broken_snapshot_is_an_error_and_runs_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pickle"
    broken.write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(InputError, match=r"refused|cannot"):
        explain(broken)
    assert not (tmp_path / "pwned").exists() and not Path("pwned").exists()


def test_junk_that_begins_like_a_pickle_is_text(tmp_path: Path) -> None:
    junk = tmp_path / "train.log"
    junk.write_bytes(b"\x80" + MESSAGE.encode())
    assert explain(junk).cause.kind == "shortage"


# -- a memory log ----------------------------------------------------------------------------------------------------

HEADER = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent\n"


def test_a_memory_log_tells_where_the_run_broke_and_how_high_memory_stood(tmp_path: Path) -> None:
    log = tmp_path / "memory_log.csv"
    rows = [
        "01_start,0.000,0.000,0.000",
        "02_model_loaded,2.300,2.500,2.300",
        "04_after_pruning ERROR!,2.300,2.500,9.100",
    ]
    log.write_text(HEADER + "".join(f"2025-12-28T00:15:45,{row},2.450,6.10\n" for row in rows))
    told = explain(log)
    assert told.source.kind == "memory_log" and told.known and told.cause.certainty == "possible"
    assert "04_after_pruning" in told.cause.sentence and "9.10 GiB" in told.cause.sentence


def test_a_memory_log_of_a_good_run_has_nothing_to_explain(tmp_path: Path) -> None:
    log = tmp_path / "memory_log.csv"
    log.write_text(HEADER + "2025-12-28T00:15:45,02_model_loaded,2.300,2.500,2.300,2.450,6.10\n")
    assert not explain(log).known


def test_a_long_memory_log_is_judged_for_growth(tmp_path: Path) -> None:
    log = tmp_path / "memory_log.csv"
    rows = "".join(
        f"2025-12-28T00:15:45,step_{i},{2 + i / 50:.3f},8.000,{4 + i / 50:.3f},2.450,6.10\n" for i in range(60)
    )
    log.write_text(HEADER + rows)
    growth = explain(log).growth
    assert growth is not None and growth["kind"] == "leak"
    assert growth["bytes_per_step"] == pytest.approx(GiB / 50, rel=0.02)


# -- a run's folder --------------------------------------------------------------------------------------------------


def run_folder(folder: Path, *sets: str) -> Path:
    """As `memfit train` leaves it when a single row at a time is too much."""
    folder.mkdir()
    config = load_config("smollm2-lora-demo", sets=["model.name=smollm2-135m", "micro_batch_size=2", *sets])
    (folder / "config.yaml").write_text(dump(config))
    cause = cause_of(torch.OutOfMemoryError(MESSAGE))
    halved = HalvedStep(step=2, micro_step=1, longest_row=512, rows_before=2, rows_after=1, cause=cause)
    log = RunLog(folder)
    log(TrainEvent(kind="step", step=1, total_steps=10, loss=2.3))
    log(TrainEvent(kind="out-of-memory", step=2, text=halved.in_words()))
    log.write(f"error: memory ran out with a single row at a time, 512 tokens long: {cause}")
    log.close()
    return folder


def test_the_folder_of_a_training_run_tells_the_job(tmp_path: Path) -> None:
    told = explain(run_folder(tmp_path / "run"), predict=False)
    assert told.source.kind == "run_folder" and told.source.text_from == "train.log"
    assert told.found is not None and len(told.found.ooms) == 2
    work = told.job.workload
    config = load_config("smollm2-lora-demo")
    assert work is not None and (work.kind, work.loop, work.rank) == ("lora", "memfit", config.workload.rank)
    assert work.batch_size == 1  # as the log tells that it was halved
    assert global_batch_of(work) == config.batch.global_batch_size
    assert not told.job.missing
    assert told.gpu is not None and told.gpu.capacity_bytes == GiB, "as the message says"


def test_the_folder_of_a_run_tells_how_many_processes_shared_the_global_batch(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "result.json").write_text(json.dumps({"schema": "memfit.train-result/1", "world_size": 2}))
    work = explain(folder, predict=False).job.workload
    assert work is not None and (work.world_size, work.grad_accum, global_batch_of(work)) == (2, 2, 4)


def test_growth_that_the_run_recorded_is_told_and_decides_the_advice(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    for kind, helps in (("none", False), ("long-batches", False), ("leak", True)):
        growth = {"kind": kind, "text": f"{kind} by its record"}
        (folder / "result.json").write_text(json.dumps({"schema": "memfit.train-result/1", "growth": growth}))
        told = explain(folder, predict=False)
        assert told.growth == growth
        assert ("looking for a memory leak" in {each.advice for each in told.withheld}) is not helps


def test_a_folder_with_a_snapshot_and_its_text_uses_both(tmp_path: Path) -> None:
    (tmp_path / "snapshot.pickle").write_bytes((DATA / "snap-oom.pickle").read_bytes())
    (tmp_path / "stderr.txt").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of "
        "139.80 GiB of "
        "which 133.11 GiB is free. Including non-PyTorch memory, this process has 6.68 GiB memory in use. 6.00 "
        "GiB allowed; "
        "Of the allocated memory 5.76 GiB is allocated by PyTorch, and 198.88 MiB is reserved by PyTorch but "
        "unallocated."
    )
    told = explain(tmp_path)
    assert told.cause.kind == "fragmentation" and told.account.whole_bytes is not None
    assert "may hold 6.00 GiB" in told.cause.sentence and told.holders


def test_a_name_with_a_typing_mistake_is_not_taken_for_a_message() -> None:
    with pytest.raises(InputError, match=r"no file or folder 'trian\.log'"):
        explain("trian.log")


def test_an_empty_folder_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to explain") as error:
        explain(tmp_path)
    assert error.value.hint is not None


# -- a job that is known ---------------------------------------------------------------------------------------------


JOB: dict[str, Any] = {"kind": "train", "batch_size": 4, "seq_len": 512, "precision": "fp32"}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    folder = tmp_path_factory.mktemp("known")
    (folder / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 2}))
    return explain(MESSAGE, gpu="1GiB", model=str(folder), **JOB)


def test_every_fix_of_a_known_job_is_the_difference_of_two_predictions(known: Explanation) -> None:
    predicted = {fix.name: fix for fix in known.fixes if fix.basis == "predicted"}
    model = known.job.settings["model"]
    before = memfit.predict(gpu="1GiB", model=model, **JOB)
    after = memfit.predict(gpu="1GiB", model=model, loss="chunked", **JOB)
    assert predicted["chunked loss"].saved_bytes == before.peak.device_bytes - after.peak.device_bytes
    assert known.plan is not None and known.plan.peak == before.peak


@pytest.mark.parametrize(
    ("batch_size", "grad_accum", "world_size"), quick([(4, 8, 1)], [(4, 8, 1), (8, 8, 1), (3, 3, 2)])
)
def test_every_proposal_keeps_the_global_batch(tiny: str, batch_size: int, grad_accum: int, world_size: int) -> None:
    job: dict[str, Any] = {"batch_size": batch_size, "grad_accum": grad_accum, "world_size": world_size}
    told = explain(MESSAGE, gpu="1GiB", kind="train", model=tiny, seq_len=512, **job)

    rows = batch_size * grad_accum * world_size
    changes = [{**job, **fix.changes} for fix in told.fixes]
    assert len({each["batch_size"] for each in changes}) > 1
    assert {each["batch_size"] * each["grad_accum"] * each["world_size"] for each in changes} == {rows}
    for fix in told.fixes:
        for said in re.findall(r"batch.size[ =](\d+).*?(?:accum|accumulation_steps)[ =](\d+)", str(fix.how)):
            assert int(said[0]) * int(said[1]) * world_size == rows
    (step, *_) = next_steps(dataclasses.replace(told, fixes=()))
    assert f"--batch-size {batch_size}" in step and (grad_accum == 1 or f"--grad-accum {grad_accum}" in step)


def test_the_global_batch_is_kept_in_text_json_and_the_trainers_words(tiny: str) -> None:
    told = explain(MESSAGE, gpu="1GiB", kind="train", model=tiny, seq_len=512, batch_size=2, grad_accum=8)

    assert "--batch-size 1 --grad-accum 16" in str(told)
    (fix,) = (fix for fix in told.to_json()["fixes"] if fix["name"] == "micro-batch 1")
    assert fix["changes"] == {"batch_size": 1, "grad_accum": 16}
    assert fix["how"]["trainer"] == "per_device_train_batch_size=1, gradient_accumulation_steps=16"
    assert "looked at with 2 of 8 micro-steps, the others are like the last of them" in told.notes


@given(
    rows=st.integers(1, 64), steps=st.integers(1, 64), world=st.integers(1, 8), kind=st.sampled_from(["train", "lora"])
)
def test_no_change_to_a_job_changes_its_global_batch(rows: int, steps: int, world: int, kind: Any) -> None:
    work = Workload(kind=kind, model="gpt2", batch_size=rows, grad_accum=steps, world_size=world)

    for lever in levers_for(work):
        assert global_batch_of(apply(work, [lever])) == rows * steps * world


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "train", "batch_size": 2, "grad_accum": 8, "loop": "trainer", "clip_grad": False},
        {"kind": "lora", "rank": 8, "target_modules": ("q_proj", "v_proj"), "world_size": 2, "parallel": "fsdp2"},
        {"kind": "generate", "new_tokens": 32, "decoding": "beam", "num_beams": 6, "cache": "static"},
        {"kind": "prune", "method": "sparsegpt", "sparsity_type": "2:4", "nsamples": 64, "dataset": "builtin"},
    ],
)
def test_the_command_for_a_job_says_every_setting_that_is_not_the_usual_one(settings: dict[str, Any]) -> None:
    work = Workload(model="gpt2", **settings)
    words = list(unusual_flags(work))

    said = {"clip_grad": "--no-clip-grad", "target_modules": "--target-modules q_proj,v_proj"}
    for name, value in settings.items():
        assert name == "kind" or said.get(name, f"{flag(name)} {value}") in " ".join(words)


def test_fixes_are_ranked_by_what_they_save(known: Explanation) -> None:
    saved = [fix.saved_bytes or 0 for fix in known.fixes if fix.basis == "predicted"]
    assert saved and saved == sorted(saved, reverse=True) and saved[-1] > 0


def test_the_command_to_go_on_with_repeats_the_settings_of_the_job(known: Explanation) -> None:
    (step, *_) = next_steps(dataclasses.replace(known, fixes=()))
    for words in ("memfit fit train", "--batch-size 4", "--seq-len 512", "--precision fp32", "--gpu 1024MiB"):
        assert words in step


def test_the_tensor_of_a_known_job_is_named(known: Explanation) -> None:
    assert known.readings.likeliest is not None
    assert known.readings.likeliest.product == "4 rows x 512 tokens x 32,000 vocabulary x 4 bytes"


def test_what_is_predicted_to_save_is_not_withheld(known: Explanation) -> None:
    names = {fix.name for fix in known.fixes}
    withheld = {each.advice for each in known.withheld}
    assert ("expandable segments" in names) is not ("expandable_segments:True" in withheld)
    assert "checkpointing" in names and "gradient checkpointing alone" not in withheld


def test_a_known_job_as_a_document_is_plain_json(known: Explanation) -> None:
    document = json.loads(json.dumps(known.to_json(), allow_nan=False))
    assert document["schema"] == "memfit.explain/1" and document["job"]["predicted"]["peak"]["device_bytes"] > 0
    assert str(known).startswith("out of memory: ")


def test_a_job_that_is_predicted_to_fit_is_said_to_be_another_one(tiny: str) -> None:
    told = explain(MESSAGE, gpu="24GiB", kind="train", model=tiny, batch_size=1, seq_len=64)
    assert any("predicted to fit" in note for note in told.notes)
    assert "which fits: not all is as in the run that failed" in " ".join(str(told).split())


def test_of_levers_that_replace_each_other_the_mildest_that_is_enough_is_proposed(tiny: str) -> None:
    told = explain(MESSAGE, gpu="2GiB", kind="train", model=tiny, batch_size=8, seq_len=512, precision="fp32")
    (rows,) = (fix for fix in told.fixes if "batch_size" in fix.changes)
    assert told.plan is not None and told.plan.verdict == "fails" and rows.verdict == "safe"
    assert rows.changes["batch_size"] in (2, 4)


def test_the_card_is_that_of_the_message_less_what_others_hold(tiny: str) -> None:
    others = MESSAGE.replace("Including", "Process 9 has 300.00 MiB memory in use. Including").replace("0.95", "0.66")
    told = explain(others, predict=False)
    assert told.gpu is not None
    assert told.gpu.capacity_bytes == pytest.approx(0.66 * GiB + 20 * MiB, abs=12 * MiB)


def test_a_config_of_memfit_train_is_a_job() -> None:
    told = explain(MESSAGE, config="qwen2.5-7b-lora-24gb", predict=False)
    work = told.job.workload
    assert work is not None and (work.model, work.seq_len, work.rank, work.loss) == ("qwen2.5-7b", 2048, 128, "chunked")


@pytest.mark.parametrize(
    "given",
    [{"model": "lama-3"}, {"kind": "lora", "model": "gpt2", "batch_size": 0, "seq_len": 8, "rank": 8}, {"sqe": 1}],
)
def test_a_wrong_setting_is_an_error_in_the_users_words(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        explain(MESSAGE, predict=False, **given)


def test_the_name_is_public() -> None:
    assert memfit.explain is explain

"""A trace is kept and found again without torch; a bad entry, or a folder that cannot be used, costs time only."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from plans import LLAMA, document
from support.warm_python import warm_python

from memfit.cli.main import main
from memfit.errors import UsageError
from memfit.events import Trace
from memfit.fitting.durations import step_cost
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.planning import cache
from memfit.planning import few as few_blocks
from memfit.planning.predict import Plan, predict
from memfit.platform import H200, platform_of
from memfit.tracing.compiled import settings
from memfit.units import MiB

KEY = '{"job": 1}'
FACTS = {"answer": 42, "notes": ["é"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "caches" / "traces"
    monkeypatch.setenv("MEMFIT_CACHE", str(where))
    monkeypatch.setattr(cache, "_written_since_look", cache.LOOK_EVERY_BYTES)
    return where


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Six blocks are enough to be extended from four."""
    return save_model(tmp_path / "six-blocks", num_hidden_layers=6)


@pytest.fixture
def tracings(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """What is traced, rather than taken from the cache."""
    done: list[Workload] = []
    original = few_blocks.trace_few_blocks

    def counted(work: Workload, platform: Any) -> Any:
        done.append(work)
        return original(work, platform)

    monkeypatch.setattr(few_blocks, "trace_few_blocks", counted)
    return done


def save_model(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(folder)


def forward(model: str, **settings: Any) -> Plan:
    return predict(**{"kind": "forward", "model": model, "batch_size": 2, "seq_len": 64, **settings})


def small_trace() -> Trace:
    trace = Trace(facts={"torch": "2.11"})
    trace.mark("forward", 1)
    trace.free(trace.alloc(1000, op="aten.mm", module="layers.0"))
    return trace


def loaded(key: str = KEY) -> tuple[Trace, Any] | None:
    return cache.load(key, lambda trace, facts: (trace, facts))


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# -- the same plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("forward", {}),
        ("train", {"grad_checkpointing": True}),
        ("lora", {"rank": 4, "precision": "amp-bf16"}),
        ("generate", {"new_tokens": 3}),
    ],
)
def test_a_plan_from_the_cache_is_the_plan_without_it(
    model: str, tracings: list[Workload], kind: str, settings: dict[str, Any]
) -> None:
    job = {"kind": kind, "model": model, "batch_size": 2, "seq_len": 64, "gpu": "24GiB", **settings}

    without, missed, hit = predict(**job, trace_cache=False), predict(**job), predict(**job)

    assert len(tracings) == 2
    assert json.dumps(document(hit)) == json.dumps(document(missed)) == json.dumps(document(without))
    assert list(hit.trace.events()) == list(without.trace.events())
    assert [hit.trace.module(b) for b in range(len(hit.trace.requested))] == [
        without.trace.module(b) for b in range(len(without.trace.requested))
    ]


def test_a_model_too_short_to_be_extended_is_kept_whole(tmp_path: Path, tracings: list[Workload]) -> None:
    model = save_model(tmp_path / "two-blocks", num_hidden_layers=2)

    assert document(forward(model)) == document(forward(model))
    assert len(tracings) == 1


def test_what_is_kept_is_as_short_as_what_was_traced(folder: Path, model: str, tmp_path: Path) -> None:
    """The entry of 100 blocks is no larger than that of 6, give or take the key."""
    forward(model)
    (six,) = entries(folder)
    forward(save_model(tmp_path / "many", num_hidden_layers=100))
    (hundred,) = set(entries(folder)) - {six}

    assert (folder / hundred).stat().st_size == pytest.approx((folder / six).stat().st_size, rel=0.05)


def test_the_model_is_shown_as_this_one_asked_for_it(tmp_path: Path, model: str, tracings: list[Workload]) -> None:
    copy = save_model(tmp_path / "copy", num_hidden_layers=6)

    forward(model)
    plan = forward(copy).to_json()

    assert len(tracings) == 1
    assert (plan["workload"]["model"], plan["model"]["name"]) == (copy, "copy")


def test_a_preset_is_found_again_in_the_process_that_traced_it(tracings: list[Workload]) -> None:
    """transformers writes into the rope settings that it is given."""
    assert document(forward("llama-3.2-1b")) == document(forward("llama-3.2-1b"))
    assert len(tracings) == 1


# -- without torch -----------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import contextlib, io, json, sys
from memfit.fitting.durations import step_cost
from memfit.cli.main import main

out = []
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert main(line) == 0
    out.append(json.loads(stdout.getvalue()))
heavy = [name for name in ("torch", "transformers", "peft", "accelerate") if name in sys.modules]
print(json.dumps([heavy, out]))
"""


def test_another_card_of_the_class_or_another_allocator_setting_needs_no_torch(model: str) -> None:
    job = {"kind": "lora", "model": model, "batch_size": 2, "seq_len": 64, "rank": 4}
    others = [{"gpu": "H100", "alloc_conf": "expandable_segments:True"}, {"gpu": "1GiB", "alloc_conf": ""}]
    predict(**job, gpu="H200")
    step_cost(Workload.from_mapping(job))  # the command tells how long a step takes, too, and keeps its operations
    command = ["plan", "lora", "--model", model, "--batch-size", "2", "--seq-len", "64", "--rank", "4", "--json"]
    lines = [[*command, "--gpu", other["gpu"], "--alloc-conf", other["alloc_conf"]] for other in others]

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)], capture_output=True, text=True, check=True
    )

    heavy, plans = json.loads(done.stdout)
    assert heavy == []
    for plan, other in zip(plans, others, strict=True):
        del plan["seconds"]
        (read,) = (note for note in plan["notes"] if note.startswith("read from the cache: "))
        plan["notes"].remove(read)
        assert plan.pop("how")["cached"]
        assert (plan.pop("duration") is None) == (other["gpu"] == "1GiB")
        asked = document(predict(**job, **other, trace_cache=False))
        del asked["duration"]
        assert plan == asked


# -- what an entry is found by -----------------------------------------------------------------------------------------


def job(model: str = "gpt2", kind: str = "lora", **settings: Any) -> Workload:
    return Workload.from_mapping({"kind": kind, "model": model, **settings})


def test_the_card_is_known_by_its_class_alone() -> None:
    keys = {name: cache.key_of(job(), platform_of(find_gpu(name))) for name in ("H200", "24GiB", "H100", "A100 80GB")}

    assert keys["H200"] == keys["24GiB"] == keys["H100"] != keys["A100 80GB"]


def test_the_l2_cache_counts_where_a_compiler_times_kernels() -> None:
    eager, compiled = (
        [cache.key_of(job(compile=way), platform_of(find_gpu(name))) for name in ("H200", "H100")]
        for way in (False, True)
    )
    assert eager[0] == eager[1] and compiled[0] != compiled[1]


@pytest.mark.parametrize(
    "change", [{"arch": (8, 0)}, {"sm_count": 114}, {"max_threads_per_sm": 1536}, {"torch": (2, 9)}, {"cudnn": 91000}]
)
def test_another_class_of_card_is_another_entry(change: dict[str, Any]) -> None:
    assert cache.key_of(job(), H200) != cache.key_of(job(), replace(H200, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 2}, {"seq_len": 64}, {"precision": "fp32"}, {"attention": "eager"}, {"padding": True},
        {"loop": "trainer"}, {"optimizer": "sgd"}, {"grad_checkpointing": True}, {"grad_accum": 2}, {"clip_grad": True},
        {"rank": 8}, {"target_modules": ("c_attn",)}, {"lora_dropout": 0.1}, {"adapter_dtype": "same"},
        {"kind": "train"}, {"model": "gpt2-medium"},
    ],
)  # fmt: skip
def test_other_settings_are_another_entry(change: dict[str, Any]) -> None:
    assert cache.key_of(job(), H200) != cache.key_of(job(**change), H200)


def test_settings_that_the_trace_does_not_see_are_the_same_entry() -> None:
    alike = [job(), job(alloc_conf="expandable_segments:True"), job(model="openai-community/GPT2")]

    assert len({cache.key_of(each, H200) for each in alike}) == 1


def test_other_versions_are_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.key_of(job(), H200)
    versions = cache.versions()

    assert {"torch", "transformers", "triton"} <= set(versions)
    for package in versions:
        monkeypatch.setattr(cache, "versions", lambda package=package: versions | {package: "0.0.1"})
        assert cache.key_of(job(), H200) != before


@pytest.mark.parametrize(
    "variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_SHAPE_PADDING", "AOT_PARTITIONER_DEBUG"]
)
def test_a_compiled_job_with_other_variables_of_the_compiler_is_another_entry(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "CONFIGURATIONS", ())  # as if it were still to be imported
    monkeypatch.setattr(settings, "_before_import", {})
    monkeypatch.setattr(settings, "_seen_before_import", False)
    before = [cache.key_of(job(compile=compiled), H200) for compiled in (True, False)]
    monkeypatch.setenv(variable, "1")

    assert cache.key_of(job(compile=True), H200) != before[0]
    assert cache.key_of(job(), H200) == before[1]


def test_a_variable_that_came_after_the_compiler_had_read_them_keeps_nothing(model: str) -> None:
    late = f"""
import os, torch._dynamo
from memfit.jobs.workload import Workload
from memfit.planning import cache
from memfit.platform import H200
job = Workload(kind="train", model={model!r}, batch_size=1, seq_len=8, compile=True)
before = cache.key_of(job, H200)
os.environ["TORCH_COMPILE_DISABLE"] = "1"
print(before is None, cache.key_of(job, H200) is None)
"""
    process = subprocess.run([warm_python(), "-c", late], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False", "True"]


@contextmanager
def attention_as_plain_products() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def deterministic() -> Iterator[None]:
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("state", [
    attention_as_plain_products, deterministic, lambda: __import__("torch").no_grad(),
    lambda: __import__("torch").inference_mode(), lambda: __import__("torch").autograd.detect_anomaly(),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_a_process_has_set_is_no_part_of_a_job_that_was_named(model: str, state: Any) -> None:
    job = {"kind": "train", "model": model, "batch_size": 2, "seq_len": 64}
    usual = predict(**job, trace_cache=False)
    with state():
        altered = predict(**job, trace_cache=False)
    assert document(altered) == document(usual)


def test_what_the_shell_says_to_accelerate_is_no_part_of_a_job_that_was_named(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"kind": "train", "model": model, "batch_size": 2, "seq_len": 64, "loop": "trainer", "trace_cache": False}
    usual = predict(**job)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert document(predict(**job)) == document(usual)


def test_contexts_that_nothing_ends_from_within_are_named(model: str) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.autograd.graph import save_on_cpu

    for context, name in ((FakeTensorMode(), "FakeTensorMode"), (save_on_cpu(), "save_on_cpu")):
        with context, pytest.raises(UsageError, match=f"inside .*{name}"):
            predict(kind="train", model=model, batch_size=2, seq_len=64, trace_cache=False)


def test_a_process_with_other_code_in_its_models_keeps_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    work = job(model)
    assert cache.key_of(work, H200) is not None
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
        assert cache.key_of(work, H200) is None
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: args)
        assert cache.key_of(work, H200) is None
    for family in ("gpt2", "t5", "mixtral", "qwen3_moe", "vit", "whisper", "mamba", "gpt_oss", "gemma3", "bert"):
        import_module(f"transformers.models.{family}.modeling_{family}")
    assert cache.key_of(work, H200) is not None


def test_a_compiled_job_in_a_process_that_has_set_the_compiler_otherwise_is_not_kept() -> None:
    from torch._dynamo import config

    with config.patch(suppress_errors=True):
        assert cache.key_of(job(compile=True), H200) is None
        assert cache.key_of(job(), H200) is not None
    assert cache.key_of(job(compile=True), H200) is not None


def test_another_content_of_the_config_is_another_entry(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    before = cache.key_of(job(folder), H200)
    save_model(tmp_path / "model", vocab_size=1024)

    assert cache.key_of(job(folder), H200) != before


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_other_weights_beside_the_config_are_another_entry(tmp_path: Path, name: str) -> None:
    folder = save_model(tmp_path / "model")
    keys = [cache.key_of(job(folder), H200)]
    for content in (b"{", b"{}"):
        (tmp_path / "model" / name).write_bytes(content)
        keys.append(cache.key_of(job(folder), H200))

    assert len(set(keys)) == 3


@pytest.fixture
def own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source of memfit's that can be changed."""
    package = tmp_path / "package"
    for room in cache.ROOMS:
        (package / room / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1"')
    for name in ("events.py", "platform.py"):
        (package / name).write_text("H200 = 1")
    (package / "models" / "presets.json").write_text("{}")
    (package / "tracing" / "inner" / "rules.py").write_text("ROUND = 512")
    monkeypatch.setattr(cache, "_package", lambda: package)
    cache._first_look.cache_clear()
    yield package
    cache._first_look.cache_clear()


@pytest.mark.parametrize(
    "changed", ["__init__.py", "platform.py", "models/presets.json", "tracing/inner/rules.py", "replay/new.py"]
)
def test_a_changed_source_file_is_another_entry(own_source: Path, changed: str) -> None:
    before = cache.key_of(job(), H200)
    (own_source / changed).write_text("something else")
    cache._first_look.cache_clear()  # as in a new process

    after = cache.key_of(job(), H200)
    assert before is not None
    assert after is not None
    assert before != after


def test_a_process_that_is_older_than_its_source_files_keeps_nothing(own_source: Path) -> None:
    assert cache.key_of(job(), H200) is not None
    (own_source / "replay" / "new.py").write_text("")

    assert cache.key_of(job(), H200) is None


def test_the_model_of_a_factory_is_never_kept() -> None:
    assert cache.key_of(job("plans:Bigram", "forward"), H200) is None


def test_a_config_that_changes_while_it_is_traced_is_not_kept(
    folder: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = few_blocks.trace_few_blocks

    def disturbed(work: Workload, platform: Any) -> Any:
        save_model(Path(model), num_hidden_layers=5)
        return original(work, platform)

    monkeypatch.setattr(few_blocks, "trace_few_blocks", disturbed)
    forward(model)
    assert entries(folder) == []


# -- bad entries -------------------------------------------------------------------------------------------------------


class Payload:
    """Unpickling this makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def as_an_array(payload: bytes, path: Path) -> None:
    """An object array inside an otherwise good archive."""
    import numpy as np

    np.savez(path, actions=np.array([Payload(payload.decode())], dtype=object), allow_pickle=True)


def behind_a_link(entry: Path, elsewhere: Path) -> None:
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)


BAD: dict[str, Callable[[Path, Path], object]] = {
    "empty": lambda entry, _: entry.write_bytes(b""),
    "text": lambda entry, _: entry.write_text("not a trace"),
    "cut off": lambda entry, _: entry.write_bytes(entry.read_bytes()[:-30]),
    "only a beginning": lambda entry, _: entry.write_bytes(entry.read_bytes()[:100]),
    "a pickle": lambda entry, marker: entry.write_bytes(pickle.dumps(Payload(str(marker)))),
    "a pickle in an archive": lambda entry, marker: as_an_array(str(marker).encode(), entry),
    "a trace that is not an entry": lambda entry, _: small_trace().save(entry),
    "too large": lambda entry, _: os.truncate(entry, cache.MAX_ENTRY_BYTES + 1),
    "a folder": lambda entry, _: (entry.unlink(), entry.mkdir()),
    "a pipe": lambda entry, _: (entry.unlink(), os.mkfifo(entry)),
    "a link": lambda entry, marker: behind_a_link(entry, marker.with_name("elsewhere")),
    "a link to nowhere": lambda entry, marker: (entry.unlink(), entry.symlink_to(marker)),
}  # fmt: skip


@pytest.fixture
def entry(folder: Path) -> Path:
    """A good one."""
    cache.store(KEY, small_trace(), FACTS)
    assert loaded() is not None
    return folder / cache.file_name(KEY)


def test_what_is_stored_is_loaded(entry: Path) -> None:
    trace, facts = loaded() or (None, None)

    assert facts == FACTS
    assert trace == small_trace()


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_entry_is_not_read(entry: Path, tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    BAD[kind](entry, marker)

    assert loaded() is None
    assert not marker.exists()


@pytest.mark.parametrize("kind", sorted(set(BAD) - {"a folder"}))
def test_a_bad_entry_is_replaced_by_the_next_good_one(entry: Path, tmp_path: Path, kind: str) -> None:
    BAD[kind](entry, tmp_path / "marker")
    cache.store(KEY, small_trace(), FACTS)

    assert loaded() is not None
    assert stat.S_ISREG(entry.lstat().st_mode)


def test_a_link_is_replaced_and_what_it_points_to_left_alone(entry: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    entry.unlink()
    entry.symlink_to(victim)

    cache.store(KEY, small_trace(), FACTS)

    assert victim.read_text() == "precious"
    assert not entry.is_symlink()


def test_an_entry_under_the_name_of_another_is_not_read(entry: Path) -> None:
    other = '{"job": 2}'
    entry.rename(entry.with_name(cache.file_name(other)))

    assert loaded(other) is None


def test_an_entry_of_another_user_is_not_read(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: entry.stat().st_uid + 1)

    assert loaded() is None


def test_an_entry_that_would_inflate_to_too_much_is_not_inflated(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(entry, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.npy", bytes(MiB))
    assert loaded() is not None
    monkeypatch.setattr(cache, "MAX_INFLATED_BYTES", MiB)
    monkeypatch.setattr(Trace, "load", lambda path: pytest.fail("inflated"))

    assert loaded() is None


def test_no_flipped_bit_makes_another_trace(entry: Path) -> None:
    good = entry.read_bytes()
    for at in range(0, len(good), 7):
        entry.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        found = loaded()
        assert found is None or found == (small_trace(), FACTS)


def test_what_the_reader_cannot_make_sense_of_is_no_entry(entry: Path) -> None:
    assert cache.load(KEY, lambda trace, facts: facts["missing"]) is None


@pytest.mark.parametrize(
    "facts", [{"units": 10**12}, {"period": 0}, {"parameters": -1}, {"units": "many"}, {"settings": None}, {"notes": 7}]
)
def test_impossible_facts_are_traced_again(
    folder: Path, model: str, tracings: list[Workload], facts: dict[str, Any]
) -> None:
    good = document(forward(model))
    key = cache.key_of(tracings[0], H200)
    assert key is not None
    trace, kept = loaded(key) or pytest.fail("nothing was kept")
    cache.store(key, trace, kept | facts)

    assert document(forward(model)) == good
    assert len(tracings) == 2
    assert document(forward(model)) == good
    assert len(tracings) == 2


# -- several processes -------------------------------------------------------------------------------------------------

WRITER = """
from memfit.events import Trace
from memfit.planning import cache

cache.LOOK_EVERY_BYTES = 0  # each entry also tidies the folder
trace = Trace()
for size in range(2000):
    trace.alloc(size)
print("ready", flush=True)
for _ in range(60):
    cache.store('{"job": 1}', trace, {"blocks": 2000})
"""


def test_processes_that_write_at_once_leave_a_good_entry(folder: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    read = 0
    while any(writer.poll() is None for writer in writers):
        there = (folder / cache.file_name(KEY)).exists()
        found = loaded()
        assert found is not None or not there
        if found is not None:
            read += 1
            assert (len(found[0].requested), found[1]) == (2000, {"blocks": 2000})
    for writer in writers:
        assert writer.wait() == 0
        assert writer.stdout is not None
        writer.stdout.close()

    assert read > 0
    assert entries(folder) == [cache.file_name(KEY)]


# -- the folder --------------------------------------------------------------------------------------------------------


def test_the_folder_is_for_the_user_alone(folder: Path, entry: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_it_lies_where_caches_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "memfit" / "traces"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache.folder() == tmp_path / ".cache" / "memfit" / "traces"


def test_a_home_that_is_missing_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))

    cache.store(KEY, small_trace(), FACTS)

    assert loaded() is None
    assert not (tmp_path / "nobody").exists()


@pytest.mark.parametrize("word", ["off", "OFF", "0"])
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", word)

    cache.store(KEY, small_trace(), FACTS)

    assert cache.key_of(job(), H200) is None
    assert loaded() is None
    assert entries(tmp_path) == []


def test_the_flag_reads_nothing_and_keeps_nothing(
    folder: Path, model: str, tracings: list[Workload], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "forward", "--model", model, "--seq-len", "64", "--json"]

    assert [main([*command, "--no-trace-cache"]), main([*command, "--no-trace-cache"])] == [0, 0]

    assert len(tracings) == 2
    assert entries(folder) == []


def test_a_folder_that_cannot_be_made_is_done_without(
    folder: Path, model: str, tmp_path: Path, tracings: list[Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file" / "traces"))

    assert document(forward(model)) == document(forward(model))
    assert len(tracings) == 2


@pytest.mark.parametrize("call", ["mkdir", "replace", "scandir"])
def test_a_disk_that_refuses_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, call, refuse)
    cache.store(KEY, small_trace(), FACTS)
    assert (loaded() is not None) is (call == "scandir")  # which is asked for when the entry is there


def test_what_lies_in_a_read_only_folder_is_read(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    for call in ("utime", "mkdir", "replace", "unlink"):
        monkeypatch.setattr(os, call, refuse)

    assert loaded() is not None
    cache.store(KEY, small_trace(), FACTS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_read_but_not_written(folder: Path, entry: Path) -> None:
    folder.chmod(0o500)
    try:
        cache.store("{}", small_trace(), FACTS)
        assert loaded() is not None
        assert entries(folder) == [cache.file_name(KEY)]
    finally:
        folder.chmod(0o700)


def test_nothing_is_put_where_anyone_may_write(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    cache.store(KEY, small_trace(), FACTS)

    assert entries(folder) == []


# -- its size ----------------------------------------------------------------------------------------------------------


def put(folder: Path, name: str, size: int, age: float) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    os.truncate(folder / name, size)
    os.utime(folder / name, times=(time.time() - age,) * 2)
    return name


def test_what_was_not_used_for_longest_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_TOTAL_BYTES", 8 * MiB)
    names = [put(folder, f"{i:064x}.npz", 2 * MiB, age=i) for i in range(5)]

    cache.tidy(folder)

    assert entries(folder) == names[:3]  # 10 MiB are 2 too many; another eighth goes, so that there is room again


def test_a_folder_that_is_not_full_is_left_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_TOTAL_BYTES", 10 * MiB)
    names = [put(folder, f"{i:064x}.npz", 2 * MiB, age=i) for i in range(5)]

    cache.tidy(folder)

    assert entries(folder) == names


def test_only_what_memfit_itself_put_there_is_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_TOTAL_BYTES", MiB)
    names = [put(folder, name, 2 * MiB, age=9) for name in ("model.npz", "notes.txt", f"{'0' * 63}.npz")]

    cache.tidy(folder)

    assert entries(folder) == sorted(names)


def test_reading_an_entry_makes_it_the_last_to_go(entry: Path) -> None:
    put(entry.parent, entry.name, entry.stat().st_size, age=1000)
    assert loaded() is not None

    assert time.time() - entry.stat().st_mtime < 100


def test_what_a_killed_process_left_behind_is_cleared_away_later(folder: Path) -> None:
    for name, age in (("old", 2 * cache.ABANDONED_SECONDS), ("new", 0)):
        (folder / f".writing-{name}").mkdir(parents=True)
        (folder / f".writing-{name}" / "trace.npz").touch()
        os.utime(folder / f".writing-{name}", times=(time.time() - age,) * 2)

    cache.tidy(folder)

    assert entries(folder) == [".writing-new"]


def test_a_full_folder_is_tidied_by_whoever_writes_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_TOTAL_BYTES", MiB)
    old = put(folder, f"{0:064x}.npz", 2 * MiB, age=9)

    cache.store(KEY, small_trace(), FACTS)

    assert old not in entries(folder)
    assert loaded() is not None


def test_an_entry_beyond_the_bound_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", 100)
    cache.store(KEY, small_trace(), FACTS)

    assert entries(folder) == []

"""`memfit plan batch`: one line out for each line in that is not blank, whatever is in it."""

from __future__ import annotations

import io
import json
import math
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.warm_python import warm_python
from tiny import TINY

from memfit.cli import many_jobs as batch_command
from memfit.cli import output
from memfit.gpus import find_gpu
from memfit.jobs.workload import Workload
from memfit.models.registry import resolve
from memfit.planning import many
from memfit.planning.many import MAX_LINE_BYTES, Refusal, read_lines

Memfit = Callable[..., Any]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answer(line: bytes | None, number: int) -> tuple[dict[str, Any], int]:
    """And the exit code that it calls for."""
    made = many.answer(line, number)
    code = 0 if not isinstance(made, Refusal) else batch_command.BUG if made.is_bug else batch_command.BAD_LINES
    return made.to_json(), code


def test_plans_come_in_the_order_of_the_lines_with_their_ids(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    work = {"kind": "forward", "model": tiny, "seq_len": 16}
    file = write(tmp_path / "x.jsonl", {**work, "id": "a"}, "", "   ", {**work, "id": [1, None]}, work)
    ended = memfit("plan", "batch", file)
    assert ended.code == 0
    assert [plan["id"] for plan in ended.lines] == ["a", [1, None], None]
    assert {plan["schema"] for plan in ended.lines} == {"memfit.plan/1"}


def test_a_bad_line_is_answered_and_the_rest_goes_on(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    good = {"kind": "forward", "model": tiny, "seq_len": 16, "id": 1}
    file = write(tmp_path / "x.jsonl", good, {**good, "model": "gtp2", "id": 2}, "{", good)
    ended = memfit("plan", "batch", file)
    assert ended.code == 2
    assert [line["schema"] for line in ended.lines] == [
        "memfit.plan/1",
        "memfit.error/1",
        "memfit.error/1",
        "memfit.plan/1",
    ]
    wrong = ended.lines[1]
    assert (wrong["id"], wrong["line"], wrong["error"]) == (2, 2, "no model called 'gtp2'")
    assert wrong["hint"].startswith("did you mean 'gpt2'?")
    assert (ended.lines[2]["id"], ended.lines[2]["line"]) == (None, 3)


def test_a_line_that_does_not_fit_is_an_answer_not_an_error(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", {"kind": "forward", "model": tiny, "seq_len": 16, "gpu": "600MiB"})
    ended = memfit("plan", "batch", file)
    assert (ended.code, ended.lines[0]["verdict"]) == (0, "fails")


def test_the_card_of_a_line_wins_over_the_flag(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    work = {"kind": "forward", "model": tiny, "seq_len": 16}
    file = write(tmp_path / "x.jsonl", {**work, "gpu": "RTX 3060"}, work, {**work, "gpu": None})
    names = [plan["gpu"]["name"] for plan in memfit("plan", "batch", file, "--gpu", "RTX 4090").lines]
    assert names == ["RTX 3060", "RTX 4090", "RTX 4090"]


def test_a_wrong_card_on_the_command_line_stops_at_once(memfit: Memfit, tmp_path: Path) -> None:
    ended = memfit(
        "plan", "batch", write(tmp_path / "x.jsonl", {"kind": "forward", "model": "gpt2"}), "--gpu", "RTX 4091"
    )
    assert (ended.code, ended.out) == (2, "")


def test_other_spellings_of_a_line_are_read(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    line = {
        "kind": "lora", "model": tiny, "context-length": 16, "batch-size": 2, "optimizer": "adamw_fused",
        "target-modules": "q_proj,v_proj",
    }  # fmt: skip
    (plan,) = memfit("plan", "batch", write(tmp_path / "x.jsonl", line)).lines
    work = plan["workload"]
    assert (work["seq_len"], work["batch_size"], work["optimizer"]) == (16, 2, "adamw-fused")
    assert work["target_modules"] == ["q_proj", "v_proj"]


def test_standard_input_is_a_dash(memfit: Memfit, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"kind": "forward", "model": tiny, "seq_len": 16, "id": 9})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line.encode())))  # no newline at its end
    ended = memfit("plan", "batch", "-")
    assert (ended.code, ended.lines[0]["id"]) == (0, 9)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "not a line of JSON"),
        ("[]", "[] is no object"),
        ("3", "3 is no object"),
        ("NaN", "NaN is not a number"),
        ('{"id": Infinity}', "Infinity is not a number"),
        ('{"id": 1e999}', "1e999 is not a number"),
        ("[" * 100_000, "not a line of JSON"),
        ("{}", "a workload needs at least 'kind' and 'model'"),
        ('{"kind": "train"}', "needs at least"),
        ('{"kind": "train", "model": 5}', "model must be a name"),
        ('{"kind": "train", "model": "gpt2", "seq_len": 8, "seqlen": 9}', "'seqlen' is a second 'seq_len'"),
        ('{"kind": "train", "model": "gpt2", "seq_lenn": 8}', "no setting called 'seq_lenn'"),
        ('{"kind": "train", "model": "gpt2", "batch_size": 1.5}', "--batch-size 1.5 is not a whole number"),
        ('{"kind": "train", "model": "gpt2", "batch_size": true}', "--batch-size True"),
        ('{"kind": "train", "model": "gpt2", "gpu": 24}', "gpu 24 is not text"),
        ('{"kind": "train", "model": "gpt2", "gpu": ""}', "--gpu is empty"),
        ('{"kind": "cook", "model": "gpt2"}', "'cook' is not one of forward"),
        ('{"kind": "lora", "model": "gpt2", "target_modules": [1]}', "--target-modules"),
        ('{"kind": "train", "model": "gpt2", "precision": ["bf16"]}', "--precision"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_in_its_answer(line: str, said: str) -> None:
    document, code = answer(line.encode(), 7)
    assert (document["schema"], document["line"], code) == ("memfit.error/1", 7, 2)
    assert said in document["error"]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    document, _ = answer(b'\xef\xbb\xbf{"kind": "cook", "model": "x", "id": 4}', 1)
    assert document["id"] == 4


def test_a_line_without_end_is_read_past_and_never_held() -> None:
    stream = io.BytesIO(b"x" * (3 * MAX_LINE_BYTES) + b"\n" + b"{}\n" + b"y" * (MAX_LINE_BYTES + 1))
    assert list(read_lines(stream)) == [(1, None), (2, b"{}\n"), (3, None)]
    document, code = answer(None, 1)
    assert (document["error"], code) == ("the line is longer than 1,048,576 bytes", 2)


def test_the_longest_line_that_is_allowed_is_read_whole() -> None:
    line = b"x" * (MAX_LINE_BYTES - 1) + b"\n"
    assert list(read_lines(io.BytesIO(line + b"z"))) == [(1, line), (2, b"z")]


def test_a_bug_in_one_line_leaves_the_others_alone(
    memfit: Memfit, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.planning import predict as module

    real = module.predict

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if kwargs["id"] == "bad":
            raise ZeroDivisionError("no such luck")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "predict", sometimes)
    work = {"kind": "forward", "model": tiny, "seq_len": 16}
    ended = memfit("plan", "batch", write(tmp_path / "x.jsonl", {**work, "id": "bad"}, {**work, "id": "good"}))
    assert ended.code == 70
    assert [line["schema"] for line in ended.lines] == ["memfit.error/1", "memfit.plan/1"]
    assert ended.lines[0]["error"] == "ZeroDivisionError: no such luck"
    assert "Traceback" in ended.err


# -- whatever is in a line --------------------------------------------------------------------------------------


class Checked:
    """In place of a plan: everything that a prediction checks before it begins to trace."""

    def __init__(self, *, gpu: str | None, id: object, **given: Any) -> None:
        resolve(Workload.from_mapping(given).model)
        if gpu is not None:
            find_gpu(gpu)
        self.id = id

    def to_json(self) -> dict[str, Any]:
        return {"schema": "memfit.plan/1", "id": self.id}


@pytest.fixture
def checks_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("memfit.planning.predict.predict", Checked)
    yield


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["kind", "model", "batch_size", "batch-size", "seq_len", "seqlen", "context_length", "precision", "attention",
     "rank", "optimizer", "clip_grad", "grad_accum", "target_modules", "lora_dropout", "alloc_conf", "gpu", "id",
     "new_tokens"]
) | st.text(max_size=10)  # fmt: skip
likely = st.sampled_from(
    [
        "train",
        "lora",
        "gpt2",
        "bf16",
        "eager",
        "sgd",
        "24GB",
        "RTX 4090",
        "",
        "7b",
        "a:b",
        "../x",
        "~",
        "/",
        "config.json",
    ]
)
workloads = st.dictionaries(names, likely | json_values, max_size=6)
lines = st.one_of(
    workloads.map(lambda value: json.dumps(value).encode()),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60).map(lambda raw: raw.replace(b"\n", b"")),
    st.text(alphabet='{}[]":,0123456789.eE-+ntf\\u \t', max_size=40).map(str.encode),
)


def run_batch(data: bytes) -> tuple[list[str], int]:
    said, code = [], 0
    for number, line in read_lines(io.BytesIO(data)):
        document, failed = answer(line, number)
        said.append(json.dumps(document, allow_nan=False))
        code = max(code, failed)
    return said, code


@pytest.mark.usefixtures("checks_only")
class TestAnyLine:
    @settings(max_examples=examples(400), deadline=None)
    @given(data=st.lists(lines, max_size=6))
    def test_has_exactly_one_answer_and_never_a_bug(self, data: list[bytes]) -> None:
        said, code = run_batch(b"\n".join(data))
        assert len(said) == sum(1 for line in data if line.strip())
        assert code in (0, 2)
        documents = [json.loads(text) for text in said]
        assert {document["schema"] for document in documents} <= {"memfit.plan/1", "memfit.error/1"}
        assert (code == 2) == any(document["schema"] == "memfit.error/1" for document in documents)

    @settings(max_examples=examples(200), deadline=None)
    @given(
        value=workloads,
        mark=json_values.filter(lambda v: "NaN" not in json.dumps(v) and "Infinity" not in json.dumps(v)),
    )
    def test_keeps_its_id(self, value: dict[str, Any], mark: Any) -> None:
        if any(isinstance(each, float) and not math.isfinite(each) for each in value.values()):
            return
        text = json.dumps({**value, "id": mark})
        if "NaN" in text or "Infinity" in text:
            return
        document, _ = answer(text.encode(), 1)
        assert document["id"] == json.loads(json.dumps(mark))


SMALL = st.fixed_dictionaries(
    {"kind": st.just("lora")},  # which has all of them
    optional={
        "batch_size": st.integers(1, 3), "seq_len": st.sampled_from([1, 2, 7, 33]),
        "precision": st.sampled_from(["fp32", "bf16", "fp16"]), "attention": st.sampled_from(["sdpa", "eager"]),
        "optimizer": st.sampled_from(["adamw", "adamw-fused", "adamw-single", "sgd"]),
        "grad_checkpointing": st.booleans(), "grad_accum": st.integers(1, 2), "clip_grad": st.booleans(),
        "rank": st.integers(1, 9), "lora_dropout": st.sampled_from([0.0, 0.1]),
        "gpu": st.sampled_from(["24GB", "600MiB", "RTX 3060"]),
        "alloc_conf": st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:64"]),
    },
)  # fmt: skip


@settings(max_examples=examples(12), deadline=None)
@given(work=SMALL)
def test_any_sensible_workload_has_a_plan_whose_parts_add_up(work: dict[str, Any], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    plan, code = answer(json.dumps({**work, "model": str(folder)}).encode(), 1)
    assert (code, plan["schema"]) == (0, "memfit.plan/1")
    assert sum(plan["breakdown"].values()) == plan["peak"]["allocated_bytes"] <= plan["peak"]["reserved_bytes"]
    assert plan["smallest_gpu_bytes"] <= plan["peak"]["device_bytes"] + (2 << 20)


def sweep(model: str, count: int) -> list[dict[str, Any]]:
    points = random.Random(0)
    work = {"kind": "forward", "model": model, "gpu": "24GB"}
    return [{**work, "batch_size": points.randint(2, 32), "seq_len": points.randint(300, 500)} for _ in range(count)]


def test_a_file_is_looked_through_for_jobs_that_differ_in_batch_and_length(
    memfit: Memfit, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.planning import few as few_blocks
    from memfit.planning import interpolation as families

    traced = []
    original = few_blocks.trace_few_blocks
    monkeypatch.setenv("MEMFIT_CACHE", "off")
    monkeypatch.setattr(few_blocks, "trace_few_blocks", lambda *args: traced.append(args) or original(*args))
    families._families.clear()
    families._wholes.clear()
    wanted = sweep(tiny, 24)
    ended = memfit("plan", "batch", write(tmp_path / "x.jsonl", "not JSON", *wanted, {"kind": "forward"}))
    assert len(traced) <= 9
    plans = ended.lines[1:-1]
    families._families.clear()
    families._wholes.clear()
    alone = [answer(json.dumps(line).encode(), 1)[0] for line in wanted[-2:]]
    for interpolated, traced in zip(plans[-2:], alone, strict=True):
        ways = [plan.pop("how")["way"] for plan in (interpolated, traced)]
        assert ways[0] == "interpolated" != ways[1]
        assert interpolated["notes"].pop(1).startswith("interpolated between ") and traced["notes"].pop(1)
        assert interpolated | {"seconds": 0} == traced | {"seconds": 0}


def test_a_line_is_answered_before_the_next_one_is_written(tiny: str) -> None:
    command = [warm_python(), "-m", "memfit", "plan", "batch", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in sweep(tiny, 2):
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["workload"]["seq_len"] == line["seq_len"]
        process.stdin.close()


def test_progress_is_silent_where_nobody_looks_on(capfd: pytest.CaptureFixture[str]) -> None:
    with output.bar("spinner", "count") as tell:
        tell(completed=1, total=2)
    assert capfd.readouterr() == ("", "")


def test_a_key_that_stands_twice_in_a_line_is_an_error(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    line = f'{{"kind": "forward", "model": {json.dumps(tiny)}, "seq_len": 16, "seq_len": 32, "id": 1}}'
    (answered,) = memfit("plan", "batch", write(tmp_path / "x.jsonl", line)).lines
    assert answered["error"] == "'seq_len' stands in it twice, as 16 and as 32"


def test_a_setting_of_another_kind_of_job_is_an_error(memfit: Memfit, tiny: str, tmp_path: Path) -> None:
    line = {"kind": "train", "model": tiny, "seq_len": 16, "rank": 8}
    (answered,) = memfit("plan", "batch", write(tmp_path / "x.jsonl", line)).lines
    assert answered["error"] == "--rank 8 has no effect: it is a setting of lora, not of train"

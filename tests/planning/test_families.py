"""One job at many batch sizes and lengths: what is told from a few traces is what a trace of each would give."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from miniatures import rows, shrunk
from plans import document
from support.quick import quick
from support.warm_python import warm_python
from told_points import CORNERS, INSIDE, at, fresh, knowing

from memfit.extrapolation.streams import NotSeparable
from memfit.jobs.workload import Workload
from memfit.models.registry import load_config, resolve, supports_sdpa
from memfit.planning import few as few_blocks
from memfit.planning import interpolation as families
from memfit.planning.interpolation import family_of
from memfit.planning.predict import predict
from memfit.planning.traced import UNLIKE, trace_workload
from memfit.platform import H200

BERT = {
    "model_type": "bert", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
    "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    families._families.clear()
    families._wholes.clear()


@pytest.fixture
def traced_points(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    done: list[tuple[int, int]] = []
    original = few_blocks.trace_few_blocks

    def counted(work: Workload, platform: Any) -> Any:
        done.append((work.batch_size, work.seq_len))
        return original(work, platform)

    monkeypatch.setattr(few_blocks, "trace_few_blocks", counted)
    return done


@dataclasses.dataclass(frozen=True)
class Models:
    parent: Path

    def folder(self, family: str) -> str:
        folder = self.parent / family
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(BERT if family == "bert" else shrunk(family, 5)))
        return str(folder)

    def work(self, family: str = "llama", **settings: Any) -> Workload:
        return Workload(model=self.folder(family), **{"kind": "train", **settings})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def check(work: Workload, points: list[tuple[int, int]], told: list[tuple[int, int]]) -> None:
    family = knowing(work, points)
    for point in told:
        found = family.told(at(work, point))
        assert found is not None, point
        assert rows(found.trace) == rows(fresh(at(work, point))), point


LORA = {"kind": "lora", "rank": 4}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, fp32": ("llama", {"precision": "fp32", "clip_grad": True}),
    "qwen2, trainer, amp": ("qwen2", {**LORA, "lora_dropout": 0.1, "loop": "trainer", "precision": "amp-bf16"}),
    "qwen3, forward, padded": ("qwen3", {"kind": "forward", "padding": True}),
    "gpt2, amp": ("gpt2", {"precision": "amp-fp16"}),
    "gpt2, eager, forward": ("gpt2", {"kind": "forward", "attention": "eager", "precision": "fp32"}),
    "phi3, forward, amp": ("phi3", {"kind": "forward", "precision": "amp-bf16"}),
    "gemma2, beyond its window": ("gemma2", {"precision": "bf16"}),
    "gemma3": ("gemma3_text", {"kind": "forward"}),
    "experts": ("qwen3_moe", {}),
    "experts of mixtral, lora": ("mixtral", {**LORA, "target_modules": ("q_proj",)}),
    "bert": ("bert", {"padding": True}),
}


EACH_TIME = ("llama, fp32", "experts", "bert")


@pytest.mark.parametrize("job", quick(EACH_TIME, JOBS))
def test_what_is_told_is_what_a_trace_gives(models: Models, job: str) -> None:
    family, settings = JOBS[job]
    points = random.Random(job)
    told = points.randint(2, 16), points.randint(129, 511)
    check(models.work(family, **settings), CORNERS + INSIDE, [told])


WIDE = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6,
    "num_attention_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("quant", quick(["nf4"], ["nf4", "int8", "torchao-int8"]))
def test_quantised_jobs_are_told_on_both_sides_of_where_other_kernels_are_taken(tmp_path: Path, quant: str) -> None:
    """On an H200 products that widen read 4-bit weights packed up to 512 rows."""
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    four_bits: dict[str, Any] = {"double_quant": True, "grad_checkpointing": True} if quant == "nf4" else {}
    work = Workload(model=str(tmp_path), **LORA, quant=quant, **four_bits)
    draw = random.Random(quant)
    few, many = (2, draw.randint(200, 256)), (draw.randint(3, 16), draw.randint(257, 511))
    family = knowing(work, [*CORNERS, *INSIDE, (2, 300), (3, 256)])
    copies = []
    for point in (few, many):
        told, traced = family.told(at(work, point)), rows(fresh(at(work, point)))
        assert told is not None and rows(told.trace) == traced
        copies.append(str(traced).count(f" {2 * 64 * 192}, "))
    assert copies[0] < copies[1] or quant != "nf4"


GENERATIONS: dict[str, dict[str, Any]] = {
    "sampled": {"new_tokens": 33, "decoding": "sample"},
    "beams": {"new_tokens": 6, "decoding": "beam", "num_beams": 3},
    "static cache, of which every token is traced": {"new_tokens": 10, "cache": "static"},
}


@pytest.mark.parametrize("kind", quick(["beams"], GENERATIONS))
def test_generations_are_told_too(models: Models, kind: str) -> None:
    work = models.work(kind="generate", **GENERATIONS[kind])
    check(work, CORNERS + INSIDE, [(10, 401)])


# -- what is not told --------------------------------------------------------------------------------------------------


def test_batch_size_1_is_told_along_its_own_line_alone(models: Models) -> None:
    work = models.work(kind="forward")
    check(work, [(1, 129), (1, 200), (1, 301), (1, 512)], [(1, 180), (1, 444)])
    assert knowing(work, CORNERS + INSIDE).told(at(work, (1, 300))) is None


def test_lengths_on_one_side_of_a_window_do_not_tell_of_the_other(models: Models) -> None:
    """The miniature's window is 16. Its other numbers, up to 96, count too: something could happen between them."""
    work = models.work("gemma2", kind="forward")
    if not supports_sdpa(load_config(resolve(work.model))):
        pytest.skip("Gemma 2 is eager in this transformers, and does the same on both sides of its window")
    around = [(2, 5), (2, 512), (16, 5), (16, 512), *INSIDE]
    family = knowing(work, around)
    assert family.told(at(work, (3, 12))) is None
    assert family.told(at(work, (3, 200))) is None
    for point in ((2, 97), (16, 97)):
        family._trace(point)
    assert family.told(at(work, (3, 200))) is not None
    assert family.told(at(work, (3, 96))) is None


def test_lengths_that_8_divides_do_not_tell_of_others_where_masks_are_padded(models: Models) -> None:
    work = models.work("opt", precision="fp32", padding=True)
    eights = [(2, 136), (2, 512), (16, 136), (16, 512), (5, 304), (11, 160)]
    check(work, eights, [(7, 400)])
    family = knowing(work, CORNERS + INSIDE)
    assert family.told(at(work, (7, 400))) is None
    assert family.told(at(work, (7, 401))) is None


def test_a_factory_has_no_family() -> None:
    assert family_of(Workload(kind="forward", model="small_models:bigram"), H200) is None


def test_other_settings_another_model_and_another_card_are_other_families(models: Models) -> None:
    work = models.work()
    same = [at(work, (7, 7)), dataclasses.replace(work, alloc_conf="expandable_segments:True")]
    assert {id(family_of(each, H200)) for each in same} == {id(family_of(work, H200))}
    others = [dataclasses.replace(work, precision="fp32"), models.work("qwen2")]
    assert id(family_of(work, H200)) not in {id(family_of(each, H200)) for each in others}
    assert family_of(work, dataclasses.replace(H200, sm_count=100)) is not family_of(work, H200)


# -- sweeps ------------------------------------------------------------------------------------------------------------


def sweep(count: int, seed: int = 0) -> list[tuple[int, int]]:
    points = random.Random(seed)
    return [(points.randint(2, 16), points.randint(129, 512)) for _ in range(count)]


def test_a_sweep_is_told_from_a_few_traces_and_gives_the_same_plans(
    models: Models, traced_points: list[tuple[int, int]]
) -> None:
    work = models.work(kind="forward")
    asked = sweep(20)
    plans = [predict(at(work, point), gpu="24GB") for point in asked]
    assert len(traced_points) <= 12
    told = [i for i, point in enumerate(asked) if point not in traced_points]
    for i in told[::5]:
        assert document(plans[i]) == document(predict(at(work, asked[i]), gpu="24GB", trace_cache=False))
        assert plans[i].how.way == "interpolated"


def test_points_that_are_known_to_come_need_fewer_traces(models: Models, traced_points: list[tuple[int, int]]) -> None:
    work = models.work(kind="forward")
    family = family_of(work, H200)
    assert family is not None
    family.corners.expected.update(sweep(40))
    for point in sweep(40):
        trace_workload(at(work, point), H200)
    assert len(traced_points) <= 10


ONE_PLAN = """
import sys
for name in [name for name in sys.modules if name.startswith("memfit.planning")]:
    del sys.modules[name]  # as in a process that has just begun
from memfit.planning.predict import predict

def entered():
    return "memfit.planning.interpolation" in sys.modules

for length in (64, 48):
    predict(kind="forward", model=sys.argv[1], seq_len=length)
    print(entered())

from memfit.planning import interpolation as family
(made,) = family._families.values()
print(sorted(made._traced), sorted(made.corners.asked))
"""


def test_a_single_plan_does_not_enter_the_room_of_interpolation_and_a_second_knows_of_the_first(models: Models) -> None:
    done = subprocess.run(
        [warm_python(), "-c", ONE_PLAN, models.folder("llama")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == ["False", "True", "[(1, 48), (1, 64)] [(1, 48), (1, 64)]"]


FIRST_UNKNOWN = """
import sys
from memfit.errors import MemfitError
from memfit.planning.predict import predict

for model in ("nobody-knows-it", sys.argv[1], sys.argv[1]):
    try:
        print(predict(kind="forward", model=model, seq_len=32).peak.allocated_bytes > 0)
    except MemfitError as error:
        print(error)
"""


def test_a_first_job_that_cannot_be_planned_is_no_error_of_the_second(models: Models) -> None:
    command = [warm_python(), "-c", FIRST_UNKNOWN, models.folder("llama")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    first, *others = done.stdout.splitlines()
    assert "nobody-knows-it" in first and others == ["True", "True"]


def test_a_few_plans_are_traced_each_by_itself(models: Models, traced_points: list[tuple[int, int]]) -> None:
    work = models.work(kind="forward")
    for point in sweep(3):
        trace_workload(at(work, point), H200)
    assert traced_points == sweep(3)


def test_a_batch_that_varies_alone_is_told_along_its_line(models: Models, traced_points: list[tuple[int, int]]) -> None:
    work = models.work(kind="forward")
    batches = [4, 8, 2, 16, 6, 10, 12, 14, 5, 3]
    made = [trace_workload(at(work, (batch, 256)), H200) for batch in batches]
    assert len(traced_points) <= 7
    assert {length for _, length in traced_points} == {256}
    assert rows(made[-1].trace) == rows(fresh(at(work, (3, 256))))


def test_a_corner_that_cannot_be_done_does_no_harm(models: Models) -> None:
    """BERT has 512 positions: the corner above 400 is first looked for at 512, and one above 500 would be at 1,024."""
    work = models.work("bert", kind="forward")
    for point in [(2, 500), (3, 130), (4, 501), (5, 140), (6, 399), (7, 512), (8, 201)]:
        assert trace_workload(at(work, point), H200).workload.seq_len == point[1]


# -- where it fails ----------------------------------------------------------------------------------------------------


def test_a_job_that_cannot_be_learned_from_is_traced_and_says_so(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise NotSeparable("a rule's buffer is used outside of it")

    monkeypatch.setattr(families, "stream_of", fail)
    work = models.work(kind="forward")
    notes = [trace_workload(at(work, point), H200).notes for point in sweep(4)]
    assert [any(note.startswith(UNLIKE) for note in each) for each in notes] == [False, False, True, True]
    assert notes[-1][-1].endswith("a rule's buffer is used outside of it")


def test_a_rule_that_cannot_be_asked_again_leaves_every_point_to_its_own_trace(
    models: Models, monkeypatch: pytest.MonkeyPatch, traced_points: list[tuple[int, int]]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such op")

    monkeypatch.setattr("memfit.tracing.rule_answers.answers_on", lambda platform: fail)
    work = models.work(kind="forward")
    for point in sweep(5):
        trace_workload(at(work, point), H200)
    assert set(sweep(5)) <= set(traced_points)


def test_without_the_cache_every_point_is_traced(models: Models, traced_points: list[tuple[int, int]]) -> None:
    work = models.work(kind="forward")
    for point in (*sweep(6), *sweep(6)):
        trace_workload(at(work, point), H200, cached=False)
    assert traced_points == sweep(6) * 2


def test_whoever_changes_a_trace_changes_no_other(models: Models) -> None:
    work = models.work(kind="forward")
    family = knowing(work, CORNERS + INSIDE)
    first, again = (family.told(at(work, (7, 222))) for _ in range(2))
    assert first is not None and again is not None
    before = rows(again.trace)
    first.trace.set_category(0, "other")
    first.trace.truncate(3)
    assert rows(again.trace) == before

"""The jobs really run: on the CPU, with two blocks, the same code that is traced and that runs on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import model_folder

from memfit.jobs.build import Prepared, prepare
from memfit.jobs.run import outputs_and_loss, run_job, token_ids, wanted
from memfit.jobs.workload import Workload


@pytest.fixture(autouse=True)
def small_work() -> Iterator[None]:
    """The same numbers each time, and one thread: several would wait for each other longer than they work."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Noted:
    """Phases that only remember what was announced."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        self.seen.append((name, step))
        yield


def on_the_cpu(model: str, kind: str, **settings: Any) -> Prepared:
    work = {"kind": kind, "model": model, "batch_size": 2, "seq_len": 16, "precision": "fp32", **settings}
    job = prepare(Workload.from_mapping(work))
    with torch.no_grad():
        for parameter in job.model.parameters():  # they were left as the memory was found
            parameter.normal_(0, 0.02)
    return job


def loss(job: Prepared) -> float:
    return float(outputs_and_loss(job, ids := token_ids(job, "cpu"), wanted(job, ids))[1].detach())


def trained(job: Prepared, steps: int = 2) -> list[tuple[str, int]]:
    """Run it, and hold that weights have changed, that frozen ones have not, and that the loss is a number."""
    before = [p.detach().clone() for p in job.model.parameters()]
    phases = Noted()
    run_job(job, "cpu", phases, steps=steps)
    changed = [now for old, now in zip(before, job.model.parameters(), strict=True) if not torch.equal(old, now)]
    assert changed
    assert all(parameter.requires_grad for parameter in changed)
    assert math.isfinite(loss(job))
    return phases.seen


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_full_training_runs(tmp_path: Path, family: str, attention: str) -> None:
    trained(on_the_cpu(model_folder(tmp_path, family), "train", attention=attention))


@pytest.mark.parametrize(
    "settings",
    [
        {"grad_checkpointing": True},
        {"optimizer": "adamw-fused"},
        {"optimizer": "adamw-single"},
        {"optimizer": "sgd"},
        {"precision": "bf16"},
        {"precision": "amp-bf16"},
        {"padding": True},
    ],
    ids=str,
)
def test_training_runs_with(tmp_path: Path, settings: dict[str, Any]) -> None:
    trained(on_the_cpu(model_folder(tmp_path, "llama"), "train", **settings))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_are_trained_and_the_base_is_not(tmp_path: Path, family: str, checkpointed: bool) -> None:
    folder = model_folder(tmp_path, family)
    trained(on_the_cpu(folder, "lora", rank=4, lora_dropout=0.1, grad_checkpointing=checkpointed))


def test_one_s_own_module_is_trained_on_the_cross_entropy_of_its_logits() -> None:
    trained(on_the_cpu("small_models:bigram", "train"))


def test_a_forward_pass_runs(tmp_path: Path) -> None:
    phases = Noted()
    run_job(on_the_cpu(model_folder(tmp_path, "llama"), "forward"), "cpu", phases, steps=2)
    assert phases.seen == [("load", 0), ("data", 1), ("forward", 1), ("data", 2), ("forward", 2)]


def test_a_forward_pass_of_one_s_own_module_runs() -> None:
    phases = Noted()
    run_job(on_the_cpu("small_models:bigram", "forward"), "cpu", phases, steps=1)
    assert phases.seen == [("load", 0), ("data", 1), ("forward", 1)]


def test_training_announces_its_phases_in_order(tmp_path: Path) -> None:
    job = on_the_cpu(model_folder(tmp_path, "llama"), "train", grad_accum=2, clip_grad=True)
    one_step = ["data", "forward", "backward", "data", "forward", "backward", "clip", "step", "zero"]
    assert trained(job, steps=2) == [("load", 0), *((name, step) for step in (1, 2) for name in one_step)]


def test_gradients_are_clipped_to_a_norm_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = on_the_cpu(model_folder(tmp_path, "llama"), "train", clip_grad=True)
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda ps, norm: norms.append(norm) or clip(ps, norm))
    run_job(job, "cpu", Noted(), steps=2)
    assert norms == [1.0, 1.0]


def test_micro_batches_are_accumulated_before_the_step(tmp_path: Path) -> None:
    seen = trained(on_the_cpu(model_folder(tmp_path, "llama"), "train", grad_accum=3), steps=1)
    names = [name for name, _ in seen]
    assert (names.count("backward"), names.count("step")) == (3, 1)


def test_generation_makes_as_many_tokens_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = on_the_cpu(model_folder(tmp_path, "llama"), "generate", new_tokens=5)
    lengths: list[torch.Size] = []
    generate = job.model.generate
    monkeypatch.setattr(job.model, "generate", lambda **options: lengths.append(generate(**options).shape))
    run_job(job, "cpu", Noted())
    assert lengths == [torch.Size([2, 16 + 5])]


def test_the_hugging_face_trainer_runs(tmp_path: Path) -> None:
    trained(on_the_cpu(model_folder(tmp_path, "llama"), "train", loop="trainer"))

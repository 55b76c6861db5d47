"""What lies on the host changes nothing but memory: losses and trained weights are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from late_lane import LateLane
from support.quick import quick
from tiny_run import LLAMA, run, same, tiny_job

from memfit.errors import UsageError
from memfit.jobs.build import Prepared, prepare
from memfit.jobs.run import run_job
from memfit.jobs.training import offload
from memfit.jobs.training.offload import PLACES, FrozenWeightsOnHost
from memfit.jobs.workload import Workload

BLOCKS = 5
"""More than there is room for, so that weights have to come and go."""
LORA = {"method": {"kind": "lora", "rank": 2, "dropout": 0.2}}
ALL = ["optimizer", "activations", "weights"]


@pytest.fixture(autouse=True)
def _whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST", 1)
    monkeypatch.setitem(LLAMA, "num_hidden_layers", BLOCKS)


class Silent:
    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Iterator[None]:
        yield


def prepared(folder: Path, **settings: Any) -> Prepared:
    from tiny_run import llama_folder

    usual = {"kind": "lora", "batch_size": 2, "seq_len": 16, "precision": "fp32", "lora_dropout": 0.2}
    job = prepare(Workload(model=llama_folder(folder), **(usual | settings)))
    torch.manual_seed(1)
    for parameter in job.model.parameters():
        parameter.data.normal_(0, 0.05)
    return job


def trained(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    job = prepared(folder, **settings)
    run_job(job, "cpu", Silent(), steps=3)
    return {name: each.detach() for name, each in job.model.named_parameters() if each.requires_grad}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- a loop of one's own and the Hugging Face Trainer ------------------------------------------------------------------


LOOPS = [
    (how, loop) for how in ("none", "grad_checkpointing", "selective_checkpointing") for loop in ("plain", "trainer")
]


@pytest.mark.parametrize(
    ("checkpointing", "loop"), quick([("none", "trainer"), ("grad_checkpointing", "plain")], LOOPS)
)
def test_lora_learns_the_same_whatever_lies_on_the_host(tmp_path: Path, loop: str, checkpointing: str) -> None:
    settings = {"loop": loop, "clip_grad": True, "grad_accum": 2}
    settings |= {} if checkpointing == "none" else {checkpointing: True}
    whole = trained(tmp_path, **settings)
    assert any(each.abs().sum() for name, each in whole.items() if "lora_B" in name)
    for levers in (("activations",), ("weights",), ("optimizer",), tuple(ALL)):
        assert equal(trained(tmp_path, offload=levers, **settings), whole), levers


@pytest.mark.parametrize("attention", quick(["sdpa"], ["eager", "sdpa"]))
@pytest.mark.parametrize("checkpointing", ["none", "grad_checkpointing", "selective_checkpointing"])
def test_copies_that_come_as_late_as_they_may_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: str, attention: str
) -> None:
    settings = {"grad_accum": 2, "attention": attention} | ({} if checkpointing == "none" else {checkpointing: True})
    whole = trained(tmp_path, **settings)
    late = []
    monkeypatch.setattr(offload, "Lane", lambda device: late.append(LateLane(device)) or late[-1])
    alone = [("activations",), ("weights",), ("optimizer",)] if checkpointing == "none" else []
    for levers in (*alone, tuple(ALL)):
        late.clear()
        assert equal(trained(tmp_path, offload=levers, **settings), whole), levers
        assert len(late) >= len(levers)


def test_what_is_saved_for_backward_comes_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    come = offload._Carrier._come

    def counted(carrier: offload._Carrier, kept: offload._HostCopy) -> torch.Tensor:
        if kept.here is None:
            came.append(kept.uses)
        return come(carrier, kept)

    monkeypatch.setattr(offload._Carrier, "_come", counted)
    trained(tmp_path, offload=("activations",))

    assert came
    assert min(came) > 0, "something that nobody needs any more was brought back"


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "adamw-single"])
def test_all_weights_are_trained_the_same_by_an_optimizer_on_the_host(tmp_path: Path, optimizer: str) -> None:
    settings: dict[str, Any] = {"kind": "train", "optimizer": optimizer, "loss": "chunked", "loss_chunk": 8}
    on_host = trained(tmp_path, offload=("optimizer", "activations"), grad_checkpointing=True, **settings)
    assert equal(on_host, trained(tmp_path, grad_checkpointing=True, **settings))


def test_autocast_changes_nothing_of_that(tmp_path: Path) -> None:
    settings = {"precision": "amp-bf16", "selective_checkpointing": True}
    assert equal(trained(tmp_path, offload=tuple(ALL), **settings), trained(tmp_path, **settings))


# -- `memfit train` ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", quick(["full"], ["full", "selective"]))
def test_a_run_with_everything_on_the_host_is_the_same_run(tmp_path: Path, checkpointing: str) -> None:
    changes = {**LORA, "memory.gradient_checkpointing": checkpointing, "memory.probe": True, "max_grad_norm": 0.5}
    plain, _ = run(tmp_path, output_dir=str(tmp_path / "plain"), **changes)
    on_host = {**changes, "memory.offload": ALL}
    other, _ = run(tmp_path, output_dir=str(tmp_path / "other"), **on_host)
    assert other.losses == plain.losses
    assert same(tmp_path / "plain" / "step_4", tmp_path / "other" / "step_4")
    again, _ = run(
        tmp_path, output_dir=str(tmp_path / "again"), resume_from=str(tmp_path / "other" / "step_2"), **on_host
    )
    assert again.losses == plain.losses
    assert same(tmp_path / "plain" / "step_4", tmp_path / "again" / "step_4")


def test_the_optimizer_s_state_goes_from_the_host_to_the_device_and_back(tmp_path: Path) -> None:
    """It is saved as AdamW saves it, so a run may go on without the lever, or with it."""
    changes = {"optimizer": "adamw-fused", "weight_decay": 0.1}
    on_host = {**changes, "memory.offload": ["optimizer"]}
    run(tmp_path, output_dir=str(tmp_path / "plain"), **changes)
    run(tmp_path, output_dir=str(tmp_path / "host"), **on_host)
    for name, source, levers in (("there", "plain", on_host), ("back", "host", changes)):
        run(tmp_path, output_dir=str(tmp_path / name), resume_from=str(tmp_path / source / "step_2"), **levers)
        assert same(tmp_path / "plain" / "step_4", tmp_path / name / "step_4")


# -- what is where -----------------------------------------------------------------------------------------------------


def test_frozen_weights_of_all_blocks_lie_in_the_room_of_two(tmp_path: Path) -> None:
    job = prepared(tmp_path, offload=("weights",), grad_checkpointing=True)
    before = {name: each.detach().clone() for name, each in job.model.named_parameters() if ".layers." in name}
    run_job(job, "cpu", Silent(), steps=1)
    frozen = [each for name, each in job.model.named_parameters() if ".layers." in name and not each.requires_grad]
    assert len({each.untyped_storage()._cdata for each in frozen}) == PLACES
    model = job.model.get_base_model()  # type: ignore[operator]
    for index in range(BLOCKS):  # a forward pass brings each of them in, unchanged
        seen: dict[str, torch.Tensor] = {}

        def look(layer: Any, *_: Any, seen: dict[str, torch.Tensor] = seen) -> None:
            seen.update({name: each.detach().clone() for name, each in layer.named_parameters()})

        handle = model.model.layers[index].register_forward_hook(look)
        with torch.no_grad():
            model(torch.arange(8)[None])
        handle.remove()
        for name, value in seen.items():
            if "lora" not in name:
                assert torch.equal(value, before[f"base_model.model.model.layers.{index}.{name}"])


def test_saved_tensors_are_on_the_device_one_at_a_time(tmp_path: Path) -> None:
    on_host = offload.ActivationsOnHost()
    x = torch.randn(64, 64, requires_grad=True)
    values = [x]
    with torch.autograd.graph.saved_tensors_hooks(on_host.pack, on_host.unpack):
        for _ in range(6):
            values.append(values[-1].sin())
    carrier = on_host._carrier
    assert carrier is not None
    kept = [ref() for _, ref in carrier._known.values()]
    assert sum(each is not None and each.here is not None for each in kept) == 1
    values[-1].sum().backward()
    want = torch.ones_like(x)
    for each in values[:-1]:
        want = want * each.detach().cos()
    assert torch.allclose(x.grad, want)  # type: ignore[arg-type]


def test_views_of_one_storage_are_copied_once() -> None:
    on_host = offload.ActivationsOnHost()
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(on_host.pack, on_host.unpack):
        a, b, c = (x * 1).unbind(0)
        loss = (a * b * c).sum()
    carrier = on_host._carrier
    assert carrier is not None and len(carrier._known) == 2  # the product by 1, and a * b
    loss.backward()
    assert torch.equal(x.grad[0], (x[1] * x[2]).detach())  # type: ignore[index]


def test_host_memory_is_used_again_by_the_next_step() -> None:
    on_host = offload.ActivationsOnHost()
    w = torch.randn(64, requires_grad=True)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(on_host.pack, on_host.unpack):
            loss = w.sin().exp().sum()
        loss.backward()
        del loss
    carrier = on_host._carrier
    assert carrier is not None
    assert carrier.pieces.memory.peak_bytes == 2 * 64 * 4  # w and exp(sin(w)), and not three times that


# -- what cannot be done -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "said"), [
    ({"memory.offload": ["optimizer"], "optimizer": "sgd"}, "memory.offload optimizer is AdamW on the host"),
    ({"memory.offload": ["weights"]}, "only frozen layers can lie on the host"),
])  # fmt: skip
def test_what_cannot_lie_on_the_host_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tiny_job(tmp_path, **changes)


@pytest.mark.parametrize(("settings", "said"), [
    ({"offload": ("weights",)}, "--offload weights does not go with fsdp2"),
    ({"offload": ("optimizer",)}, "--offload optimizer does not go with fsdp2"),
    ({"offload": ("activations",)}, "--offload activations with fsdp2 needs checkpointing"),
])  # fmt: skip
def test_shards_do_not_lie_on_the_host(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prepared(tmp_path, world_size=2, parallel="fsdp2", **settings)


def test_a_model_without_blocks_has_no_weights_to_bring_block_by_block() -> None:
    with pytest.raises(UsageError, match="has no list of blocks"):
        FrozenWeightsOnHost(torch.nn.Linear(2, 2).requires_grad_(False))

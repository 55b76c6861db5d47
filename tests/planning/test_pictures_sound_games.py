"""`memfit.trace` of what programs of pictures, sound, points and games do, and language models seldom."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

import memfit
from memfit.analysis.stacks import is_own
from memfit.errors import TraceError
from memfit.tracing.answers import ALL_TRUE, BLACK, PASSED
from memfit.tracing.packages import matching, torchscript
from memfit.tracing.unknown import FINITE_NOTE


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


# -- numbers that nobody knows -----------------------------------------------------------------------------------------


def test_a_tensor_times_a_number_that_nobody_knows_is_a_tensor() -> None:
    def step() -> None:
        temperature = on_gpu(1).exp().item()
        for made in (temperature * on_gpu(256, 4), on_gpu(256, 4) - temperature, temperature / on_gpu(256, 4)):
            assert made.is_cuda and made.shape == (256, 4)
        assert (temperature > on_gpu(256, 4)).shape == (256, 4)

    memfit.trace(step)


def test_an_array_times_a_number_that_nobody_knows_is_an_array_of_nan() -> None:
    def step() -> None:
        unknown = on_gpu(1).item()
        assert np.isnan(unknown * np.ones(3)).all() and (unknown * np.ones(3)).shape == (3,)
        assert not (unknown < np.ones(3)).any()

    memfit.trace(step)


def test_functions_of_numpy_tell_of_an_unknown_number_what_those_of_math_do() -> None:
    def step() -> None:
        norm = on_gpu(10).norm().item()
        for made in (np.sqrt(norm**2), np.exp(norm), norm * np.float32(2), np.float64(2) * norm, np.maximum(norm, 1.0)):
            assert f"{made:.3f}" == "?"
        assert np.isfinite(norm) and not np.isnan(np.sqrt(norm)) and not np.isinf(norm)
        assert np.isnan(np.add(norm, np.ones(2))).all() and np.isnan(np.mean([norm, norm]))

    assert FINITE_NOTE in memfit.trace(step).notes
    with pytest.raises(TraceError, match="the code decides by a number that is not known"):
        memfit.trace(lambda: on_gpu(3) if np.sqrt(on_gpu(1).item()) > np.float64(3) else None)


CHECKS = """
import torch
boxes = torch.randn(100, 4, device="cuda")
assert (boxes[:, 2:] >= boxes[:, :2]).all(), f"boxes of {boxes.shape}"
assert not (boxes < 0).any()
assert boxes.sum().item() < 5 and bool((boxes > 0).all())
with torch.no_grad():
    if boxes.min() < -1 or boxes.max() > 1:
        raise ValueError(f"out of range: {boxes.shape}")
if not torch.allclose(boxes, boxes + 1) or torch.equal(boxes, boxes):
    raise ValueError("unequal")
assert not torch.equal(boxes, boxes[:1]) and torch.equal(torch.ones(3).cuda(), torch.ones(3).cuda())
print("seen")
"""
CAUGHT = """
import torch
x = torch.randn(100, 4, device="cuda")
try:
    assert (x > 0).all()
except AssertionError:
    x = torch.cat([x, x])
"""
DECIDES = """
import torch
x = torch.randn(100, 4, device="cuda")
if (x > 0).all():
    x = torch.cat([x, x])
"""


def plan_of(text: str, folder: Path) -> memfit.Plan:
    """As a program: pytest changes what `assert` does in its own tests."""
    (folder / "train.py").write_text(text)
    return memfit.trace_script(str(folder / "train.py"))


def test_what_a_program_only_checks_is_as_it_should_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    note = next(note for note in plan_of(CHECKS, tmp_path).notes if note.startswith(PASSED))
    assert re.fullmatch(r": train.py:\d+(, train.py:\d+){3} and \d+ more", note.removeprefix(PASSED))
    assert "seen" in capfd.readouterr().err


@pytest.mark.parametrize("text", [CAUGHT, DECIDES])
def test_a_check_whose_error_the_program_catches_and_a_decision_are_asked_about(text: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"train.py:\d, .* the code asks a bool tensor for its value"):
        plan_of(text, tmp_path)


def test_pairs_that_scipy_matches_are_as_many_as_their_shapes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(costs: Any, maximize: bool = False) -> Any:
        if np.isnan(costs).any():
            raise ValueError("matrix contains invalid numeric entries")
        return np.arange(min(costs.shape)), np.arange(min(costs.shape))

    optimize = ModuleType("scipy.optimize")
    optimize.linear_sum_assignment = solve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scipy.optimize", optimize)

    def step() -> None:
        costs = on_gpu(100, 7).cpu()
        rows, columns = optimize.linear_sum_assignment(costs)
        assert len(rows) == len(columns) == 7
        assert optimize.linear_sum_assignment(np.eye(3))[0].tolist() == [0, 1, 2]

    assert matching.ANY_PAIRS in memfit.trace(step).notes
    assert optimize.linear_sum_assignment is solve


def test_fractions_that_are_picked_from_known_ones_are_known() -> None:
    def step() -> None:
        labels = torch.cat([torch.arange(96)] * 2)
        same = (labels[:, None] == labels[None]).float().cuda()  # more of them than are followed unless they are copies
        others = ~torch.eye(192, dtype=torch.bool).cuda()
        positives = on_gpu(192, 191)[same[others].view(192, 191).bool()]
        assert positives.shape == (192,)

    memfit.trace(step)


# -- where things lie --------------------------------------------------------------------------------------------------


def test_indices_may_lie_on_the_host_beside_others_on_the_gpu() -> None:
    def step() -> None:
        queries = on_gpu(2, 3, 32, 8)
        top = on_gpu(2, 3, 32).topk(5)[1]
        picked = queries[torch.arange(2)[:, None, None], torch.arange(3)[None, :, None], top, :]
        assert picked.is_cuda and picked.shape == (2, 3, 5, 8)
        queries[torch.arange(2)[:, None, None], torch.arange(3)[None, :, None], top, :] = picked

    memfit.trace(step)


def test_a_layer_with_weight_norm_moves_to_the_gpu_and_comes_back() -> None:
    with pytest.warns(FutureWarning):
        layer = weight_norm(nn.Conv1d(8, 16, 3))
    before = {name: (weight, weight.clone()) for name, weight in layer.named_parameters()}

    def step() -> None:
        layer.cuda()
        assert dict(layer.named_parameters())["weight_g"] is before["weight_g"][0] and layer.weight_g.is_cuda
        layer(on_gpu(4, 8, 100)).sum().backward()

    plan = memfit.trace(step)
    # Three tensors of 16, 8*16*3 and 16 numbers, each in blocks of 512 bytes.
    assert plan.report.breakdown["weights"] == 512 + 1536 + 512
    for name, weight in layer.named_parameters():
        assert weight is before[name][0] and torch.equal(weight, before[name][1])


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_type_of_tensors_may_be_one_of_the_gpu() -> None:
    def step() -> None:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        made = [torch.Tensor(4, 5), torch.Tensor([1.0, 2.0]), torch.Tensor(np.ones(3)), torch.zeros(3)]
        assert all(each.is_cuda and each.dtype == torch.float32 for each in made) and nn.Linear(2, 2).weight.is_cuda
        assert made[1].tolist() == [1.0, 2.0]
        assert not torch.FloatTensor([1.0]).is_cuda and not torch.from_numpy(np.ones(3)).is_cuda
        torch.set_default_tensor_type("torch.FloatTensor")
        assert not torch.Tensor(3).is_cuda and not torch.zeros(3).is_cuda
        torch.set_default_tensor_type(torch.cuda.DoubleTensor)

    memfit.trace(step)
    assert torch.Tensor(3).device.type == "cpu" and torch.zeros(3).dtype == torch.float32


def test_the_card_may_be_named_in_every_question_about_it() -> None:
    def step() -> None:
        on_gpu(1000)
        for device in (0, "cuda", torch.device("cuda", 0)):
            assert torch.cuda.max_memory_allocated(device=device) == 4096
            torch.cuda.reset_peak_memory_stats(device=device)
            assert torch.cuda.memory_allocated(device=device) == 0
            on_gpu(1000)
            assert torch.cuda.mem_get_info(device=device)[1] > 0
            assert torch.cuda.get_device_name(device=device) and torch.cuda.get_device_capability(device=device)
            assert torch.cuda.get_device_properties(device=device).total_memory
            assert torch.cuda.current_stream(device=device) == torch.cuda.default_stream(device=device)

    memfit.trace(step)


# -- TorchScript -------------------------------------------------------------------------------------------------------


def test_the_graph_for_tensorboard_is_left_out_and_its_forward_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class SummaryWriter:
        def add_graph(self, *_: Any) -> None:
            raise AssertionError("it would trace the model")

    writers = ModuleType("tensorboardX.writer")
    writers.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, writers.__name__, writers)
    real = SummaryWriter.add_graph

    def step() -> None:
        model = nn.Sequential(nn.Linear(256, 1024), nn.Dropout()).cuda()
        SummaryWriter().add_graph(model, on_gpu(1024, 256))
        assert model.training
        torch.cuda.synchronize()

    plan = memfit.trace(step)
    # Weights and biases, the input, and what the layer makes of it.
    assert plan.peak.allocated_bytes >= 4 * (256 * 1024 + 1024 + 1024 * 256 + 1024 * 1024)
    assert torchscript.NO_GRAPH in plan.notes and SummaryWriter.add_graph is real


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_model_that_torch_jit_traces_on_the_gpu_is_refused_with_the_line() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TraceError, match=r"test_pictures.*: the code uses torch.jit.trace, which memfit does not"):
        memfit.trace(lambda: torch.jit.trace(model.cuda(), on_gpu(2, 4)))


SCRIPTED = """
import torch
@torch.jit.script
def gate(x):
    return torch.tanh(x) * torch.sigmoid(x)
x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
gate(x).sum().backward()
"""


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripted_code_is_planned_op_by_op_and_that_is_said_beside_the_verdict(tmp_path: Path) -> None:
    plan = plan_of(SCRIPTED, tmp_path)
    assert plan.peak.allocated_bytes >= 4 * 4 * 1024 * 1024
    assert torchscript.OP_BY_OP in plan.notes


# -- files -------------------------------------------------------------------------------------------------------------

SAVED = """
import os, shutil
import torch
from pathlib import Path
model = torch.nn.Linear(4, 4).cuda()
torch.save(model.state_dict(), "last.tmp")
os.replace("last.tmp", "last.pt")
shutil.copyfile("last.pt", "best.pt")
os.mkdir("kept")
shutil.copy("best.pt", "kept")
for name in ("last.pt", "best.pt", "kept/best.pt"):
    model.load_state_dict(torch.load(name))
os.remove("best.pt")
Path("other.txt").write_text("a file")
os.rename("other.txt", "another.txt")
assert shutil.copy(src="another.txt", dst="third.txt") and Path("third.txt").read_text() == "a file"
os.unlink("another.txt")
print(sorted(os.listdir()))
"""


def test_a_checkpoint_that_was_saved_may_be_renamed_copied_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan_of(SAVED, tmp_path)
    assert "['kept', 'third.txt', 'train.py']" in capfd.readouterr().err


# -- libraries ---------------------------------------------------------------------------------------------------------


def test_a_folder_of_packages_on_the_path_is_no_code_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("installed/package-1.0.dist-info", "installed/package", "mine"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "installed"), str(tmp_path / "mine"), *sys.path])
    assert not is_own(str(tmp_path / "installed" / "package" / "core.py"))
    assert is_own(str(tmp_path / "mine" / "core.py")) and is_own(str(tmp_path / "train.py"))


# -- batch norm of several processes -----------------------------------------------------------------------------------

SYNCHRONISED = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 1), torch.nn.BatchNorm2d(64))
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
model(torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()
assert model[1].weight.grad.shape == (64,)
"""


def test_a_batch_norm_of_several_processes_keeps_its_input_and_the_numbers_of_its_channels(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SYNCHRONISED)
    plan = memfit.trace_script(f"torchrun --nproc_per_node=4 {tmp_path / 'train.py'}", gpu="H200")
    kept, passing = plan.report.breakdown["activations"], plan.report.breakdown["temporaries"]
    whole = 8 * 64 * 64 * 64 * 4  # what the convolution makes; what is kept of channels is at most a few KiB
    assert whole <= kept < whole + 4096
    # The gradient that comes in, laid out whole as the kernel reads it, and that which goes on.
    assert 2 * whole <= passing < 2 * whole + 4096


# -- values that follow from data, and pictures ------------------------------------------------------------------------


def test_how_many_boxes_match_an_anchor_follows_from_the_data() -> None:
    found: list[int] = []

    def step() -> None:
        boxes = torch.linspace(0, 1, 2000 * 6).view(1, 2000, 6).repeat(3, 1, 1).cuda()
        anchors = torch.tensor([[0.1, 0.2], [0.3, 0.3], [0.9, 0.8]]).cuda()
        gain = torch.ones(6, device="cuda")
        gain[2:4] = torch.tensor([20, 40])[[1, 0]]
        ratio = (boxes * gain)[..., 2:4] / anchors[:, None] / gain[[2, 3]]
        found.append(boxes[torch.max(ratio, 1 / ratio).amax(2) < 4].shape[0])

    memfit.trace(step)
    boxes = torch.linspace(0, 1, 2000 * 6).view(2000, 6)[:, 2:4]
    ratio = boxes[None] / torch.tensor([[0.1, 0.2], [0.3, 0.3], [0.9, 0.8]])[:, None]
    assert found == [int((torch.max(ratio, 1 / ratio).amax(2) < 4).sum())]


def test_what_weights_make_of_data_is_not_reckoned() -> None:
    def step() -> None:
        weights = nn.Linear(2, 64).cuda()
        bool(weights(torch.ones(1000, 2, device="cuda")).sum() > 0)

    with pytest.raises(TraceError, match="the code asks a bool tensor for its value"):
        memfit.trace(step)


def test_a_mask_that_is_read_where_it_is_written_is_true_everywhere() -> None:
    def step() -> None:
        x, y = on_gpu(8, 1 << 17), on_gpu(8, 1 << 17)
        mask = x > y
        x[mask] = y[mask]
        y[~mask] *= x[~mask]

    plan = memfit.trace(step)
    assert ALL_TRUE in plan.notes
    positions = 2 * 8 * (8 << 17)
    assert plan.peak.allocated_bytes > 3 * (4 << 20) + positions

    def other() -> None:
        x = on_gpu(8)
        x[x > 1] = x[x < 0]

    with pytest.raises(TraceError, match="the code selects by a bool tensor"):
        memfit.trace(other)


def test_pictures_of_a_model_that_are_saved_are_black() -> None:
    def step() -> None:
        picture = on_gpu(3, 8, 8).mul(255).permute(1, 2, 0).to("cpu", torch.uint8).numpy()
        assert picture.shape == (8, 8, 3) and not picture.any()

    assert BLACK in memfit.trace(step).notes
    with pytest.raises(TraceError, match="for all its values"):
        memfit.trace(lambda: on_gpu(8).byte().cpu().numpy())


def test_losses_of_a_batch_that_were_copied_to_the_host_are_a_list_of_numbers_that_nobody_knows() -> None:
    def step() -> None:
        each = on_gpu(3, 4).pow(2).mean(1).cpu().reshape(-1).tolist()
        assert [f"{loss:.2f}" for loss in each] == ["?"] * 3
        assert torch.arange(3, device="cuda").cpu().tolist() == [0, 1, 2]
        assert f"{on_gpu(1).new(each[:1]).item():.2f}" == "?" and on_gpu(1).new([1, 2]).dtype == torch.float32

    memfit.trace(step)

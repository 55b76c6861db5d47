"""`memfit.trace` of code as strangers write it: it finds what a GPU would show, or is refused with the line."""

from __future__ import annotations

import io
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import small_llama
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import TraceError
from memfit.planning.predict import Plan
from memfit.tracing.unknown import FINITE_NOTE


def language_model(**settings: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small_llama()), dtype=torch.bfloat16, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    language_model().save_pretrained(folder)
    return folder


def weights(made: Plan) -> int:
    return made.report.breakdown["weights"]


# -- where a tensor lies -----------------------------------------------------------------------------------------------


def test_a_tensor_of_the_gpu_says_that_it_is_on_cuda() -> None:
    def step() -> None:
        x = nn.Linear(4, 4).to("cuda")(torch.ones(2, 4).cuda())
        assert (x.is_cuda, x.is_meta, x.is_cpu, x.device, x.get_device()) == (
            True,
            False,
            False,
            torch.device("cuda:0"),
            0,
        )
        assert x.device.type == "cuda" and x.type() == "torch.cuda.FloatTensor"
        assert torch.zeros(3, device=x.device).is_cuda and not torch.ones(3).is_cuda

    memfit.trace(step)


def test_a_model_that_the_code_builds_on_meta_takes_no_gpu_memory() -> None:
    def step() -> None:
        torch.zeros(1, device="cuda")
        with torch.device("meta"):
            model = nn.Linear(1000, 1000)
        assert model.weight.is_meta and (model.weight * 2).is_meta
        nn.Linear(1000, 1000, device="meta")

    assert memfit.trace(step).trace.requested.tolist() == [4]


def test_a_model_on_meta_is_given_memory_by_to_empty() -> None:
    made = memfit.trace(lambda: nn.Linear(10, 10, device="meta").to_empty(device="cuda"))
    assert made.trace.requested.tolist() == [400, 40]


def test_what_comes_back_to_the_host_is_no_gpu_memory() -> None:
    def step() -> None:
        x = torch.randn(1000, device="cuda")
        host = x.cpu()
        assert host.device.type == "cpu" and not host.is_cuda and (host * 2).device.type == "cpu"
        assert (host * 2).to("cuda").is_cuda

    assert memfit.trace(step).trace.requested.tolist() == [4000, 4000]


@pytest.mark.parametrize(
    "use", [lambda: torch.zeros(3, device="cuda:1"), lambda: torch.zeros(3).to(torch.device("cuda", 1))]
)
def test_a_second_gpu_is_refused_with_the_line(use: Callable[[], object]) -> None:
    with pytest.raises(TraceError, match=r"test_strangers_code.py:\d+.*cuda:1, and memfit traces one GPU"):
        memfit.trace(use)


def test_weights_that_from_pretrained_puts_on_cuda_are_counted(saved: str) -> None:
    from transformers import AutoModelForCausalLM

    def step(**settings: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16, **settings).to("cuda")
        model(torch.ones(1, 8, dtype=torch.int64, device=model.device))

    mapped, moved = memfit.trace(lambda: step(device_map="cuda")), memfit.trace(step)
    assert mapped.parameters == moved.parameters == language_model().num_parameters()
    assert weights(mapped) == weights(moved) > 2 * mapped.parameters


def test_what_a_thread_puts_on_the_gpu_is_counted() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        thread = threading.Thread(target=lambda: kept.append(torch.zeros(1000, device="cuda")))
        thread.start()
        thread.join()

    assert memfit.trace(step).trace.requested.tolist() == [4000]


def test_the_default_device_of_the_code_ends_with_the_trace() -> None:
    def step() -> None:
        torch.set_default_device("cuda")
        assert torch.zeros(3).is_cuda

    memfit.trace(step)
    assert torch.zeros(3).device.type == "cpu"


# -- what CUDA refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: nn.Embedding(10, 4).cuda()(torch.zeros(3, dtype=torch.int64)), "cuda:0 and cpu"),
        (lambda: torch.ones(3, device="cuda") + torch.ones(3), "cuda:0 and cpu"),
        (lambda: torch.ones(3, 3, device="cuda") @ torch.ones(3, 3, device="cuda").half(), "same dtype"),
        (lambda: nn.Linear(3, 3).cuda().half()(torch.ones(2, 3, device="cuda")), "same dtype"),
    ],
)
def test_what_fails_on_a_gpu_fails_in_a_trace(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(TraceError, match=f"the job itself fails: RuntimeError: .*{said}"):
        memfit.trace(wrong)


def test_numbers_and_indices_may_come_from_the_host() -> None:
    def step() -> None:
        x = torch.ones(4, 4, device="cuda")
        _ = x * torch.tensor(2.0), x[torch.tensor([0, 1])], x + 1
        x[torch.tensor([True, False, True, False])] = 0.0

    memfit.trace(step)


# -- values ------------------------------------------------------------------------------------------------------------


def masked(change: Callable[[torch.Tensor], object], where: str) -> Plan:
    def step() -> None:
        ids = torch.ones(4, 128, dtype=torch.int64, device="cuda")
        mask = torch.ones(4, 128, dtype=torch.int64, device=where)
        change(mask)
        language_model(attn_implementation="sdpa").cuda()(ids, attention_mask=mask.cuda(), labels=ids).loss.backward()

    return memfit.trace(step)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_mask_with_a_zero_in_it_is_a_mask(where: str) -> None:
    ones = masked(lambda mask: None, where)
    zeros = masked(lambda mask: mask[0, 100:].zero_(), where)
    again = masked(lambda mask: mask[0, 100:].zero_().fill_(1), where)
    assert zeros.trace.requested.tolist() != ones.trace.requested.tolist() == again.trace.requested.tolist()


def test_shapes_that_depend_on_known_values_are_right() -> None:
    def step() -> None:
        labels = torch.tensor([[1, -100, 3], [-100, -100, 6]]).cuda()
        logits = torch.randn(2, 3, 5, device="cuda")
        assert logits[labels != -100].shape == (3, 5)
        assert labels.unique().tolist() == [-100, 1, 3, 6]
        assert labels.max().item() == 6 and bool((labels > 5).any()) and int(labels[0, 0]) == 1
        assert F.one_hot(labels.clamp(min=0)).shape == (2, 3, 7)
        assert (labels * 2).cpu().numpy()[1, 2] == 12

    memfit.trace(step)


def test_a_value_is_unknown_once_something_unknown_was_written_into_it() -> None:
    def step() -> None:
        mask = torch.ones(8, device="cuda")
        mask.mul_(torch.randn(8, device="cuda"))
        if mask.sum() > 0:
            mask.add_(1)

    with pytest.raises(TraceError, match="asks a bool tensor for its value"):
        memfit.trace(step)


def unknown_loss() -> torch.Tensor:
    loss: torch.Tensor = torch.randn(100, 100, device="cuda").sum()
    return loss


def test_a_number_that_nobody_knows_can_be_printed_and_reckoned_with() -> None:
    said: list[object] = []

    def step() -> None:
        loss = unknown_loss()
        total = 0.0 + loss.item()
        said.append(f"{loss:.3f}|{loss.item():8.4f}|{math.exp(loss.item())}|{total / 2:.1f}|{round(total, 2)}|{-total}")
        said[0] = f"{said[0]}|{round(total)}|{math.ceil(total)}"
        said.append([loss.item(), (loss > 0).long().item(), loss.tolist(), math.isnan(loss.item())])

    plan = memfit.trace(step)
    assert said[0] == "?|       ?|?|?|?|?|?|?"
    assert str(said[1]) == "[?, ?, ?, False]"
    assert any("numpy takes them for NaN" in note for note in plan.notes)
    assert "losses, norms and gradients are finite wherever the code looks" in plan.notes


def test_what_inference_mode_has_left_on_the_host_may_be_asked_to_go_there() -> None:
    def step() -> None:
        with torch.inference_mode():
            found = torch.stack([unknown_loss().cpu()])
        assert found.cpu().numpy().shape == (1,)

    memfit.trace(step)


def scaled_by_root(x: torch.Tensor) -> torch.Tensor:
    return x * math.sqrt(2.0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_what_torchscript_compiles_may_use_mathematics() -> None:
    def step() -> None:
        made = torch.jit.script(scaled_by_root)(torch.ones(256, device="cuda"))
        assert made.shape == (256,) and str(math.sqrt(unknown_loss().item())) == "?"

    assert memfit.trace(step).peak.allocated_bytes >= 1024


def decide_by_it() -> None:
    if unknown_loss().item() > 3:
        unknown_loss()


def decide_by_its_float() -> None:
    if float(unknown_loss()) > 3:
        raise AssertionError("not reached")


def test_a_float_of_an_unknown_number_is_named() -> None:
    losses: list[float] = []

    def step() -> None:
        losses.append(float(unknown_loss()))

    plan = memfit.trace(step)
    assert math.isnan(losses[0]) and "float() of a number that nobody knows, such as a loss, is NaN" in plan.notes


@pytest.mark.parametrize(
    "ask",
    [decide_by_it, decide_by_its_float, lambda: int(unknown_loss()), lambda: [1, 2][round(unknown_loss().item())]],
)
def test_a_decision_by_an_unknown_number_is_what_memfit_lacks_and_not_the_job_s_failure(
    ask: Callable[[], object],
) -> None:
    with pytest.raises(TraceError, match=r"test_strangers_code.py:\d+") as caught:
        memfit.trace(ask)
    assert "the job itself fails" not in str(caught.value)
    assert 'answers={("test_strangers_code.py", ' in str(caught.value.hint)


def test_right_answers_are_counted_and_that_is_said() -> None:
    seen: list[int] = []

    def step() -> None:
        num_correct = 0
        for label in range(3):
            num_correct += int(torch.randn(4, device="cuda").argmin().item() == label)
        seen.append(num_correct)

    assert "answers whose right ones are counted are right" in memfit.trace(step).notes and seen == [3]


def test_so_is_a_share_of_right_answers_that_is_a_whole_number_first() -> None:
    seen: list[float] = []

    def step() -> None:
        correct = torch.randn(8, 4, device="cuda").argmax(1) == torch.zeros(8, device="cuda").long()
        acc = int(correct.sum()) / 8
        test_accs = [int((correct == 1).sum()) / 8]
        seen.extend([acc, *test_accs])

    assert "answers whose right ones are counted are right" in memfit.trace(step).notes and len(seen) == 2


def test_different_values_are_counted_where_they_are_known_and_else_asked_about() -> None:
    def of_labels() -> None:
        found, where = torch.unique(torch.tensor([3, 1, 3]).cuda(), return_inverse=True)
        assert found.tolist() == [1, 3] and where.tolist() == [1, 0, 1]

    memfit.trace(of_labels)
    with pytest.raises(TraceError, match="which values an int64 tensor has"):
        memfit.trace(lambda: torch.unique(torch.randn(8, 4, device="cuda").argmax(1)))


def test_counts_of_values_are_as_many_as_are_asked_for_or_known() -> None:
    def of_confusions() -> None:
        unknown = torch.randn(8, 4, device="cuda").argmax(1)
        assert torch.bincount(unknown, minlength=16).shape == (16,)
        assert torch.bincount(torch.tensor([1, 5]).cuda(), minlength=2).tolist() == [0, 1, 0, 0, 0, 1]

    assert "values that `bincount` counts are less than its `minlength`" in memfit.trace(of_confusions).notes
    with pytest.raises(TraceError, match="counts the values"):
        memfit.trace(lambda: torch.bincount(torch.randn(8, 4, device="cuda").argmax(1)))


def test_a_metric_of_torchmetrics_finds_its_classes_as_they_should_be(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "torchmetrics" / "functional" / "classification"
    folder.mkdir(parents=True)
    (folder / "stat_scores.py").write_text(
        "import torch\n"
        "def _multiclass_stat_scores_tensor_validation(preds, num_classes):\n"
        "    found = len(torch.unique(preds, dim=None))\n"
        "    if found > num_classes:\n"
        "        raise RuntimeError('more classes than there are')\n"
        "    return found\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    import stat_scores

    def step() -> None:
        assert stat_scores._multiclass_stat_scores_tensor_validation(torch.randn(8, 4, device="cuda").argmax(1), 4) == 1

    assert any(note.startswith("what distributions and losses check") for note in memfit.trace(step).notes)


def test_scores_of_a_curve_of_torchmetrics_all_differ(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "torchmetrics" / "functional" / "classification"
    folder.mkdir(parents=True)
    (folder / "precision_recall_curve.py").write_text(
        "import torch\ndef _binary_clf_curve(preds):\n    return torch.nonzero(preds[1:] - preds[:-1])\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    import precision_recall_curve

    def step() -> None:
        assert precision_recall_curve._binary_clf_curve(torch.randn(8, device="cuda")).shape == (7, 1)

    assert any(note.startswith("no two scores of a curve") for note in memfit.trace(step).notes)


def test_tokens_that_are_printed_as_characters_are_any_characters() -> None:
    seen: list[str] = []

    def step() -> None:
        tokens = torch.randn(3, 256, device="cuda").argmax(-1)
        seen.append("".join(str(chr(max(32, token))) for token in tokens))
        seen.append("".join(chr(token) for token in tokens) + chr(tokens[0].item()))

    plan = memfit.trace(step)
    assert seen == ["   ", "\0" * 4] and any(note.startswith("characters of numbers") for note in plan.notes)


def test_a_search_for_nans_finds_none_by_whatever_name() -> None:
    def step() -> None:
        loss = torch.randn(4, device="cuda").sum()
        nans, nan_weights = torch.isnan(loss), torch.isnan(loss)
        assert not (nans.any() or nan_weights.any())

    assert FINITE_NOTE in memfit.trace(step).notes


def test_a_large_mask_made_of_ones_is_known() -> None:
    def step() -> None:
        rows = torch.randn(2, 512, 64, device="cuda")
        later = torch.triu(rows.new_ones(512, 1024), diagonal=513).byte()[:, :, None]
        infinite = torch.full((512, 512), float("-inf"), device="cuda").triu(1)
        assert later.any().item() and not later[:, :513].any().item()
        assert infinite[0, 0] == 0 and infinite[0, 1] < 0 and rows.new_zeros(3).sum() == 0

    memfit.trace(step)


class Swapping(torch.optim.SGD):
    """Puts each weight elsewhere, as optimizers do that work on a projection of it."""

    def step(self, *_: Any) -> None:  # type: ignore[override]
        super().step()
        for weight in self.param_groups[0]["params"]:
            weight.data = weight.data.clone().detach()


def test_weights_that_an_optimizer_swaps_amid_the_backward_pass_are_weights_and_counted_once() -> None:
    def steps() -> None:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))).cuda()
        each = {weight: Swapping([weight], lr=0.1, momentum=0.9) for weight in model.parameters()}

        def step_at_once(weight: Any) -> None:
            each[weight].step()
            each[weight].zero_grad()

        for weight in each:
            weight.register_post_accumulate_grad_hook(step_at_once)
        for _ in range(3):
            model(torch.randn(8, 512, device="cuda")).sum().backward()

    plan = memfit.trace(steps)
    assert plan.parameters == plan.trainable_parameters == 3 * 512 * 512
    assert plan.report.breakdown["weights"] + plan.report.breakdown["optimizer"] >= 6 * 512 * 512 * 4
    assert plan.report.breakdown.get("gradients", 0) < 2 * 512 * 512 * 4


def test_the_best_so_far_is_answered_and_said() -> None:
    seen: list[bool] = []

    def step() -> None:
        best = float("inf")
        for _ in range(2):
            loss = unknown_loss().item()
            if loss < best:
                best = loss
                seen.append(True)

    plan = memfit.trace(step)
    assert seen == [True, True]
    assert "each result that is compared with the best so far is a new best" in plan.notes


# -- the card ----------------------------------------------------------------------------------------------------------


def test_the_card_that_the_code_finds_is_the_card_of_the_plan() -> None:
    def step() -> None:
        torch.zeros(1, device="cuda")
        found = torch.cuda.get_device_properties(0)
        assert "RTX 4090" in found.name and (found.major, found.minor) == (8, 9) == torch.cuda.get_device_capability()
        assert found.total_memory == torch.cuda.mem_get_info()[1] > torch.cuda.mem_get_info()[0]
        assert torch.accelerator.current_accelerator() == torch.device("cuda")

    memfit.trace(step, gpu="RTX 4090")


def test_code_that_prints_its_own_peak_prints_the_predicted_one() -> None:
    said: list[int] = []

    def step() -> None:
        x = torch.zeros(5 << 20, device="cuda")
        del x
        said.extend(
            (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
        )

    peak = memfit.trace(step).peak
    assert said == [peak.allocated_bytes, peak.reserved_bytes, 0]


def test_streams_events_generators_and_pinned_memory_are_there() -> None:
    def step() -> None:
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        x = torch.ones(8).pin_memory().cuda(non_blocking=True)
        with torch.cuda.stream(stream):
            y = x * 2
        y.record_stream(torch.cuda.current_stream())
        event.record()
        event.synchronize()
        torch.randn(4, device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    made = memfit.trace(step)
    assert any(note.startswith("record_stream") for note in made.notes)


def test_a_thread_that_has_ended_gives_its_cublas_workspace_on_to_whoever_asks_next() -> None:
    """403,784,192 bytes on an H200, with a linear layer of 4,096 and three threads before the first step."""

    def step() -> None:
        model = nn.Linear(4096, 4096).cuda()

        def look(rows: int) -> None:
            with torch.no_grad():
                model(torch.randn(rows, 4096, device="cuda")).sum().item()

        for rows in (256, 512, 768):
            thread = threading.Thread(target=look, args=(rows,))
            thread.start()
            thread.join()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = model(torch.randn(512, 4096, device="cuda")).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert memfit.trace(step, gpu="H200").peak.allocated_bytes == 403_784_192


def test_the_default_device_may_be_the_gpu() -> None:
    def step() -> None:
        torch.set_default_device("cuda")
        assert torch.get_default_device() == torch.device("cuda", 0)
        assert torch.tensor([3, 4]).tolist() == [3, 4]

    assert memfit.trace(step).peak.allocated_bytes
    assert torch.get_default_device() == torch.device("cpu")


def test_whole_numbers_that_backward_needs_may_wait_on_the_host() -> None:
    def step() -> None:
        x = torch.randn(64, 8, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            chosen = x.max(dim=1).values.sum()
        chosen.backward()

    made = memfit.trace(step)
    assert made.peak.allocated_bytes and not any("NaN" in note for note in made.notes)


def test_what_the_host_knows_is_known_on_the_gpu_in_inference_mode_too() -> None:
    def step() -> None:
        ids = torch.tensor([[1, 2], [3, 0]])
        with torch.inference_mode():
            assert bool((ids.cuda()[:, -1] == 0).any())
            assert torch.tensor([7]).to("cuda").item() == 7

    assert memfit.trace(step).peak.allocated_bytes


def test_adafactor_with_relative_steps_asks_for_nothing_that_is_not_known() -> None:
    from transformers.optimization import Adafactor

    def step() -> None:
        model = nn.Linear(2048, 2048, device="cuda")
        optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        model(torch.randn(4, 2048, device="cuda")).sum().backward()
        optimizer.step()

    assert any(note.startswith("Adafactor") for note in memfit.trace(step).notes)


def test_beams_are_compared_up_to_the_longest_length_and_come_out_as_long() -> None:
    shapes: list[tuple[int, ...]] = []

    def step(**more: Any) -> None:
        model = language_model().cuda().eval()
        ids = torch.ones(2, 8, dtype=torch.int64, device="cuda")
        out = model.generate(ids, max_new_tokens=5, num_beams=3, do_sample=False, **more)
        shapes.append(tuple(out.shape))

    plan = memfit.trace(lambda: step(num_return_sequences=2))
    memfit.trace(lambda: step(early_stopping=True))
    assert shapes == [(4, 13), (2, 13)]
    assert "beam search: beams are compared up to the longest length that the code allows" in plan.notes


def test_an_unknown_count_is_printed_in_every_form_and_asked_about_where_it_decides() -> None:
    said: list[str] = []

    def step() -> None:
        right = nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).argmax(1).eq(0).sum().item()
        said.extend(("%d of 8" % right, str(right), f"{right:d}", "%.1f" % right))  # noqa: UP031
        said.append(str(7 % right))

    memfit.trace(step)
    assert said == ["0 of 8", "?", "?", "nan", "?"]
    for decides in (int, range, lambda right: [1, 2][right]):
        with pytest.raises(TraceError, match=r"test_strangers_code.py:\d+"):
            memfit.trace(lambda use=decides: use(torch.randn(4, device="cuda").sum().item()))


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # torch's has no `copy`
def test_numpy_takes_a_tensor_of_the_host_whoever_asks() -> None:
    import numpy

    def step() -> None:
        out = nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).detach()
        for made in (
            numpy.asarray(out.cpu()),
            numpy.array(out.cpu(), dtype="float64"),
            numpy.concatenate([out.cpu()] * 2),
        ):
            assert numpy.isnan(made).all()
        assert numpy.asarray(torch.arange(3).cuda().cpu()).tolist() == [0, 1, 2]
        with pytest.raises(TypeError, match="cuda"):
            numpy.asarray(out)

    assert any("numpy is given" in note for note in memfit.trace(step).notes)


def test_l_bfgs_is_planned_with_all_its_iterations_and_every_direction_that_it_remembers() -> None:
    def plan(history: int) -> Plan:
        def step() -> None:
            model = nn.Linear(1024, 1024, bias=False, device="cuda")  # 4 MiB of weights, as of a direction
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8, history_size=history)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(1, 1024, device="cuda")).square().mean()
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)

        return memfit.trace(step)

    few, many = plan(2), plan(10)
    each = 2 * 4 * 2**20 + 2 * 512  # a change, a step, and two numbers
    assert many.peak.allocated_bytes - few.peak.allocated_bytes == 8 * each
    assert any(note.startswith("L-BFGS takes all its iterations") for note in many.notes)
    assert {phase.name for phase in many.report.phases if phase.step == 2} == {"step", "forward", "backward"}


def test_a_line_search_of_l_bfgs_tries_two_points() -> None:
    calls: list[int] = []

    def step() -> None:
        model = nn.Linear(16, 16, device="cuda")
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 16, device="cuda")).square().mean()
            loss.backward()
            calls.append(1)
            return loss

        optimizer.step(closure if model is not None else step)  # words of a decision beside it ask nothing

    notes = memfit.trace(step).notes
    assert len(calls) == 1 + 2 * 5  # then there were more than the 8 * 5 / 4 that it allows itself
    assert any(note.startswith("each line search of L-BFGS tries two points") for note in notes)


class Named(torch.autograd.Function):
    """Tells when its gradient is made, and makes a node of the same kind then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, told: list[str]) -> torch.Tensor:
        ctx.name, ctx.told = name, told
        return torch.mul(x, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.told.append(ctx.name)
        if len(ctx.name) < 12:
            return Named.apply(gradient, f"of {ctx.name}", ctx.told), None, None
        return gradient, None, None


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_a_backward_pass_makes_is_differentiated_as_a_gpu_s_own_thread_has_numbered_it(in_backward: bool) -> None:
    """There the nodes of such a pass have low numbers, and come after those of the passes before it."""

    def order(device: str, in_autograd_s_thread: bool) -> list[str]:
        told: list[str] = []
        start = torch.ones(3, device=device, requires_grad=True)
        for _ in range(40):
            start = start + 1  # numbers that the other thread has not come to
        before = Named.apply(start, "before", told)
        x = torch.ones(3, device=device, requires_grad=True)
        y = Named.apply(x, "inner", told).square().sum()
        given: list[torch.Tensor] = []

        def differentiate() -> None:
            if in_backward:
                y.backward(create_graph=True)
                assert x.grad is not None
                given.append(x.grad)
            else:
                given.extend(torch.autograd.grad(y, x, create_graph=True))

        if in_autograd_s_thread:
            other = threading.Thread(target=differentiate)
            other.start()
            other.join()
        else:
            differentiate()
        (before.sum() + (Named.apply(x, "after", told) * given[0]).sum()).backward()
        return told

    seen: list[list[str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of gradients that hold their graph
        on_a_gpu = order("cpu", in_autograd_s_thread=True)
        memfit.trace(lambda: seen.append(order("cuda", in_autograd_s_thread=False)))
    assert on_a_gpu != order("cpu", in_autograd_s_thread=False)
    assert seen == [on_a_gpu]


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda: torch.cuda.CUDAGraph(), "torch.cuda.CUDAGraph"),
    ],
)
def test_what_memfit_lacks_is_named_with_the_line(use: Callable[[], object], what: str) -> None:
    with pytest.raises(TraceError, match=rf"test_strangers_code.py:\d+.*{what}"):
        memfit.trace(use)


def test_inference_mode_needs_what_no_grad_needs() -> None:
    def forward(mode: Any) -> list[int]:
        def step() -> None:
            ids = torch.ones(2, 64, dtype=torch.int64, device="cuda")
            with mode():
                language_model().cuda().eval()(ids, attention_mask=torch.ones_like(ids))

        return memfit.trace(step).trace.requested.tolist()

    assert forward(torch.inference_mode) == forward(torch.no_grad)


def test_the_code_s_own_generate_makes_the_longest_answer() -> None:
    lengths: list[int] = []

    def step() -> None:
        model = language_model().cuda().eval()
        lengths.append(model.generate(torch.ones(2, 8, dtype=torch.int64, device="cuda"), max_new_tokens=5).shape[1])

    made = memfit.trace(step)
    assert lengths == [13]
    assert any("no end token" in note for note in made.notes)


def test_a_checkpointed_model_recomputes_on_the_same_device() -> None:
    def step() -> None:
        model = language_model().cuda()
        model.gradient_checkpointing_enable()
        model.train()(torch.ones(2, 64, dtype=torch.int64, device="cuda")).logits.sum().backward()

    memfit.trace(step)


def test_a_package_imported_inside_is_not_traced_while_it_sets_itself_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_package.py").write_text(
        "import torch\nTABLE = torch.ones(1000)\nHALF = TABLE.half() * 2\n"
        "assert torch.cuda.is_available() and torch.cuda.get_device_properties(0).major >= 8\n"
        "from torch.cuda import is_available\ndef use(): return HALF.cuda()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def step() -> None:
        import late_package  # type: ignore[import-not-found]

        late_package.use()

    assert memfit.trace(step).trace.requested.tolist() == [2000]
    import late_package

    assert late_package.is_available() == torch.cuda.is_available()


# -- what was outside --------------------------------------------------------------------------------------------------


def test_the_caller_s_model_and_optimizer_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.mine = "kept"
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()

    def step() -> None:
        model.cuda()
        assert model[0].weight.mine == "kept"
        model(torch.randn(4, 3, device="cuda")).sum().backward()
        optimizer.step()

    memfit.trace(step)
    assert {name: value.device.type for name, value in model.state_dict().items()} == dict.fromkeys(before, "cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.grad for p in model.parameters()] == [None] * 4 and not optimizer.state
    assert torch.equal(torch.get_rng_state(), drawn)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_the_caller_s_model_comes_back_after_a_failure_too() -> None:
    model = nn.Linear(3, 3)

    def step() -> None:
        model.cuda()(torch.ones(2, 3, device="cuda"))
        raise KeyError("mine")

    with pytest.raises(TraceError):
        memfit.trace(step)
    assert model.weight.device.type == "cpu" and model.weight.isfinite().all()


def test_the_caller_s_gradients_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(512, 3), nn.Linear(3, 3))
    model.append(model[1])
    model(torch.ones(2, 512)).sum().backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]

    def step() -> None:
        for device in ("cuda", "cpu", "cuda"):
            model.to(device)
        model(torch.ones(2, 512, device="cuda")).sum().backward()
        model[0].zero_grad()

    memfit.trace(step)
    assert len(before) == 4
    for p, (grad, value) in zip(model.parameters(), before, strict=True):
        assert p.grad is grad and torch.equal(grad, value)


def test_gradients_that_come_with_a_model_are_on_the_gpu_until_they_are_let_go() -> None:
    model = nn.Linear(512, 512, bias=False)
    model(torch.ones(2, 512)).sum().backward()
    held: list[int] = []

    def step() -> None:
        model.cuda()
        held.append(torch.cuda.memory_allocated())
        model.zero_grad()
        held.append(torch.cuda.memory_allocated())

    memfit.trace(step)
    assert held == [2 * 512 * 512 * 4, 512 * 512 * 4]
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[2.0] * 512] * 512


def test_a_weight_that_the_code_replaces_gets_a_gradient_that_fits_it() -> None:
    moved, replaced = nn.Linear(3, 3), nn.Linear(3, 3)
    for model in (moved, replaced):
        model(torch.ones(2, 3)).sum().backward()

    def step() -> None:
        moved.cuda()
        moved.weight = nn.Parameter(torch.ones(5, 5, device="cuda"))
        replaced.float().weight = nn.Parameter(torch.ones(5, 5))

    memfit.trace(step)
    assert moved.weight.grad is not None and moved.weight.shape == (3, 3)
    assert replaced.weight.grad is None and replaced.bias.grad is not None


def test_a_model_that_cannot_be_put_back_leaves_the_others_to_be_put_back() -> None:
    first, broken, last = models = [nn.Linear(3, 3) for _ in range(3)]

    def step() -> None:
        for model in models:
            model.cuda()
        broken._parameters = None

    with pytest.raises(AttributeError):
        memfit.trace(step)
    assert {p.device.type for model in (first, last) for p in model.parameters()} == {"cpu"}


def test_a_checkpoint_that_the_code_saves_leaves_the_real_one_alone(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    paths = [tmp_path / name for name in ("model.pt", "model.safetensors")]
    for path in paths:
        path.write_bytes(b"real")

    def step() -> None:
        state = nn.Linear(3, 3).cuda().state_dict()
        torch.save(state, paths[0])
        save_file(state, str(paths[1]))
        language_model().cuda().save_pretrained(tmp_path / "folder")

    made = memfit.trace(step)
    assert [path.read_bytes() for path in paths] == [b"real", b"real"] and not any((tmp_path / "folder").iterdir())
    assert any("nothing was written" in note for note in made.notes)


def test_torch_s_settings_are_as_they_were() -> None:
    def step() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.zeros(1, device="cuda")

    memfit.trace(step)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


# -- what is no function to trace --------------------------------------------------------------------------------------


def generator() -> Any:
    yield torch.zeros(1, device="cuda")


async def coroutine() -> None:
    torch.zeros(1, device="cuda")


@pytest.mark.parametrize("given", [5, lambda a: a, generator, coroutine])
def test_what_cannot_be_called_to_its_end_is_refused(given: Any) -> None:
    with pytest.raises(memfit.MemfitError):
        memfit.trace(given)


@pytest.mark.parametrize("answers", [5, {"x": 1}])
def test_answers_of_another_form_are_refused(answers: Any) -> None:
    with pytest.raises(memfit.MemfitError, match="another form"):
        memfit.trace(lambda: torch.zeros(1, device="cuda"), answers=answers)


def test_code_that_exits_does_not_end_the_caller() -> None:
    with pytest.raises(TraceError, match=r"sys.exit\(3\)"):
        memfit.trace(lambda: sys.exit(3))


def test_reentrant_checkpoints_have_a_backward_pass_inside_the_backward_pass() -> None:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ weight) @ weight)

    def step() -> None:
        weight = torch.randn(64, 64, device="cuda", requires_grad=True)
        x = torch.randn(128, 64, device="cuda", requires_grad=True)
        for _ in range(3):
            x = checkpoint(run, x, weight, use_reentrant=True)
        x.sum().backward()

    marks = [mark.phase for mark in memfit.trace(step).trace.marks]
    assert marks == ["data", "backward", "data"]


def test_a_trace_that_somebody_else_begins_meanwhile_waits_for_the_first() -> None:
    runs, other_waits, plans = threading.Event(), threading.Event(), []

    def first() -> None:
        kept = torch.zeros(1000, device="cuda")
        runs.set()
        other_waits.wait(120)
        del kept

    threads = [
        threading.Thread(target=lambda: plans.append(memfit.trace(first))),
        threading.Thread(target=lambda: plans.append(memfit.trace(lambda: torch.zeros(2000, device="cuda")))),
    ]
    threads[0].start()
    runs.wait(120)
    threads[1].start()
    other_waits.set()
    for thread in threads:
        thread.join(240)
    assert sorted(list(plan.trace.requested) for plan in plans) == [[4000], [8000]]


def test_products_in_8_bits_have_scales_of_32() -> None:
    def product() -> None:
        a, b = (torch.empty(4096, 4096, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device="cuda")
        torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    assert memfit.trace(product, gpu="H200").peak.allocated_bytes >= (2 + 2) * 4096**2


def test_sparse_tensors_are_what_memfit_does_not_cover_not_an_error_of_the_job() -> None:
    def gradient() -> None:
        table = nn.Embedding(1000, 64, sparse=True).cuda()
        table(torch.randint(0, 1000, (4, 8), device="cuda")).sum().backward()

    def own() -> None:
        torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device="cuda")

    for code in (gradient, own):
        with pytest.raises(TraceError, match="memfit does not cover sparse coo tensors") as told:
            memfit.trace(code)
        assert "sparse=False" in str(told.value.hint)


def test_a_thread_that_goes_on_after_the_code_is_refused() -> None:
    wait = threading.Event()

    def step() -> None:
        torch.zeros(1, device="cuda")
        threading.Thread(target=wait.wait).start()

    try:
        with pytest.raises(TraceError, match="a thread that the code started"):
            memfit.trace(step)
    finally:
        wait.set()


@pytest.mark.parametrize("ask", [lambda: memfit.predict({"kind": "train"}), lambda: memfit.explain(5)])
def test_a_question_of_the_wrong_type_is_a_question_that_is_wrong(ask: Callable[[], object]) -> None:
    with pytest.raises(memfit.MemfitError):
        ask()


# -- what grows, and what no rule tells --------------------------------------------------------------------------------


def test_a_tensor_that_is_resized_takes_the_memory_that_it_grows_to() -> None:
    def step() -> None:
        x = torch.empty(0, device="cuda")
        x.resize_(1000)
        x.resize_(10)
        x.resize_(2000)

    assert memfit.trace(step).trace.requested.tolist() == [4000, 8000]


def test_a_kernel_without_a_rule_is_named_beside_the_verdict() -> None:
    made = memfit.trace(lambda: torch.linalg.svd(torch.randn(64, 64, device="cuda")), gpu="RTX 4090")
    assert any(note.startswith("not modelled:") and "svd" in note for note in made.notes)
    assert "not modelled:" in "".join(str(made).splitlines()[:5])


def test_a_random_draw_that_decides_a_size_is_told() -> None:
    def step() -> None:
        drawn = torch.randint(0, 1000, (1000,), device="cuda")
        torch.empty(int((drawn > 500).sum()), device="cuda")

    assert any("drawn at random" in note for note in memfit.trace(step).notes)


def test_what_is_saved_into_memory_is_loaded_from_there() -> None:
    def step() -> None:
        kept = io.BytesIO()
        torch.save(torch.arange(3, device="cuda"), kept)
        kept.seek(0)
        assert torch.load(kept).tolist() == [0, 1, 2]

    memfit.trace(step)


def test_what_is_saved_into_memory_is_loaded_back() -> None:
    def save_and_load() -> None:
        there = io.BytesIO()
        saved = torch.randn(1024, 1024, device="cuda")
        torch.save({"saved": saved}, there)
        there.seek(0)
        assert torch.load(there)["saved"].shape == saved.shape

    assert memfit.trace(save_and_load).peak.allocated_bytes == 2 * 4 * 1024**2


def test_numbers_that_numpy_is_given_unknown_are_nan_and_that_is_said() -> None:
    seen: list[Any] = []
    plan = memfit.trace(lambda: seen.append(torch.randn(100, 100, device="cuda").cpu().numpy()))
    assert seen[0].shape == (100, 100) and seen[0].dtype == "float32" and (seen[0] != seen[0]).all()
    (said,) = (note for note in plan.notes if "numpy is given" in note)
    assert said.startswith("not modelled:") and said.split(": ", 1)[1] in " ".join(str(plan).split("\n\n")[0].split())
    with pytest.raises(TraceError, match="requires grad"):
        memfit.trace(lambda: torch.randn(2, device="cuda", requires_grad=True).cpu().numpy())


def test_whole_numbers_that_nobody_knows_are_no_array_and_no_list() -> None:
    for take in (lambda t: t.cpu().numpy(), lambda t: t.tolist()):
        with pytest.raises(TraceError, match="for all its values") as told:
            memfit.trace(lambda take=take: take((torch.randn(100, 100, device="cuda") > 0).sum(-1)))
        assert "--answer test_strangers_code.py:" in str(told.value.hint) and "=0 of plan script" in str(
            told.value.hint
        )


def test_an_action_that_the_gpu_chooses_is_the_first_one_and_that_is_said_beside_the_verdict() -> None:
    seen: list[Any] = []

    def step() -> None:
        scores = torch.randn(8, 3, device="cuda")
        seen.append(scores.argmax(1).cpu().numpy().tolist())
        seen.append(torch.cat([scores.max(1)[1].view(8, 1)] * 2).tolist())
        action = scores[0].argmax().item() if len(seen) > 1 else 2
        seen.append(action)

    plan = memfit.trace(step)
    assert seen == [[0] * 8, [[0]] * 16, 0] and type(seen[-1]) is int
    assert "each of them is the first, 0" in " ".join(str(plan).split("\n\n")[0].split())


def test_a_count_and_a_choice_that_the_code_compares_are_still_asked_about() -> None:
    def chooses() -> None:
        if torch.randn(3, device="cuda").argmax().item() == 1:
            torch.ones(10, device="cuda")

    with pytest.raises(TraceError, match="not known"):
        memfit.trace(chooses)


def test_what_an_op_makes_in_another_size_on_the_host_is_not_taken_for_its_values_on_a_gpu() -> None:
    def step() -> None:
        bags = nn.EmbeddingBag(10, 4, mode="sum").cuda()
        bags(torch.tensor([1, 2, 4]).cuda(), torch.tensor([0, 2]).cuda()).sum().backward()

    assert memfit.trace(step).peak.allocated_bytes


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_a_class_that_torchscript_compiles_finds_the_names_of_its_file() -> None:
    def step() -> None:
        @torch.jit.script
        class Twice:
            def __init__(self, number: int):
                self.number = doubled(number)

        assert Twice(torch.ones(2, device="cuda").shape[0]).number == 4

    memfit.trace(step)


def doubled(number: int) -> int:
    return 2 * number


@dataclass(slots=True)
class Slotted:
    loss: torch.Tensor | None = None


def test_a_variable_that_has_slots_is_looked_into() -> None:
    def step() -> None:
        held = Slotted(nn.Linear(4, 4).cuda()(torch.ones(2, 4, device="cuda")).sum())
        assert held.loss is not None
        held.loss.backward()

    memfit.trace(step)


def test_that_cudnn_tries_its_kernels_is_said_beside_the_verdict() -> None:
    def convolve(tries: bool) -> memfit.Plan:
        def run() -> None:
            torch.backends.cudnn.benchmark = tries
            nn.Conv2d(8, 8, 3).cuda().half()(torch.ones(2, 8, 16, 16, device="cuda", dtype=torch.half))

        return memfit.trace(run)

    assert any("cudnn.benchmark" in note and note.startswith("not modelled:") for note in convolve(True).notes)
    assert not any("cudnn.benchmark" in note for note in convolve(False).notes)


def test_a_table_from_the_host_is_known_where_one_of_its_numbers_is_asked_for() -> None:
    angles = torch.outer(torch.arange(2048).float(), torch.rand(64) + 1).cos()
    seen: list[Any] = []

    def step() -> None:
        there = angles.to("cuda")
        seen.extend([bool(there[0, 0] == 1), bool(there.isnan().any())])
        there.copy_(torch.zeros_like(angles))
        seen.append(bool(there[0, 0] == 1))
        there.mul_(torch.rand(2048, 64, device="cuda"))
        seen.append(there[0, 0].item())

    memfit.trace(step)
    assert seen[:3] == [True, False, False] and str(seen[3]) == "?"


def test_a_mask_of_fractions_selects_as_the_one_that_it_was_made_of() -> None:
    labels = torch.where(torch.arange(12_000) % 3 == 0, -100, 7).view(3, 4_000)
    seen: list[int] = []

    def step() -> None:
        mask = (labels.cuda() != -100).float()
        seen.append(len(torch.randn(12_000, 16, device="cuda")[mask.view(-1) == 1]))

    memfit.trace(step)
    assert seen == [8_000]


def test_a_mask_that_is_put_together_from_known_ones_is_known_however_long_it_is() -> None:
    """As peft does it for prefixes: ones of the host before the mask of a batch."""
    seen: list[bool] = []

    def step() -> None:
        of_batch = torch.ones(8, 600, dtype=torch.int64).cuda()
        mask = torch.cat((torch.ones(8, 20).to(of_batch.device), of_batch), dim=1)
        seen.append(bool(mask.to(torch.float16).clone().bool().all()))
        mask[0, 0] = 0
        seen.append(bool(torch.stack((mask, mask)).bool().all()))

    memfit.trace(step)
    assert seen == [True, False]


def test_weights_are_not_kept_on_the_host_for_their_values() -> None:
    seen: list[Any] = []
    memfit.trace(lambda: seen.append(torch.nn.Linear(100, 100).cuda().weight[0, 0].item()))
    assert str(seen[0]) == "?"


class Experts(torch.nn.Module):
    """Written by hand, as many are: which rows an expert gets follows from what the router chooses."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(width, count)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).topk(2, dim=-1).indices
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            if mask.any():
                out[mask] += expert(x[mask])
        return out


def test_choices_that_a_person_calls_even_tell_the_sizes_that_follow_from_them() -> None:
    rows: list[int] = []

    def step() -> None:
        layer = Experts(count=8, width=64).cuda()
        for expert in layer.experts:
            expert.register_forward_hook(lambda _, given, out: rows.append(len(out)))
        layer(torch.randn(400, 64, device="cuda")).sum().backward()

    with pytest.raises(TraceError, match=r"bool tensor for its value.*") as refused:
        memfit.trace(step)
    assert re.search(r"test_strangers_code.py:\d+ chooses, such as experts: --answer .*=even", str(refused.value.hint))
    rows.clear()
    plan = memfit.trace(step, answers={("test_strangers_code.py", "forward"): "even"})
    assert rows == [100] * 8
    assert any("chooses is spread evenly, as answered" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("choose", "shape"),
    [
        (lambda x: x.topk(3, dim=0).indices, (3, 40)),
        (lambda x: x.argmax(-1), (24,)),
        (lambda x: x.argmax(), ()),
        (lambda x: x.max(dim=0, keepdim=True).indices, (1, 40)),
        (lambda x: x.topk(2).indices, (24, 2)),
    ],
)
def test_an_even_choice_is_one_that_could_be_made(
    choose: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    seen: list[torch.Tensor] = []

    def choosing() -> None:
        seen.append(choose(torch.randn(24, 40, device="cuda")).cpu())

    memfit.trace(choosing, answers={("test_strangers_code.py", "<lambda>"): "even"})
    (chosen,) = seen
    counts = chosen.flatten().bincount()
    assert chosen.shape == shape and counts.max() - counts.min() <= 1
    if shape == (3, 40):
        assert all(len(set(column.tolist())) == 3 for column in chosen.T), "three different ones in each column"


def test_a_time_that_nobody_knows_is_above_zero_and_no_more_is_known_of_it() -> None:
    seen: list[Any] = []

    def step() -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        seconds = start.elapsed_time(end) / 1000
        total = 0.0 + seconds
        seen.append((bool(total > 0), total <= 0, total == 0, 5 / total > 0, bool(total), f"{total:.2f}"))
        if total - seconds > 0:
            seen.append("a difference is known")

    with pytest.raises(TraceError, match="decides by a number that is not known"):
        memfit.trace(step)
    assert seen == [(True, False, False, True, True, "?")]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_embedding_gets_rows_for_new_words_wherever_it_lies(device: str) -> None:
    def step() -> None:
        model = language_model().to(device)
        before = model.get_input_embeddings().num_embeddings
        model.resize_token_embeddings(before + 1)
        ids = torch.full((1, 4), before, device="cuda")
        model.cuda()(input_ids=ids, labels=ids).loss.backward()

    plan = memfit.trace(step)
    assert any("new rows of an embedding" in note for note in plan.notes) == (device == "cuda")


def attends(length: int) -> None:
    q = torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


@pytest.mark.parametrize(("warn_only", "parts"), [(False, 14), (True, 1)])
def test_attention_whose_sums_are_in_order_keeps_one_for_each_part_of_the_keys(warn_only: bool, parts: int) -> None:
    def in_order() -> None:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        attends(256)

    more = (
        memfit.trace(in_order, gpu="A100 40GB").peak.allocated_bytes
        - memfit.trace(lambda: attends(256), gpu="A100 40GB").peak.allocated_bytes
    )
    assert -(-108 // (2 * 4)) == 14
    assert more == (parts - 1) * 4 * 2 * 4 * 256 * 64


def test_deterministic_ops_that_no_rule_tells_are_named() -> None:
    def adds() -> None:
        torch.use_deterministic_algorithms(True)
        x = torch.zeros(1024, 64, device="cuda")
        x.index_add_(0, torch.arange(512, device="cuda"), torch.ones(512, 64, device="cuda"))

    assert any(
        note.startswith("not modelled:") and "index_add_ (deterministic)" in note for note in memfit.trace(adds).notes
    )

"""What a script could do to take less, each saving held against the script so changed."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfit

BATCH, WORDS, WIDTH = 64, 4096, 64
HEAD = f"""
import torch
from torch import nn
model = nn.Sequential(nn.Embedding({WORDS}, {WIDTH}), nn.Linear({WIDTH}, {WORDS})).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
def train():
    for _ in range(100):
        ids = torch.arange({BATCH} * 16, device="cuda") % {WORDS}
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits, ids)
"""
END = """
        optimizer.step()
        optimizer.zero_grad()
train()
"""
BACKWARD = "        loss.backward()"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)

    def planned(text: str) -> memfit.Plan:
        (tmp_path / "train.py").write_text(text)
        return memfit.trace_script("train.py")

    return planned


def named(plan: memfit.Plan, word: str) -> list[memfit.analysis.advice.Advice]:  # type: ignore[name-defined]
    return [each for each in plan.advice or () if word in each.what]


def test_a_variable_that_keeps_logits_is_named_with_what_deleting_it_saves(plan) -> None:  # type: ignore[no-untyped-def]
    keeps = plan(HEAD + BACKWARD + END)
    (advice,) = named(keeps, "`logits` keeps")
    deleted = plan(HEAD + "        del logits\n" + BACKWARD + END)
    assert advice.saves_allocated_bytes == keeps.peak.allocated_bytes - deleted.peak.allocated_bytes > 0
    assert advice.saves_reserved_bytes == keeps.peak.reserved_bytes - deleted.peak.reserved_bytes
    assert advice.place == f"train.py:{HEAD.count(chr(10)) + 1}" and advice.how == "`del logits` before that line"
    assert not named(deleted, "`logits` keeps")


def test_a_variable_that_is_read_after_backward_is_said_to_be(plan) -> None:  # type: ignore[no-untyped-def]
    (advice,) = named(plan(HEAD + BACKWARD + "\n        print(logits.shape)" + END), "`logits` keeps")
    assert f"take what line {HEAD.count(chr(10)) + 2} needs of it first" in advice.how


def test_what_a_function_of_one_s_own_keeps_for_its_gradient_is_no_saving_of_a_del(plan) -> None:  # type: ignore[no-untyped-def]
    own = """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.held, ctx.name = x, "not memfit's", "nor this"
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.x.sign().abs()
def train():"""
    text = (HEAD + BACKWARD + END).replace("def train():", own)
    keeps = plan(text.replace("entropy(logits", "entropy(Double.apply(logits)"))
    assert not named(keeps, "`logits` keeps")


def test_what_something_else_keeps_too_is_no_saving_of_a_del(plan) -> None:  # type: ignore[no-untyped-def]
    grows = plan(HEAD + "        kept.append(logits)\n" + BACKWARD + END)
    assert not named(grows, "`logits` keeps")
    (advice,) = named(grows, "every step leaves")
    logits = 4 * BATCH * 16 * WORDS
    assert f"{logits / 2**20:.2f} MiB" in advice.what and "logits = model(ids)" in advice.how


def test_gradients_that_are_zeroed_in_place_cost_what_dropping_them_saves(plan) -> None:  # type: ignore[no-untyped-def]
    text = HEAD + BACKWARD + END
    zeroed, dropped = plan(text.replace("zero_grad()", "zero_grad(set_to_none=False)")), plan(text)
    (advice,) = named(zeroed, "set to zero in place")
    assert advice.saves_allocated_bytes == zeroed.peak.allocated_bytes - dropped.peak.allocated_bytes > 0
    assert advice.place == f"train.py:{text[: text.index('optimizer.zero_grad')].count(chr(10)) + 1}"
    assert not named(dropped, "set to zero")


def test_weights_that_lie_on_the_gpu_twice_while_loading_are_told(plan) -> None:  # type: ignore[no-untyped-def]
    body = """
import torch
from torch import nn
model = nn.Linear(4096, 4096){}
x = torch.ones(4, 4096, device="cuda", dtype=torch.half)
for _ in range(3):
    model(x).sum()
"""
    twice, once = plan(body.format(".cuda().half()")), plan(body.format(".half().cuda()"))
    (advice,) = named(twice, "weights are there twice")
    assert advice.saves_allocated_bytes == twice.peak.allocated_bytes - once.peak.allocated_bytes > 0
    assert not named(once, "twice") and advice.place == "train.py:4"


def test_logits_that_become_fp32_are_told_with_what_16_bits_would_save(plan) -> None:  # type: ignore[no-untyped-def]
    half = HEAD.replace(".cuda()", ".cuda().bfloat16()")
    text = half.replace("cross_entropy(logits,", "cross_entropy(logits.float(),") + BACKWARD + END
    in_fp32, in_16 = plan(text), plan(half + BACKWARD + END)
    (advice,) = named(in_fp32, "copied to fp32")
    saved = in_fp32.peak.allocated_bytes - in_16.peak.allocated_bytes
    assert abs(advice.saves_allocated_bytes - saved) < 0.1 * saved
    assert not named(in_16, "fp32")


def test_what_is_alive_at_the_peak_is_told_by_the_script_s_own_lines(plan) -> None:  # type: ignore[no-untyped-def]
    document = plan(HEAD + BACKWARD + END).to_json()
    lines = {(each["code"], each["category"], each["backward"]): each for each in document["lines"]}
    logits = lines["logits = model(ids)", "activations", False]
    assert logits["line"] == 10 and logits["allocated_bytes"] >= 4 * BATCH * 16 * WORDS
    assert ("optimizer.step()", "optimizer", False) in lines
    assert any(backward for _, _, backward in lines)
    assert sum(each["allocated_bytes"] for each in document["lines"]) <= document["peak"]["allocated_bytes"]


def test_looking_at_variables_keeps_nothing_alive(plan) -> None:  # type: ignore[no-untyped-def]
    """The step's tensors live in a function's variables: the same loop at the top of a file peaks no lower."""
    inside = HEAD + BACKWARD + END
    outside = inside.replace("def train():", "if True:").replace("\ntrain()\n", "\n")
    assert plan(inside).peak == plan(outside).peak


def test_two_names_of_one_tensor_are_deleted_together(plan) -> None:  # type: ignore[no-untyped-def]
    named_twice = HEAD + "        same = logits\n"
    keeps, one = plan(named_twice + BACKWARD + END), plan(named_twice + "        del logits\n" + BACKWARD + END)
    both = plan(named_twice + "        del logits, same\n" + BACKWARD + END)
    (advice,) = named(keeps, "keep tensors alive")
    assert advice.how == "`del logits, same` before that line"
    assert (
        keeps.peak == one.peak
        and keeps.peak.allocated_bytes - both.peak.allocated_bytes == advice.saves_allocated_bytes
    )


def test_what_an_attribute_holds_too_is_not_freed_by_a_del(plan) -> None:  # type: ignore[no-untyped-def]
    assert not named(plan(HEAD + "        model.last = logits\n" + BACKWARD + END), "`logits`")


def test_outputs_of_transformers_hold_each_tensor_twice_and_are_named(plan) -> None:  # type: ignore[no-untyped-def]
    text = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=8000, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                                     num_attention_heads=2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for _ in range(9):
        ids = torch.zeros(4, 64, dtype=torch.long, device="cuda")
        outputs = model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
train()
"""
    (advice,) = named(plan(text), "`outputs` keeps")
    assert advice.saves_allocated_bytes >= 4 * 4 * 64 * 8000


def test_only_a_16_bit_tensor_that_becomes_fp32_is_said_to(plan) -> None:  # type: ignore[no-untyped-def]
    text = HEAD.replace("cross_entropy(logits,", "cross_entropy(logits.double(),") + BACKWARD + END
    assert not named(plan(text), "fp32")


def test_a_statement_of_several_lines_is_named_by_its_first(plan) -> None:  # type: ignore[no-untyped-def]
    text = HEAD.replace(
        "logits = model(ids)", "logits = model(\n            ids\n        ).view(\n            -1, 4096)"
    )
    lines = plan(text + BACKWARD + END).to_json()["lines"]
    assert {(each["line"], each["code"]) for each in lines if "model(" in each["code"]} == {(10, "logits = model(")}


def test_a_loop_without_an_optimizer_is_said_to_stop_after_backward_passes(plan) -> None:  # type: ignore[no-untyped-def]
    head = HEAD.replace("optimizer = torch.optim.AdamW(model.parameters())", "")
    made = plan(head + BACKWARD + "\n        model.zero_grad()\ntrain()\n")
    assert any(note.startswith("stopped after 3 backward passes") for note in made.notes)


def test_a_segment_that_a_device_map_asks_for_is_told_where_it_costs(plan) -> None:  # type: ignore[no-untyped-def]
    warmup = """
import torch
def caching_allocator_warmup():  # as transformers' own is called
    torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
caching_allocator_warmup()
"""
    mapped, moved = plan(warmup + HEAD + BACKWARD + END), plan(HEAD + BACKWARD + END)
    (advice,) = named(mapped, "device_map asks for all weights at once, 512.00 MiB")
    assert advice.saves_reserved_bytes == mapped.peak.reserved_bytes - moved.peak.reserved_bytes > 0
    assert not named(moved, "device_map") and advice.place == "train.py:4"

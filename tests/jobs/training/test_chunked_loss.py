"""The loss in chunks: the same loss, the same gradients, and logits that are never whole."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from memfit.errors import UsageError
from memfit.jobs.training.chunked_loss import chunked_cross_entropy, use_chunked_loss
from memfit.tracing.tracer import Tracer, trace

TOKENS, WIDTH, WORDS = 50, 24, 300
IGNORED = -100


class Example:
    """Hidden states, a head and labels, of which every seventh does not count."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, sharp: float = 3.0) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
        self.weight = (torch.randn(WORDS, WIDTH) * sharp / math.sqrt(WIDTH)).to(dtype).requires_grad_()
        self.bias = torch.randn(WORDS).to(dtype).requires_grad_()
        self.labels = torch.randint(0, WORDS, (TOKENS,))
        self.labels[::7] = IGNORED

    def full(self, *, bias: bool, cap: float | None, items: Any, scale: float = 1.0) -> list[Tensor]:
        scores = linear(self.hidden, self.weight, self.bias if bias else None).float()
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        kind = "mean" if items is None else "sum"
        loss = cross_entropy(scores, self.labels, ignore_index=IGNORED, reduction=kind) / (items or 1)
        return self._taken(loss, scale)

    def chunked(self, *, bias: bool, cap: float | None, items: Any, chunk: int, scale: float = 1.0) -> list[Tensor]:
        loss = chunked_cross_entropy(
            self.hidden, self.weight, self.labels, bias=self.bias if bias else None, cap=cap, items=items, chunk=chunk
        )
        return self._taken(loss, scale)

    def _taken(self, loss: Tensor, scale: float) -> list[Tensor]:
        (loss * scale).backward()
        found = [loss.detach()]
        for each in (self.hidden, self.weight, self.bias):
            found.append(torch.zeros(()) if each.grad is None else each.grad)
            each.grad = None
        return found


def alike(one: list[Tensor], other: list[Tensor], *, within: float) -> bool:
    """By the largest difference, against the largest number."""
    pairs = [(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
    return all(bool((a - b).abs().max() <= within * b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("chunk", [1, 16, 49, 50, 4096])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("items", [None, 37, torch.tensor(1000)])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_full_loss_to_fp32_rounding(
    bias: bool, items: Any, cap: float | None, chunk: int
) -> None:
    example = Example()

    chunked = example.chunked(bias=bias, cap=cap, items=items, chunk=chunk)

    assert alike(chunked, example.full(bias=bias, cap=cap, items=items), within=2e-6)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_in_bf16_both_are_as_far_from_the_truth(cap: float | None) -> None:
    exact = Example()
    with torch.no_grad():
        for name in ("hidden", "weight", "bias"):
            getattr(exact, name).copy_(getattr(Example(torch.bfloat16), name))
    truth = exact.full(bias=True, cap=cap, items=None)

    chunked = Example(torch.bfloat16).chunked(bias=True, cap=cap, items=None, chunk=16)

    assert [each.dtype for each in chunked] == [torch.float32] + [torch.bfloat16] * 3
    assert alike(chunked, truth, within=2e-2)
    assert alike(Example(torch.bfloat16).full(bias=True, cap=cap, items=None), truth, within=2e-2)


def test_a_token_that_is_all_but_certain_keeps_its_small_gradient_in_bf16() -> None:
    """1 - p would be 0 if it were made of a p that had been rounded to 16 bits."""
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)

    chunked_cross_entropy(hidden, weight, torch.tensor([0])).backward()

    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.item() == pytest.approx(-1 / (1 + math.exp(8)), rel=1e-2)
    assert weight.grad[0].item() == pytest.approx(-8 / (1 + math.exp(8)), rel=1e-2)


def test_fp16_gradients_of_many_tokens_do_not_vanish_before_the_loss_scale_reaches_them() -> None:
    items, scale = torch.tensor(1_000_000), 65536.0
    example = Example(torch.float16, sharp=0.1)
    truth = Example(sharp=0.1).full(bias=True, cap=None, items=items, scale=scale)

    chunked = example.chunked(bias=True, cap=None, items=items, chunk=16, scale=scale)

    assert alike(chunked, truth, within=5e-3)


def test_what_nobody_asks_for_is_not_made() -> None:
    example = Example()
    example.weight.requires_grad_(False)
    example.bias.requires_grad_(False)

    found = example.chunked(bias=True, cap=None, items=None, chunk=16)

    assert [each.numel() for each in found] == [1, TOKENS * WIDTH, 1, 1]


def test_without_gradients_there_is_a_loss_all_the_same() -> None:
    example = Example()
    with torch.no_grad():
        loss = chunked_cross_entropy(example.hidden, example.weight, example.labels, chunk=16)

    assert loss.item() == pytest.approx(example.full(bias=False, cap=None, items=None)[0].item(), rel=1e-6)


def test_a_second_backward_pass_is_refused() -> None:
    example = Example()
    loss = chunked_cross_entropy(example.hidden, example.weight, example.labels)
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="one backward pass only"):
        loss.backward()


# -- under autocast ----------------------------------------------------------------------------------------------------


def test_under_autocast_the_head_works_in_bf16_and_gradients_are_of_the_weights_own_kind() -> None:
    example = Example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked = example.chunked(bias=True, cap=None, items=None, chunk=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        full = example.full(bias=True, cap=None, items=None)

    assert {each.dtype for each in chunked} == {torch.float32}
    assert chunked[0].item() == pytest.approx(full[0].item(), rel=1e-6)
    assert alike(chunked, full, within=1e-2)


def test_under_autocast_the_weight_is_cast_once_and_not_kept() -> None:
    tokens, width, words = 512, 48, 10_000

    def job(tracer: Tracer) -> None:
        hidden = torch.randn(tokens, width, device=tracer.device, requires_grad=True)
        weight = torch.randn(words, width, device=tracer.device, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.int64, device=tracer.device)
        with torch.autocast(tracer.device.type, dtype=torch.bfloat16):
            chunked_cross_entropy(hidden, weight, labels, chunk=64).backward()

    made = trace(job)

    casts = [size for size in made.requested if size == 2 * words * width]
    assert len(casts) == 1


# -- never whole -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_block_is_larger_than_the_logits_of_a_chunk(dtype: torch.dtype, trained: bool) -> None:
    tokens, width, words, chunk = 2048, 64, 152_064, 256

    def job(tracer: Tracer) -> None:
        hidden = torch.randn(tokens, width, dtype=dtype, device=tracer.device, requires_grad=True)
        weight = torch.randn(words, width, dtype=dtype, device=tracer.device, requires_grad=trained)
        labels = torch.zeros(tokens, dtype=torch.int64, device=tracer.device)
        chunked_cross_entropy(hidden, weight, labels, chunk=chunk).backward()

    made = trace(job)

    largest = 4 * chunk * (words + 128 * tokens // chunk)
    assert max(made.requested) <= largest < tokens * words * 2


def test_the_gradient_of_a_trained_head_is_handed_over_not_copied() -> None:
    words, width = 5_000, 32

    def job(tracer: Tracer) -> None:
        weight = torch.randn(words, width, device=tracer.device, requires_grad=True)
        hidden = torch.randn(100, width, device=tracer.device, requires_grad=True)
        labels = torch.zeros(100, dtype=torch.int64, device=tracer.device)
        chunked_cross_entropy(hidden, weight, labels, chunk=10).backward()

    made = trace(job)

    assert sum(size == 4 * words * width for size in made.requested) == 2  # the weight, and its gradient


# -- in a model --------------------------------------------------------------------------------------------------------


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, **changes,
    }  # fmt: skip
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**settings))


def gemma() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(1)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0,
        )
    )  # fmt: skip


def with_adapters(model: nn.Module, *targets: str) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=list(targets)))  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted


MODELS = {
    "untied": lambda: llama(tie_word_embeddings=False), "tied": lambda: llama(tie_word_embeddings=True),
    "softcap": gemma, "lora": lambda: with_adapters(llama(), "q_proj", "down_proj"),
}  # fmt: skip


def learned(model: nn.Module, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    ids = torch.arange(60).reshape(2, 30) % 200
    labels = ids.clone()
    labels[1, 20:] = IGNORED
    loss = model(input_ids=ids, labels=labels, **inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("inputs", [{}, {"num_items_in_batch": torch.tensor(123)}], ids=["mean", "items"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_learns_the_same_with_either_loss(kind: str, inputs: dict[str, Any]) -> None:
    full = MODELS[kind]().train()
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked, chunk=16)

    (loss, grads), (same_loss, same_grads) = learned(full, **inputs), learned(chunked, **inputs)

    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert grads.keys() == same_grads.keys()
    assert all(alike([same_grads[name]], [grads[name]], within=1e-5) for name in grads)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_does_not_train_has_its_logits_and_its_loss_as_before(kind: str) -> None:
    full = MODELS[kind]().eval()
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked, chunk=16)
    ids = torch.arange(60).reshape(2, 30)

    before, after = (model(input_ids=ids, labels=ids) for model in (full, chunked))

    assert torch.equal(before.logits, after.logits)
    assert after.loss.item() == pytest.approx(before.loss.item(), rel=1e-6)


def test_a_softcap_is_still_in_the_config_that_is_saved() -> None:
    model = gemma().train()
    use_chunked_loss(model, chunk=16)
    learned(model)

    assert model.config.to_dict()["final_logit_softcapping"] == 2.0


def test_an_adapter_on_the_head_is_refused() -> None:
    with pytest.raises(UsageError, match="the output head is a Linear") as found:
        use_chunked_loss(with_adapters(llama(), "q_proj", "lm_head"))

    assert "no adapter on the output head" in str(found.value.hint)


def test_a_model_that_computes_its_own_loss_is_refused() -> None:
    from transformers import BertConfig, BertForMaskedLM

    bert = BertForMaskedLM(
        BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )

    with pytest.raises(UsageError, match="causal language model of transformers, not BertForMaskedLM"):
        use_chunked_loss(bert)


def test_a_plain_module_is_refused() -> None:
    with pytest.raises(UsageError, match="not Linear"):
        use_chunked_loss(nn.Linear(2, 2))


def test_a_scale_of_the_logits_that_is_not_followed_is_refused() -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    granite = GraniteForCausalLM(
        GraniteConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            logits_scaling=4.0,
        )
    )  # fmt: skip

    with pytest.raises(UsageError, match="logits_scaling"):
        use_chunked_loss(granite)

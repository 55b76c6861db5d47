"""Compiled steps, as people write them: what `memfit.trace` says of each beside what it takes on a GPU.

    python -m accuracy.compiled plan [NAME...]       # here: adds to compiled.planned.jsonl in the working folder
    python -m accuracy.compiled measure [NAME...]    # on a GPU: compiled.measured.jsonl
    python -m accuracy.compiled compare              # the table, against accuracy/measured/compiled.jsonl if need be
    python -m accuracy.compiled eager NAME...        # here: the same steps as they are without torch.compile
    python -m accuracy.compiled picture              # docs/compiled.svg, from accuracy/measured/compiled.jsonl

They were planned before they were measured, by the rules as they stood then. Each runs in a process of its own, and on
the GPU with caches of its own: what torch keeps of earlier compilations changes what is reserved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS: dict[str, Callable[[], object]] = {}
MEASURED = Path(__file__).parent / "measured" / "compiled.jsonl"
GPU = "cuda"
BF16 = torch.bfloat16
AT_ONCE = 4
SECONDS = int(os.environ.get("SECONDS_EACH", "170"))


def step(function: Callable[[], object]) -> Callable[[], object]:
    STEPS[function.__name__] = function
    return function


# -- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).contiguous().view(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """As in nanoGPT."""

    def __init__(
        self, *, width: int = 768, layers: int = 4, heads: int = 12, words: int = 50304, longest: int = 1024,
        dropout: float = 0.0, tied: bool = True, again: bool = False, breaks: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.again, self.breaks = again, breaks

    def forward(self, ids: Any, targets: Any = None) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
            if self.breaks and number == 1:
                torch._dynamo.graph_break()
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def tokens(batch: int, length: int, words: int = 50304) -> Any:
    return torch.randint(0, words, (batch, length), device=GPU)


def hugging(name: str, auto: str, dtype: Any = BF16, **settings: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, auto).from_config(config, dtype=dtype)


def llama(layers: int, *, dtype: Any = BF16, width: int = 2048, inner: int = 8192, heads: int = 32, kv: int = 8) -> Any:
    return hugging(
        "Llama", "AutoModelForCausalLM", dtype, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, vocab_size=128256, tie_word_embeddings=width <= 2048,
        use_cache=False,
    )  # fmt: skip


def train(model: Any, loss: Callable[[], Any], optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def gpt_steps(model: Any, called: Any, batch: int, length: int, amp: Any = BF16, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)

    def loss() -> Any:
        ids = tokens(batch, length + 1)
        with torch.autocast("cuda", dtype=amp or BF16, enabled=amp is not None):
            return called(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    train(model, loss, optimizer)


def language_steps(model: Any, called: Any, batch: int, length: int, words: int, optimizer: Any = None) -> None:
    def loss() -> Any:
        ids = tokens(batch, length, words)
        return called(input_ids=ids, labels=ids).loss

    wanted = [p for p in model.parameters() if p.requires_grad]
    train(model, loss, optimizer or torch.optim.AdamW(wanted))


def with_lora(model: Any, rank: int = 16) -> Any:
    import peft

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


# -- language models ---------------------------------------------------------------------------------------------------


@step
def gpt_autocast() -> None:
    model = Gpt(layers=6).to(GPU)
    gpt_steps(model, torch.compile(model), 12, 1024)


@step
def gpt_dropout() -> None:
    model = Gpt(layers=3, dropout=0.1, tied=False).to(GPU)
    gpt_steps(model, torch.compile(model), 8, 1024)


@step
def gpt_fp32() -> None:
    model = Gpt(layers=3).to(GPU)
    gpt_steps(model, torch.compile(model), 4, 1024, amp=None, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@step
def gpt_fp16_scaled() -> None:
    model = Gpt(layers=3).to(GPU)
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        ids = tokens(8, 513)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = called(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@step
def gpt_checkpointed() -> None:
    model = Gpt(layers=4, again=True).to(GPU)
    gpt_steps(model, torch.compile(model), 16, 1024)


@step
def gpt_blocks() -> None:
    model = Gpt(layers=6).to(GPU)
    for block in model.blocks:
        block.compile()
    gpt_steps(model, model, 12, 1024)


@step
def gpt_graph_break() -> None:
    model = Gpt(layers=4, breaks=True).to(GPU)
    gpt_steps(model, torch.compile(model), 8, 1024)


@step
def gpt_accumulated() -> None:
    model = Gpt(layers=3).to(GPU)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        for _ in range(2):
            ids = tokens(8, 1025)
            with torch.autocast("cuda", dtype=BF16):
                loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@step
def gpt_lengths() -> None:
    """The second length makes torch compile once more, for any length."""
    model = Gpt(layers=2).to(GPU)
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), fused=True)
    for length in (512, 768, 1024, 640):
        ids = tokens(8, length + 1)
        with torch.autocast("cuda", dtype=BF16):
            loss = called(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@step
def gpt_inference() -> None:
    model = Gpt(layers=6, width=1024, heads=16).to(GPU, BF16).eval()
    called = torch.compile(model)
    with torch.no_grad():
        for _ in range(3):
            called(tokens(8, 1024)).argmax(-1)


@step
def gpt_inference_dynamic() -> None:
    model = Gpt(layers=3).to(GPU, BF16).eval()
    called = torch.compile(model, dynamic=True)
    with torch.inference_mode():
        for length in (1000, 200, 700):
            called(tokens(8, length)).argmax(-1)


@step
def llama_bf16() -> None:
    model = llama(4).to(GPU)
    language_steps(model, torch.compile(model), 2, 1024, 128256)


@step
def llama_small_amp() -> None:
    model = llama(6, dtype=torch.float32, width=768, inner=2048, heads=12, kv=4).to(GPU)
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), fused=True)

    def loss() -> Any:
        ids = tokens(4, 512, 128256)
        with torch.autocast("cuda", dtype=BF16):
            return called(input_ids=ids, labels=ids).loss

    train(model, loss, optimizer)


@step
def llama_lora() -> None:
    model = with_lora(llama(6)).to(GPU)
    language_steps(model, torch.compile(model), 4, 1024, 128256)


@step
def llama_8b_lora() -> None:
    """Four blocks as wide as those of the 8B."""
    model = with_lora(llama(4, width=4096, inner=14336), 8).to(GPU)
    language_steps(model, torch.compile(model), 2, 1024, 128256)


@step
def llama_checkpointed() -> None:
    model = llama(4).to(GPU)
    model.gradient_checkpointing_enable()
    model.train()
    language_steps(model, torch.compile(model), 4, 1024, 128256)


@step
def llama_blocks() -> None:
    model = llama(6).to(GPU)
    for layer in model.model.layers:
        layer.compile()
    language_steps(model, model, 2, 1024, 128256)


@step
def llama_8b_inference() -> None:
    model = llama(4, width=4096, inner=14336).to(GPU).eval()
    called = torch.compile(model)
    with torch.inference_mode():
        for _ in range(2):
            called(input_ids=tokens(4, 2048, 128256)).logits.argmax(-1)


@step
def qwen_bf16() -> None:
    model = hugging(
        "Qwen2", "AutoModelForCausalLM", hidden_size=896, intermediate_size=4864, num_hidden_layers=5,
        num_attention_heads=14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, use_cache=False,
    ).to(GPU)  # fmt: skip
    language_steps(model, torch.compile(model), 4, 512, 151936, torch.optim.AdamW(model.parameters(), fused=True))


@step
def gpt2_amp() -> None:
    model = hugging("GPT2", "AutoModelForCausalLM", torch.float32, n_layer=4, use_cache=False).to(GPU)
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())

    def loss() -> Any:
        ids = tokens(8, 512, 50257)
        with torch.autocast("cuda", dtype=BF16):
            return called(input_ids=ids, labels=ids).loss

    train(model, loss, optimizer)


# -- others ------------------------------------------------------------------------------------------------------------


@step
def bert_classifier() -> None:
    model = hugging(
        "Bert", "AutoModelForSequenceClassification", torch.float32, num_hidden_layers=4, num_labels=3
    ).to(GPU)  # fmt: skip
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())

    def loss() -> Any:
        ids = tokens(32, 256, 30522)
        with torch.autocast("cuda", dtype=BF16):
            return called(input_ids=ids, labels=torch.randint(0, 3, (32,), device=GPU)).loss

    train(model, loss, optimizer)


@step
def vit() -> None:
    model = hugging("ViT", "AutoModelForImageClassification", torch.float32, num_hidden_layers=4, num_labels=1000)
    model = model.to(GPU)
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())

    def loss() -> Any:
        images, labels = torch.randn(64, 3, 224, 224, device=GPU), torch.randint(0, 1000, (64,), device=GPU)
        with torch.autocast("cuda", dtype=BF16):
            return called(pixel_values=images, labels=labels).loss

    train(model, loss, optimizer)


@step
def convolutions() -> None:
    def part(inside: int, outside: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]

    layers = [*part(3, 64, 2), *part(64, 64, 1), *part(64, 128, 2), *part(128, 128, 1), *part(128, 256, 2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)).to(GPU)
    called = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss() -> Any:
        images, labels = torch.randn(32, 3, 224, 224, device=GPU), torch.randint(0, 100, (32,), device=GPU)
        with torch.autocast("cuda", dtype=BF16):
            return F.cross_entropy(called(images), labels)

    train(model, loss, optimizer)


@step
def loss_alone() -> None:
    """Only the loss is compiled: the logits of a plain model go in."""
    model = Gpt(layers=2).to(GPU, BF16)

    @torch.compile
    def loss_of(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits.float().view(-1, 50304), targets.view(-1))

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss() -> Any:
        ids = tokens(8, 1025)
        return loss_of(model(ids[:, :-1].contiguous()), ids[:, 1:].contiguous())

    train(model, loss, optimizer)


@step
def optimizer_alone() -> None:
    model = Gpt(layers=2, width=512, heads=8, words=8192).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))

    @torch.compile
    def update() -> None:
        optimizer.step()

    for _ in range(3):
        ids = tokens(8, 513, 8192)
        with torch.autocast("cuda", dtype=BF16):
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)


@step
def function_with_its_loss() -> None:
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.SiLU(), nn.RMSNorm(2048))))
    model = model.to(GPU)

    @torch.compile(fullgraph=True)
    def loss_of(x: Any) -> Any:
        with torch.autocast("cuda", dtype=BF16):
            return (model(x) - x).square().mean()

    train(model, lambda: loss_of(torch.randn(16384, 2048, device=GPU)), torch.optim.AdamW(model.parameters()))


# -- as others write them ----------------------------------------------------------------------------------------------


@step
def nanogpt_124m() -> None:
    model = Gpt(layers=12).to(GPU)
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    for _ in range(3):
        for _ in range(2):
            ids = tokens(8, 1025)
            with torch.autocast("cuda", dtype=BF16):
                loss = called(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def qwen(layers: int, dtype: Any = BF16) -> Any:
    return hugging(
        "Qwen2", "AutoModelForCausalLM", dtype, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip


@step
def qwen_lora_autocast() -> None:
    model = with_lora(qwen(10), 8).to(GPU)
    called = torch.compile(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def loss() -> Any:
        ids = tokens(4, 1024, 151936)
        with torch.autocast("cuda", dtype=BF16):
            return called(input_ids=ids, labels=ids).loss

    train(model, loss, optimizer)


@step
def llama_1b_checkpointed() -> None:
    """As wide as the 1B, under autocast."""
    model = llama(6, dtype=torch.float32).to(GPU)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), fused=True)

    def loss() -> Any:
        ids = tokens(2, 2048, 128256)
        with torch.autocast("cuda", dtype=BF16):
            return called(input_ids=ids, labels=ids).loss

    train(model, loss, optimizer)


@step
def llama_blocks_two_lengths() -> None:
    model = llama(4).to(GPU)
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for length in (1024, 768, 1024):
        ids = tokens(4, length, 128256)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@step
def loss_alone_smoothed() -> None:
    model = qwen(3).to(GPU)

    @torch.compile(dynamic=False)
    def loss_of(logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), label_smoothing=0.1)

    def loss() -> Any:
        ids = tokens(2, 1024, 151936)
        return loss_of(model(input_ids=ids).logits, ids)

    train(model, loss, torch.optim.AdamW(model.parameters(), fused=True))


@step
def qwen_inference_two_lengths() -> None:
    model = qwen(8).to(GPU).eval()
    called = torch.compile(model, fullgraph=True)
    with torch.inference_mode():
        for length in (1024, 512, 256):
            called(input_ids=tokens(8, length, 151936)).logits[:, -1].softmax(-1)


@step
def bert_mlm_tf32() -> None:
    torch.set_float32_matmul_precision("high")
    model = hugging("Bert", "AutoModelForMaskedLM", torch.float32, num_hidden_layers=6).to(GPU)
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), fused=True)

    def loss() -> Any:
        ids = tokens(16, 256, 30522)
        return called(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss

    train(model, loss, optimizer)


@step
def t5_bf16() -> None:
    model = hugging("T5", "AutoModelForSeq2SeqLM", num_layers=3, num_decoder_layers=3, use_cache=False,
                    decoder_start_token_id=0).to(GPU)  # fmt: skip
    model.train()
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), fused=True)

    def loss() -> Any:
        return called(input_ids=tokens(16, 512, 32128), labels=tokens(16, 128, 32128)).loss

    train(model, loss, optimizer)


@step
def several_models() -> None:
    """A student, a frozen teacher and their loss in one function."""
    student, teacher = Gpt(layers=2).to(GPU), Gpt(layers=4).to(GPU).eval().requires_grad_(False)

    @torch.compile
    def loss_of(ids: Any) -> Any:
        with torch.no_grad():
            wanted = teacher(ids).float().softmax(-1)
        return F.cross_entropy(student(ids).float().flatten(0, 1), wanted.flatten(0, 1))

    def loss() -> Any:
        with torch.autocast("cuda", dtype=BF16):
            return loss_of(tokens(4, 512))

    train(student, loss, torch.optim.AdamW(student.parameters(), fused=True))


class FlexBlock(Block):
    mask: Any = None

    def forward(self, x: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = flex_attention(q, k, v, block_mask=self.mask)
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@step
def flex_attention_window() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 256), None, None, 1024, 1024, device=GPU)
    model = Gpt(layers=0)
    model.blocks = nn.ModuleList(FlexBlock(768, 12, 0.0) for _ in range(3))
    for block in model.blocks:
        block.mask = mask
    model = model.to(GPU)
    gpt_steps(model, torch.compile(model), 8, 1024)


@step
def own_triton_kernel() -> None:
    from accuracy.silu_kernel import silu_times

    model = nn.ModuleList(nn.Linear(1024, 2 * 4096, bias=False) for _ in range(4)).to(GPU, BF16).requires_grad_(False)
    down = nn.ModuleList(nn.Linear(4096, 1024, bias=False) for _ in range(4)).to(GPU, BF16).requires_grad_(False)

    @torch.compile
    def run(x: Any) -> Any:
        for up, back in zip(model, down, strict=True):
            gate, value = up(F.layer_norm(x, (1024,))).chunk(2, dim=-1)
            x = x + back(silu_times(gate.contiguous(), value.contiguous()))
        return x

    for _ in range(2):
        run(torch.randn(16384, 1024, device=GPU, dtype=BF16))


@step
def flex_attention_grouped() -> None:
    """Scores with a bias by distance that is learned, fewer heads of keys than of queries."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024, device=GPU)
    slopes = nn.Parameter(torch.ones(16, device=GPU))
    attend = torch.compile(flex_attention)
    inputs = [torch.randn(8, heads, 1024, 64, device=GPU, dtype=BF16, requires_grad=True) for heads in (16, 4, 4)]
    for _ in range(2):
        y = attend(
            *inputs, score_mod=lambda score, b, h, i, j: score - slopes[h] * (i - j), block_mask=mask, enable_gqa=True
        )
        y.square().mean().backward()


@step
def autotuned_triton_kernel() -> None:
    from accuracy.silu_kernel import silu_times_tuned

    @torch.compile
    def run(x: Any) -> Any:
        gate, value = F.layer_norm(x, (2048,)).chunk(2, dim=-1)
        return silu_times_tuned(gate.contiguous(), value.contiguous()) + 1

    for _ in range(2):
        run(torch.randn(16384, 2048, device=GPU, dtype=BF16))


# -- planned and measured ----------------------------------------------------------------------------------------------


def plan(name: str) -> dict[str, Any]:
    import memfit

    started = time.perf_counter()
    peak = memfit.trace(STEPS[name], gpu="H200").peak
    return {
        "allocated": peak.allocated_bytes, "reserved": peak.reserved_bytes, "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def eager(name: str) -> dict[str, Any]:
    """Planned: as if nothing were compiled."""
    from unittest import mock

    with mock.patch.object(torch, "compile", _as_it_is), mock.patch.object(nn.Module, "compile", lambda *_, **__: None):
        return plan(name)


def _as_it_is(what: Any = None, **_: Any) -> Any:
    return _as_it_is if what is None else what


def measure(name: str) -> dict[str, Any]:
    started = time.perf_counter()
    torch.manual_seed(0)
    STEPS[name]()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
        "torch": torch.__version__, "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def in_process(how: str, name: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "accuracy.compiled", how, "--one", name]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        try:
            ran = subprocess.run(words, capture_output=True, text=True, env=env, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return {"name": name, "error": f"took more than {SECONDS} seconds"}
    if ran.returncode:
        return {"name": name, "error": (ran.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return {"name": name, **json.loads(ran.stdout.strip().splitlines()[-1])}


def read(path: Path) -> dict[str, Any]:
    return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}


def compare() -> None:
    planned = read(Path("compiled.planned.jsonl"))
    measured = read(Path("compiled.measured.jsonl")) or read(MEASURED)
    for name, made in planned.items():
        seen = measured.get(name, {})
        if "error" in made or "allocated" not in seen:
            print(f"{name:28} {made.get('error') or seen}")
            continue
        off = {key: 100 * (made[key] / seen[key] - 1) for key in ("allocated", "reserved")}
        print(f"{name:28} allocated {seen['allocated']:14,} {off['allocated']:+9.4f} %"
              f"  reserved {seen['reserved']:14,} {off['reserved']:+9.4f} %")  # fmt: skip


SHOWN = {
    "gpt_autocast": "GPT, autocast", "llama_bf16": "Llama, bf16", "llama_lora": "Llama with LoRA",
    "gpt_checkpointed": "GPT, checkpointed", "gpt_inference": "GPT, inference", "vit": "ViT",
}  # fmt: skip
BAR, WIDE, LEFT = 13, 520, 150


def picture() -> None:
    """Eager beside compiled."""
    rows = [(said, read(MEASURED)[name]) for name, said in SHOWN.items()]
    most = max(max(row["eager"], row["allocated"]) for _, row in rows)
    high = 40 * len(rows) + 50
    title = "Peak of what is allocated: eager (planned) beside torch.compile (measured on an H200)"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {high}" font-family="sans-serif" font-size="13">',
        f'<title>{title}</title>\n<rect width="760" height="{high}" fill="#fff"/>',
    ]
    for number, (said, row) in enumerate(rows):
        top = 40 * number + 12
        lines.append(f'<text x="{LEFT - 8}" y="{top + 18}" text-anchor="end" fill="#333">{said}</text>')
        for below, key, colour in ((0, "eager", "#b9c3d0"), (BAR + 1, "allocated", "#2f6fb3")):
            wide = round(WIDE * row[key] / most)
            lines.append(f'<rect x="{LEFT}" y="{top + below}" width="{wide}" height="{BAR}" fill="{colour}"/>')
            said_size = f"{row[key] / 2**30:.2f} GiB"
            lines.append(
                f'<text x="{LEFT + wide + 6}" y="{top + below + 11}" font-size="11" fill="#555">{said_size}</text>'
            )
    lines.append(
        f'<text x="{LEFT}" y="{high - 14}" fill="#555">grey: eager, planned; blue: torch.compile, measured</text></svg>'
    )
    (Path(__file__).parents[1] / "docs" / "compiled.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(what: str, *names: str) -> None:
    if names[:1] == ("--one",):
        print(json.dumps({"plan": plan, "eager": eager, "measure": measure}[what](names[1])))
    elif what in ("compare", "picture"):
        {"compare": compare, "picture": picture}[what]()
    else:
        out = Path(
            {"plan": "compiled.planned.jsonl", "eager": "compiled.eager.jsonl"}.get(what, "compiled.measured.jsonl")
        )
        with out.open("a") as written, ThreadPoolExecutor(AT_ONCE if what == "measure" else 1) as pool:
            for found in pool.map(lambda name: in_process(what, name), names or STEPS):
                written.write(json.dumps(found) + "\n")
                written.flush()
                print(found, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

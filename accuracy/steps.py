"""Training steps of every kind, as people write them: what `memfit.trace` says of each beside what it takes on a GPU.

    python -m accuracy.steps plan [NAME...]       # here: writes steps.planned.jsonl into the working folder
    python -m accuracy.steps measure [NAME...]    # on a GPU: steps.measured.jsonl
    python -m accuracy.steps compare              # the table, against accuracy/measured/steps.jsonl if need be

None of these models is one that memfit knows: vision, speech, recurrent, generative, reinforcement, meta-learning. They
were traced before they were measured. Each runs in a process of its own.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS: dict[str, Callable[[], object]] = {}
MEASURED = Path(__file__).parent / "measured" / "steps.jsonl"
GPU = "cuda"


def step(function: Callable[[], object]) -> Callable[[], object]:
    STEPS[function.__name__] = function
    return function


class Basic(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        same = stride == 1 and inside == outside
        self.down = (
            None if same else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: Any) -> Any:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        return F.relu(out + (x if self.down is None else self.down(x)))


def resnet(width: int = 64, classes: int = 100) -> nn.Module:
    stages = [(width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)]
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inside = width
    for outside, stride in stages:
        layers += [Basic(inside, outside, stride), Basic(outside, outside)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


@step
def resnet18() -> None:
    model = resnet().to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(3):
        images, labels = torch.randn(32, 3, 224, 224).to(GPU), torch.randint(0, 100, (32,)).to(GPU)
        output = model(images)
        loss = F.cross_entropy(output, labels)
        correct = output.topk(5, 1)[1].eq(labels[:, None]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{correct.item()}")


@step
def resnet18_amp_channels_last() -> None:
    model = resnet().to(GPU, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        images = torch.randn(64, 3, 224, 224).to(GPU, memory_format=torch.channels_last)
        labels = torch.randint(0, 100, (64,), device=GPU)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Double(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = Double(3, 64), nn.MaxPool2d(2)
        self.down = nn.ModuleList([Double(64, 128), Double(128, 256), Double(256, 512)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (256, 128, 64)])
        self.back = nn.ModuleList([Double(2 * c, c) for c in (256, 128, 64)])
        self.last = nn.Conv2d(64, 21, 1)

    def forward(self, x: Any) -> Any:
        kept = [self.first(x)]
        for layer in self.down:
            kept.append(layer(self.pool(kept[-1])))
        x = kept.pop()
        for up, back in zip(self.up, self.back, strict=True):
            x = back(torch.cat([kept.pop(), up(x)], 1))
        return self.last(x)


@step
def unet() -> None:
    model = UNet().to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(2):
        images, masks = torch.randn(4, 3, 128, 128, device=GPU), torch.randint(0, 21, (4, 128, 128), device=GPU)
        loss = F.cross_entropy(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def dcgan() -> None:
    def up(inside: int, outside: int, first: bool = False) -> list[nn.Module]:
        layer = nn.ConvTranspose2d(inside, outside, 4, 1 if first else 2, 0 if first else 1, bias=False)
        return [layer, nn.BatchNorm2d(outside), nn.ReLU(True)]

    def down(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 4, 2, 1, bias=False), nn.BatchNorm2d(outside), nn.LeakyReLU(0.2, True)]

    generator = nn.Sequential(
        *up(100, 512, True), *up(512, 256), *up(256, 128), *up(128, 64), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()
    ).to(GPU)
    judge = nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True), *down(64, 128), *down(128, 256), *down(256, 512),
        nn.Conv2d(512, 1, 4, 1, 0), nn.Sigmoid(),
    ).to(GPU)  # fmt: skip
    criterion = nn.BCELoss()
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for _ in range(3):
        judge.zero_grad()
        real = torch.randn(128, 3, 64, 64).to(GPU)
        label = torch.full((128,), 1.0, device=GPU)
        criterion(judge(real).view(-1), label).backward()
        fake = generator(torch.randn(128, 100, 1, 1, device=GPU))
        label.fill_(0.0)
        criterion(judge(fake.detach()).view(-1), label).backward()
        of_judge.step()
        generator.zero_grad()
        label.fill_(1.0)
        criterion(judge(fake).view(-1), label).backward()
        of_generator.step()


@step
def lstm_language_model() -> None:
    words, width, batch, length = 33278, 650, 20, 35
    encoder, drop = nn.Embedding(words, width).to(GPU), nn.Dropout(0.5)
    rnn, decoder = nn.LSTM(width, width, 2, dropout=0.5).to(GPU), nn.Linear(width, words).to(GPU)
    parameters = [*encoder.parameters(), *rnn.parameters(), *decoder.parameters()]
    hidden = (torch.zeros(2, batch, width, device=GPU), torch.zeros(2, batch, width, device=GPU))
    total = 0.0
    for _ in range(4):
        ids = torch.randint(0, words, (length, batch)).to(GPU)
        targets = torch.randint(0, words, (length * batch,)).to(GPU)
        hidden = tuple(h.detach() for h in hidden)  # type: ignore[assignment]
        for p in parameters:
            p.grad = None
        output, hidden = rnn(drop(encoder(ids)), hidden)
        decoded = decoder(drop(output)).view(-1, words)
        loss = F.nll_loss(F.log_softmax(decoded, dim=1), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.25)
        for p in parameters:
            p.data.add_(p.grad, alpha=-20)
        total += loss.item()


@step
def vae() -> None:
    encode, decode = nn.Linear(784, 400).to(GPU), nn.Linear(20, 400).to(GPU)
    mean, deviation, last = nn.Linear(400, 20).to(GPU), nn.Linear(400, 20).to(GPU), nn.Linear(400, 784).to(GPU)
    parts = nn.ModuleList([encode, decode, mean, deviation, last])
    optimizer = torch.optim.Adam(parts.parameters(), lr=1e-3)
    for _ in range(3):
        data = torch.rand(2048, 1, 28, 28).to(GPU)
        optimizer.zero_grad()
        h = F.relu(encode(data.view(-1, 784)))
        mu, logvar = mean(h), deviation(h)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        recon = torch.sigmoid(last(F.relu(decode(z))))
        bce = F.binary_cross_entropy(recon, data.view(-1, 784), reduction="sum")
        loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss.backward()
        optimizer.step()


@step
def clip_like() -> None:
    images = nn.Sequential(
        nn.Conv2d(3, 256, 16, 16), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 256)
    ).to(GPU)
    words = nn.Embedding(10000, 256).to(GPU)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    texts = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(GPU)
    scale = nn.Parameter(torch.tensor(2.6, device=GPU))
    optimizer = torch.optim.AdamW([*images.parameters(), *words.parameters(), *texts.parameters(), scale], lr=1e-4)
    for _ in range(3):
        pictures, ids = torch.randn(64, 3, 224, 224, device=GPU), torch.randint(0, 10000, (64, 77), device=GPU)
        a = F.normalize(images(pictures), dim=-1)
        b = F.normalize(texts(words(ids)).mean(1), dim=-1)
        logits = scale.exp() * a @ b.t()
        target = torch.arange(64, device=GPU)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def seq2seq_attention() -> None:
    embed, encoder = nn.Embedding(8000, 256).to(GPU), nn.GRU(256, 512, bidirectional=True, batch_first=True).to(GPU)
    cell, out = nn.GRUCell(256 + 1024, 512).to(GPU), nn.Linear(512 + 1024, 8000).to(GPU)
    key = nn.Linear(1024, 512, bias=False).to(GPU)
    everything = nn.ModuleList([embed, encoder, cell, out, key])
    optimizer = torch.optim.Adam(everything.parameters(), lr=1e-3)
    for _ in range(2):
        source, target = torch.randint(0, 8000, (32, 40)).to(GPU), torch.randint(0, 8000, (32, 20)).to(GPU)
        states, last = encoder(embed(source))
        keys, h = key(states), last[0]
        loss = torch.zeros((), device=GPU)
        for t in range(19):
            weights = F.softmax(torch.bmm(keys, h.unsqueeze(2)).squeeze(2), dim=1)
            context = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
            h = cell(torch.cat([embed(target[:, t]), context], 1), h)
            loss = loss + F.cross_entropy(out(torch.cat([h, context], 1)), target[:, t + 1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(everything.parameters(), 1.0)
        optimizer.step()


@step
def experts_by_hand() -> None:
    gate = nn.Linear(512, 8, bias=False).to(GPU)
    experts = nn.ModuleList(
        [nn.Sequential(nn.Linear(512, 2048), nn.SiLU(), nn.Linear(2048, 512)) for _ in range(8)]
    ).to(GPU)
    optimizer = torch.optim.AdamW([*gate.parameters(), *experts.parameters()], lr=1e-4)
    for _ in range(2):
        x = torch.randn(4096, 512, device=GPU)
        weights, chosen = F.softmax(gate(x), -1).topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(experts):
            share = (weights * (chosen == e)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        F.mse_loss(out, x).backward()
        optimizer.step()
        optimizer.zero_grad()


@step
def distilled_convnet() -> None:
    teacher, student = resnet(64).to(GPU).eval(), resnet(32).to(GPU)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _ in range(2):
        images, labels = torch.randn(64, 3, 128, 128, device=GPU), torch.randint(0, 100, (64,), device=GPU)
        with torch.no_grad():
            soft = teacher(images)
        logits = student(images)
        kd = F.kl_div(F.log_softmax(logits / 4, 1), F.softmax(soft / 4, 1), reduction="batchmean") * 16
        loss = 0.5 * kd + 0.5 * F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def maml() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 5)).to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        total = torch.zeros((), device=GPU)
        for _task in range(4):
            support, query = torch.randn(128, 256, device=GPU), torch.randn(128, 256, device=GPU)
            labels = torch.randint(0, 5, (128,), device=GPU)
            fast = dict(model.named_parameters())
            for _inner in range(3):
                loss = F.cross_entropy(torch.func.functional_call(model, fast, (support,)), labels)
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), grads, strict=True)}
            total = total + F.cross_entropy(torch.func.functional_call(model, fast, (query,)), labels)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


@step
def checkpointed_by_hand() -> None:
    blocks = nn.ModuleList(
        [nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True) for _ in range(6)]
    ).to(GPU)
    head = nn.Linear(512, 1000).to(GPU)
    optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=1e-4)
    for _ in range(3):
        x = torch.randn(16, 256, 512, device=GPU)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss = F.cross_entropy(head(x.mean(1)), torch.randint(0, 1000, (16,), device=GPU))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@step
def text_classifier() -> None:
    bag, last = nn.EmbeddingBag(95811, 64, sparse=False).to(GPU), nn.Linear(64, 4).to(GPU)
    optimizer = torch.optim.SGD([*bag.parameters(), *last.parameters()], lr=5.0)
    for _ in range(3):
        lengths = torch.arange(20, 20 + 64)
        ids = torch.randint(0, 95811, (int(lengths.sum()),)).to(GPU)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths[:-1].cumsum(0)]).to(GPU)
        optimizer.zero_grad()
        loss = F.cross_entropy(last(bag(ids, offsets)), torch.randint(0, 4, (64,)).to(GPU))
        loss.backward()
        nn.utils.clip_grad_norm_([*bag.parameters(), *last.parameters()], 0.1)
        optimizer.step()


class Diffuser(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(32, width) for _ in range(4)])
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)])
        self.down, self.qkv, self.out = (
            nn.Conv2d(width, width, 3, 2, 1),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Any, t: Any) -> Any:
        h = self.first(x)
        angles = t[:, None] * torch.exp(torch.arange(0, 64, device=x.device) * -0.1)
        scale = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        for norm, conv in zip(self.norms[:2], self.convs[:2], strict=True):
            h = h + conv(F.silu(norm(h) + scale))
        small = self.down(h)
        b, c, height, width = small.shape
        q, k, v = self.qkv(small.flatten(2).transpose(1, 2)).chunk(3, -1)
        seen = self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        small = small + seen.transpose(1, 2).reshape(b, c, height, width)
        h = h + F.interpolate(small, scale_factor=2, mode="nearest")
        for norm, conv in zip(self.norms[2:], self.convs[2:], strict=True):
            h = h + conv(F.silu(norm(h) + scale))
        return self.last(h)


@step
def diffusion() -> None:
    model = Diffuser().to(GPU)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=GPU), 0)
    for _ in range(3):
        x, noise = torch.randn(16, 3, 64, 64, device=GPU), torch.randn(16, 3, 64, 64, device=GPU)
        t = torch.randint(0, 1000, (16,), device=GPU)
        a = alphas[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t.float()), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.mul_(0.999).add_(theirs, alpha=0.001)


@step
def speech_ctc() -> None:
    front = nn.Sequential(
        nn.Conv1d(80, 256, 11, 2, 5),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Conv1d(256, 256, 11, 1, 5),
        nn.BatchNorm1d(256),
        nn.ReLU(),
    ).to(GPU)
    rnn = nn.LSTM(256, 256, 2, batch_first=True, bidirectional=True, dropout=0.1).to(GPU)
    last = nn.Linear(512, 29).to(GPU)
    everything = nn.ModuleList([front, rnn, last])
    optimizer = torch.optim.AdamW(everything.parameters(), lr=3e-4)
    for _ in range(2):
        spectra, targets = torch.randn(16, 80, 600).to(GPU), torch.randint(1, 29, (16, 60)).to(GPU)
        lengths, sizes = torch.full((16,), 300), torch.full((16,), 60)
        h, _ = rnn(front(spectra).transpose(1, 2))
        loss = F.ctc_loss(last(h).log_softmax(-1).transpose(0, 1), targets, lengths, sizes, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def dqn() -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6),
        ).to(GPU)  # fmt: skip

    policy, target = net(), net()
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, amsgrad=True)
    for _ in range(3):
        states, after = torch.rand(128, 4, 84, 84, device=GPU), torch.rand(128, 4, 84, 84, device=GPU)
        actions, rewards = torch.randint(0, 6, (128, 1), device=GPU), torch.rand(128, device=GPU)
        values = policy(states).gather(1, actions)
        with torch.no_grad():
            best = target(after).max(1).values
        loss = nn.SmoothL1Loss()(values, (best * 0.99 + rewards).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()


@step
def policy_gradient() -> None:
    actor = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 18)).to(GPU)
    critic = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).to(GPU)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-4, eps=1e-5)
    seen, gains = torch.randn(8192, 64, device=GPU), torch.randn(8192, device=GPU)
    with torch.no_grad():
        first = torch.distributions.Categorical(logits=actor(seen))
        actions = first.sample()
        before = first.log_prob(actions)
    for _ in range(2):
        for part in range(4):
            rows = slice(2048 * part, 2048 * part + 2048)
            policy = torch.distributions.Categorical(logits=actor(seen[rows]))
            ratio = (policy.log_prob(actions[rows]) - before[rows]).exp()
            gain = (gains[rows] - gains[rows].mean()) / (gains[rows].std() + 1e-8)
            loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
            loss = loss + 0.5 * F.mse_loss(critic(seen[rows]).view(-1), gains[rows]) - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            optimizer.step()


@step
def masked_language_model() -> None:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
    words, body = nn.Embedding(30522, 512).to(GPU), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(GPU)
    head = nn.Linear(512, 30522).to(GPU)
    optimizer = torch.optim.AdamW([*words.parameters(), *body.parameters(), *head.parameters()], lr=1e-4)
    for _ in range(3):
        ids = torch.randint(0, 30522, (16, 128))
        chosen = torch.rand(ids.shape) < 0.15
        labels = ids.masked_fill(~chosen, -100).to(GPU)
        logits = head(body(words(ids.masked_fill(chosen, 103).to(GPU))))
        loss = F.cross_entropy(logits.view(-1, 30522), labels.view(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def accumulated_amp() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.BatchNorm2d(128),
        nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(2048, 10),
    ).to(GPU)  # fmt: skip
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cuda")
    for _ in range(2):
        for _part in range(4):
            images, labels = torch.randn(64, 3, 64, 64).to(GPU), torch.randint(0, 10, (64,)).to(GPU)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@step
def multi_task() -> None:
    body = nn.Sequential(nn.Linear(300, 1024), nn.LayerNorm(1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU()).to(GPU)
    heads = nn.ModuleDict({"a": nn.Linear(1024, 40), "b": nn.Linear(1024, 1), "c": nn.Linear(1024, 200)}).to(GPU)
    optimizer = torch.optim.RMSprop([*body.parameters(), *heads.parameters()], lr=1e-4, momentum=0.9)
    for _ in range(3):
        h = body(torch.randn(2048, 300, device=GPU))
        losses = [
            F.cross_entropy(heads["a"](h), torch.randint(0, 40, (2048,), device=GPU)),
            F.huber_loss(heads["b"](h).squeeze(-1), torch.randn(2048, device=GPU)),
            F.binary_cross_entropy_with_logits(heads["c"](h), torch.rand(2048, 200, device=GPU)),
        ]
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()


@step
def packed_tagger() -> None:
    words, rnn = (
        nn.Embedding(20000, 300, padding_idx=0).to(GPU),
        nn.LSTM(300, 256, bidirectional=True, batch_first=True).to(GPU),
    )
    last = nn.Linear(512, 17).to(GPU)
    optimizer = torch.optim.Adam([*words.parameters(), *rnn.parameters(), *last.parameters()], lr=1e-3)
    for _ in range(2):
        lengths = torch.arange(60, 28, -1)
        ids, tags = torch.randint(1, 20000, (32, 60)).to(GPU), torch.randint(0, 17, (32, 60)).to(GPU)
        packed = nn.utils.rnn.pack_padded_sequence(words(ids), lengths, batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(rnn(packed)[0], batch_first=True)
        loss = F.cross_entropy(last(out).transpose(1, 2), tags[:, : out.shape[1]], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def graph_network() -> None:
    nodes, edges = 20000, 100000
    first, second = nn.Linear(128, 256).to(GPU), nn.Linear(256, 40).to(GPU)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-2, weight_decay=5e-4)
    x, labels = torch.randn(nodes, 128, device=GPU), torch.randint(0, 40, (nodes,), device=GPU)
    source, target = torch.randint(0, nodes, (2, edges), device=GPU)
    degree = torch.zeros(nodes, device=GPU).index_add_(0, target, torch.ones(edges, device=GPU)).clamp(min=1)
    for _ in range(3):
        h = x
        for layer in (first, second):
            h = layer(h)
            h = torch.zeros_like(h).index_add_(0, target, h[source]) / degree[:, None]
            h = F.dropout(F.relu(h), 0.5) if layer is first else h
        loss = F.nll_loss(F.log_softmax(h, 1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def mnist_convnet() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    ).to(GPU)  # fmt: skip
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for _ in range(3):
        data, target = torch.randn(64, 1, 28, 28).to(GPU), torch.randint(0, 10, (64,)).to(GPU)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


@step
def vision_transformer() -> None:
    patches, place = nn.Conv2d(3, 384, 16, 16).to(GPU), nn.Parameter(torch.zeros(1, 197, 384, device=GPU))
    first = nn.Parameter(torch.zeros(1, 1, 384, device=GPU))
    layer = nn.TransformerEncoderLayer(384, 6, 1536, 0.1, "gelu", batch_first=True, norm_first=True)
    body, head = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(GPU), nn.Linear(384, 1000).to(GPU)
    parameters = [*patches.parameters(), place, first, *body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05, fused=True)
    for _ in range(3):
        images = torch.randn(32, 3, 224, 224, device=GPU)
        mix = torch.randperm(32).to(GPU)
        images = 0.7 * images + 0.3 * images[mix]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = patches(images).flatten(2).transpose(1, 2)
            x = torch.cat([first.expand(32, -1, -1), x], 1) + place
            loss = F.cross_entropy(head(body(x)[:, 0]), torch.randint(0, 1000, (32,), device=GPU))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


@step
def super_resolution() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(),
        nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 9, 3, 1, 1), nn.PixelShuffle(3),
    ).to(GPU)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        low, high = torch.rand(16, 1, 85, 85).to(GPU), torch.rand(16, 1, 255, 255).to(GPU)
        optimizer.zero_grad()
        loss = nn.MSELoss()(model(low), high)
        loss.backward()
        optimizer.step()


@step
def wgan_penalty() -> None:
    critic = nn.Sequential(
        nn.Linear(784, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)
    ).to(GPU)
    generator = nn.Sequential(nn.Linear(100, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh()).to(
        GPU
    )
    of_critic, of_generator = (torch.optim.Adam(m.parameters(), lr=1e-4, betas=(0.0, 0.9)) for m in (critic, generator))
    for _ in range(2):
        for _inner in range(2):
            real = torch.randn(512, 784, device=GPU)
            fake = generator(torch.randn(512, 100, device=GPU)).detach()
            share = torch.rand(512, 1, device=GPU)
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            gradient = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
            loss = critic(fake).mean() - critic(real).mean() + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(torch.randn(512, 100, device=GPU))).mean()).backward()
        of_generator.step()


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True), nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        same = stride == 1 and inside == 4 * width
        self.down = nn.Identity() if same else nn.Conv2d(inside, 4 * width, 1, stride, bias=False)

    def forward(self, x: Any) -> Any:
        return F.relu(self.body(x) + self.down(x))


def bottlenecks(groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Bottleneck(64, 64, groups=groups), Bottleneck(256, 64, groups=groups), Bottleneck(256, 128, 2, groups),
        Bottleneck(512, 128, groups=groups), Bottleneck(512, 256, 2, groups), Bottleneck(1024, 512, 2, groups),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000),
    )  # fmt: skip


def classify(model: nn.Module, batch: int, side: int, *, last: bool = False, dtype: Any = None) -> None:
    kind = torch.channels_last if last else torch.contiguous_format
    model = model.to(GPU, memory_format=kind)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        images = torch.randn(batch, 3, side, side).to(GPU, memory_format=kind)
        labels = torch.randint(0, 1000, (batch,)).to(GPU)
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def bottlenecks_fp32() -> None:
    classify(bottlenecks(), 24, 192)


@step
def bottlenecks_without_tf32() -> None:
    torch.backends.cudnn.allow_tf32 = False
    classify(bottlenecks(), 16, 224)


@step
def grouped_deterministic() -> None:
    torch.backends.cudnn.deterministic = True
    classify(bottlenecks(groups=32), 32, 160)


@step
def bottlenecks_bf16_channels_last() -> None:
    classify(bottlenecks(), 48, 224, last=True, dtype=torch.bfloat16)


def inverted(inside: int, outside: int, stride: int = 1) -> nn.Module:
    middle = 6 * inside
    return nn.Sequential(
        nn.Conv2d(inside, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU6(inplace=True),
        nn.Conv2d(middle, middle, 3, stride, 1, groups=middle, bias=False), nn.BatchNorm2d(middle),
        nn.ReLU6(inplace=True), nn.Conv2d(middle, outside, 1, bias=False), nn.BatchNorm2d(outside),
    )  # fmt: skip


@step
def mobile_fp32() -> None:
    layers = [inverted(24, 24), inverted(24, 32, 2), inverted(32, 64, 2), inverted(64, 96), inverted(96, 160, 2)]
    stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6(inplace=True))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 1000))
    classify(nn.Sequential(stem, *layers, head), 40, 192)


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        inner = self.down(F.gelu(self.up(self.norm(self.spread(x).permute(0, 2, 3, 1)))))
        return x + inner.permute(0, 3, 1, 2)


@step
def depthwise_channels_last_bf16() -> None:
    blocks = [Wide(96), Wide(96), nn.Conv2d(96, 192, 2, 2), Wide(192), nn.Conv2d(192, 384, 2, 2), Wide(384)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 1000))
    classify(nn.Sequential(nn.Conv2d(3, 96, 4, 4), *blocks, head), 32, 224, last=True, dtype=torch.bfloat16)


@step
def waves_1d() -> None:
    layers: list[nn.Module] = [nn.Conv1d(1, 64, 15, 4, 7)]
    for dilation in (1, 2, 4, 8):
        layers += [nn.Conv1d(64, 64, 9, padding=4 * dilation, dilation=dilation), nn.BatchNorm1d(64), nn.ReLU()]
    layers += [nn.ConvTranspose1d(64, 64, 8, 4, 2), nn.ReLU(), nn.Conv1d(64, 1, 1)]
    model = nn.Sequential(*layers).to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        waves = torch.randn(16, 1, 32000, device=GPU)
        loss = F.l1_loss(model(waves), waves)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def volumes_3d() -> None:
    model = nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv3d(16, 32, 3, 2, 1), nn.SiLU(),
        nn.Conv3d(32, 64, 3, 2, 1), nn.SiLU(), nn.Conv3d(64, 64, 3, padding=1), nn.SiLU(),
        nn.ConvTranspose3d(64, 32, 2, 2), nn.SiLU(), nn.ConvTranspose3d(32, 16, 2, 2), nn.SiLU(), nn.Conv3d(16, 2, 1),
    ).to(GPU)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        volume, labels = torch.randn(2, 1, 64, 64, 64, device=GPU), torch.randint(0, 2, (2, 64, 64, 64), device=GPU)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(volume), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def upwards() -> nn.Module:
    layers: list[nn.Module] = [nn.ConvTranspose2d(128, 512, 4, bias=False), nn.BatchNorm2d(512), nn.ReLU(True)]
    for inside in (512, 256, 128):
        layers += [
            nn.ConvTranspose2d(inside, inside // 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(inside // 2),
            nn.ReLU(True),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


@step
def transposed_decoder() -> None:
    model = upwards().to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    for _ in range(3):
        made = model(torch.randn(96, 128, 1, 1, device=GPU))
        loss = F.mse_loss(made, torch.rand(96, 3, 64, 64, device=GPU))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def adversarial_benchmark() -> None:
    torch.backends.cudnn.benchmark = True
    generator = upwards().to(GPU)
    critic = nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(64, 128, 4, 2, 1), nn.BatchNorm2d(128),
        nn.LeakyReLU(0.2, True), nn.Conv2d(128, 256, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(256, 1, 8),
    ).to(GPU)  # fmt: skip
    of_critic, of_generator = (torch.optim.Adam(m.parameters(), lr=2e-4) for m in (critic, generator))
    for _ in range(3):
        real, noise = torch.rand(64, 3, 64, 64).to(GPU), torch.randn(64, 128, 1, 1, device=GPU)
        fake = generator(noise)
        of_critic.zero_grad()
        (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        of_generator.step()


@step
def segmented_benchmark_amp() -> None:
    torch.backends.cudnn.benchmark = True
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU()]
    for inside, outside, dilation in ((32, 64, 1), (64, 128, 2), (128, 128, 4), (128, 128, 8)):
        layers += [
            nn.Conv2d(inside, outside, 3, padding=dilation, dilation=dilation),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.Conv2d(128, 21, 1), nn.Upsample(scale_factor=2, mode="bilinear")).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        images, labels = torch.randn(8, 3, 256, 256, device=GPU), torch.randint(0, 21, (8, 256, 256), device=GPU)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def large_unet_fp32() -> None:
    model = UNet().to(GPU)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, momentum=0.9)
    for _ in range(3):
        images = torch.randn(4, 3, 320, 256, device=GPU)
        made = model(images)
        loss = F.binary_cross_entropy_with_logits(made, torch.rand_like(made))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def measure(name: str) -> dict[str, int]:
    torch.cuda.init()
    STEPS[name]()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def plan(name: str) -> dict[str, int]:
    import memfit

    peak = memfit.trace(STEPS[name], gpu="H200").peak
    return {"allocated": peak.allocated_bytes, "reserved": peak.reserved_bytes}


def in_process(how: str, name: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "accuracy.steps", how, "--one", name]
    ran = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ), timeout=300)
    if ran.returncode:
        return {"name": name, "error": (ran.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return {"name": name, **json.loads(ran.stdout.strip().splitlines()[-1])}


def read(path: Path) -> dict[str, Any]:
    return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}


def compare() -> None:
    planned = read(Path("steps.planned.jsonl"))
    measured = read(Path("steps.measured.jsonl") if Path("steps.measured.jsonl").exists() else MEASURED)
    for name, made in planned.items():
        seen = measured.get(name, {})
        if "error" in made or "allocated" not in seen:
            print(f"{name:28} {made.get('error') or seen}")
            continue
        off = {key: 100 * (made[key] / seen[key] - 1) for key in ("allocated", "reserved")}
        print(f"{name:28} allocated {seen['allocated']:14,} {off['allocated']:+9.4f} %"
              f"  reserved {seen['reserved']:14,} {off['reserved']:+9.4f} %")  # fmt: skip


def need_cudnn() -> None:
    """That of the measured runs, by which convolutions are planned."""
    from memfit.platform import H200
    from memfit.tracing.kernels.cudnn import BY_RULE, said

    if (who := said(H200)).startswith(BY_RULE):
        raise SystemExit(f"{who}; `make accuracy` fetches both")


def section() -> Iterator[str]:
    """Of docs/accuracy.md: every step planned again, beside what it took."""
    yield "| step | allocated, bytes | off | reserved off |"
    yield "|---|---:|---:|---:|"
    for name, seen in read(MEASURED).items():
        made = in_process("plan", name)
        off = [f"{made[key] / seen[key] - 1:+.4%}" for key in ("allocated", "reserved")]
        yield f"| `{name}` | {seen['allocated']:,} | {off[0]} | {off[1]} |"


def main(what: str, *names: str) -> None:
    if names[:1] == ("--one",):
        print(json.dumps({"plan": plan, "measure": measure}[what](names[1])))
    elif what == "compare":
        compare()
    else:
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            found = list(pool.map(lambda name: in_process(what, name), names or STEPS))
        out = Path("steps.planned.jsonl" if what == "plan" else "steps.measured.jsonl")
        out.write_text("".join(json.dumps(line) + "\n" for line in found))
        print(*found, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

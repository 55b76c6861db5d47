"""Steps as people write them, measured on a GPU beside what `memfit.trace` says of the same functions.

    python -m accuracy.own_steps            # on a machine with a GPU: a table of predicted and measured peaks
    python -m accuracy.own_steps masked     # only these

Each step runs twice in processes of their own: traced, with no GPU to be seen, and for real.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STEPS: dict[str, Callable[[], object]] = {}


def step(function: Callable[[], object]) -> Callable[[], object]:
    STEPS[function.__name__] = function
    return function


def language_model(**settings: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=2048, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def rows(batch: int, length: int, padded: int = 0) -> dict[str, Any]:
    import torch

    ids = torch.arange(batch * length).reshape(batch, length) % 31999
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, length - padded * row :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(model: Any, batch: dict[str, Any], steps: int = 3) -> None:
    import torch

    model.cuda().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    for _ in range(steps):
        moved = {name: value.to("cuda", non_blocking=True) for name, value in batch.items()}
        outputs = model(**moved)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@step
def outputs_kept() -> None:
    train(language_model(), rows(4, 512))


@step
def padded() -> None:
    train(language_model(), rows(4, 512, padded=37))


@step
def padded_eager() -> None:
    train(language_model(attn_implementation="eager"), rows(4, 384, padded=37))


@step
def checkpointed() -> None:
    model = language_model()
    model.gradient_checkpointing_enable()
    train(model, rows(8, 512))


@step
def adapters() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"])
    train(get_peft_model(language_model(), config), rows(4, 512))


@step
def inference_mode() -> None:
    import torch

    model = language_model().cuda().eval()
    batch = {name: value.cuda() for name, value in rows(8, 512).items() if name != "labels"}
    with torch.inference_mode():
        for _ in range(2):
            model(**batch)


@step
def generated() -> None:
    model = language_model().cuda().eval()
    batch = {name: value.cuda() for name, value in rows(4, 100).items() if name != "labels"}
    model.generate(**batch, max_new_tokens=40, do_sample=False, eos_token_id=None)


@step
def loaded_to_cuda() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = os.environ.get("OWN_STEPS_MODEL") or tempfile.gettempdir() + "/own-steps-model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    with torch.no_grad():
        model(**{name: value.to(model.device) for name, value in rows(4, 512).items()})


@step
def scaled_fp16() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048), nn.LayerNorm(2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        x = torch.randn(4096, 2048, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(x) - x).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@step
def averaged_copy() -> None:
    import torch
    from torch import nn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = torch.randn(8, 256, 768, device=device)
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            target = average(x)
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)


@step
def selected_tokens() -> None:
    import torch
    from torch.nn import functional as F

    model = language_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = rows(4, 512, padded=60)
    for _ in range(2):
        ids, labels = batch["input_ids"].cuda(), batch["labels"].cuda()
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"].cuda()).logits
        wanted = labels != -100
        F.cross_entropy(logits[wanted].float(), labels[wanted]).backward()
        optimizer.step()
        optimizer.zero_grad()


@step
def distilled() -> None:
    import torch
    from torch.nn import functional as F

    teacher, student = language_model().cuda().eval(), language_model().cuda()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5)
    losses = []
    for _ in range(3):
        ids = rows(2, 512)["input_ids"].to(student.device)
        with torch.inference_mode():
            target = teacher(ids).logits
        logits = student(ids).logits
        loss = F.kl_div(F.log_softmax(logits, -1), F.softmax(target.clone(), -1), reduction="batchmean")
        loss.backward()
        losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()


@step
def by_hand() -> None:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(768), nn.Linear(768, 2304), nn.Linear(768, 768)
            self.register_buffer("seen", torch.tril(torch.ones(512, 512)).bool())

        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            q, k, v = (part.view(b, t, 12, 64).transpose(1, 2) for part in self.qkv(self.norm(x)).split(768, 2))
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 8
            weights = F.softmax(scores.masked_fill(~self.seen[:t, :t], float("-inf")), -1)
            return x + self.out(torch.einsum("bhqk,bhkd->bhqd", weights, v).transpose(1, 2).reshape(b, t, c))

    torch.set_default_device("cuda")
    model = nn.Sequential(nn.Embedding(50257, 768), *(Block() for _ in range(4)), nn.Linear(768, 50257, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(3):
        ids = torch.randint(0, 50257, (4, 512))
        logits = model(ids)
        loss = F.cross_entropy(logits.view(-1, 50257), ids.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@step
def by_trainer() -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    data = [{name: value[0] for name, value in rows(1, 512).items()} for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=3, per_device_train_batch_size=4, bf16=True, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        Trainer(model=language_model(), args=arguments, train_dataset=data).train()  # type: ignore[arg-type]


def measure(name: str) -> dict[str, int]:
    import torch

    torch.cuda.init()
    STEPS[name]()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def predict(name: str) -> dict[str, int]:
    import memfit

    peak = memfit.trace(STEPS[name], gpu="H200").peak
    return {"allocated": peak.allocated_bytes, "reserved": peak.reserved_bytes}


def _in_process(how: str, name: str, **environment: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "accuracy.own_steps", how, name], capture_output=True, text=True,
        env={**os.environ, **environment}, timeout=300,
    )  # fmt: skip
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or ["?"])[-3:]}
    answer: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return answer


def main(names: list[str]) -> None:
    folder = Path(tempfile.gettempdir()) / "own-steps-model"
    if not folder.exists():
        language_model().save_pretrained(folder)
    print(f"{'step':20} {'allocated':>15} {'error':>10} {'reserved':>15} {'error':>10}")
    names = names or list(STEPS)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 3)) as pool:
        traced = {name: pool.submit(_in_process, "predict", name, CUDA_VISIBLE_DEVICES="") for name in names}
    for name in names:
        measured, predicted = _in_process("measure", name), traced[name].result()
        if "error" in measured or "error" in predicted:
            print(f"{name:20} measured {measured} predicted {predicted}", flush=True)
            continue
        line = f"{name:20}"
        for what in ("allocated", "reserved"):
            line += f" {measured[what]:15,} {predicted[what] / measured[what] - 1:+10.4%}"
        print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] in (["measure"], ["predict"]):
        print(json.dumps({"measure": measure, "predict": predict}[sys.argv[1]](sys.argv[2])))
    else:
        main(sys.argv[1:])

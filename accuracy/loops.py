"""Training loops as people write them, on a GPU, beside what is predicted of them.

    python -m accuracy.loops plan SPECS.jsonl            # here: adds `predicted` to every line
    python -m accuracy.loops measure SPECS.jsonl OUT     # on a GPU: OUT/measured.jsonl, and the history of what is off

A spec is a workload with an `id`. The program that is measured is plain PyTorch, transformers and peft: no line of
memfit runs in it but the names of the settings. Each runs in a process of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

AT_ONCE = 4
"""On one card: what a process has does not depend on the others, as long as there is room."""
NOT_SETTINGS = ("id", "group", "predicted", "config", "peft", "auto", "picture", "image_token")


def plan(file: Path) -> None:
    import memfit

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for spec in lines:
        settings = {name: value for name, value in spec.items() if name not in NOT_SETTINGS}
        if spec.get("predicted"):
            continue
        try:
            peak = memfit.predict(**settings, gpu="H200").peak
            spec["predicted"] = [peak.allocated_bytes, peak.reserved_bytes]
        except memfit.MemfitError as error:
            spec["predicted"] = None
            print(spec["id"], "refused:", error)
        print(spec["id"], spec["predicted"], flush=True)
        file.write_text("".join(json.dumps(each) + "\n" for each in lines))


def measure(file: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "measured.jsonl").open("w") as written, ThreadPoolExecutor(AT_ONCE) as pool:
        for result in pool.map(lambda line: _measured(line, out), file.read_text().splitlines()):
            written.write(json.dumps(result) + "\n")
            written.flush()
            print(_line(result), flush=True)


def _measured(line: str, out: Path) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, __file__, "one", line, str(out)], capture_output=True, text=True, timeout=90
        )
    except subprocess.TimeoutExpired:
        return {**json.loads(line), "error": "took more than 90 seconds"}
    found = [text[7:] for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(found[-1]) if found else {**json.loads(line), "error": done.stderr[-600:]}
    return result


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['id']} error {result['error'][-250:]!r}"
    peaks = result["peak_allocated"], result["peak_reserved"]
    if not result.get("predicted"):
        return f"{result['id']} {peaks} not predicted"
    off = [predicted / peak - 1 for predicted, peak in zip(result["predicted"], peaks, strict=True)]
    exact = "exact" if off == [0.0, 0.0] else f"allocated {off[0]:+.4%} reserved {off[1]:+.4%}"
    return f"{result['id']} {peaks[0]:,} {peaks[1]:,} {exact}"


def one(spec: dict[str, Any], out: Path) -> None:
    import torch

    cuda = torch.cuda
    cuda.init()
    cuda.memory._record_memory_history(max_entries=2_000_000, context="alloc", stacks="python")
    run(spec)
    cuda.synchronize()
    result = {
        **spec, "peak_allocated": cuda.max_memory_allocated(), "peak_reserved": cuda.max_memory_reserved(),
        "gpu": cuda.get_device_name(), "torch": torch.__version__,
    }  # fmt: skip
    print("RESULT " + json.dumps(result), flush=True)
    if spec.get("predicted") != [result["peak_allocated"], result["peak_reserved"]]:
        save_history(out / f"{spec['id']}.jsonl.gz")
    os._exit(0)


def save_history(path: Path) -> None:
    import torch

    with gzip.open(path, "wt") as written:
        for event in torch.cuda.memory._snapshot()["device_traces"][0]:
            frames = [f"{'/'.join(f['filename'].split('/')[-3:])}:{f['line']}" for f in event.get("frames") or []][:8]
            written.write(json.dumps([event["action"], event.get("addr", 0), event["size"], frames]) + "\n")


# -- the programs ------------------------------------------------------------------------------------------------------


def run(spec: dict[str, Any]) -> None:
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    precision = spec.get("precision", "bf16")
    autocast = dtypes[precision.removeprefix("amp-")] if precision.startswith("amp-") else None
    model = build(spec, torch.float32 if autocast else dtypes[precision])
    if spec["kind"] == "lora":
        model = adapted(model, spec)
    model = model.to("cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0, 0.02)
    if spec["kind"] == "forward":
        forward(model, spec, autocast)
    else:
        train(model, spec, autocast)


def build(spec: dict[str, Any], dtype: Any) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(spec["config"])
    config.use_cache = spec.get("use_cache", False)
    transformers.PreTrainedModel.initialize_weights = lambda self: None
    for name in ("Linear", "Embedding", "LayerNorm", "Conv2d"):
        getattr(torch.nn, name).reset_parameters = lambda self: None
    auto = getattr(transformers, spec.get("auto", "AutoModelForCausalLM"))
    return auto.from_config(config, dtype=dtype, attn_implementation=spec.get("attention", "sdpa"))


def adapted(model: Any, spec: dict[str, Any]) -> Any:
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = dict(spec["peft"])
    config = PEFT_TYPE_TO_CONFIG_MAPPING[settings.pop("peft_type")](**settings)
    return get_peft_model(model, config, autocast_adapter_dtype=spec.get("adapter_dtype", "fp32") == "fp32")


def train(model: Any, spec: dict[str, Any], dtype: Any) -> None:
    import torch

    model.train()
    if spec.get("grad_checkpointing"):
        if spec["kind"] == "lora":
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(spec.get("optimizer", "adamw"), parameters)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    for _ in range(3):
        for _ in range(spec.get("grad_accum", 1)):
            batch = batch_of(model, spec)
            with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                outputs = model(**batch)
            loss = outputs.loss
            if spec.get("outputs") == "dropped":
                del outputs
            scaler.scale(loss).backward()
        if spec.get("clip_grad"):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def forward(model: Any, spec: dict[str, Any], dtype: Any) -> None:
    import torch

    model.eval()
    for _ in range(3):
        batch = batch_of(model, spec)
        batch.pop("labels", None)
        with torch.no_grad(), torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            outputs = model(**batch)
        del outputs


def make_optimizer(name: str, parameters: list[Any]) -> Any:
    import torch

    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=name == "adamw-fused" or None)


def batch_of(model: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Random numbers on the GPU, by the names that a collator or a processor gives them."""
    import torch

    rows, length, config = spec["batch_size"], spec["seq_len"], model.config
    if spec.get("head") == "image-classification":
        side = config.image_size
        pixels = torch.rand((rows, 3, side, side), device="cuda")
        return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (rows,), device="cuda")}
    if "picture" in spec:
        return with_pictures(config, spec)
    words = config.vocab_size
    ids = torch.randint(0, words, (rows, length), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    if "target_len" in spec:
        text = torch.randint(0, words, (rows, spec["target_len"]), device="cuda")
        return {"input_ids": ids, "decoder_input_ids" if spec["kind"] == "forward" else "labels": text}
    if spec.get("head") in ("sequence-classification", "token-classification"):
        shape = (rows,) if spec["head"] == "sequence-classification" else (rows, length)
        batch["labels"] = torch.randint(0, config.num_labels, shape, device="cuda")
    if spec.get("padding"):
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][-1, length // 2 :] = 0
    return batch


def with_pictures(config: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """`picture` has the tokens of one, the shape of its pixels and, for Qwen's models, its grid."""
    import torch

    rows, one, token = spec["batch_size"], spec["picture"], spec["image_token"]
    count = rows * spec.get("images", 1)
    ids = torch.randint(0, 1000, (rows, spec["seq_len"]))
    for number in range(spec.get("images", 1)):
        first = number * (one["tokens"] + 1)
        ids[:, first : first + one["tokens"]] = token
    first, *rest = one["pixels"]
    batch = {"input_ids": ids.to("cuda")}
    batch |= {"labels": batch["input_ids"], "pixel_values": torch.rand((count * first, *rest), device="cuda")}
    if "grid" in one:
        batch["image_grid_thw"] = torch.tensor([one["grid"]] * count).to("cuda")
        batch["mm_token_type_ids"] = (ids == token).long().to("cuda")
    return batch


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "one":
        one(json.loads(rest[0]), Path(rest[1]))
    else:
        {"plan": plan, "measure": measure}[what](*map(Path, rest))  # type: ignore[operator]

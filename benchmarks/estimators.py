"""Public estimators beside memfit, on measured training steps of language models; writes docs/estimators.svg.

    python -m benchmarks.estimators --cookbook PATH     # asks all of them again (PATH: EleutherAI/cookbook, a clone)
    python -m benchmarks.estimators                     # draws what was noted

Each is asked for the very job: `accelerate estimate-memory` knows the model and the precision, EleutherAI's
calc_transformer_mem.py also batch, length and checkpointing, torch's MemTracker runs the step on fake tensors. They are
held against the allocated peak on an H200, which is kind to them: a card needs what is reserved, and the context.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTED = ROOT / "accuracy" / "measured" / "estimators.jsonl"
PICTURE = ROOT / "docs" / "estimators.svg"
FILES = ("given", "loops")
NAMES = {
    "accelerate": "accelerate estimate-memory",
    "cookbook": "EleutherAI cookbook",
    "mem_tracker": "torch MemTracker",
    "memfit": "memfit plan",
}
UNUSUAL = (
    "world_size",
    "offload",
    "selective_checkpointing",
    "alloc_conf",
    "padding",
    "images",
    "target_len",
    "use_cache",
)


def jobs() -> Iterator[dict[str, Any]]:
    """One process, a plain loop, AdamW, a language model that has a name."""
    from memfit.models.presets import find_preset

    for name in FILES:
        for line in (ROOT / "accuracy" / "measured" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            plain = row["kind"] == "train" and row.get("loop", "plain") == "plain" and row.get("loss", "full") == "full"
            usual = row.get("optimizer", "adamw") in ("adamw", "adamw-fused") and not any(
                row.get(key) for key in UNUSUAL
            )
            if (
                plain
                and usual
                and find_preset(row["model"])
                and row.get("precision", "bf16") in ("bf16", "fp32", "amp-bf16")
            ):
                yield row


def ask_accelerate(row: dict[str, Any], config: Any) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(empty_model(config))
    dtype = "float32" if row.get("precision") == "fp32" else "bfloat16"
    return int(max(estimate_training_usage(total, dtype).values()))


def empty_model(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def ask_cookbook(row: dict[str, Any], config: Any, cookbook: Path) -> int:
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    heads = config.num_attention_heads
    words = {
        "--hidden-size": config.hidden_size, "--num-layers": config.num_hidden_layers,
        "--num-attention-heads": heads, "--vocab-size": config.vocab_size,
        "--sequence-length": row["seq_len"], "--batch-size-per-gpu": row["batch_size"],
        "--ffn-expansion-factor": inner / config.hidden_size, "--zero-stage": 0,
        "--num-mlp-linears": 2 if config.model_type in ("gpt2", "opt", "gpt_neox") else 3,
        "--kv-size-ratio": getattr(config, "num_key_value_heads", heads) / heads,
    }  # fmt: skip
    flags = ["--checkpoint-activations"] if row.get("grad_checkpointing") else []
    flags += ["--disable-mixed-precision"] if row.get("precision") == "fp32" else []
    command = [sys.executable, str(cookbook / "calc" / "calc_transformer_mem.py"), *flags]
    said = subprocess.run(
        [*command, *(str(word) for pair in words.items() for word in pair)], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"Per-GPU Memory Required for Training: ([\d.]+) GiB", said)
    assert found, said
    return int(float(found[1]) * 2**30)


def ask_mem_tracker(row: dict[str, Any], config: Any) -> int:
    """The fake tensors lie on the CPU: without a GPU torch has no others."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import AutoModelForCausalLM

    precision, kept = row.get("precision", "bf16"), row.get("outputs", "dropped") == "kept"
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        model.config.use_cache = False
        model.train()
        if row.get("grad_checkpointing"):
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), fused=row.get("optimizer") == "adamw-fused", foreach=None)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        ids = torch.randint(0, config.vocab_size, (row["batch_size"], row["seq_len"]))
        with tracker:
            for _ in range(2):
                for _ in range(row.get("grad_accum", 1)):
                    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp-bf16"):
                        outputs = model(input_ids=ids, labels=ids)
                        loss = outputs.loss
                    if not kept:
                        del outputs
                    loss.backward()
                    tracker.reset_mod_stats()  # it follows a module through one pass
                optimizer.step()
                optimizer.zero_grad()
        found = tracker.get_tracker_snapshot("peak")
    return max(int(device["Total"]) for device in found.values())


def ask_memfit(row: dict[str, Any]) -> int:
    from accuracy.table import MEASURED
    from memfit.planning.predict import predict

    return predict(**{key: value for key, value in row.items() if key not in MEASURED}).peak.allocated_bytes


def ask_all(cookbook: Path) -> None:
    """Those that were not asked about yet: minutes each."""
    from memfit.models.registry import load_config, resolve

    known = {row["id"] for row in read_noted()} if NOTED.exists() else set()
    for row in jobs():
        if row["id"] in known:
            continue
        config = load_config(resolve(row["model"]))
        said = {
            "accelerate": ask_accelerate(row, config), "cookbook": ask_cookbook(row, config, cookbook),
            "mem_tracker": ask_mem_tracker(row, config), "memfit": ask_memfit(row),
        }  # fmt: skip
        line = json.dumps({"id": row["id"], "model": row["model"], "allocated": row["peak_allocated"], **said})
        print(line, flush=True)
        with NOTED.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_noted() -> list[dict[str, Any]]:
    return [json.loads(line) for line in NOTED.read_text(encoding="utf-8").splitlines()]


def draw(noted: list[dict[str, Any]]) -> str:
    """One row an estimator, one dot a run, by how far off it was."""
    left, width, step, widest = 210, 430, 44, 100
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 250" font-family="sans-serif" font-size="13">',
        f"<title>How far four estimators were from the measured peak of {len(noted)} training steps</title>",
        '<rect width="760" height="250" fill="#fff"/>',
    ]

    def across(off: float) -> float:
        return left + width / 2 + max(-widest, min(widest, off)) / widest * width / 2

    for off in (-100, -50, 0, 50, 100):
        label = f"{off:+d} %" if off else "exact"
        label += " or more" if off == 100 else ""
        out.append(f'<path d="M{across(off):.0f} 30V206" stroke="#{"888" if off == 0 else "ddd"}"/>')
        out.append(f'<text x="{across(off):.0f}" y="222" text-anchor="middle" fill="#555">{label}</text>')
    for number, (key, name) in enumerate(NAMES.items()):
        offs = [(row[key] / row["allocated"] - 1) * 100 for row in noted]
        y = 52 + number * step
        colour = "#0072b2" if key == "memfit" else "#d55e00"
        out.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end" fill="#111">{name}</text>')
        out += [f'<circle cx="{across(off):.1f}" cy="{y}" r="4.5" fill="{colour}" fill-opacity=".45"/>' for off in offs]
        median = statistics.median(map(abs, offs))
        said = f"median {median:.0f} %" if median >= 0.5 else f"median {median:.2g} %"
        out.append(f'<text x="{left + width + 14}" y="{y + 4}" fill="#111">{said}</text>')
    out.append(
        f'<text x="{left + width / 2:.0f}" y="243" text-anchor="middle" fill="#555">predicted against the allocated'
        f" peak measured on an H200, {len(noted)} training steps</text></svg>"
    )
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cookbook", type=Path)
    asked = parser.parse_args()
    if asked.cookbook:
        ask_all(asked.cookbook)
    noted = read_noted()
    PICTURE.write_text(draw(noted), encoding="utf-8")
    for key, name in NAMES.items():
        offs = sorted((row[key] / row["allocated"] - 1) * 100 for row in noted)
        print(f"{name:28} median {statistics.median(map(abs, offs)):8.3f} %   {offs[0]:+8.2f} % to {offs[-1]:+8.2f} %")


if __name__ == "__main__":
    main()

"""The table of config keys in docs/training.md, from the dataclasses themselves.

`python tests/jobs/training/config_table.py` writes it anew.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from memfit.jobs.settings import Optimizer
from memfit.jobs.training import config
from memfit.jobs.training.config import DOCUMENT
from memfit.jobs.training.config_file import config_from
from memfit.jobs.training.config_names import type_of

PAGE = Path(__file__).parents[3] / "docs" / "training.md"
BEGIN, END = "<!-- keys -->\n", "<!-- end of keys -->\n"
OF_SETTINGS = {
    "method.target_modules": "None: all linear layers of a block.",
    "method.adapter_dtype": "fp32, as peft makes adapters whatever the base model has; `same` as the base otherwise.",
    "precision": "Of the weights; amp is autocast over fp32 weights, with a gradient scaler for fp16. fp16 itself is "
    "for LoRA: where all weights are trained, small updates would be lost.",
    "autocast": "The type of the autocast region, whatever the weights are. None: what the precision says.",
    "quant.kind": "The base model's linear layers in 4 or 8 bits, by bitsandbytes: `load_in_4bit`, `load_in_8bit`. "
    "For LoRA.",
    "quant.double": "Scales of 4-bit weights are quantised too: `bnb_4bit_use_double_quant`.",
    "quant.compute": "The type in which 4-bit layers compute, `bnb_4bit_compute_dtype`. "
    "None: that of the other weights.",
    "quant.prepare": "peft's `prepare_model_for_kbit_training`: every weight that is not quantised becomes fp32. "
    "None: yes.",
    "optimizer.weight_decay": "Not on biases and norms.",
    "optimizer.momentum": "Of sgd.",
    "memory.offload": "What lies on the host: optimizer, activations, weights (frozen base layers of LoRA).",
    "memory.alloc_conf": "PYTORCH_CUDA_ALLOC_CONF, set before CUDA starts.",
    "loss.kind": "chunked: the same loss and gradients, the logits never whole.",
    "loss.chunk": "Tokens at a time.",
    "parallel.kind": "Of no effect in a single process.",
}
"""What keys that are settings of a `Workload` mean in a config."""


def said_of() -> dict[tuple[str, str], str]:
    """What stands below each field in the source."""
    found = {}
    for made in ast.parse(inspect.getsource(config)).body:
        if isinstance(made, ast.ClassDef):
            for field, below in zip(made.body, made.body[1:], strict=False):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                    text = str(below.value.value)  # type: ignore[attr-defined]
                    found[made.name, field.target.id] = " ".join(text.split())
    return found


def rows() -> Iterator[str]:
    said = said_of()
    usual = config_from({"model": "gpt2"})
    for section, names in DOCUMENT.items():
        for key in [f"{section}.{name}" for name in names] or [section]:
            if key == "name":
                continue
            owner = f"{section.title()}Config" if names else "TrainConfig"
            yield row(key, usual.value(key), OF_SETTINGS.get(key) or said.get((owner, key.rpartition(".")[2]), ""))


def row(key: str, usual: object, text: str) -> str:
    what = "; ".join(part for part in (choices(key), text.replace("None: ", "If not given: ")) if part)
    return f"| `{key}` | {'' if key == 'model.name' else shown(usual)} | {what} |"


def choices(key: str) -> str:
    hint = Optimizer if key == "optimizer.name" else type_of(key)
    return ", ".join(f"`{each}`" for each in get_args(hint)) if get_origin(hint) is Literal else ""


def shown(value: object) -> str:
    if value in (None, "", [], {}):
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"`{value}`"


def table() -> str:
    return "\n".join(["| key | default | |", "|---|---|---|", *rows()]) + "\n"


def written(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

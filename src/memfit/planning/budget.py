"""The budget of a training job as a table: a row for each thing that takes memory, and their sum.

The rows are what is alive when most is allocated. What the allocator holds beyond that, and what CUDA itself takes, are
the last row, so that the total is what the card must have. Where the job fits only because torch gives back what is
idle, or not at all, that is the smallest card that takes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.planning.predict import Plan
from memfit.units import gib

OF_ADAPTERS = "lora_"
"""In the names of the weights that peft adds."""
ACTIVATIONS, LOSS = ("activations", "temporaries"), ("loss",)


def budget_of(plan: Plan) -> dict[str, int]:
    """The overhead is workspaces of the libraries, what the allocator holds beyond the peak, and CUDA's context."""
    parts = plan.report.breakdown
    adapters = _adapter_bytes(plan)
    named = {
        "base_bytes": parts["weights"] - adapters, "adapter_bytes": adapters,
        "activation_bytes": sum(parts[name] for name in ACTIVATIONS), "loss_bytes": sum(parts[name] for name in LOSS),
        "gradient_bytes": parts["gradients"], "optimizer_bytes": parts["optimizer"],
    }  # fmt: skip
    needed = plan.needed_bytes
    return {**named, "overhead_bytes": needed - sum(named.values()), "total_bytes": needed}


def _adapter_bytes(plan: Plan) -> int:
    trace, sizes = plan.trace, plan.timeline.size
    return sum(
        int(sizes[block])
        for block in plan.report.alive.tolist()
        if trace.category(block) == "weights" and OF_ADAPTERS in trace.module(block)
    )


def table(columns: dict[str, Plan]) -> Iterator[str]:
    """As lines of text, a column for each plan."""
    budgets = [budget_of(plan) for plan in columns.values()]
    last = list(columns.values())[-1]
    rows = [(label, [each[f"{name}_bytes"] for each in budgets]) for name, label in _labels(last)]
    width = max(len(label) for label, _ in rows)
    wide = [max(len(title), 11) for title in columns]
    yield "  " + " " * width + "".join(f"  {title:>{each}}" for title, each in zip(columns, wide, strict=True))
    for label, values in rows:
        yield f"  {label:<{width}}" + "".join(f"  {gib(v):>{each}}" for v, each in zip(values, wide, strict=True))


def _labels(plan: Plan) -> list[tuple[str, str]]:
    work = plan.workload
    of_base = work["precision"].replace("amp-bf16", "fp32").replace("amp-fp16", "fp32")
    rows = [("base", f"Base model ({of_base if work.get('quant', 'none') == 'none' else work['quant']})")]
    if work["kind"] == "lora":
        dtype = "fp32" if work["adapter_dtype"] == "fp32" else work["precision"]
        rows.append(("adapter", f"LoRA adapters (rank {work['rank']}, {dtype})"))
    return [
        *rows,
        ("activation", f"Activations ({work['batch_size']} x {work['seq_len']:,} tokens)"),
        ("loss", "Logits and loss"),
        ("gradient", "Gradients"),
        ("optimizer", f"Optimizer states ({work['optimizer']})"),
        ("overhead", "Buffer/overhead (allocator, workspaces, CUDA)"),
        ("total", "Total"),
    ]

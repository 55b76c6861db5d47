"""Record on a GPU what single ops allocate: the probes of tests/data/h200-ops.json.

    python -m accuracy.record_ops PROBES.json RECORDED.json

PROBES is a list of objects with `name` and `spec`, as the recorded file itself has under `probes`; how an op is run is
in tests/tracing/ops.py. Each is run once to warm up, then with the allocator's history on.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tracing"))


def recorded_events(run: Callable[[], None]) -> str:
    import torch

    memory = torch.cuda.memory
    gc.collect()
    torch.cuda.synchronize()
    memory._record_memory_history(enabled=None)
    memory._record_memory_history(max_entries=200_000, context=None)
    run()
    torch.cuda.synchronize()
    entries = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(enabled=None)
    numbers: dict[int, int] = {}
    words: list[str] = []
    for entry in entries:
        if entry["action"] == "alloc":
            numbers[entry["addr"]] = sum(word[0] == "+" for word in words)
            words.append(f"+{entry['size']}")
        elif entry["action"] == "free_completed":
            words.append(f"-{numbers.pop(entry['addr'], '?')}")
    return " ".join(words)


def record(probe: dict[str, Any]) -> dict[str, Any]:
    import ops
    import torch

    choices: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **options: Any) -> Any:
        choices.append(int(torch._fused_sdp_choice(*args, **options)))
        return attention(*args, **options)

    try:
        run = ops.BUILDERS[probe["name"]](*probe["spec"])
        torch.nn.functional.scaled_dot_product_attention = watched
        for _ in range(max(1, ops.WARMED.get(probe["name"], 1))):
            run()
        torch.nn.functional.scaled_dot_product_attention = attention
        events = recorded_events(run)
    except Exception as error:
        events = f"ERR {type(error).__name__}: {error}"[:300].replace("\n", " ")
    finally:
        torch.nn.functional.scaled_dot_product_attention = attention
    made = {"name": probe["name"], "spec": probe["spec"], "events": events}
    return made | ({"choice": choices[0]} if choices else {})


def main() -> None:
    import torch

    source, target = map(Path, sys.argv[1:3])
    found: list[dict[str, Any]] = []
    for probe in json.loads(source.read_text()):
        found.append(record(probe))
        if torch.cuda.memory_reserved() > 12 << 30:
            torch.cuda.empty_cache()
    info = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda}
    target.write_text(json.dumps({"info": info, "probes": found}))


if __name__ == "__main__":
    main()

"""How a command walks through the rooms of memfit: files, functions, changes of room, what runs more than once.

    PYTHONPATH=src python3 -m benchmarks.walk                # `plan lora`, cold, and `train --dry-run`
    PYTHONPATH=src python3 -m benchmarks.walk plan --list    # every function in the order of its first call

Files are noted in the order in which a function of theirs is first called: a change of room is one between two files
that follow each other there, which is how often somebody who reads along goes to another folder. Files beside the rooms
(units, errors) are everybody's, and count as no room. What runs while a module is imported does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PLAN = "plan lora --model llama-3.2-1b --batch-size 2 --seq-len 512 --rank 16 --no-trace-cache"
TRAIN = "train --config tiny.yaml --dry-run"
CONFIG = """\
model: {name: ./tiny, tokenizer: bytes, from_scratch: true}
data: {source: text.txt}
method: {kind: lora, rank: 4}
max_seq_len: 64
max_steps: 2
micro_batch_size: 2
global_batch_size: 4
device: cpu
precision: fp32
output_dir: out
"""
MODEL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
WATCHED = {
    "models/registry.py resolve": "resolve()",
    "jobs/workload.py __post_init__": "checks of a workload",
    "jobs/workload.py settings": "Workload.settings()",
}
NAMELESS = ("<module>", "<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


@dataclass
class Walk:
    root: Path
    first: list[tuple[str, str]] = field(default_factory=list)
    """File and function, in the order of their first calls."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    _known: dict[CodeType, tuple[str, str] | None] = field(default_factory=dict)
    _importing: int = 0

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            self._importing += 1 if event == "call" else -1
        if event != "call" or self._importing:
            return
        if code not in self._known:
            self._known[code] = self._place(code)
            if (place := self._known[code]) is not None:
                self.first.append(place)
        if (place := self._known[code]) is not None:
            self.calls[place] += 1

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        try:
            file = str(Path(code.co_filename).relative_to(self.root))
        except ValueError:
            return None
        if code.co_name in NAMELESS:
            return None
        return file, code.co_name

    @property
    def rooms(self) -> list[str]:
        """As they are entered; what stands in no room is passed over."""
        inside = [file.split(os.sep)[0] for file in dict.fromkeys(file for file, _ in self.first) if os.sep in file]
        return [room for i, room in enumerate(inside) if i == 0 or inside[i - 1] != room]

    def figures(self) -> str:
        files = {file for file, _ in self.first}
        lines = [
            f"{len(files)} files, {len(self.first)} functions, {len(self.rooms) - 1} changes of room",
            *(f"{self.often(place):>6} x  {word}" for place, word in WATCHED.items()),
            " > ".join(self.rooms),
        ]
        return "\n".join(lines)

    def often(self, place: str) -> int:
        file, name = place.split()
        return sum(count for (where, what), count in self.calls.items() if what == name and where == file)


@contextlib.contextmanager
def profiled(walk: Walk) -> Iterator[None]:
    threading.setprofile(walk.see)
    sys.setprofile(walk.see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def run(line: str) -> Walk:
    import memfit
    from memfit.cli.main import main as command

    walk = Walk(Path(memfit.__file__).parent)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out), profiled(walk):
        code = command(line.split())
    if code not in (0, 1):
        raise SystemExit(f"`memfit {line}` ended with {code}")
    return walk


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description="How a command walks")
    parser.add_argument("which", nargs="*", choices=["plan", "train", []], help="both by default")
    parser.add_argument("--list", action="store_true", help="list every function in the order of its first call")
    asked = parser.parse_args(argv)
    os.environ["MEMFIT_CACHE"] = "off"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("tiny.yaml").write_text(CONFIG, encoding="utf-8")
        Path("text.txt").write_text("to be or not to be. " * 400, encoding="utf-8")
        Path("tiny").mkdir()
        Path("tiny", "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for which in asked.which or ["plan", "train"]:
            line = PLAN if which == "plan" else TRAIN
            walk = run(line)
            print(f"memfit {line}\n{walk.figures()}\n")
            if asked.list:
                print("\n".join(f"  {file:<40} {name}" for file, name in walk.first))
    return 0


if __name__ == "__main__":
    sys.exit(main())

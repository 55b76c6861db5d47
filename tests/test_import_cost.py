"""`memfit --help` is instant, and everything that needs no prediction answers without torch."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

from support.warm_python import warm_python

HEAVY = ["torch", "transformers", "peft", "accelerate", "numpy"]
NOT_FOR_TEXT = ["pydantic", "rich.progress", "memfit.cli.running"]

SCRIPT = """
import contextlib, io, json, sys
from memfit.cli.main import main

heavy, lines = json.loads(sys.argv[1])
sys.executable = sys.argv[2]  # of the process in which `check` tries an import
loaded = {}
for line in lines:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = main(line.split())
    loaded[line] = [code, [name for name in heavy if name in sys.modules]]
print(json.dumps(loaded))
"""

ANSWERS = {
    "--help": 0,
    "--version": 0,
    "plan --help": 0,
    "fit --help": 0,
    "fit lora --help": 0,
    "fit lora --model gtp2 --gpu 24GB": 2,
    "fit lora --model gpt2 --gpu 24GB --emit toml": 2,
    "plan lora --help": 0,
    "plan batch --help": 0,
    "prune --help": 0,
    "train --help": 0,
    "train --config smollm2-lora-demo --set rnak=3": 2,
    "check --help": 0,
    "check": 0,
    "check lora --model gtp2": 2,
    "report --help": 0,
    "diff --help": 0,
    "export --help": 0,
    "models": 0,
    "models --json": 0,
    "gpus": 0,
    "plan train --model gtp2": 2,
    "plan train --model gpt2 --gpu nonsense": 2,
    "plan train --model gpt2 --batch-size 0": 2,
    "prune --model ./nowhere --sparsity_ratio 2": 2,
}


def test_nothing_heavy_is_imported_before_a_prediction_starts() -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps([HEAVY, list(ANSWERS)]), warm_python()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout) == {line: [code, []] for line, code in ANSWERS.items()}


def test_a_plan_imports_neither_what_converts_text_nor_other_commands() -> None:
    lines = [line for line in ANSWERS if line.startswith("plan") and "gtp2" not in line]
    command = [sys.executable, "-c", SCRIPT, json.dumps([NOT_FOR_TEXT, lines]), warm_python()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout) == {line: [ANSWERS[line], []] for line in lines}


def test_help_answers_within_two_seconds_of_work() -> None:
    """About half a second; torch alone would take more than the limit. A busy machine takes longer for the same."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "memfit", "--help"], capture_output=True, check=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 2

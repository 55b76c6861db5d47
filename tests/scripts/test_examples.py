"""The programs in examples/scripts, each planned as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import memfit

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
NEEDS = {
    "plain_loop.py --layers 2 --seq_len 64": (),
    "trainer.py --layers 2 --seq_len 64 --bf16 True --output_dir out --report_to none": (),
    "trl_sft.py": ("trl", "datasets"),
    "trl_dpo.py": ("trl", "datasets"),
    "trl_grpo.py": ("trl", "datasets"),
    "diffusers_lora.py --size 16": ("diffusers",),
}


@pytest.mark.filterwarnings("ignore")  # of other people's packages
@pytest.mark.parametrize("command", NEEDS)
def test_an_example_is_planned_as_it_is(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS[command]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: `make test-all` does")
    monkeypatch.chdir(tmp_path)
    plan = memfit.trace_script(f"{SCRIPTS}/{command}", gpu="24GB")
    assert plan.verdict == "safe" and any(note.startswith("stopped after") for note in plan.notes)
    named = {Path(each["file"]).name for each in plan.to_json()["lines"]}
    assert command.split()[0] in named
    assert not list(tmp_path.rglob("*.safetensors"))

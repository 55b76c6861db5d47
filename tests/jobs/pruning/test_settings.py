"""What may be asked of a pruning run, and the words for what may not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from memfit.errors import UsageError
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.settings import Sparsity


def test_the_defaults_are_those_of_the_guides() -> None:
    made = PruneSettings.asked(model="m").to_json()
    asked = {"method": "wanda", "sparsity_ratio": 0.5, "sparsity_type": "unstructured", "nsamples": 128, "seqlen": 2048}
    assert {name: made[name] for name in asked} == asked
    assert (made["dataset"], made["seed"], made["save"]) == ("wikitext2", 0, None)


@pytest.mark.parametrize(("kind", "expected"), [("2:4", (2, 4, 0.5)), ("4:8", (4, 8, 0.5)), ("1:4", (1, 4, 0.25))])
def test_n_of_m_removes_n(kind: str, expected: tuple[int, int, float]) -> None:
    made = Sparsity.parse(kind)
    assert (made.removed, made.group, made.ratio) == expected
    assert made.kind == kind


def test_a_ratio_beside_groups_must_agree() -> None:
    assert Sparsity.parse("2:4", 0.5) == Sparsity.parse("2:4")
    with pytest.raises(UsageError, match=r"--sparsity-ratio 0\.6 is not 2:4, which removes 0\.5"):
        Sparsity.parse("2:4", 0.6)


@pytest.mark.parametrize("kind", ["4:4", "0:4", "5:4", "2-4", "2:4:8", "half", "", "-2:4", "2:99999"])
def test_an_impossible_type_is_told(kind: str) -> None:
    with pytest.raises(UsageError, match="--sparsity-type"):
        Sparsity.parse(kind)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan"), True, "0.5"])
def test_an_impossible_ratio_is_told(ratio: Any) -> None:
    with pytest.raises(UsageError, match="--sparsity-ratio"):
        Sparsity.parse("unstructured", ratio)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"method": "wonda"}, "--method 'wonda' is not one of magnitude, wanda, sparsegpt, ria"),
        ({"nsamples": 0}, "--nsamples 0 is not a whole number"),
        ({"seqlen": 2.5}, "--seq-len 2.5 is not a whole number"),
        ({"seed": -1}, "--seed -1"),
        ({"model": " "}, "model must be a name"),
        ({"dataset": ""}, "--dataset '' is not text"),
        ({"max_gpu_memory": 0}, "--max-gpu-memory 0 is not a size"),
        ({"use_variant": True, "method": "ria"}, "--use-variant belongs to --prune-method wanda"),
        ({"use_variant": True, "sparsity_type": "2:4"}, "--use-variant is not defined for"),
        ({"use_variant": True, "allocation": "owl"}, "beside --allocation uniform only"),
        ({"allocation": "owl", "method": "magnitude"}, "--allocation owl needs calibration data"),
        ({"resume": True}, "--resume continues what --save began"),
    ],
)
def test_what_cannot_be_is_told_with_the_flag(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        PruneSettings.asked(**{"model": "m", **wrong})
    assert words in str(raised.value)


def test_settings_need_no_torch() -> None:
    code = "import sys, memfit.jobs.pruning.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

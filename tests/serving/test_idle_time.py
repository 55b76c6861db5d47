"""Whoever moves a slider waits for one trace at most; what tells the next positions is traced while nobody asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.planning import few
from memfit.serving import planned

LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def test_a_question_waits_for_one_trace_and_idle_time_tells_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    traced: list[tuple[int, int]] = []
    trace = few.trace_few_blocks

    def counted(work: Any, platform: Any) -> Any:
        traced.append((work.batch_size, work.seq_len))
        return trace(work, platform)

    monkeypatch.setattr(few, "trace_few_blocks", counted)

    def asked(batch: int, length: int) -> str:
        job = {"kind": "forward", "model": str(tmp_path), "batch_size": batch, "seq_len": length, "precision": "fp32"}
        way: str = planned.plan_job(job, None)["plan"]["how"]["way"]
        return way

    points = [(2, 64), (3, 100), (4, 72), (5, 90), (6, 80), (7, 110), (6, 70), (5, 84)]
    for point in points:
        before = len(traced)
        asked(*point)
        assert traced[before:] in ([], [point])

    in_idle_time = 0
    before = len(traced)
    while planned.use_idle_time():
        in_idle_time += 1
        assert len(traced) <= before + in_idle_time + 1, "a line and its corner are the most that one step traces"
    assert len(traced) > before
    known = len(traced)
    assert asked(4, 88) == "interpolated"
    assert len(traced) == known

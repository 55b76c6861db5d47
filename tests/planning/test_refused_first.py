"""Many jobs of which the first is refused: each answer is of its own job, and says what decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memfit.planning import traced
from memfit.planning.many import Refusal, predict_many

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def model(folder: Path, said: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY, "quantization_config": said}))
    return str(folder)


def refusals(jobs: list[dict[str, Any]]) -> list[str]:
    return [each.message for each in predict_many(jobs) if isinstance(each, Refusal)]


def test_a_first_job_that_is_refused_refuses_no_other(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(traced, "_first", None)
    names = [model(tmp_path / name, {"quant_method": name}) for name in ("aaa", "bbb", "ccc")]
    said = refusals([{"kind": "forward", "model": name, "seq_len": 8} for name in names])
    assert [name in each for name, each in zip(("'aaa'", "'bbb'", "'ccc'"), said, strict=True)] == [True] * 3


def test_settings_of_4_bit_weights_leave_a_stored_checkpoint_as_it_is(tmp_path: Path) -> None:
    job = {"kind": "forward", "model": model(tmp_path / "a", NF4), "seq_len": 8}
    for each in refusals([job | {"double_quant": False}, job | {"quant_compute": "fp16"}]):
        assert "a checkpoint that is stored so says it in its config.json" in each
    (said,) = refusals([job | {"double_quant": "yes"}])
    assert said.endswith("is true or false, not 'yes'")


def test_a_word_where_yes_or_no_is_wanted_is_told_with_a_next_step() -> None:
    (refusal,) = predict_many([{"kind": "train", "model": "gpt2", "compile": "max-autotune"}])
    assert isinstance(refusal, Refusal)
    assert refusal.hint == "write true or false without quotes, or leave it out"

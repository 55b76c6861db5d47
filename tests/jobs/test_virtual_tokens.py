"""Tokens that an adapter puts before each row take positions of the model, too."""

from __future__ import annotations

import pytest

import memfit
from memfit.errors import UsageError


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(2000, "and num_virtual_tokens 2000 is more than the 1024 positions"), (-1, "not a whole number above 0")],
)
def test_virtual_tokens_count_as_positions(tokens: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        memfit.predict(
            kind="lora", model="gpt2", seq_len=64, adapter="prompt", adapter_config={"num_virtual_tokens": tokens}
        )

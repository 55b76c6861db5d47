"""A value where a config has a section: the error says what it wants."""

from __future__ import annotations

import pytest

from memfit.errors import UsageError
from memfit.jobs.training.config_file import canonical


@pytest.mark.parametrize("key", ["quantization_config", "bnb_config", "saving", "training.quantization_config"])
def test_a_number_in_place_of_a_section_is_no_unknown_key(key: str) -> None:
    with pytest.raises(UsageError, match=f"^{key} is 5, not a section of keys and values"):
        canonical({key: 5})

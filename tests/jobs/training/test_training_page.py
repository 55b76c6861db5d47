"""docs/training.md says what the code does."""

from __future__ import annotations

from config_table import PAGE, table

from memfit.jobs.training.config_file import shipped_configs


def test_every_key_of_a_config_is_on_the_page() -> None:
    """`python tests/jobs/training/config_table.py` writes the table anew."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_every_shipped_config_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in shipped_configs())

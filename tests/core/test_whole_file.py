from __future__ import annotations

from pathlib import Path

import pytest

from memfit.core.whole_file import written_whole


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with written_whole(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as beside:
        beside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

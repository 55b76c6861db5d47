"""GSA trained by memfit: from scratch, on either path, and on from the weights that an earlier run left in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import run, tiny_job, weights
from training_folder import TINY_GSA

from memfit.jobs.training.loops import find_unused_parameters


def gsa(**settings: Any) -> dict[str, Any]:
    return {"model": {"name": "gsa", "tokenizer": "bytes", "settings": {**TINY_GSA, **settings}}}


def test_both_paths_and_both_losses_learn_the_same(tmp_path: Path) -> None:
    runs = {
        f"{path}-{loss}": run(tmp_path, **gsa(path=path), loss=loss, output_dir=str(tmp_path / f"{path}-{loss}"))[0]
        for path in ("gather", "masked")
        for loss in ("full", "chunked")
    }

    first, *others = runs.values()
    assert first.losses[4] < first.losses[1]
    for other in others:
        assert other.losses == pytest.approx(first.losses, rel=1e-4)


def test_a_folder_with_gsa_s_weights_is_a_model_to_train(tmp_path: Path) -> None:
    first, _ = run(tmp_path, **gsa(), output_dir=str(tmp_path / "first"))
    folder = tmp_path / "first" / "step_4"
    more = {"model": {"name": str(folder), "tokenizer": "bytes"}, "output_dir": str(tmp_path / "more")}

    job = tiny_job(tmp_path, **more)
    second, _ = run(tmp_path, **more)

    assert find_unused_parameters(job)  # no gradient reaches the indexer, whatever the model is called
    assert second.losses[1] < first.losses[1]
    assert weights(tmp_path / "more" / "step_4").keys() == weights(folder).keys()

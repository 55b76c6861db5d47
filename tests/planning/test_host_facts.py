"""What lies on the host, told from a few blocks, is what a trace of all of them counts."""

from __future__ import annotations

from typing import Any

import pytest
from miniatures import Miniatures, all_blocks

from memfit.events import Trace
from memfit.extrapolation.blocks import NotRepeating
from memfit.jobs.training import offload
from memfit.jobs.workload import Workload
from memfit.planning import few
from memfit.planning import interpolation as families
from memfit.planning import traced as traced_plans
from memfit.planning.few import blocks_of
from memfit.planning.traced import HOST, Provenance, Recipe, trace_workload
from memfit.platform import H200

JOBS: dict[str, dict[str, Any]] = {
    # The embedding and the head are trained too: the optimizer's share does not grow with the blocks alone.
    "train": {"kind": "train", "offload": ("optimizer",), "optimizer": "adamw-fused"},
    "lora": {"kind": "lora", "offload": ("optimizer", "activations", "weights"), "grad_checkpointing": True, "rank": 4},
}


@pytest.mark.parametrize("job", JOBS)
def test_host_facts_of_few_blocks_are_those_of_all(
    job: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "LEAST", 1)
    work = Miniatures(tmp_path_factory.mktemp("host")).work("llama", 8, **JOBS[job])
    blocks, _ = blocks_of(work.source, work.attention)
    assert blocks is not None and blocks.worthwhile and blocks.traced < 8

    told, (full, prepared) = trace_workload(work, H200, cached=False), all_blocks(work)

    assert told.trace.facts[HOST] == full.facts[HOST]
    assert set(told.trace.facts[HOST]) == set(JOBS[job]["offload"])
    weights = sum(each.numel() * each.element_size() for each in prepared.trainable)
    assert told.trace.facts[HOST]["optimizer"] == 2 * weights


def test_a_model_of_which_more_grows_than_its_blocks_is_not_told_from_few(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    work = Miniatures(tmp_path_factory.mktemp("host")).work("llama", 8, kind="forward")
    blocks, parameters = blocks_of(work.source, work.attention)
    assert blocks is not None
    for counted in (parameters - 1, parameters + 1):
        with pytest.raises(NotRepeating, match="they are not all that grows with the number of layers"):
            few._of_few(work, H200, blocks, counted)


def test_a_plan_that_is_told_from_other_shapes_has_what_lies_on_the_host() -> None:
    """Of activations as many times as much as it has tokens; of weights and the optimizer the same."""
    work = Workload(kind="lora", model="gpt2", batch_size=6, seq_len=100)
    traced = Recipe(
        trace=Trace(facts={HOST: {"weights": 70, "optimizer": 50, "activations": 1000}, "lists": [1]}), parameters=1,
        trainable_parameters=1, settings={"batch_size": 2, "seq_len": 150}, notes=(), how=Provenance(),
    )  # fmt: skip
    recipe = families._PieceFacts.make(traced, frozenset()).recipe

    assert recipe.trace.facts == {HOST: {"weights": 70, "optimizer": 50, "activations": 1000}}
    told = traced_plans._told(work, families.Interpolation(recipe, Trace(), 5))
    assert told.trace.facts[HOST] == {"weights": 70, "optimizer": 50, "activations": 2000}

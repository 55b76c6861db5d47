"""The engine against pruning in memory, bit for bit on the CPU, for every family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import in_memory
import pytest
import torch
from tiny_models import FAMILIES, tiny_folder, tiny_model, tiny_windows
from torch import Tensor

from memfit.errors import InputError, UsageError
from memfit.jobs.pruning.decoder import Decoder
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.output import OutputFolder
from memfit.jobs.pruning.result import PruningOutcome
from memfit.jobs.pruning.settings import PruneSettings
from memfit.jobs.settings import PRUNE_METHODS, Sparsity

SIZE = 2
"""Windows in a micro-batch; five windows make two whole ones and a half."""
DENSE = [name for name in FAMILIES if name not in ("mixtral", "qwen3_moe")]


def pruned(folder: Path, save: Path, **changes: Any) -> tuple[Any, PruningOutcome]:
    """The model that the engine saves, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    settings = changes.pop("settings", {})
    decoder = Decoder.open(folder)
    windows = tiny_windows()
    output = OutputFolder.create(save, decoder, {})
    with Engine(decoder, device="cpu", micro_batch=SIZE, **changes) as engine:
        asked = PruneSettings.asked(model=str(folder), nsamples=len(windows), seqlen=windows.shape[1], **settings)
        outcome = engine.prune(asked, windows, output=output)
        output.finish()
    return AutoModelForCausalLM.from_pretrained(save).eval(), outcome


def same_weights(one: Any, other: Any) -> list[str]:
    """Names of those that are not."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize("family", DENSE)
def test_wanda_comes_to_the_weights_of_pruning_in_memory(family: str, tmp_path: Path) -> None:
    expected = tiny_model(family)
    in_memory.prune_in_memory(expected, tiny_windows(), SIZE, in_memory.wanda(0.5))

    made, outcome = pruned(tiny_folder(tmp_path, family), tmp_path / "out")

    assert same_weights(made, expected) == []
    assert outcome.sparsity == 0.5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_groups_of_columns_come_to_the_weights_of_pruning_in_memory(family: str, tmp_path: Path) -> None:
    expected = tiny_model(family)
    in_memory.prune_in_memory(expected, tiny_windows(), SIZE, in_memory.wanda_groups(2, 4))

    made, _ = pruned(tiny_folder(tmp_path, family), tmp_path / "out", settings={"sparsity_type": "2:4"})

    assert same_weights(made, expected) == []


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sparsegpt_comes_to_the_weights_of_pruning_in_memory(family: str, tmp_path: Path) -> None:
    expected = tiny_model(family)
    in_memory.prune_in_memory(expected, tiny_windows(), SIZE, in_memory.sparsegpt(0.5, 5))

    made, _ = pruned(tiny_folder(tmp_path, family), tmp_path / "out", settings={"method": "sparsegpt"})

    assert same_weights(made, expected) == []


def test_magnitude_needs_neither_data_nor_passes(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    with Engine(Decoder.open(folder), device="cpu") as engine:
        outcome = engine.prune(PruneSettings.asked(model="-", method="magnitude"), None)
    assert outcome.sparsity == 0.5
    assert outcome.host_peak_bytes < 1 << 20


@pytest.mark.parametrize("family", list(FAMILIES))
def test_windows_that_ride_along_leave_the_blocks_as_they_leave_the_saved_model(family: str, tmp_path: Path) -> None:
    folder, windows = tiny_folder(tmp_path, family), tiny_windows(3, seed=2)
    decoder = Decoder.open(folder)
    output = OutputFolder.create(tmp_path / "out", decoder, {})
    with Engine(decoder, device="cpu", micro_batch=SIZE) as engine:
        outcome = engine.prune(
            PruneSettings.asked(model="-", nsamples=5, seqlen=16),
            tiny_windows(),
            output=output,
            pruned=windows,
        )
        output.finish()
        assert outcome.pruned_states is not None
        dense = engine.embed(windows)
        engine.run_blocks(dense)
        made = [logits_of(engine, states) for states in (dense, outcome.pruned_states)]

    from transformers import AutoModelForCausalLM

    for logits, path in zip(made, (folder, tmp_path / "out"), strict=True):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        with torch.no_grad():
            expected = [model(windows[first : first + SIZE]).logits for first in range(0, 3, SIZE)]
        assert torch.equal(logits, torch.cat(expected))


def logits_of(engine: Engine, states: Any) -> Tensor:
    with engine.tail():
        return torch.cat([engine.logits(hidden) for _, hidden in states.batches()])


def test_the_tail_may_be_asked_for_a_few_tokens_at_a_time(tmp_path: Path) -> None:
    with Engine(Decoder.open(tiny_folder(tmp_path, "gemma2")), device="cpu", micro_batch=SIZE) as engine:
        states = engine.embed(tiny_windows(2))
        engine.run_blocks(states)
        (_, hidden), *_ = states.batches()
        with engine.tail():
            whole = engine.logits(hidden)
            parts = torch.cat([engine.logits(hidden[:, i : i + 5]) for i in range(0, 16, 5)], dim=1)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_hidden_states_on_the_host_change_nothing(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    one, outcome = pruned(folder, tmp_path / "one", where="device")
    other, offloaded = pruned(folder, tmp_path / "other", where="host")
    assert same_weights(one, other) == []
    assert (outcome.hidden_on, offloaded.hidden_on) == ("device", "host")
    assert offloaded.host_peak_bytes - outcome.host_peak_bytes == 5 * 16 * 32 * 4


@pytest.mark.parametrize("method", PRUNE_METHODS)
@pytest.mark.parametrize("kind", ["unstructured", "2:4", "3:8"])
def test_every_method_removes_what_was_asked(method: Any, kind: str, tmp_path: Path) -> None:
    sparsity = Sparsity.parse(kind)
    with Engine(Decoder.open(tiny_folder(tmp_path, "llama")), device="cpu", micro_batch=SIZE) as engine:
        outcome = engine.prune(PruneSettings.asked(model="-", method=method, sparsity_type=kind), tiny_windows())
    assert outcome.sparsity == sparsity.ratio
    assert {matrix.sparsity for block in outcome.blocks for matrix in block.matrices} == {sparsity.ratio}


def test_the_variant_of_wanda_comes_near_the_ratio(tmp_path: Path) -> None:
    with Engine(Decoder.open(tiny_folder(tmp_path, "llama")), device="cpu", micro_batch=SIZE) as engine:
        outcome = engine.prune(PruneSettings.asked(model="-", use_variant=True), tiny_windows())
    assert abs(outcome.sparsity - 0.5) < 0.01


def test_owl_gives_blocks_different_shares_and_keeps_the_mean(tmp_path: Path) -> None:
    with Engine(Decoder.open(tiny_folder(tmp_path, "llama")), device="cpu", micro_batch=SIZE) as engine:
        outcome = engine.prune(PruneSettings.asked(model="-", allocation="owl"), tiny_windows())
    assert max(outcome.ratios) - min(outcome.ratios) == pytest.approx(0.16)
    assert sum(outcome.ratios) / 3 == pytest.approx(0.5)


def test_reconstruction_brings_the_blocks_nearer_to_the_dense_ones(tmp_path: Path) -> None:
    folder, windows = tiny_folder(tmp_path, "llama"), tiny_windows()

    def error(*, reconstruct: bool) -> float:
        with Engine(Decoder.open(folder), device="cpu", micro_batch=SIZE) as engine:
            settings = PruneSettings.asked(model="-", reconstruct=reconstruct)
            dense = engine.embed(windows)
            engine.run_blocks(dense)
            outcome = engine.prune(settings, windows, pruned=windows)
            assert outcome.sparsity == 0.5
            assert outcome.pruned_states is not None
            pairs = zip(dense.batches(), outcome.pruned_states.batches(), strict=True)
            return sum(float((x - y).square().sum()) for (_, x), (_, y) in pairs)

    assert error(reconstruct=True) < error(reconstruct=False)


def test_a_nan_in_a_weight_is_named_before_anything_is_lost(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "m")
    with (
        Engine(Decoder.open(tmp_path / "m"), device="cpu", micro_batch=SIZE) as engine,
        pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: NaN"),
    ):
        engine.prune(PruneSettings.asked(model="-"), tiny_windows())


def test_columns_that_do_not_divide_are_told_at_the_start(tmp_path: Path) -> None:
    with (
        Engine(Decoder.open(tiny_folder(tmp_path, "llama")), device="cpu") as engine,
        pytest.raises(InputError, match="32 columns cannot be cut into groups of 5"),
    ):
        engine.prune(PruneSettings.asked(model="-", sparsity_type="2:5"), tiny_windows())


def test_wanda_without_windows_is_refused(tmp_path: Path) -> None:
    with (
        Engine(Decoder.open(tiny_folder(tmp_path, "llama")), device="cpu") as engine,
        pytest.raises(UsageError, match="needs calibration windows"),
    ):
        engine.prune(PruneSettings.asked(model="-"), None)


def test_nothing_is_held_after_a_run(tmp_path: Path) -> None:
    """Not even until Python's collector comes by: exceptions that end a pass early hold their frames."""
    import gc

    decoder = Decoder.open(tiny_folder(tmp_path, "llama"))
    gc.collect()
    gc.disable()
    try:
        before = large_tensors()
        with Engine(decoder, device="cpu", micro_batch=SIZE) as engine:
            engine.prune(PruneSettings.asked(model="-"), tiny_windows(64))
            assert engine.host.held_bytes == 0
        assert large_tensors() - before == set()
    finally:
        gc.enable()
    assert all(parameter.is_meta for block in decoder.blocks for parameter in block.parameters())


def large_tensors() -> set[int]:
    import gc

    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # left in the compiler by others
    found = [e for e in gc.get_objects() if type(e) in (Tensor, torch.nn.Parameter) and not wrapped(e)]
    return {id(t) for t in found if not t.is_meta and t.untyped_storage().nbytes() >= SIZE * 16 * 32 * 4}

"""GSA: what it computes, checked against a slow version written from the specification; and two paths to it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memfit.models.gsa import GsaConfig, GsaForCausalLM, keys_wanted, select
from memfit.models.presets import GSA_SIZES, parameters_of

SMALL: dict[str, Any] = {
    "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ffn": 48, "vocab_size": 101,
    "max_position_embeddings": 128, "k_base": 8, "k_min": 2, "k_max": 16, "indexer_heads": 2, "indexer_dim": 8,
}  # fmt: skip


def built(path: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = GsaForCausalLM(GsaConfig(**{**SMALL, **changes, "path": path}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # else attention hardly matters
    return model.train()


def learned(model: Any, length: int, *, amp: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(0, SMALL["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        made = model(input_ids=ids, labels=ids)
    made.loss.backward()
    return made.logits.detach().float(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


CASES = {
    "shorter than k_min": (2, {}), "shorter than k_max": (12, {}), "as long as k_max": (16, {}),
    "longer than k_max": (50, {}), "fixed k": (50, {"adaptive_k": False}),
    "fixed k, short": (6, {"adaptive_k": False}), "every key": (40, {"k_base": 64, "k_max": 64, "adaptive_k": False}),
    "tied head": (20, {"tie_word_embeddings": True}), "one group": (20, {"n_kv_heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_both_paths_give_the_same_logits_and_gradients(case: str) -> None:
    length, changes = CASES[case]

    logits, grads = learned(built("gather", **changes), length)
    same, same_grads = learned(built("masked", **changes), length)

    assert apart(same, logits) < 1e-5
    assert grads.keys() == same_grads.keys()
    assert all(apart(same_grads[name], grads[name]) < 1e-4 for name in grads if grads[name].any())


@pytest.mark.parametrize("length", [12, 50])
def test_under_autocast_a_layer_is_the_same_on_both_paths_to_bf16_rounding(length: int) -> None:
    """Of one layer: where two follow each other, a rounding in the first may change what the second one chooses."""
    logits, grads = learned(built("gather", n_layers=1), length, amp=True)
    same, same_grads = learned(built("masked", n_layers=1), length, amp=True)

    assert apart(same, logits) < 0.02
    assert all(apart(same_grads[name], grads[name]) < 0.05 for name in grads if grads[name].any())


def test_a_single_token_attends_to_itself() -> None:
    one, two = (built(path).eval()(torch.tensor([[5]])).logits for path in ("gather", "masked"))

    assert one.isfinite().all()
    assert apart(two.detach(), one.detach()) < 1e-5


def test_with_every_key_it_is_causal_attention() -> None:
    """No token sees a later one."""
    model = built("masked", k_base=64, k_max=64, adaptive_k=False).eval()
    ids = torch.arange(30)[None]
    changed = ids.clone()
    changed[0, 20:] = 7

    before, after = model(ids).logits, model(changed).logits

    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20:], after[0, 20:])


@torch.no_grad()
def test_the_indexer_is_what_the_specification_says() -> None:
    model = built("masked")
    indexer, x = model.model.layers[0].attention.indexer, torch.randn(1, 5, SMALL["d_model"])

    scores = indexer(x)

    q, k = indexer.q_proj(x)[0].view(5, 2, 8), indexer.k_proj(x)[0]
    w = torch.sigmoid(indexer.weight_proj(x))[0]
    for t in range(5):
        for s in range(5):
            expected = sum(
                float(w[t, j] * torch.sigmoid(q[t, j] @ k[s] / math.sqrt(8) + indexer.bias[j])) for j in range(2)
            )
            assert float(scores[0, t, s]) == (pytest.approx(expected, rel=1e-5) if s <= t else -math.inf)


def test_a_query_gets_fewer_keys_where_its_scores_vary_more() -> None:
    config = GsaConfig(**{**SMALL, "k_base": 8, "k_min": 2, "k_max": 16})
    scores = torch.zeros(1, 40, 40)
    scores[0, 30, :31] = torch.linspace(-5, 5, 31)

    wanted = keys_wanted(scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf), config)[0]

    spread = float(torch.linspace(-5, 5, 31).square().sum() / 39)  # over all 40 places; the others are 0, and the mean
    relative = spread / (spread / 40 + 1e-8)
    assert int(wanted[30]) == int(8 * (0.5 + 1 / (1 + relative))) == 4
    assert int(wanted[39]) == 12  # 1.5 times the base where nothing varies
    assert wanted[:12].tolist() == list(range(1, 13))  # and never more than there are


def test_only_the_best_keys_are_chosen() -> None:
    config = GsaConfig(**{**SMALL, "k_base": 3, "k_min": 1, "adaptive_k": False})
    scores = torch.tensor([[[1.0, -math.inf, -math.inf, -math.inf], [1, 2, -math.inf, -math.inf], [3, 1, 2, -math.inf],
                            [1, 4, 2, 3]]])  # fmt: skip

    chosen, valid = select(scores, config)

    kept = [sorted(chosen[0, t][valid[0, t]].tolist()) for t in range(4)]
    assert kept == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]


def test_no_gradient_reaches_the_indexer() -> None:
    _, grads = learned(built("masked"), 20)

    assert not any("indexer" in name for name in grads)
    without = [name for name, _ in built("masked").named_parameters() if name not in grads]
    assert len(without) == 5 * SMALL["n_layers"]


def test_the_tables_of_all_layers_are_one() -> None:
    model = built("masked")

    assert sum(name.endswith(("cos", "sin")) for name, _ in model.named_buffers()) == 2
    assert not any("positions" in name for name in model.state_dict())


def test_what_was_saved_is_what_is_loaded(tmp_path: Any) -> None:
    model = built("masked").eval()
    model.save_pretrained(tmp_path)

    again = GsaForCausalLM.from_pretrained(tmp_path).eval()

    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_blocks_that_are_computed_again_give_the_same_gradients() -> None:
    _, grads = learned(built("masked"), 20)
    model = built("masked")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    _, same = learned(model, 20)

    assert all(torch.equal(same[name], grads[name]) for name in grads)


@pytest.mark.parametrize(("changes", "why"), [
    ({"n_heads": 5}, "do not divide"), ({"n_kv_heads": 3}, "do not divide"), ({"k_min": 20}, "not in order"),
    ({"path": "dense"}, "not one of gather, masked"), ({"d_model": 12}, "even width"),
])  # fmt: skip
def test_impossible_sizes_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        GsaConfig(**{**SMALL, **changes})


def test_the_published_files_have_the_published_counts() -> None:
    assert {name: parameters_of(size) for name, size in GSA_SIZES.items() if "gather" not in name} == {
        "gsa": 7_435_358_464, "gsa-512m": 183_662_144, "gsa-512m-copy1": 319_555_680, "gsa-1b": 405_227_312,
    }  # fmt: skip

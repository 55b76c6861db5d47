"""A job's settings: what is refused, and what the defaults are."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import MemfitError, UnknownName, UsageError
from memfit.jobs.settings import KINDS
from memfit.jobs.together import without_effect
from memfit.jobs.workload import Workload

FIELDS = [field.name for field in dataclasses.fields(Workload)]


def workload(**settings: Any) -> Workload:
    return Workload.from_mapping({"kind": "train", "model": "gpt2", **settings})


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [
        ("kind", "finetune", "--kind"),
        ("kind", None, "--kind"),
        ("batch_size", 0, "--batch-size"),
        ("batch_size", -3, "--batch-size"),
        ("batch_size", 1.5, "--batch-size"),
        ("batch_size", "8", "--batch-size"),
        ("batch_size", True, "--batch-size"),
        ("batch_size", None, "--batch-size"),
        ("batch_size", 1 << 40, "--batch-size"),
        ("seq_len", 0, "--seq-len"),
        ("seq_len", 1 << 30, "--seq-len"),
        ("seq_len", float("nan"), "--seq-len"),
        ("precision", "int4", "--precision"),
        ("precision", ["bf16"], "--precision"),
        ("attention", "flash", "--attention"),
        ("optimizer", "adam", "--optimizer"),
        ("optimizer", {}, "--optimizer"),
        ("loop", "deepspeed", "--loop"),
        ("grad_checkpointing", "yes", "--grad-checkpointing"),
        ("grad_checkpointing", 1, "--grad-checkpointing"),
        ("grad_accum", 0, "--grad-accum"),
        ("clip_grad", "1.0", "--clip-grad"),
        ("rank", 0, "--rank"),
        ("rank", 1 << 20, "--rank"),
        ("lora_dropout", 1.0, "--lora-dropout"),
        ("lora_dropout", -0.1, "--lora-dropout"),
        ("lora_dropout", True, "--lora-dropout"),
        ("lora_dropout", float("nan"), "--lora-dropout"),
        ("target_modules", "q_proj", "--target-modules"),
        ("target_modules", [], "--target-modules"),
        ("target_modules", [""], "--target-modules"),
        ("target_modules", [1], "--target-modules"),
        ("adapter_dtype", "bf16", "--adapter-dtype"),
        ("alloc_conf", 3, "--alloc-conf"),
        ("model", "", "model"),
        ("model", 7, "model"),
    ],
)
def test_a_bad_value_is_one_error_that_names_the_flag_and_the_value(setting: str, value: Any, flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        workload(**{setting: value})
    assert flag in caught.value.message
    assert "\n" not in caught.value.message
    if setting not in ("model", "target_modules"):
        assert repr(value) in caught.value.message


@pytest.mark.parametrize("setting", ["precision", "attention", "optimizer", "adapter_dtype", "kind", "loop"])
def test_a_choice_that_does_not_exist_lists_those_that_do(setting: str) -> None:
    with pytest.raises(UsageError, match=r"is not one of \w[\w-]*, "):
        workload(**{setting: "other"})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("batchsize", "batch_size"),
        ("sequence_len", "seq_len"),
        ("gradient_checkpointing", "grad_checkpointing"),
        ("optimiser", "optimizer"),
    ],
)
def test_an_unknown_setting_suggests_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UnknownName) as caught:
        workload(**{typed: 1})
    assert repr(typed) in caught.value.message
    assert f"did you mean {meant!r}" in str(caught.value.hint)


def test_an_unknown_setting_lists_all_of_them() -> None:
    with pytest.raises(UnknownName) as caught:
        workload(zzz=1)
    assert all(name in str(caught.value.hint) for name in FIELDS)


@pytest.mark.parametrize("missing", ["kind", "model"])
def test_kind_and_model_cannot_be_left_out(missing: str) -> None:
    settings = {"kind": "train", "model": "gpt2"}
    del settings[missing]
    with pytest.raises(UsageError, match=missing):
        Workload.from_mapping(settings)


def test_more_tokens_than_any_card_holds_are_refused() -> None:
    with pytest.raises(UsageError, match="tokens"):
        workload(batch_size=1 << 20, seq_len=1 << 20)


def test_a_norm_to_clip_at_means_that_gradients_are_clipped() -> None:
    assert workload(clip_grad=1.0).clip_grad is True
    assert workload(clip_grad=0).clip_grad is False
    assert workload(clip_grad=True).clip_grad is True


def test_the_plain_loop_takes_foreach_adamw_and_does_not_clip() -> None:
    assert (workload().optimizer, workload().clip_grad) == ("adamw", False)


def test_the_trainer_takes_fused_adamw_and_clips() -> None:
    by_trainer = workload(loop="trainer")
    assert (by_trainer.optimizer, by_trainer.clip_grad) == ("adamw-fused", True)
    assert workload(loop="trainer", optimizer="sgd", clip_grad=False).optimizer == "sgd"


def test_a_list_of_modules_may_come_from_json() -> None:
    assert workload(kind="lora", target_modules=["q_proj", "v_proj"]).target_modules == ("q_proj", "v_proj")


def test_only_settings_that_the_kind_reads_are_shown() -> None:
    assert not {"optimizer", "rank", "grad_accum", "new_tokens"} & set(workload(kind="forward").settings())
    assert not {"rank", "target_modules", "new_tokens"} & set(workload().settings())
    assert {"optimizer", "grad_accum", "rank", "target_modules", "lora_dropout"} <= set(
        workload(kind="lora").settings()
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "train", "rank": 64}, "--rank 64 has no effect: it is a setting of lora, not of train"),
        ({"kind": "train", "rank": 16}, "--rank 16 has no effect"),
        ({"kind": "generate", "world_size": 8}, "--world-size 8 has no effect: it is a setting of train and lora"),
        ({"kind": "generate", "num_beams": 8}, "--num-beams 8 has no effect: greedy decoding has no beams"),
        ({"kind": "forward", "grad_checkpointing": True}, "--grad-checkpointing has no effect"),
        ({"kind": "forward", "clip_grad": False}, "--no-clip-grad has no effect"),
        (
            {"kind": "lora", "loss": "full", "loss_chunk": 16},
            "--loss-chunk 16 has no effect: a full loss has",
        ),
        ({"kind": "prune", "batch_size": 8}, "--batch-size 8 has no effect: it is a setting of forward and train"),
        ({"kind": "train", "target_modules": ["q_proj", "v_proj"]}, "--target-modules q_proj,v_proj has no effect"),
    ],
)
def test_a_setting_that_the_job_does_not_use_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        workload(**settings)
    assert caught.value.message.startswith(said)
    assert str(caught.value.hint).startswith("leave --")


def test_nothing_given_is_nothing_asked() -> None:
    assert workload(kind="train", target_modules=None, sparsity=None) == workload(kind="train")


def test_how_processes_work_together_may_be_said_of_a_single_one() -> None:
    made = workload(parallel="fsdp2", gradient_as_bucket_view=True)
    assert list(without_effect(made)) == [
        "--parallel fsdp2 has no effect: there is a single process",
        "--gradient-as-bucket-view has no effect: there is a single process",
    ]
    assert not list(without_effect(workload(parallel="ddp")))


def test_a_workload_made_by_hand_knows_what_has_no_effect() -> None:
    assert list(without_effect(Workload(kind="train", model="gpt2", rank=64))) == [
        "--rank 64 has no effect: it is a setting of lora, not of train"
    ]
    assert not list(without_effect(Workload(kind="train", model="gpt2", loop="memfit")))


def test_settings_beside_a_workload_replace_its_own_and_what_hung_on_them() -> None:
    chunked = workload(loss="chunked", loss_chunk=16)
    assert Workload.asked(chunked, {"loss": "full"}) == workload()
    assert Workload.asked(chunked, {"loss_chunk": 32}).loss_chunk == 32
    assert Workload.asked(workload(kind="prune", sparsity=0.7), {"kind": "forward"}) == workload(kind="forward")
    with pytest.raises(UsageError, match="--loss-chunk 32 has no effect"):
        Workload.asked(chunked, {"loss": "full", "loss_chunk": 32})
    with pytest.raises(UnknownName, match="'lenght'"):
        Workload.asked(chunked, {"lenght": 3})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shown_makes_the_same_workload_again(kind: str) -> None:
    made = workload(kind=kind, seq_len=77, **({} if kind == "prune" else {"batch_size": 3}))
    assert Workload.from_mapping(json.loads(json.dumps(made.settings()))) == made


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)
CHOICES = st.sampled_from([*KINDS, "bf16", "amp-bf16", "eager", "sgd", "trainer", "same", "static", "beam"])
MAPPINGS = st.dictionaries(
    st.sampled_from(FIELDS) | st.text(max_size=12), ANYTHING | CHOICES | st.integers(1, 64), max_size=8
)


@given(MAPPINGS, st.booleans())
def test_any_mapping_is_a_workload_or_an_error_in_words(settings: dict[str, Any], complete: bool) -> None:
    if complete:
        settings = {"kind": "train", "model": "gpt2"} | settings
    try:
        made = Workload.from_mapping(settings)
    except MemfitError as error:
        assert error.message
        return
    json.dumps(made.settings(), allow_nan=False)
    assert 1 <= made.batch_size * made.seq_len <= 1 << 32


def test_a_norm_to_clip_at_is_a_number() -> None:
    assert Workload.from_mapping({"kind": "train", "model": "gpt2", "clip_grad": 0.5}).clip_grad is True
    assert Workload.from_mapping({"kind": "train", "model": "gpt2", "clip_grad": -1}).clip_grad is False
    with pytest.raises(UsageError, match="clip-grad nan"):
        Workload.from_mapping({"kind": "train", "model": "gpt2", "clip_grad": float("nan")})

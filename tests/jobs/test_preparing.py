"""What happens in host memory before a job starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import LLAMA, model_folder

import memfit
from memfit.errors import MemfitError, UsageError
from memfit.jobs.adapters import linear_layers_of_blocks
from memfit.jobs.build import Prepared, prepare, takes_labels
from memfit.jobs.run import wanted
from memfit.jobs.workload import Workload
from memfit.models.registry import parameter_count


def on_meta(model: str, kind: str = "train", **settings: Any) -> Prepared:
    with torch.device("meta"):
        return prepare(Workload.from_mapping({"kind": kind, "model": model, "seq_len": 16, **settings}))


def dtypes(job: Prepared, *, trained: bool) -> set[torch.dtype]:
    return {p.dtype for p in job.model.parameters() if p.requires_grad is trained}


# -- full models -------------------------------------------------------------------------------------------------------


def test_a_model_prepared_on_meta_has_no_memory(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "llama"))
    assert {p.device.type for p in job.model.parameters()} == {"meta"}


def test_nor_have_weights_that_torch_draws_on_the_host_whatever_the_device(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "llama", model_type="diffllama", architectures=["DiffLlamaForCausalLM"])
    parameters = dict(on_meta(folder).model.named_parameters())
    assert {p.device.type for p in parameters.values()} == {"meta"}
    assert "model.layers.0.self_attn.lambda_q1" in parameters


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("amp-bf16", torch.float32),
        ("amp-fp16", torch.float32),
    ],
)
def test_weights_have_the_precision_asked_for_and_fp32_under_autocast(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    assert dtypes(on_meta(model_folder(tmp_path, "llama"), precision=precision), trained=True) == {dtype}


def test_parameters_are_counted_once_when_tied(tmp_path: Path) -> None:
    v, h, m, kv = (LLAMA[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_key_value_heads"))
    narrow = h // LLAMA["num_attention_heads"] * kv
    block = 2 * h * h + 2 * h * narrow + 3 * h * m + 2 * h
    assert on_meta(model_folder(tmp_path, "llama")).parameters == v * h + 2 * block + h


@pytest.mark.parametrize(("kind", "training"), [("forward", False), ("train", True), ("lora", True)])
def test_a_model_is_in_training_mode_only_where_it_is_trained(tmp_path: Path, kind: str, training: bool) -> None:
    assert on_meta(model_folder(tmp_path, "llama"), kind).model.training is training


def test_the_vocabulary_is_the_config_s(tmp_path: Path) -> None:
    assert on_meta(model_folder(tmp_path, "llama")).vocab_size == 128


@pytest.mark.parametrize("checkpointed", [True, False])
def test_blocks_are_checkpointed_where_asked(tmp_path: Path, checkpointed: bool) -> None:
    job = on_meta(model_folder(tmp_path, "llama"), grad_checkpointing=checkpointed)
    assert job.model.is_gradient_checkpointing is checkpointed


# -- positions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_a_limit(tmp_path: Path, family: str) -> None:
    folder = model_folder(tmp_path, family)
    on_meta(folder, seq_len=32)
    with pytest.raises(UsageError, match="--seq-len 33 is more than the 32 positions"):
        on_meta(folder, seq_len=33)


def test_what_is_generated_needs_positions_too(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "gpt2")
    on_meta(folder, "generate", seq_len=20, new_tokens=13)
    with pytest.raises(UsageError, match="--seq-len 20 and --new-tokens 14 is more than the 32 positions") as caught:
        on_meta(folder, "generate", seq_len=20, new_tokens=14)
    assert caught.value.hint == "together at most 33"


def test_a_table_of_sines_is_a_limit_unless_it_grows(tmp_path: Path) -> None:
    gptj = model_folder(tmp_path, "gpt2", model_type="gptj", rotary_dim=8)
    with pytest.raises(UsageError, match="--seq-len 33 is more than the 32 positions"):
        on_meta(gptj, seq_len=33, attention="eager")
    xglm = {"model_type": "xglm", "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}
    grows = model_folder(tmp_path, "opt", **xglm)
    assert on_meta(grows, seq_len=33, attention="eager").parameters


def test_rotary_positions_are_no_limit(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "llama"), seq_len=640)
    assert job.workload.seq_len > job.model.config.max_position_embeddings


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "linear"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
        ("opt", ["k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"]),
    ],
)
def test_adapters_go_to_all_linear_layers_of_a_block_and_not_to_the_head(
    tmp_path: Path, family: str, linear: list[str]
) -> None:
    job = on_meta(model_folder(tmp_path, family), "lora")
    assert sorted(job.workload.target_modules or ()) == sorted(linear)
    adapted = {
        name.split(".lora_A")[0].rpartition(".")[2] for name, _ in job.model.named_parameters() if ".lora_A" in name
    }
    assert adapted == set(linear)


def test_the_head_is_not_a_layer_of_a_block_even_when_untied(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "llama", tie_word_embeddings=False)
    assert "lm_head" not in (on_meta(folder, "lora").workload.target_modules or ())


def test_rank_and_targets_decide_how_much_is_trained(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "llama"), "lora", rank=4, target_modules=["q_proj", "v_proj"])
    per_block = 4 * (64 + 64) + 4 * (64 + 32)  # q: 64 in, 64 out; v: 64 in, 2 heads of 16 out
    assert sum(p.numel() for p in job.trainable) == 2 * per_block
    assert job.parameters == on_meta(model_folder(tmp_path, "llama")).parameters


ADAPTER_DTYPES = pytest.mark.parametrize(
    ("adapter_dtype", "dtype"), [("fp32", torch.float32), ("same", torch.bfloat16)]
)


@ADAPTER_DTYPES
def test_adapters_are_fp32_unless_they_shall_be_as_the_base(
    tmp_path: Path, adapter_dtype: str, dtype: torch.dtype
) -> None:
    settings = {"kind": "lora", "model": model_folder(tmp_path, "llama"), "seq_len": 16, "precision": "bf16"}
    job = prepare(Workload.from_mapping(settings | {"adapter_dtype": adapter_dtype}))
    assert dtypes(job, trained=True) == {dtype}
    assert dtypes(job, trained=False) == {torch.bfloat16}


@ADAPTER_DTYPES
def test_adapters_on_meta_have_the_dtype_that_they_have_in_memory(
    tmp_path: Path, adapter_dtype: str, dtype: torch.dtype
) -> None:
    job = on_meta(model_folder(tmp_path, "llama"), "lora", precision="bf16", adapter_dtype=adapter_dtype)
    assert dtypes(job, trained=True) == {dtype}


def test_adapters_on_meta_take_no_memory(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "llama"), "lora")
    assert {p.device.type for p in job.model.parameters()} == {"meta"}


def test_the_input_of_checkpointed_blocks_asks_for_gradients_although_the_embedding_is_frozen(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "llama"), "lora", grad_checkpointing=True)
    embedding = job.model.get_input_embeddings()  # type: ignore[operator]
    assert embedding(torch.zeros(1, 4, dtype=torch.int64, device="meta")).requires_grad


def test_an_unknown_target_is_an_error_that_lists_the_layers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--target-modules") as caught:
        on_meta(model_folder(tmp_path, "llama"), "lora", target_modules=["query"])
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in str(caught.value.hint)


EXPERTS = ["gate_proj", "up_proj", "down_proj"]


def test_adapters_of_experts_are_noted_and_peft_s_untrue_warnings_are_not(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    job = on_meta(model_folder(tmp_path, "deepseek"), "lora", rank=4)
    (note,) = job.notes
    assert note.startswith(f"peft adapts every expert by {', '.join(EXPERTS)}")  # by 0.19 the router, too
    assert not [w for w in recwarn if "pattern keys" in str(w.message)]
    fused = next(p for name, p in job.model.named_parameters() if "experts.base_layer.lora_A" in name)
    assert fused.shape[0] == 2 * 4 * 4  # gate and up as one, with twice the rank, for each of four experts


def test_dropout_in_front_of_experts_is_an_error_that_says_what_can_be_done(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--lora-dropout 0\.1: peft has no dropout for experts") as caught:
        on_meta(model_folder(tmp_path, "deepseek"), "lora", lora_dropout=0.1)
    assert "--target-modules q_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj" in str(caught.value.hint)


def test_dropout_in_front_of_the_other_layers_of_such_a_model_is_planned(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "deepseek"), "lora", lora_dropout=0.1, target_modules=["q_proj", "o_proj"])
    assert job.notes == ()


# -- one's own module --------------------------------------------------------------------------------------------------


def test_a_factory_s_module_is_taken_as_it_is() -> None:
    job = on_meta("small_models:bigram", precision="bf16")
    assert type(job.model).__name__ == "Bigram"
    assert (job.vocab_size, job.parameters) == (50, 50 * 16 + 16 * 64 + 64 + 64 * 50 + 50)
    assert dtypes(job, trained=True) == {torch.bfloat16}
    assert not takes_labels(job.model)


def test_adapters_go_to_a_factory_s_linear_layers_too() -> None:
    assert linear_layers_of_blocks(on_meta("small_models:bigram").model) == ["hidden", "head"]
    assert on_meta("small_models:bigram", "lora", rank=2).trainable


def test_a_module_without_a_vocabulary_is_an_error() -> None:
    with pytest.raises(MemfitError, match="vocabulary"):
        on_meta("small_models:without_a_vocabulary")


def test_a_module_that_cannot_checkpoint_says_where_to_do_it() -> None:
    with pytest.raises(UsageError, match="--grad-checkpointing") as caught:
        on_meta("small_models:bigram", grad_checkpointing=True)
    assert "factory" in str(caught.value.hint)


# -- what a config says ------------------------------------------------------------------------------------------------


def test_no_block_is_left_out_at_random_and_the_job_says_so(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "opt", layerdrop=0.5))
    assert job.model.model.decoder.layerdrop == 0
    assert any("layerdrop 0.5" in note and "all of them" in note for note in job.notes)
    assert not any("layerdrop" in note for note in on_meta(model_folder(tmp_path, "opt"), kind="forward").notes)


@pytest.mark.parametrize("targets", [["q_proj", "gate_porj"], ["gate_porj"]])
def test_every_module_to_adapt_must_be_there(tmp_path: Path, targets: list[str]) -> None:
    with pytest.raises(UsageError, match="--target-modules: no module is called 'gate_porj'") as caught:
        on_meta(model_folder(tmp_path, "llama"), kind="lora", target_modules=targets)
    assert str(caught.value.hint).startswith("did you mean 'gate_proj'?")


def test_a_module_may_be_named_by_its_path(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "llama"), kind="lora", target_modules=["layers.0.self_attn.q_proj", "v_proj"])
    assert sum(p.numel() for p in job.trainable) == 16 * (64 + 64) + 2 * 16 * (64 + 32)


HEADS = {
    "LlamaForSequenceClassification": {"labels": (torch.int64, (2,))},
    "LlamaForTokenClassification": {"labels": (torch.int64, (2, 16))},
    "LlamaForQuestionAnswering": {"end_positions": (torch.int64, (2,)), "start_positions": (torch.int64, (2,))},
}


@pytest.mark.parametrize("loop", ["plain", "trainer"])
@pytest.mark.parametrize("named", HEADS)
def test_the_class_that_a_config_names_is_planned_with_labels_and_loss_of_its_own(
    tmp_path: Path, named: str, loop: str
) -> None:
    folder = model_folder(tmp_path, "llama", architectures=[named], pad_token_id=0)
    job = on_meta(folder, batch_size=2, loop=loop)
    assert type(job.model).__name__ == named
    assert any(named in note and "no language-model head" in note for note in job.notes)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    assert {name: (each.dtype, tuple(each.shape)) for name, each in wanted(job, ids).items()} == HEADS[named]
    trained = memfit.predict(job.workload, trace_cache=False)
    assert trained.parameters == parameter_count(job.model) == trained.trainable_parameters


@pytest.mark.parametrize(
    ("said", "labels", "dtype", "shape"),
    [
        ({"num_labels": 1}, 1, torch.float32, (2,)),
        ({"problem_type": "regression"}, 2, torch.float32, (2,)),
        ({"num_labels": 5, "problem_type": "multi_label_classification"}, 5, torch.float32, (2, 5)),
        ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, 3, torch.int64, (2,)),
    ],
)
def test_labels_are_what_the_config_says(
    tmp_path: Path, said: dict[str, Any], labels: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    job = on_meta(model_folder(tmp_path, "llama", architectures=["LlamaForSequenceClassification"], **said))
    assert job.model.score.out_features == labels
    made = wanted(job, torch.zeros(2, 16, dtype=torch.int64))["labels"]
    assert (made.dtype, tuple(made.shape)) == (dtype, shape)


def test_lora_trains_the_head_of_a_classifier_too(tmp_path: Path) -> None:
    job = on_meta(model_folder(tmp_path, "llama", architectures=["LlamaForSequenceClassification"]), kind="lora")
    names = [name for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    assert "score" not in (job.workload.target_modules or ())
    assert [name for name in names if "lora_" not in name] == ["base_model.model.score.modules_to_save.default.weight"]


@pytest.mark.parametrize(
    ("named", "settings", "said"),
    [
        ("LlamaModel", {}, "LlamaModel .* no loss to train on"),
        ("LlamaForMultipleChoice", {}, "memfit cannot plan a 'LlamaForMultipleChoice'"),
        ("LlamaDoubleHeadsModel", {}, "memfit cannot plan a 'LlamaDoubleHeadsModel'"),
        ("LlamaForTokenClassification", {"loss": "chunked"}, "--loss chunked is for language models"),
        ("LlamaForTokenClassification", {"loop": "memfit"}, "--loop memfit is for language models"),
        ("LlamaForSequenceClassification", {"kind": "generate", "new_tokens": 1}, "does not generate text"),
    ],
)
def test_a_head_that_is_not_planned_is_refused(tmp_path: Path, named: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(MemfitError, match=said):
        on_meta(model_folder(tmp_path, "llama", architectures=[named]), **settings)


@pytest.mark.parametrize("named", ["LLaMAForCausalLM", "OwnLMHeadModel", "LlamaForCausalLM"])
def test_a_language_model_by_any_name_is_one(tmp_path: Path, named: str) -> None:
    job = on_meta(model_folder(tmp_path, "llama", architectures=[named]))
    assert (type(job.model).__name__, job.head) == ("LlamaForCausalLM", None)


def test_a_family_without_fused_attention_is_prepared_with_eager_and_says_so() -> None:
    with torch.device("meta"):
        job = prepare(Workload(kind="forward", model="gpt-oss-20b", seq_len=16), layers=2)

    assert job.workload.attention == "eager"
    assert job.notes[0] == "transformers has no fused attention for gpt-oss-20b: eager, as it takes by itself"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(2000, "and num_virtual_tokens 2000 is more than the 1024 positions"), (-1, "not a whole number above 0")],
)
def test_virtual_tokens_count_as_positions(tokens: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        memfit.predict(
            kind="lora", model="gpt2", seq_len=64, adapter="prompt", adapter_config={"num_virtual_tokens": tokens}
        )

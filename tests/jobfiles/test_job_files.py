"""Job files of other tools are read as those tools would: public examples, their defaults, what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from public_examples import ALL

from memfit.errors import InputError, MemfitError, UsageError
from memfit.jobfiles.file import FORMATS, is_job_file, read_job, with_values
from memfit.jobs.workload import Workload

EXAMPLES = [(form, *each) for form, examples in ALL.items() for each in examples]
LLAMAFACTORY = {
    "do_train": True, "stage": "sft", "finetuning_type": "lora", "model_name_or_path": "gpt2", "bf16": True,
}  # fmt: skip
AXOLOTL = {
    "base_model": "gpt2", "adapter": "lora", "lora_r": 16, "lora_target_linear": True, "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "attn_implementation": "flash_attention_2",
}  # fmt: skip


def written(folder: Path, keys: dict[str, Any], name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(json.dumps(keys) if name.endswith(".json") else yaml.safe_dump(keys))
    return path


@pytest.mark.parametrize(("form", "source", "keys", "expected"), EXAMPLES, ids=[each[1] for each in EXAMPLES])
def test_a_public_example_is_read_as_its_own_tool_would(
    form: str, source: str, keys: dict[str, Any], expected: dict[str, Any] | str, tmp_path: Path
) -> None:
    given = {"seq_len": 1024} if form == "torchtune" else {}
    path = written(tmp_path, keys, "job.json" if form in ("huggingface", "deepspeed") else "job.yaml")
    if isinstance(expected, str):
        with pytest.raises(UsageError) as refused:
            read_job(path, **given)
        assert refused.value.message.endswith(f"memfit has no plan for {expected}")
        return
    job = read_job(path, **given)
    assert [each.name for each in job.formats] == [form]
    assert {name: job.settings.get(name) for name in expected} == expected
    assert job.unknown == ()
    Workload.from_mapping({"model": "gpt2", "seq_len": 1024, **job.settings}, asked=())


def test_there_are_ten_public_examples_of_each_format() -> None:
    assert set(ALL) == set(FORMATS)
    assert all(len(each) >= 10 for each in ALL.values())


def test_the_tools_own_defaults_stand_where_a_key_is_absent(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, LLAMAFACTORY))
    work = job.workload
    assert (work.batch_size, work.grad_accum, work.seq_len, work.rank) == (8, 1, 2048, 8)
    assert (work.grad_checkpointing, work.optimizer, work.padding) == (True, "adamw-fused", True)
    assert job.defaults["per_device_train_batch_size"] == 8 and job.defaults["cutoff_len"] == 2048
    small = read_job(written(tmp_path, AXOLOTL)).workload
    assert (small.seq_len, small.optimizer, small.precision, small.grad_checkpointing) == (
        512,
        "adamw-fused",
        "bf16",
        False,
    )


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"finetuning_type": "full"}, {"kind": "train", "precision": "amp-bf16"}),
        ({"finetuning_type": "full", "bf16": False}, {"kind": "train", "precision": "fp32"}),
        ({"finetuning_type": "full", "pure_bf16": True, "bf16": False}, {"precision": "bf16", "autocast": None}),
        ({"fp16": True, "bf16": False}, {"kind": "lora", "precision": "fp16", "autocast": "fp16"}),
        ({"use_dora": True}, {"adapter": "dora"}),
        ({"lora_target": "q_proj, v_proj"}, {"target_modules": ("q_proj", "v_proj")}),
        ({"quantization_bit": 8}, {"quant": "int8"}),
        ({"disable_gradient_checkpointing": True}, {"grad_checkpointing": False}),
        ({"flash_attn": "disabled"}, {"attention": "eager"}),
        ({"cutoff_len": 1001, "per_device_train_batch_size": 1}, {"seq_len": 1008, "padding": True}),
        ({"packing": True}, {"seq_len": 2048, "padding": False}),
        ({"packing": True, "cutoff_len": 2047}, {"seq_len": 2048, "padding": True}),
        ({"stage": "pt", "packing": True}, {"seq_len": 2047, "padding": False}),
        ({"optim": "adamw_8bit"}, {"optimizer": "adamw-8bit"}),
        ({"optim": "sgd", "weight_decay": 0.1}, {"optimizer": "sgd", "weight_decay": 0.1, "momentum": 0.0}),
        ({"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True"}, {"weight_decay": 0.0, "momentum": 0.9}),
        (
            {"optim": "adamw_torch", "weight_decay": 0.1, "optim_args": "momentum=0.9"},
            {"weight_decay": 0, "momentum": 0},
        ),
        ({"max_grad_norm": 0}, {"clip_grad": False}),
    ],
)
def test_a_key_of_llamafactory_is_this_setting(keys: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    work = read_job(written(tmp_path, {**LLAMAFACTORY, **keys})).workload
    assert {name: getattr(work, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("stored", "keys", "precision", "said"),
    [
        ("bfloat16", {}, "bf16", ""),
        ("float32", {}, "fp32", "weights are loaded as they are stored, fp32"),
        ("float32", {"bf16": False}, "fp32", "weights are loaded as they are stored, fp32"),
        ("float16", {}, "fp16", "weights are loaded as they are stored, fp16"),
        ("float32", {"finetuning_type": "full"}, "amp-bf16", ""),
        (None, {}, "bf16", "not modelled: the type in which the weights are stored"),
    ],
)
def test_llamafactory_loads_weights_in_the_type_that_they_are_stored_in(
    stored: str | None, keys: dict[str, Any], precision: str, said: str, tmp_path: Path
) -> None:
    settings = {"model_type": "llama", **({"dtype": stored} if stored else {})}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    job = read_job(written(tmp_path, {**LLAMAFACTORY, "model_name_or_path": str(tmp_path), **keys}))
    assert job.workload.precision == precision
    assert [note for note in job.notes if "stored" in note][:1] == [n for n in job.notes if said and n.startswith(said)]


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"sample_packing": True, "sequence_len": 1000}, {"batch_size": 1, "seq_len": 2048}),
        ({"sample_packing": True, "multipack_real_batches": True}, {"batch_size": 2, "seq_len": 512}),
        ({"batch_size": 8, "gradient_accumulation_steps": None}, {"batch_size": 2, "grad_accum": 4}),
        ({"load_in_4bit": True, "adapter": "qlora"}, {"quant": "nf4", "double_quant": True, "kbit_prepare": False}),
        ({"flash_attention": True, "attn_implementation": None}, {"attention": "sdpa", "padding": False}),
        ({"sdp_attention": True, "attn_implementation": None}, {"attention": "sdpa", "padding": True}),
        ({"peft_autocast_adapter_dtype": False}, {"adapter_dtype": "same"}),
        ({"lora_target_linear": None, "lora_target_modules": "all-linear"}, {"target_modules": None}),
        ({"model_type": "AutoModelForCausalLM"}, {"kind": "lora"}),
        ({"fp16": True}, {"precision": "fp16", "autocast": "fp16"}),
        (
            {"optimizer": "sgd", "optim_args": {"momentum": 0.9}, "weight_decay": 0.1},
            {"momentum": 0.9, "weight_decay": 0.1},
        ),
        ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, {"parallel": "fsdp2"}),
    ],
)
def test_a_key_of_axolotl_is_this_setting(keys: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    count = {"world_size": 2} if "fsdp_version" in keys else {}
    job = read_job(written(tmp_path, {**AXOLOTL, **keys}), **count)
    assert {name: getattr(job.workload, name) for name in settings} == settings


@pytest.mark.parametrize(
    "key",
    ["enable_liger_kernel", "use_unsloth", "neftune_noise_alpha", "neat_packing", "upcast_layernorm", "deepspeed"],
)
def test_what_memfit_cannot_honour_is_an_error_and_never_planned(key: str, tmp_path: Path) -> None:
    path = written(tmp_path, {**LLAMAFACTORY, key: "ds.json" if key == "deepspeed" else True})
    with pytest.raises(UsageError, match=f"no plan for {key}") as refused:
        read_job(path)
    assert f"--without {key}" in str(refused.value.hint)
    job = read_job(path, without=[key])
    assert job.left_out == (key,) and job.workload.kind == "lora"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({**LLAMAFACTORY, "finetuning_type": "full", "quantization_bit": 4}, "quantization_bit"),
        ({**AXOLOTL, "adapter": "qlora"}, "adapter"),
    ],
)
def test_what_the_tool_itself_refuses_is_no_plan(keys: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no plan for {named}"):
        read_job(written(tmp_path, keys))


def test_two_keys_that_cannot_be_planned_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no plan for enable_liger_kernel, stage"):
        read_job(written(tmp_path, {**LLAMAFACTORY, "stage": "dpo", "enable_liger_kernel": True}))


def test_deepspeed_is_planned_otherwise_only_where_a_flag_says_how(tmp_path: Path) -> None:
    written(tmp_path, {"zero_optimization": {"stage": 3}}, "z3.json")
    path = written(tmp_path, {**LLAMAFACTORY, "deepspeed": "configs/z3.json"})
    with pytest.raises(UsageError) as refused:
        read_job(path)
    assert "ZeRO stage 3" in str(refused.value.hint)
    job = read_job(path, parallel="fsdp2", world_size=4)
    assert job.workload.parallel == "fsdp2"
    assert any(note.startswith("not modelled: deepspeed") for note in job.notes)


def test_a_deepspeed_config_elsewhere_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    written(tmp_path, {"zero_optimization": {"stage": 3}}, "z3.json")
    path = written(tmp_path / "inner", {**LLAMAFACTORY, "deepspeed": "../z3.json"})
    with pytest.raises(UsageError) as refused:
        read_job(path)
    assert "stage" not in str(refused.value.hint)


def test_unknown_keys_are_named_and_idle_ones_too(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, {**LLAMAFACTORY, "lora_ranc": 4, "template": "qwen", "learning_rate": 1e-4}))
    assert job.unknown == ("lora_ranc",)
    assert set(job.idle) == {"template", "learning_rate"}
    document = job.to_json()
    assert document["unknown"] == ["lora_ranc"] and document["used"]["stage"] == "sft"
    assert json.dumps(document, allow_nan=False)


def test_flags_replace_what_the_file_says(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, {**LLAMAFACTORY, "lora_rank": 4}), rank=64, model="qwen2.5-0.5b")
    assert (job.workload.rank, job.workload.model) == (64, "qwen2.5-0.5b")
    assert job.to_json()["by_flags"] == {"rank": 64, "model": "qwen2.5-0.5b"}


def test_what_a_file_does_not_say_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, {"per_device_train_batch_size": 2, "bf16": True}, "args.json")
    with pytest.raises(UsageError, match="which model") as missing:
        _ = read_job(path).workload
    assert missing.value.hint == "--model does"
    with pytest.raises(UsageError, match="how long its rows are"):
        _ = read_job(path, model="gpt2").workload
    assert read_job(path, model="gpt2", seq_len=128).workload.precision == "amp-bf16"
    assert read_job(path, model="gpt2", seq_len=128, precision="bf16").workload.autocast == "bf16"
    assert read_job(path, model="gpt2", seq_len=128, rank=4).workload.kind == "lora"


def test_a_config_of_accelerate_stands_beside_another_file(tmp_path: Path) -> None:
    arguments = written(tmp_path, {"per_device_train_batch_size": 2, "bf16": True}, "args.json")
    launch = written(tmp_path, {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"})
    work = read_job(arguments, launch, model="gpt2", seq_len=128).workload
    assert (work.world_size, work.parallel, work.batch_size, work.loop) == (4, "ddp", 2, "trainer")
    with pytest.raises(UsageError, match="two jobs"):
        read_job(arguments, written(tmp_path, LLAMAFACTORY, "other.yaml"))


def test_a_section_of_accelerate_is_read_or_left_out_whole(tmp_path: Path) -> None:
    section = {"fsdp_version": 2, "fsdp_activation_checkpointing": True, "fsdp_offload_params": True}
    launch = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", "fsdp_config": section}
    asked: dict[str, Any] = {"model": "gpt2", "seq_len": 128, "batch_size": 2, "kind": "train"}
    with pytest.raises(UsageError, match=r"no plan for fsdp_config\.fsdp_offload_params"):
        read_job(written(tmp_path, launch), **asked)
    job = read_job(written(tmp_path, launch), without=["fsdp_config.fsdp_offload_params"], **asked)
    assert (job.workload.parallel, job.workload.grad_checkpointing) == ("fsdp2", True)
    job = read_job(written(tmp_path, launch), without=["fsdp_config"], parallel="fsdp2", **asked)
    assert job.left_out == tuple(f"fsdp_config.{key}" for key in sorted(section))
    assert not job.workload.grad_checkpointing


@pytest.mark.parametrize("rows", [1.5, "2.5", "many"])
def test_rows_that_are_no_whole_number_are_told(rows: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"micro_batch_size .* is not a whole number"):
        read_job(written(tmp_path, {**AXOLOTL, "micro_batch_size": rows}))


def test_the_format_can_be_said_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMAFACTORY)
    assert read_job(path, format="llamafactory").formats[0].title == "LLaMA-Factory"
    with pytest.raises(UsageError, match="no format called 'lamafactory'"):
        read_job(path, format="lamafactory")
    with pytest.raises(InputError, match="no job file that memfit knows"):
        read_job(written(tmp_path, {"some": "thing"}, "x.yaml"))


def test_a_config_of_memfit_train_is_no_job_file_of_another_tool(tmp_path: Path) -> None:
    assert is_job_file(str(written(tmp_path, LLAMAFACTORY)))
    assert not is_job_file(str(written(tmp_path, {"model": "gpt2", "data": {"source": "builtin"}}, "own.yaml")))
    assert not is_job_file("qwen2.5-7b-lora-24gb")


TEXT = """# my job
model_name_or_path: gpt2   # small
stage: sft
do_train: true
finetuning_type: lora

### rows
per_device_train_batch_size: 8  # as many as fit
gradient_accumulation_steps:
cutoff_len: 512
bf16: true
"""


def test_a_file_is_written_back_with_only_the_needed_keys_changed(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(TEXT)
    job = read_job(path)
    work = job.workload
    fitted = Workload.from_mapping(
        {**work.settings(), "batch_size": 2, "grad_accum": 4, "optimizer": "adamw-8bit"}, asked=()
    )
    made = job.write(fitted)
    expected = TEXT.replace("batch_size: 8 ", "batch_size: 2 ").replace("steps:\n", "steps: 4\n")
    assert made == expected + "optim: adamw_bnb_8bit\n"
    assert "alloc_conf" in {*vars(fitted)} and "offload" in job.kept and "rank" not in job.kept


def test_the_environment_that_a_fit_needs_is_a_remark_at_the_top(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, LLAMAFACTORY))
    fitted = Workload.from_mapping({**job.workload.settings(), "alloc_conf": "expandable_segments:True"}, asked=())
    assert job.write(fitted).startswith("# run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


def test_what_no_key_says_is_not_written(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, LLAMAFACTORY))
    fitted = Workload.from_mapping({**job.workload.settings(), "offload": ("optimizer",)}, asked=())
    with pytest.raises(UsageError, match="no key of LLaMA-Factory says --offload"):
        job.write(fitted)


def test_values_are_written_where_they_stand() -> None:
    text = "a: 1  # one\nmodel:\n  rank: 8 # r\n  name: x\nlast: {b: 2}\n"
    made = with_values(
        text, {"model.rank": 4, "a": True, "model.new": "y", "last.b": 3, "end": 5}, is_json=False, nested=True
    )
    assert made == "a: true  # one\nmodel:\n  rank: 4 # r\n  name: x\n  new: y\nlast: {b: 3}\nend: 5\n"
    assert (
        with_values('{\n  "a": 1\n}\n', {"a": 2, "b": "x"}, is_json=True, nested=False)
        == '{\n  "a": 2,\n  "b": "x"\n}\n'
    )


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1]\nb: *x\n", "!!python/object/apply:os.system ['true']\n", "- 1\n", "", "stage: [\n", "{" * 4000,
        "stage: sft\nstage: pt\n", "\x00", "stage: 2020-99-99\n",
    ],
)  # fmt: skip
def test_a_hostile_or_broken_file_is_an_error_in_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(MemfitError):
        read_job(path)


def test_a_file_that_is_too_large_or_none_is_told(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_text("stage: sft\n" + "#" * (1 << 20))
    for path, words in ((big, "at most"), (tmp_path, "is not a file"), (tmp_path / "none.yaml", "no job file")):
        with pytest.raises(InputError, match=words):
            read_job(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = {
    name: sorted({*form.keys, *form.refused, *form.idle.replace("*", "x").split()}) for name, form in FORMATS.items()
}


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_file_crashes_the_reading(data: st.DataObject, tmp_path: Path) -> None:
    form = data.draw(st.sampled_from(sorted(FORMATS)))
    keys = data.draw(st.dictionaries(st.sampled_from(NAMES[form]), VALUES, max_size=8))
    nested: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, leaf = key.rpartition(".")
        place = nested.setdefault(section, {}) if section and FORMATS[form].nested else nested
        if isinstance(place, dict):
            place[leaf if section and FORMATS[form].nested else key] = value
    path = tmp_path / "job.json"
    path.write_text(json.dumps(nested))
    try:
        job = read_job(path, format=form, model="gpt2", seq_len=64)
        json.dumps(job.to_json())
        _ = job.workload
    except MemfitError:
        pass


@pytest.mark.parametrize(
    "keys", [{**LLAMAFACTORY, "model_name_or_path": "evil:make"}, {**AXOLOTL, "base_model": "evil:make"}]
)
def test_code_that_a_file_names_as_its_model_is_not_imported(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\ndef make(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="which no job file may run"):
        read_job(written(tmp_path, keys))
    assert not Path("ran").exists()
    assert read_job(written(tmp_path, keys), model="evil:make").settings["model"] == "evil:make"


def test_axolotl_wants_two_of_three_batch_keys(tmp_path: Path) -> None:
    one = {key: value for key, value in AXOLOTL.items() if key != "gradient_accumulation_steps"}
    with pytest.raises(UsageError, match="memfit has no plan for micro_batch_size"):
        read_job(written(tmp_path, one))
    assert read_job(written(tmp_path, {**one, "batch_size": 8})).settings["grad_accum"] == 4


def test_torch_compile_of_the_trainer_is_planned_compiled(tmp_path: Path) -> None:
    assert read_job(written(tmp_path, {**LLAMAFACTORY, "torch_compile": True})).workload.compile is True
    assert read_job(written(tmp_path, LLAMAFACTORY)).workload.compile is False
    assert read_job(written(tmp_path, {**LLAMAFACTORY, "torch_compile_backend": "inductor"})).workload.compile is True
    with pytest.raises(UsageError, match="no plan for torch_compile_backend"):
        read_job(written(tmp_path, {**LLAMAFACTORY, "torch_compile_backend": "eager"}))
    with pytest.raises(UsageError, match="no plan for torch_compile"):
        read_job(written(tmp_path, {**AXOLOTL, "torch_compile": True}))


def test_a_word_for_yes_in_a_file_is_told_to_be_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="torch_compile 'yes' is text; true or false is wanted"):
        read_job(written(tmp_path, {**LLAMAFACTORY, "torch_compile": "yes"}))


def test_checkpointing_that_is_on_is_not_told_to_be_off_by_default(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, LLAMAFACTORY))
    assert job.workload.grad_checkpointing and "gradient_checkpointing" not in job.defaults


TRAINER = {"model_name_or_path": "gpt2", "output_dir": "out", "per_device_train_batch_size": 2, "max_length": 512}


@pytest.mark.parametrize(
    "keys",
    [
        {"use_cache": True}, {"pad_to_multiple_of": 64}, {"model_init_kwargs": {"dtype": "bfloat16"}},
        {"per_gpu_train_batch_size": 16}, {"split_batches": True}, {"accelerator_config": {"split_batches": True}},
    ],
    ids=lambda keys: next(iter(keys)),
)  # fmt: skip
def test_what_moves_the_memory_of_the_trainer_is_refused_where_it_is_not_planned(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        read_job(written(tmp_path, {**TRAINER, **keys}, "job.json"))
    assert next(iter(keys)) in refused.value.message


def test_a_file_of_trl_has_its_defaults_and_says_so(tmp_path: Path) -> None:
    plain = read_job(written(tmp_path, TRAINER, "job.json")).settings
    assert not plain.get("grad_checkpointing") and plain.get("precision") != "amp-bf16"
    job = read_job(written(tmp_path, {**TRAINER, "dataset_text_field": "text"}, "job.json"))
    assert job.settings["grad_checkpointing"] is True
    assert job.defaults["bf16"] is True and job.workload.precision == "amp-bf16"
    assert any(note.startswith("dataset_text_field is a key of TRL's SFTConfig") for note in job.notes)
    said = read_job(
        written(tmp_path, {**TRAINER, "packing": False, "bf16": False, "gradient_checkpointing": False}, "job.json")
    )
    assert not said.settings["grad_checkpointing"] and said.workload.precision == "fp32"


FSDP_TRAINER = {**TRAINER, "bf16": True, "fsdp": True}


@pytest.mark.parametrize(
    "keys",
    [
        {"fsdp": True}, {"fsdp": "full_shard auto_wrap"}, {"fsdp": ["full_shard", "auto_wrap"]},
        {"fsdp_config": {"fsdp_reshard_after_forward": "True", "fsdp_version": 2}},
        {"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}},
        {"fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": 100}},
    ],
    ids=str,
)  # fmt: skip
def test_fsdp_of_the_trainer_is_fsdp2_where_no_version_is_said(keys: dict[str, Any], tmp_path: Path) -> None:
    job = read_job(written(tmp_path, {**FSDP_TRAINER, **keys}, "job.json"), world_size=2)
    assert job.workload.parallel == "fsdp2" and not job.workload.grad_checkpointing and job.unknown == ()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"fsdp_config": {"version": 1}}, "FSDP1 is not modelled"),
        ({"fsdp_config": {"version": 2, "cpu_offload": True}}, "offloading of weights"),
        ({"fsdp_config": {"cpu_offload": "false"}}, "offloading of weights"),
        ({"fsdp": "full_shard offload"}, "offloading of weights"),
        ({"fsdp_config": {"reshard_after_forward": "False"}}, "weights that stay gathered"),
        ({"fsdp_config": {"reshard_after_forward": 0}}, "weights that stay gathered"),
        ({"fsdp_config": {"reshard_after_forward": "FULL_SHARD"}}, "neither true nor false"),
        ({"fsdp": "shard_grad_op"}, "weights that stay gathered"),
        ({"fsdp": "hybrid_shard"}, "hybrid_shard is of FSDP1"),
        ({"fsdp": "no_shard auto_wrap"}, "no_shard is of FSDP1"),
        ({"fsdp": "full"}, "'full' is no option of FSDP"),
        ({"fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}, "only blocks that are gathered"),
        ({"fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "only blocks that are gathered"),
        ({"fsdp_config": {"xla": True}}, "TPU"),
        ({"fsdp_config": "fsdp.json"}, "names a file"),
        ({"fsdp_config": {"activation_checkpointing": "maybe"}}, "activation_checkpointing is neither"),
    ],
    ids=str,
)  # fmt: skip
def test_fsdp_that_is_not_planned_is_refused(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no plan for fsdp") as refused:
        read_job(written(tmp_path, {**FSDP_TRAINER, **keys}, "job.json"), world_size=2)
    assert why in str(refused.value.hint)


@pytest.mark.parametrize(
    "keys",
    [
        {"fsdp": "hybrid_shard"}, {"fsdp_config": {"version": 1, "reshard_after_forward": "FULL_SHARD"}},
        {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1}},
    ],
)  # fmt: skip
def test_fsdp1_is_planned_otherwise_where_a_flag_says_how(keys: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, {**FSDP_TRAINER, **keys}, "job.json")
    job = read_job(path, parallel="fsdp2", world_size=2)
    assert any("planned with --parallel fsdp2 in its place" in note for note in job.notes)


def test_keys_of_an_fsdp_config_are_named_as_others_are(tmp_path: Path) -> None:
    config = {"cpu_ofload": True, "backward_prefetch": "BACKWARD_PRE", "activation_checkpointing": "True"}
    job = read_job(written(tmp_path, {**FSDP_TRAINER, "fsdp_config": config}, "job.json"), world_size=2)
    assert job.unknown == ("fsdp_config.cpu_ofload",) and "fsdp_config.backward_prefetch" in job.idle
    assert job.workload.grad_checkpointing


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        ({}, {}, ("amp-bf16", None)),
        ({"bf16": False}, {"precision": "bf16"}, ("bf16", "bf16")),
        ({"fp16": True}, {}, ("amp-fp16", None)),
        ({}, {"precision": "bf16", "autocast": "fp16"}, ("bf16", "fp16")),
        ({}, {"precision": "amp-fp16"}, ("amp-fp16", None)),
    ],
)
def test_mixed_precision_of_accelerate_counts_where_training_arguments_say_none(
    own: dict[str, Any], given: dict[str, Any], expected: tuple[str, str | None], tmp_path: Path
) -> None:
    arguments = written(tmp_path, {**TRAINER, **own}, "args.json")
    launch = written(tmp_path, {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "bf16"})
    work = read_job(arguments, launch, **given).workload
    assert (work.precision, work.autocast) == expected


def test_mixed_precision_of_accelerate_beside_the_other_tools(tmp_path: Path) -> None:
    launch = written(tmp_path, {"distributed_type": "NO", "mixed_precision": "bf16"}, "launch.yaml")
    adapters = read_job(written(tmp_path, {**LLAMAFACTORY, "bf16": False}), launch).workload
    assert (adapters.precision, adapters.autocast) == ("bf16", "bf16")
    own = read_job(written(tmp_path, {**AXOLOTL, "bf16": False}), launch).workload
    assert (own.precision, own.autocast) == ("fp32", None), "Axolotl sets the variable itself"


FSDP_LAUNCH = {
    "distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_activation_checkpointing": True,
    },
}  # fmt: skip


def test_checkpointing_of_fsdp_is_that_of_a_trainer_that_says_none(tmp_path: Path) -> None:
    launch = written(tmp_path, FSDP_LAUNCH)
    for own in ({}, {"gradient_checkpointing": False}):
        for order in (1, -1):
            files = [written(tmp_path, {**TRAINER, **own}, "args.json"), launch][::order]
            assert read_job(*files).workload.grad_checkpointing
    own = written(tmp_path, {**LLAMAFACTORY, "disable_gradient_checkpointing": False}, "llamafactory.yaml")
    assert read_job(own, launch).workload.grad_checkpointing
    with pytest.raises(UsageError, match="both switch on checkpointing"):
        read_job(written(tmp_path, {**TRAINER, "gradient_checkpointing": True}, "args.json"), launch)
    both = {**FSDP_TRAINER, "gradient_checkpointing": True, "fsdp_config": {"fsdp_activation_checkpointing": "true"}}
    with pytest.raises(UsageError, match="no plan for gradient_checkpointing"):
        read_job(written(tmp_path, both, "args.json"), world_size=2)
    alone = {**FSDP_TRAINER, "gradient_checkpointing": True}
    assert read_job(written(tmp_path, alone, "args.json"), world_size=2).workload.grad_checkpointing


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, "fsdp_auto_wrap_policy"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1}, "fsdp_auto_wrap_policy"),
        ({"fsdp_reshard_after_forward": False}, "fsdp_reshard_after_forward"),
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, "fsdp_reshard_after_forward"),
        ({"fsdp_activation_checkpointing_offload": True}, "fsdp_activation_checkpointing_offload"),
    ],
)
def test_fsdp_of_accelerate_that_is_not_planned_is_refused(section: dict[str, Any], named: str, tmp_path: Path) -> None:
    launch = {**FSDP_LAUNCH, "fsdp_config": {**FSDP_LAUNCH["fsdp_config"], **section}}
    with pytest.raises(UsageError, match=rf"no plan for fsdp_config\.{named}"):
        read_job(written(tmp_path, launch), model="gpt2", seq_len=64)


def test_blocks_that_accelerate_does_not_wrap_are_told(tmp_path: Path) -> None:
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": "true"}
    job = read_job(written(tmp_path, {**FSDP_LAUNCH, "fsdp_config": section}), model="gpt2", seq_len=64)
    assert any(note.startswith("not modelled: weights that are gathered all at once") for note in job.notes)


def test_what_deepspeed_keeps_on_the_host_is_said_where_fsdp_is_planned_instead(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "gpt2", "seq_len": 64, "parallel": "fsdp2", "world_size": 2}
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    job = read_job(written(tmp_path, {"zero_optimization": zero}, "ds.json"), **asked)
    assert any("zero_optimization.offload_optimizer.device: DeepSpeed keeps it on the host" in n for n in job.notes)
    assert "zero_optimization.offload_optimizer.device" not in job.idle
    assert "zero_optimization.offload_param.device" in job.idle
    section = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
    job = read_job(written(tmp_path, {"distributed_type": "DEEPSPEED", "deepspeed_config": section}), **asked)
    assert any("deepspeed_config.offload_optimizer_device: DeepSpeed" in note for note in job.notes)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({**LLAMAFACTORY, "moe_aux_loss_coef": 0.001}, "moe_aux_loss_coef"),
        ({**AXOLOTL, "model_type": "AutoModelForSequenceClassification"}, "model_type"),
        ({**AXOLOTL, "lora_target_linear": False}, "adapter"),
    ],
)
def test_keys_that_move_memory_are_not_called_idle(keys: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no plan for {named}"):
        read_job(written(tmp_path, keys))


def test_adamw_of_torchtune_without_foreach_takes_weights_one_by_one(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "tokenizer": {"max_seq_len": 64},
        "optimizer": {"_component_": "torch.optim.AdamW", "foreach": False}, "batch_size": 2, "metric_logger": {},
    }  # fmt: skip
    job = read_job(written(tmp_path, recipe))
    assert job.workload.optimizer == "adamw-single" and "optimizer.foreach" not in job.idle
    fitted = Workload.from_mapping({**job.workload.settings(), "optimizer": "adamw-fused"}, asked=())
    assert "foreach: null" in job.write(fitted)
    recipe["optimizer"] = {"_component_": "torch.optim.SGD", "momentum": 0.9, "weight_decay": 0.1}
    work = read_job(written(tmp_path, recipe)).workload
    assert (work.optimizer, work.momentum, work.weight_decay) == ("sgd", 0.9, 0.1)
    recipe["optimizer"]["foreach"] = False
    with pytest.raises(UsageError, match=r"no plan for optimizer\.foreach"):
        read_job(written(tmp_path, recipe))


def test_a_key_is_known_by_its_newer_name_too(tmp_path: Path) -> None:
    """transformers 5.23 says activation_checkpointing; where a file has both, that counts."""
    keys = {"model_name_or_path": "gpt2", "max_seq_length": 64, "per_device_train_batch_size": 2, "dataset_num_proc": 1}
    newer = {**keys, "activation_checkpointing": False, "gradient_checkpointing": True}
    job = read_job(written(tmp_path, newer))
    assert not job.workload.grad_checkpointing and job.used["activation_checkpointing"] is False and not job.unknown
    fitted = Workload.from_mapping({**job.workload.settings(), "grad_checkpointing": True}, asked=())
    assert "activation_checkpointing: true" in job.write(fitted)
    for more in ({"every_n_layers": 2}, {"offload": True}):
        with pytest.raises(UsageError, match="no plan for activation_checkpointing_kwargs"):
            read_job(
                written(tmp_path, {**keys, "activation_checkpointing": True, "activation_checkpointing_kwargs": more})
            )
    read_job(
        written(
            tmp_path,
            {**keys, "activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 1}},
        )
    )


def recipe_of_torchtune(**more: Any) -> dict[str, Any]:
    return {
        "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "tokenizer": {"max_seq_len": 64},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4, "betas": [0.9, 0.95]},
        "batch_size": 2, "metric_logger": {}, **more,
    }  # fmt: skip


def test_arguments_of_torchtune_s_optimizer_are_idle_refused_or_named(tmp_path: Path) -> None:
    job = read_job(written(tmp_path, recipe_of_torchtune()))
    assert {"optimizer.lr", "optimizer.betas"} <= {*job.idle}
    for name in ("amsgrad", "maximize"):
        recipe = recipe_of_torchtune()
        recipe["optimizer"][name] = True
        with pytest.raises(UsageError, match=rf"no plan for optimizer\.{name}"):
            read_job(written(tmp_path, recipe))
    recipe = recipe_of_torchtune()
    recipe["optimizer"]["optim_bits"] = 8
    assert "optimizer.optim_bits" in read_job(written(tmp_path, recipe)).unknown


def test_a_validation_of_torchtune_with_more_rows_is_said_not_to_be_modelled(tmp_path: Path) -> None:
    more = {"run_val_every_n_steps": 10, "dataset_val": {"_component_": "torchtune.datasets.alpaca_dataset"}}
    for rows, expected in ((32, 1), (2, 0), (None, 0)):
        job = read_job(written(tmp_path, recipe_of_torchtune(batch_size_val=rows, **more)))
        assert sum(note.startswith("not modelled: validation, with 32 rows") for note in job.notes) == expected


def test_groups_of_fsdp_that_are_no_blocks_are_said_not_to_be_modelled(tmp_path: Path) -> None:
    for name, expected in (("LlamaDecoderLayer", 0), ("LlamaMLP", 1)):
        config = {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": name, "fsdp_reshard_after_forward": True,
        }  # fmt: skip
        file = written(tmp_path, {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": config})
        notes = read_job(file, model="gpt2", seq_len=64, precision="bf16").notes
        assert sum(f"groups of {name}" in note for note in notes) == expected

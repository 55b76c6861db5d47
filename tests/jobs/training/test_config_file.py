"""A config file is plain data: bounded, without code, and nothing in it is taken silently."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from config_table import PAGE, table

from memfit.errors import InputError, MemfitError, UnknownName, UsageError
from memfit.jobfiles.file import read_job
from memfit.jobs.training.batch import resolve_batch
from memfit.jobs.training.config_file import dump, load_config, shipped_configs


def written(folder: Path, text: str, name: str = "my.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_these_configs_come_with_memfit() -> None:
    assert shipped_configs() == ("gsa-512m", "qwen2.5-7b-lora-24gb", "qwen2.5-7b-qlora-8gb", "smollm2-lora-demo")


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_config_reads_and_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert config.notes() == ()
    again = load_config(written(tmp_path, dump(config), f"{name}.yaml"))
    assert again == config
    assert again.output_dir == f"outputs/{name}"


def test_the_7b_config_gives_up_neither_length_nor_rank_nor_batch() -> None:
    config = load_config("qwen2.5-7b-lora-24gb")
    assert (config.data.max_seq_len, config.workload.rank, config.workload.target_modules) == (2048, 128, None)
    assert resolve_batch(config.batch, 1).global_batch_size == 16
    assert (config.workload.loss, config.workload.checkpointing, config.workload.precision) == (
        "chunked",
        "full",
        "bf16",
    )


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_gsa_config_has_a_global_batch_of_256_on_any_number_of_gpus(gpus: int) -> None:
    config = load_config("gsa-512m")
    assert resolve_batch(config.batch, gpus).global_batch_size == 256
    assert (config.data.max_seq_len, config.workload.precision, config.model.settings["path"]) == (
        1024,
        "amp-bf16",
        "masked",
    )


def test_the_gsa_config_has_the_parameters_that_it_says() -> None:
    from memfit.jobs.training.shapes import gsa_config
    from memfit.models.presets import parameters_of

    assert parameters_of(gsa_config(load_config("gsa-512m").model).to_dict()) == 183_662_144


def test_settings_of_the_command_line_are_yaml(tmp_path: Path) -> None:
    path = written(tmp_path, "model: gpt2\nmax_seq_len: 7\n")
    config = load_config(path, sets=["data.max_seq_len=9", "offload=[optimizer]", "learning_rate=3e-4"])
    assert (config.data.max_seq_len, config.workload.offload, config.schedule.learning_rate) == (
        9,
        ("optimizer",),
        3e-4,
    )
    assert config.name == "my"


@pytest.mark.parametrize("said", ["max_seq_len", "=3", ""])
def test_a_setting_without_an_equals_sign_is_refused(said: str) -> None:
    with pytest.raises(MemfitError, match="is not KEY=VALUE"):
        load_config("gsa-512m", sets=[said])


def test_a_name_that_is_close_is_suggested() -> None:
    with pytest.raises(UnknownName, match="no config called 'gsa-512'") as found:
        load_config("gsa-512")
    assert "gsa-512m" in str(found.value.hint)


def test_a_file_that_is_not_there_is_said_with_what_there_is() -> None:
    with pytest.raises(InputError, match=r"no config file 'nowhere\.yaml'"):
        load_config("nowhere.yaml")


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "model: gpt2\nbatch_sise: 3\n")
    with pytest.raises(MemfitError, match=r"my\.yaml': unknown key 'batch_sise'"):
        load_config(path)


@pytest.mark.parametrize(("text", "said"), [
    ("", "is empty"), ("- 1\n- 2\n", "not a mapping"), ("model: gpt2\nmodel: gpt3\n", "stands twice"),
    ("a: &x 1\nb: *x\n", "anchors and aliases are not read"), ("a: !!python/object/apply:os.system ['true']\n", "tag"),
    ("a: !mine 3\n", "tag"), ("a: [1, 2\n", "not YAML"), ("? [a, b]\n: 3\n", "not YAML that memfit reads"),
    ("a: " + "[" * 50 + "]" * 50 + "\n", "nested deeper"), ("a: 2024-99-99\n", "cannot be read"),
    ("a: 1\n---\nb: 2\n", "not YAML"), ("seed: " + "9" * 5000 + "\n", "cannot be read"), ("a: '\x00'\n", "not YAML"),
])  # fmt: skip
def test_a_hostile_or_broken_file_is_one_error(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_config(written(tmp_path, text))


def test_a_python_file_of_constants_is_refused_without_running_it(tmp_path: Path) -> None:
    path, ran = tmp_path / "config.py", tmp_path / "ran"
    path.write_text(f"MAX_SEQ_LENGTH = 1536\nopen({str(ran)!r}, 'w')\nTRAINING_CONFIG = {{\n    'lr': 1e-4,\n}}\n")
    for read in (load_config, read_job):
        with pytest.raises(InputError, match=r"config\.py' is a Python file, which is not read") as told:
            read(str(path))
        assert told.value.hint is not None and "qwen2.5-7b-lora-24gb" in told.value.hint
    assert not ran.exists()


def test_keys_of_such_a_file_are_read_from_yaml(tmp_path: Path) -> None:
    text = "model_name: gpt2\nmax_seq_length: 1536\ntraining_config: {num_train_epochs: 3}\nlora_config: {r: 16}\n"
    config = load_config(written(tmp_path, text + "data: my.jsonl\nmethod: lora\n"))

    assert (config.data.max_seq_len, config.schedule.epochs, config.workload.rank) == (1536, 3, 16)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a config has at most"):
        load_config(written(tmp_path, "#" * (1 << 20) + "\n"))
    if os.path.exists("/dev/zero"):
        with pytest.raises(InputError, match="may have no end"):
            load_config("/dev/zero")


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load_config(str(tmp_path / "x.yaml"))
    with pytest.raises(InputError, match="is a folder"):
        load_config(str(tmp_path))


def test_a_key_that_is_set_twice_to_different_values_is_refused() -> None:
    assert load_config("smollm2-lora-demo", sets=["r=8", "r=8"]).workload.rank == 8
    with pytest.raises(UsageError, match="--set gives r twice: 8 and 16"):
        load_config("smollm2-lora-demo", sets=["r=8", "r=16"])


def test_every_key_of_a_config_is_on_the_page() -> None:
    """`python tests/jobs/training/config_table.py` writes the table anew."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_every_shipped_config_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in shipped_configs())

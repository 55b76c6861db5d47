"""`--resume_from` a folder of another program: its weights are the beginning, or it is said what was looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_run import run, tiny_job, weights

from memfit.errors import InputError
from memfit.jobs.build import build_for_training


@pytest.fixture
def trained(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Weights that no seed makes."""
    run(tmp_path, output_dir=str(tmp_path / "before"))
    return weights(tmp_path / "before" / "step_4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "out" / "step_5000"
    made.mkdir(parents=True)
    (made / "optimizer.bin").write_bytes(b"of another kind")
    return made


def begins_with(tmp_path: Path, folder: Path, wanted: dict[str, torch.Tensor], **changes: Any) -> str:
    """The note on it."""
    job = tiny_job(tmp_path, resume_from=str(folder), **changes)
    model = build_for_training(job)
    built = model.state_dict()
    assert all(torch.equal(built[name], each) for name, each in wanted.items())
    assert (job.resume_from, job.to_json()["start_from"]) == (None, str(folder))
    return job.notes[-1]


def test_the_guide_s_own_command_begins_with_the_weights_of_its_folder(
    tmp_path: Path, folder: Path, trained: dict[str, torch.Tensor]
) -> None:
    save_file(trained, folder / "model.safetensors")
    note = begins_with(tmp_path, folder, trained)
    assert "the 21 weights in model.safetensors are the beginning" in note
    assert "steps, optimizer, learning rate and the order of the data begin anew" in note
    result, _ = run(tmp_path, resume_from=str(folder))
    assert (result.first_step, result.steps) == (0, 4)
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("form", ["plain", "in a dictionary", "of DDP", "compiled"])
def test_pickled_tensors_are_read_as_programs_write_them(
    tmp_path: Path, folder: Path, trained: dict[str, torch.Tensor], form: str
) -> None:
    held: Any = {
        "plain": trained, "in a dictionary": {"step": 5000, "model_state_dict": trained, "config": {"d_model": 16}},
        "of DDP": {f"module.{name}": each for name, each in trained.items()},
        "compiled": {"model": {f"_orig_mod.{name}": each for name, each in trained.items()}, "iter_num": 3},
    }[form]  # fmt: skip
    torch.save(held, folder / "ckpt.pt")
    assert "weights in ckpt.pt are the beginning" in begins_with(tmp_path, folder, trained)


def test_adapters_of_another_program_begin_a_lora_run(tmp_path: Path, folder: Path) -> None:
    lora = {"method": "lora", "method.rank": 4}
    run(tmp_path, output_dir=str(tmp_path / "before"), **lora)
    adapters = weights(tmp_path / "before" / "step_4")
    save_file(adapters, folder / "adapter_model.safetensors")
    note = begins_with(tmp_path, folder, {}, **lora)
    assert f"the {len(adapters)} weights in adapter_model.safetensors" in note
    model = build_for_training(tiny_job(tmp_path, resume_from=str(folder), **lora)).state_dict()
    for name, each in adapters.items():
        assert torch.equal(model[name.replace(".weight", ".default.weight")], each)


def test_weights_of_another_model_are_refused_with_what_was_looked_for(
    tmp_path: Path, folder: Path, trained: dict[str, torch.Tensor]
) -> None:
    changed = dict(trained)
    changed["lm_head.weight"] = torch.zeros(7, 16)
    changed["other.weight"] = changed.pop("model.norm.weight")
    save_file(changed, folder / "model.safetensors")
    with pytest.raises(InputError) as found:
        tiny_job(tmp_path, resume_from=str(folder))
    assert found.value.message.endswith(
        "the weights in model.safetensors are not those of this model: 19 of 21 weights of this model are there; not"
        " there: model.norm.weight; of another shape: lm_head.weight 7x16 there and 300x16 here; there instead:"
        " other.weight"
    )


def test_a_folder_without_weights_says_what_was_looked_for_and_what_is_there(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match=r"looked for trainer_state\.json .*it holds optimizer\.bin") as found:
        tiny_job(tmp_path, resume_from=str(folder))
    assert "*.safetensors, *.bin, *.pt, *.pth, *.ckpt" in found.value.message


def test_no_code_out_of_a_pickle_is_run(tmp_path: Path, folder: Path) -> None:
    torch.save({"model": Path("/")}, folder / "model.pt")
    with pytest.raises(InputError, match="cannot be read as tensors alone, and memfit runs no code"):
        tiny_job(tmp_path, resume_from=str(folder))

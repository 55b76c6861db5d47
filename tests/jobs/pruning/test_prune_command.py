"""`memfit prune` from the shell: what it prints, writes and refuses, on a model of three blocks."""

from __future__ import annotations

import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folder import english, model_folder

import memfit as library
from memfit.cli.main import main

SMALL = ("--nsamples", "8", "--seqlen", "64", "--eval-windows", "4", "--device", "cpu")
TEXT = str(Path(__file__).parents[3] / "LICENSE")
LITTLE = ("--dataset", TEXT, "--eval-dataset", TEXT, *SMALL)
"""Eleven thousand letters of English are read in a moment; the text that comes with Python takes most of a second."""
CHECKPOINTS = [
    "01_start", "02_model_loaded", "03_before_pruning", "04_after_pruning", "05_before_eval", "06_after_eval",
    "07_before_save_model", "08_after_save_model", "09_end",
]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Memfit = Callable[..., Ended]


@pytest.fixture
def memfit(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Memfit:
    monkeypatch.delenv("MEMFIT_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*argv: object) -> Ended:
        capfd.readouterr()
        code = main([str(arg) for arg in argv])
        return Ended(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(english(200))
    return path


def zeros(folder: Path, name: str = "mlp.down_proj") -> float:
    weights = load_file(folder / "model.safetensors")
    found = torch.cat([weight.flatten() for key, weight in weights.items() if name in key])
    return float((found == 0).double().mean())


# -- a run -------------------------------------------------------------------------------------------------------------


def test_the_lines_that_scripts_look_for_come_in_this_order(memfit: Memfit, original: Path) -> None:
    ended = memfit("prune", "--model", original, "--dataset", "builtin", *SMALL)
    assert ended.code == 0
    lines = ended.out.splitlines()
    wanted = [
        "loading calibration data", "dataset loading complete", f"loading llm model {original}", "use device  cpu",
        "pruning starts", "pruning layer 0 name self_attn.q_proj", "pruning layer 2 name mlp.down_proj",
        "*" * 30, "layer 0 sparsity 0.500000", "layer 2 sparsity 0.500000", "sparsity sanity check 0.5000",
        "evaluating on builtin", "nsamples 4", "sample 0",
    ]  # fmt: skip
    places = [lines.index(line) for line in wanted]
    assert places == sorted(places)
    assert sum(line.startswith("pruning layer ") for line in lines) == 3 * 7
    assert re.search(r"^builtin perplexity \d+\.\d+$", ended.out, re.MULTILINE)
    assert lines[-1].endswith("not saved")


def test_in_python_it_is_the_same_run_and_the_same_document(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    said: list[str] = []

    result = library.prune(
        str(original), dataset=TEXT, eval_dataset=TEXT, nsamples=8, seqlen=64, eval_windows=4, device="cpu",
        save=str(tmp_path / "one"), listener=library.Listener(say=said.append),
    )  # fmt: skip

    ended = memfit("prune", "--model", original, *LITTLE, "--save", tmp_path / "two", "--json")
    differs = {"seconds", "saved", "settings", "peaks", "checkpoints", "layers"}  # times, places
    ours, theirs = json.loads(json.dumps(result.to_json())), json.loads(ended.out)
    assert list(ours) == list(theirs)
    assert {k: v for k, v in ours.items() if k not in differs} == {k: v for k, v in theirs.items() if k not in differs}
    assert [each["zeros"] for each in ours["layers"]] == [each["zeros"] for each in theirs["layers"]]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert said == [line for line in ended.err.splitlines() if line in said]
    assert repr(result) == f"<PruneResult: {result}>" and str(result).endswith(f"saved to {tmp_path / 'one'}")


def test_without_save_nothing_is_written(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in original.rglob("*")}
    assert memfit("prune", "--model", original, *LITTLE).code == 0
    assert {path: path.stat().st_mtime_ns for path in original.rglob("*")} == before
    assert list(tmp_path.iterdir()) == []


def test_a_saved_model_is_a_normal_folder_that_transformers_loads(
    memfit: Memfit, original: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    assert memfit("prune", "--model", original, "--save", out, *LITTLE).code == 0
    assert zeros(out) == 0.5
    assert zeros(out, "lm_head") == zeros(original, "lm_head")
    config = json.loads((out / "config.json").read_text())
    assert not [key for key in config if "spars" in key or "quant" in key]
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert loaded(torch.tensor([tokenizer("abc")["input_ids"]])).logits.isfinite().all()


def test_the_guides_spellings_are_the_same_flags(memfit: Memfit, original: Path, text: Path, tmp_path: Path) -> None:
    ended = memfit(
        "prune", "--model", original, "--prune_method", "magnitude", "--sparsity_ratio", "0.25", "--sparsity_type",
        "unstructured", "--save_model", tmp_path / "out", "--log_memory", "--no-eval", "--device", "cpu",
        "--cache_dir", tmp_path / "cache", "--use_variant",
    )  # fmt: skip
    assert (ended.code, ended.err) == (2, "error: --use-variant belongs to --prune-method wanda\n  not to magnitude\n")
    ended = memfit(
        "prune", "--model", original, "--prune_method", "magnitude", "--sparsity_ratio", "0.25", "--sparsity_type",
        "unstructured", "--save_model", tmp_path / "out", "--log_memory", "--no-eval", "--device", "cpu",
    )  # fmt: skip
    assert ended.code == 0
    assert zeros(tmp_path / "out") == 0.25


def test_beside_save_model_the_folder_of_save_gets_the_results_only(
    memfit: Memfit, original: Path, tmp_path: Path
) -> None:
    ended = memfit(
        "prune", "--model", original, *LITTLE, "--save", tmp_path / "results", "--save_model",
        tmp_path / "pruned", "--log_memory",
    )  # fmt: skip
    assert ended.code == 0
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"result.json", "log_wanda.txt", "memory_log.csv", "memory_log_parts.csv"}
    assert (tmp_path / "pruned" / "model.safetensors").is_file()


# -- memory log --------------------------------------------------------------------------------------------------------


def test_a_saved_run_has_all_nine_checkpoints_on_stdout_and_in_the_file(
    memfit: Memfit, original: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = memfit("prune", "--model", original, "--save", out, "--log_memory", *LITTLE)
    assert re.findall(r"^Memory Checkpoint: (\w+)$", ended.out, re.MULTILINE) == CHECKPOINTS
    header, *rows = (out / "memory_log.csv").read_text().splitlines()
    assert header == "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent"
    assert [row.split(",")[1] for row in rows] == CHECKPOINTS
    assert all(row.split(",")[2:5] == ["", "", ""] for row in rows), "no GPU: unknown, not nought"
    assert "MEMORY USAGE SUMMARY" in ended.out
    parts = (out / "memory_log_parts.csv").read_text().splitlines()[1:]
    assert [row.split(",")[1:3] for row in parts] == [["04_after_pruning", f"block {i}"] for i in range(3)]


def test_saving_has_no_checkpoints_where_nothing_is_saved(memfit: Memfit, original: Path) -> None:
    ended = memfit("prune", "--model", original, "--log_memory", *LITTLE)
    seen = re.findall(r"^Memory Checkpoint: (\w+)$", ended.out, re.MULTILINE)
    assert seen == [*CHECKPOINTS[:6], "09_end"]


def test_without_the_flag_there_is_no_log(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    ended = memfit("prune", "--model", original, "--save", tmp_path / "out", *LITTLE)
    assert "Memory Checkpoint" not in ended.out
    assert not (tmp_path / "out" / "memory_log.csv").exists()


def test_memory_that_runs_out_marks_the_stage_names_what_helps_and_ends_with_1(
    memfit: Memfit, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has ...")

    monkeypatch.setattr("memfit.jobs.pruning.engine.Engine.prune", fails)
    out = tmp_path / "out"
    ended = memfit(
        "prune", "--model", original, "--dataset", "builtin", "--save", out, "--log_memory", "--prune-method",
        "sparsegpt", "--device", "cpu", "--no-eval", "--seqlen", "200",
    )  # fmt: skip
    assert ended.code == 1
    assert "\n03_before_pruning: n/a\n04_after_pruning:  ERROR!\n" in ended.out
    first, *rest = ended.err.splitlines()
    assert first.startswith("error: GPU memory ran out before 04_after_pruning: CUDA out of memory. Tried to allocate")
    assert [line.split(":")[0].strip() for line in rest] == [
        "--max-gpu-memory 8GiB", "--prune-method wanda or ria", "--nsamples 64", "--device cpu",
    ]  # fmt: skip
    assert "empty_cache" not in ended.err
    assert not out.exists()
    assert not list(tmp_path.glob("out.partial*")), "nothing was done: there is nothing to resume"


# -- results -----------------------------------------------------------------------------------------------------------


def test_json_is_one_document_on_stdout_and_the_file_holds_the_same(
    memfit: Memfit, original: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = memfit("prune", "--model", original, "--save", out, "--json", "--log_memory", *LITTLE)
    document = json.loads(ended.out)
    assert document == json.loads((out / "result.json").read_text())
    assert "pruning starts" in ended.err
    assert "Memory Checkpoint: 04_after_pruning" in ended.err
    assert (document["schema"], document["method"], document["sparsity"]) == ("memfit.prune/1", "wanda", 0.5)
    assert document["perplexity_pruned"] > 1 < document["perplexity_dense"]
    assert [layer["sparsity"] for layer in document["layers"]] == [0.5] * 3
    first = document["layers"][0]["matrices"][0]
    assert (first["name"], first["zeros"], first["rows"] * first["columns"]) == ("self_attn.q_proj", 512, 1024)
    assert len(document["data"]["sha256"]) == 64
    assert [point["name"] for point in document["checkpoints"]] == CHECKPOINTS
    assert document["peaks"]["gpu_allocated_bytes"] is None
    assert document["peaks"]["host_bytes"] > 0
    assert set(document["seconds"]) == {"load", "data", "prune", "evaluate", "save", "total"}
    assert document["versions"]["torch"] == torch.__version__


def test_the_log_of_the_method_has_two_tab_separated_lines(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    ended = memfit("prune", "--model", original, "--dataset", "builtin", "--save", tmp_path / "out", *SMALL)
    header, values = (tmp_path / "out" / "log_wanda.txt").read_text().splitlines()
    perplexity = float(re.findall(r"^builtin perplexity (.*)$", ended.out, re.MULTILINE)[0])
    assert header == "method\tactual_sparsity\tppl_test"
    assert values == f"wanda\t0.5000\t{perplexity:.4f}"


# -- what is refused, before any work ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--sparsity-ratio", "1.5"], "--sparsity-ratio 1.5 is not a share"),
        (["--sparsity-ratio", "-0.1"], "--sparsity-ratio -0.1 is not a share"),
        (["--prune-method", "gblm"], "--method 'gblm' is not one of magnitude, wanda, sparsegpt, ria"),
        (["--sparsity-type", "2:4", "--sparsity-ratio", "0.6"], "--sparsity-ratio 0.6 is not 2:4"),
        (["--sparsity-type", "1:7"], "--sparsity-type 1:7: self_attn.q_proj has 32 columns, which cannot be cut"),
        (["--nsamples", "0"], "--nsamples 0 is not"),
        (["--eval-windows", "0"], "--eval-windows 0 is not"),
        (["--dataset", "wikitext"], "no data set or file called 'wikitext'"),
        (["--dataset", "wikitext2"], "no text for --dataset wikitext2"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--device", "tpu"], "--device"),
        (["--resume"], "--resume continues what --save began"),
        (["--max-gpu-memory", "plenty"], "--max-gpu-memory 'plenty' is not a size"),
        (["--no-eval", "--eval-windows", "3"], "--no-eval leaves nothing to do"),
        (["--eval-zero-shot", "--save", "never"], "--eval-zero-shot needs the package lm-eval"),
    ],
)
def test_a_wrong_flag_is_told_before_any_work(memfit: Memfit, original: Path, argv: list[str], said: str) -> None:
    ended = memfit("prune", "--model", original, *(() if "--dataset" in argv else ("--dataset", "builtin")), *argv)
    assert ended.code == 2
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert "pruning layer" not in ended.out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-such-folder/at-all/", "no-such-folder"),
        ("lama-7b", "did you mean 'llama-7b'"),
        ("missing.gguf", "no file 'missing.gguf'"),
    ],
)
def test_a_model_without_weights_is_told(memfit: Memfit, name: str, said: str) -> None:
    ended = memfit("prune", "--model", name, "--dataset", "builtin")
    assert (ended.code, said in ended.err) == (2, True), ended.err


def test_a_preset_is_looked_for_on_the_hub_by_the_id_it_names(memfit: Memfit, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def out_of_reach(name: str, **_: object) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", out_of_reach)
    ended = memfit("prune", "--model", "gpt2", "--dataset", "builtin")
    assert (ended.code, set(asked)) == (2, {"openai-community/gpt2"})
    assert "'openai-community/gpt2' is not in the Hugging Face cache and cannot be fetched" in ended.err


def test_a_window_longer_than_the_models_positions_is_cut_with_a_word(memfit: Memfit, original: Path) -> None:
    ended = memfit("prune", "--model", original, "--dataset", "builtin", "--nsamples", 2, "--no-eval", "--json")
    assert "note: --seqlen 2048 is more than the model's 256 positions: 256 is taken" in ended.err
    assert json.loads(ended.out)["settings"]["seqlen"] == 256


def test_the_models_maximum_is_never_taken_by_accident(memfit: Memfit, tmp_path: Path) -> None:
    model = model_folder(tmp_path, max_position_embeddings=131_072)
    ended = memfit(
        "prune", "--model", model, "--dataset", "builtin", "--nsamples", 1, "--no-eval", "--json", "--prune-method",
        "magnitude",
    )  # fmt: skip
    assert json.loads(ended.out)["settings"]["seqlen"] == 2048


def test_an_existing_folder_is_refused_at_once(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("chapter one")
    ended = memfit("prune", "--model", original, "--save", tmp_path / "out", *LITTLE)
    assert (ended.code, ended.out) == (2, "")
    assert "already exists" in ended.err
    ended = memfit("prune", "--model", original, "--save", tmp_path / "out", "--force", *LITTLE)
    assert ended.code == 2
    assert "is not the result of an earlier run" in ended.err
    assert (tmp_path / "out" / "thesis.txt").read_text() == "chapter one"


def test_resume_of_a_finished_run_is_done_at_once_and_of_another_one_refused(
    memfit: Memfit, original: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("prune", "--model", original, "--dataset", "builtin", "--save", out, "--nsamples", 2, "--seqlen", 32)
    first = memfit(*asked, "--no-eval", "--resume", "--json")
    written = (out / "model.safetensors").stat().st_mtime_ns
    again = memfit(*asked, "--no-eval", "--resume", "--json")
    assert (first.code, again.code, json.loads(again.out)) == (0, 0, json.loads(first.out))
    assert f"'{out}' is complete already: nothing is left to resume" in again.err
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    assert "weights are zero" in memfit(*asked, "--no-eval", "--resume").out

    other = memfit(*asked, "--no-eval", "--resume", "--sparsity-ratio", "0.75")
    assert other.code == 2 and "is the complete result of another run" in other.err
    (out / "result.json").write_text((out / "result.json").read_text().replace('"layers"', '"lairs"'))
    damaged = memfit(*asked, "--no-eval", "--resume")
    assert damaged.code == 2 and "is not as memfit wrote it" in damaged.err


def test_force_replaces_the_result_of_an_earlier_run(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    asked = ("prune", "--model", original, "--dataset", "builtin", "--save", tmp_path / "out", "--no-eval")
    assert memfit(*asked, "--nsamples", 2, "--seqlen", 32).code == 0
    again = memfit(*asked, "--nsamples", 2, "--seqlen", 32, "--sparsity-ratio", "0.75")
    assert (again.code, again.out, "--force replaces it" in again.err) == (2, "", True)
    assert zeros(tmp_path / "out") == 0.5
    assert memfit(*asked, "--nsamples", 2, "--seqlen", 32, "--force", "--sparsity-ratio", "0.75").code == 0
    assert zeros(tmp_path / "out") == 0.75


def test_an_empty_folder_may_be_saved_to(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    asked = ("prune", "--model", original, "--prune-method", "magnitude", "--save", tmp_path / "out", "--no-eval")
    assert memfit(*asked).code == 0


@pytest.mark.parametrize("there", [True, False], ids=["to an empty folder", "to a folder that is not there yet"])
def test_a_symbolic_link_is_followed_and_stays(memfit: Memfit, original: Path, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    asked = ("prune", "--model", original, "--prune-method", "magnitude", "--no-eval", "--save", tmp_path / "link")
    assert memfit(*asked, "--device", "cpu").code == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


@pytest.mark.parametrize(
    ("save", "said"),
    [
        ("/", "--save '/' is the root of all folders"),
        ("afile/x", "afile' is a file"),
        ("loop", "loop' is a symbolic link that leads nowhere"),
        ("loop/x", "loop' is a symbolic link that leads nowhere"),
    ],
)
def test_a_place_where_nothing_can_be_saved_is_refused_before_any_work(
    memfit: Memfit, tmp_path: Path, save: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").touch()
    (tmp_path / "loop").symlink_to("loop")
    ended = memfit("prune", "--model", "no-model-is-looked-for", *LITTLE, "--save", save)
    assert (ended.code, said in ended.err, "such as --save pruned" in ended.err) == (2, True, True), ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["afile", "loop"]


def test_no_folder_to_save_to_is_not_the_current_one() -> None:
    with pytest.raises(library.UsageError, match="--save is empty"):
        library.prune("no-model-is-looked-for", save="")


def test_a_place_that_cannot_be_written_is_told(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = memfit("prune", "--model", original, "--save", tmp_path / "file" / "out", *LITTLE)
    assert ended.code == 2
    assert "cannot be written" in ended.err
    assert "pruning layer" not in ended.out


def test_a_full_disk_is_told(memfit: Memfit, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    ended = memfit("prune", "--model", original, "--save", tmp_path / "out", *LITTLE)
    assert ended.code == 2
    assert "its disk has 1000 B free" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tokenizer_is_told(memfit: Memfit, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    ended = memfit("prune", "--model", model, *LITTLE)
    assert ended.code == 2
    assert "has no tokenizer" in ended.err


def test_magnitude_without_perplexity_needs_no_tokenizer_and_no_text(memfit: Memfit, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert memfit("prune", "--model", model, "--prune-method", "magnitude", "--no-eval").code == 0


def test_a_damaged_tokenizer_is_told(memfit: Memfit, model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    ended = memfit("prune", "--model", model, *LITTLE)
    assert ended.code == 2
    assert "cannot be loaded" in ended.err


def test_another_models_tokenizer_is_told(memfit: Memfit, tmp_path: Path) -> None:
    model = model_folder(tmp_path, vocab_size=64, bos_token_id=1, eos_token_id=2)
    ended = memfit("prune", "--model", model, *LITTLE)
    assert ended.code == 2
    assert re.search(r"the tokenizer gives token \d+, but the model has only 64", ended.err)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_that_is_no_number_is_found_before_any_work(
    memfit: Memfit, model: Path, tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    weights = {name: weight.to(dtype) for name, weight in load_file(model / "model.safetensors").items()}
    weights["model.layers.2.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    ended = memfit("prune", "--model", model, "--save", tmp_path / "out", *LITTLE)
    assert ended.code == 2
    assert "weight 'model.layers.2.mlp.up_proj.weight' has 1 values that are NaN or infinite" in ended.err
    assert "pruning layer" not in ended.out
    assert not (tmp_path / "out").exists()


def test_the_largest_finite_numbers_are_numbers(memfit: Memfit, model: Path) -> None:
    weights = {name: weight.to(torch.float16) for name, weight in load_file(model / "model.safetensors").items()}
    weights["model.layers.2.mlp.up_proj.weight"][3, 4] = torch.finfo(torch.float16).max
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert memfit("prune", "--model", model, "--prune-method", "magnitude", "--no-eval").code == 0


def test_a_text_that_is_too_short_says_how_many_tokens_it_has(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 50)
    ended = memfit("prune", "--model", original, "--dataset", tmp_path / "short.txt", "--seqlen", 64, "--no-eval")
    assert ended.code == 2
    assert "has only 50 tokens; --seqlen 64 needs at least 65" in ended.err


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_where_there_is_no_text_for_perplexity_there_is_none_unless_it_was_asked_for(
    memfit: Memfit, original: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    asked = ("prune", "--model", original, "--dataset", text, "--nsamples", 2, "--seqlen", 32)
    ended = memfit(*asked)
    assert (ended.code, "note: no perplexity: no text for --dataset wikitext2" in ended.err) == (0, True)
    assert memfit(*asked, "--eval").code == 2
    assert "builtin perplexity" in memfit(*asked, "--eval-dataset", "builtin", "--eval-windows", 2).out


def test_perplexity_with_and_without_saving_is_the_same(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    asked = ("prune", "--model", original, *LITTLE, "--json")
    along = json.loads(memfit(*asked).out)
    after = json.loads(memfit(*asked, "--save", tmp_path / "out").out)
    for name in ("perplexity_dense", "perplexity_pruned"):
        assert along[name] == pytest.approx(after[name], rel=1e-6)


def test_perplexity_may_be_of_another_length_than_calibration(memfit: Memfit, original: Path) -> None:
    asked = ("prune", "--model", original, *LITTLE, "--json")
    document = json.loads(memfit(*asked, "--eval-seqlen", 32).out)
    assert (document["data"]["seqlen"], document["evaluation"]["seqlen"]) == (64, 32)
    shorter = tuple(32 if name == "--seqlen" else word for name, word in zip(("", *asked), asked, strict=False))
    same = json.loads(memfit(*shorter).out)
    assert document["perplexity_dense"] == pytest.approx(same["perplexity_dense"], rel=1e-6)


def test_a_perplexity_that_is_no_number_does_not_lose_the_run(
    memfit: Memfit, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.jobs.pruning.run.perplexity_of_model", lambda *_: float("nan"))
    out = tmp_path / "out"
    ended = memfit("prune", "--model", original, "--save", out, "--json", *LITTLE)
    document = json.loads(ended.out)
    assert (ended.code, document["perplexity_pruned"], document["saved"]) == (0, None, str(out))
    assert "the pruned model's perplexity is not a number" in ended.err
    assert (out / "log_wanda.txt").read_text().splitlines()[1] == "wanda\t0.5000\tn/a"


def test_zero_shot_needs_a_saved_model(memfit: Memfit, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.jobs.pruning.evaluation.find_spec", lambda _: object())
    ended = memfit("prune", "--model", original, "--dataset", "builtin", "--eval_zero_shot")
    assert (ended.code, "--eval-zero-shot needs --save" in ended.err) == (2, True)


def test_zero_shot_accuracies_are_lm_evals_of_the_saved_folder(
    memfit: Memfit, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    package, models = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.models.huggingface")
    package.__spec__ = ModuleSpec("lm_eval", None)
    package.simple_evaluate = lambda model, tasks: {"results": {t: {"acc,none": 0.5} for t in tasks}}  # type: ignore[attr-defined]
    models.HFLM = lambda pretrained, device: loaded.append(pretrained)  # type: ignore[attr-defined]
    for name, module in (("lm_eval", package), ("lm_eval.models.huggingface", models)):
        monkeypatch.setitem(sys.modules, name, module)
    out = tmp_path / "out"
    asked = ("prune", "--model", original, "--prune-method", "magnitude", "--no-eval", "--save", out, "--json")
    document = json.loads(memfit(*asked, "--eval_zero_shot").out)
    assert loaded == [str(out)]
    assert document["zero_shot"]["boolq"] == 0.5
    assert len(document["zero_shot"]) == 7


def test_another_runs_results_are_not_overwritten(memfit: Memfit, original: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "result.json").write_text("{}")
    asked = ("prune", "--model", original, "--prune-method", "magnitude", "--no-eval", "--save", tmp_path / "results")
    ended = memfit(*asked, "--save-model", tmp_path / "pruned")
    assert (ended.code, "has results already" in ended.err) == (2, True)
    assert not (tmp_path / "pruned").exists()


def test_help_is_grouped_and_ends_with_an_example(memfit: Memfit) -> None:
    out = memfit("prune", "--help").out
    headings = re.findall(r"^([A-Z][^\n]*):$", out, re.MULTILINE)
    assert headings == ["What is pruned, and how", "Calibration", "Evaluation", "What is written", "Machine", "Options"]
    assert out.rstrip().splitlines()[-1].strip().startswith("memfit prune --model ")

"""The guides' own commands, in their order, in real processes and without a network.

Each guide is followed line by line with the flags and file names that it prints; only the program's name is memfit's.
The guides' models are there under their Hub ids, with one small block instead of many large ones, in a cache as
`huggingface_hub` keeps it; WikiText-2 is a short text of the same form, in the folder that MEMFIT_DATA names.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.quick import quick
from support.warm_python import warm_python

pytestmark = pytest.mark.usefixtures("shared_traces")

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "jobs" / "pruning"))
SOURCE = TESTS.parent / "src"
HUB_IDS = ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-7B", "meta-llama/Llama-13B", "Qwen/Qwen2.5-7B-Instruct")
TINY = {
    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1,
    "num_key_value_heads": 1, "max_position_embeddings": 131_072,
}  # fmt: skip
TINY_GSA = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ffn": 32, "vocab_size": 300}

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME of someone who has the guides' models, and MEMFIT_DATA beside it."""
    from tiny_folder import english, model_folder

    home = tmp_path_factory.mktemp("hub")
    for number, name in enumerate(HUB_IDS):
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        revision = f"{number:040x}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(revision)
        (repository / "snapshots").mkdir()
        model_folder(home / f"made{number}", **TINY).rename(repository / "snapshots" / revision)
    texts = home / "data" / "wikitext-2-raw"
    texts.mkdir(parents=True)
    for part, words in (("train", 2500), ("valid", 200), ("test", 200)):
        (texts / f"wiki.{part}.raw").write_text(english(words))
    return home


@pytest.fixture
def shell(hub: Path, tmp_path: Path) -> Shell:
    """Run a line of a guide in an empty working folder. `code` is what it must end with."""

    def run(line: str, *, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line.replace("\\\n", " "))
        module = {"memfit": ["-m", "memfit"], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
        done = subprocess.run(
            [warm_python(), *module[words[0]], *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=600,
            env={
                **os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "MEMFIT_DATA": str(hub / "data"),
                "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SOURCE), "NO_COLOR": "1", "PYTHON_EXEC": warm_python(),
                **env,
            },
        )  # fmt: skip
        assert done.returncode == code, (
            f"$ {line}\nended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
        return done

    return run


# -- debugging memory in pruning ---------------------------------------------------------------------------------------

PRUNE = """memfit prune \\
    --model meta-llama/Llama-3.2-1B \\
    --prune_method wanda \\
    --sparsity_ratio 0.5 \\
    --sparsity_type unstructured \\
    """


def test_the_debugging_guides_commands_run_in_their_order(shell: Shell, tmp_path: Path) -> None:
    saved = tmp_path / "out/llama_3.2_1b/unstructured/wanda"
    shell(PRUNE + "--save out/llama_3.2_1b/unstructured/wanda/")
    first = json.loads((saved / "result.json").read_text())
    assert first["settings"]["seqlen"] == 2048 and first["settings"]["nsamples"] == 128
    assert first["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in saved.iterdir()}

    again = shell(PRUNE + "--seqlen 2048 --save out/llama_3.2_1b/unstructured/wanda/")
    assert "holds the result of this very run" in again.stderr
    assert json.loads((saved / "result.json").read_text())["data"] == first["data"]

    logged = shell(PRUNE + "--seqlen 2048 --save out/llama_3.2_1b/unstructured/wanda/ --log_memory")
    assert "Memory Checkpoint: 01_start" in logged.stdout + logged.stderr
    assert "MEMORY USAGE SUMMARY" in logged.stdout + logged.stderr
    with (saved / "memory_log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    promised = "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent"
    assert set(promised.split(",")) <= set(rows[0])
    assert [row["Checkpoint"] for row in rows][:4] == [
        "01_start", "02_model_loaded", "03_before_pruning", "04_after_pruning",
    ]  # fmt: skip
    assert rows[-1]["Checkpoint"] == "09_end"


# -- estimating memory for pruning -------------------------------------------------------------------------------------


@pytest.mark.slow  # what they do is in the guide above; as they are written: jobs/pruning/test_from_the_hub.py
def test_the_estimating_guides_examples_run_in_their_order(shell: Shell) -> None:
    shell(PRUNE + "--dataset wikitext2 --nsamples 128 --seqlen 2048")
    shell(PRUNE.replace("Llama-3.2-1B", "Llama-7B") + "--dataset wikitext2 --nsamples 64 --seqlen 1024")
    shell(
        "memfit prune --model meta-llama/Llama-13B --sparsity_ratio 0.5 --dataset wikitext2 --nsamples 32 --seqlen 512"
    )


def test_the_estimating_guides_examples_are_planned_before_they_run(shell: Shell) -> None:
    safe = shell("memfit plan prune --model meta-llama/Llama-3.2-1B --nsamples 128 --seqlen 2048 --gpu 16GB")
    assert safe.stdout.startswith("safe: ")
    shell("memfit plan prune --model llama-7b --nsamples 64 --seqlen 1024 --gpu 24GB")


# -- profiling ---------------------------------------------------------------------------------------------------------

PROFILE = "memfit profile --model-size 2.7B --context-length 512 --device predict "


@pytest.mark.slow  # of a small model: jobs/test_profile.py
def test_the_profiling_guides_three_commands_run_in_their_order(shell: Shell, tmp_path: Path) -> None:
    results = tmp_path / "results" / "memory_profiling"
    shell(PROFILE + "--profile-type forward")
    shell(PROFILE + "--profile-type training")
    shell(PROFILE + "--profile-type training --use-mixed-precision")

    made = {path.name for path in results.glob("*.pickle")}
    assert {"2.7B_ctx512_forward_snapshot.pickle", "2.7B_ctx512_training_snapshot.pickle"} <= made
    assert len(made) == 3

    shell("memfit profile --model-size small --context-length 512 --profile-type forward --device predict")
    for name in sorted(made):
        report = json.loads(shell(f"memfit report results/memory_profiling/{name} --json").stdout)
        assert report["origin"] == "predicted" and report["peak"]["allocated_bytes"] > 10 * 2**30


@pytest.mark.slow
def test_the_profiling_guides_run_all_makes_every_file_that_it_lists(shell: Shell, tmp_path: Path) -> None:
    results = tmp_path / "results" / "memory_profiling"
    shell("memfit profile suite --device predict --output-dir results/memory_profiling")
    kinds = [f"ctx{length}_{kind}" for length in (128, 256, 512) for kind in ("forward", "training")]
    kinds += [f"ctx512_{kind}_{dtype}" for kind in ("forward", "training") for dtype in ("fp32", "bf16")]
    texts = ["peak_memory_summary.txt", "mixed_precision_memory_summary.txt", "activation_size_analysis.txt"]
    assert {f"2.7B_{kind}_snapshot.pickle" for kind in kinds} | set(texts) <= {path.name for path in results.iterdir()}


# -- LoRA of a 7B model in 24 GB ---------------------------------------------------------------------------------------

AFTER = {"max_seq_length": 1536, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
LORA = {
    "model": "Qwen/Qwen2.5-7B-Instruct", "r": 128, "lora_alpha": 256, "gradient_checkpointing": True,
    "max_steps": 2, "logging_steps": 1, "save_steps": 2, "learning_rate": 2e-4,
}  # fmt: skip
ALLOCATOR = "max_split_size_mb:128,expandable_segments:True"


def baseline_7b(folder: Path, settings: dict[str, object]) -> None:
    """The guide's config.py as YAML, with its names."""
    rows = [{"instruction": f"Parse sentence {number}.", "output": f"(s{number} / sentence)"} for number in range(40)]
    (folder / "train.json").write_text(json.dumps(rows))
    document = {**LORA, **settings, "data": {"source": "train.json"}}
    (folder / "baseline_7b.yaml").write_text(yaml.safe_dump(document))


@pytest.mark.parametrize("accumulation", quick([1], [1, 8]))
def test_the_7b_guides_jobs_before_and_after_are_planned(shell: Shell, accumulation: int) -> None:
    """The guide accumulates over 8 micro-steps before, and each is traced."""
    plan = "memfit plan lora --model qwen2.5-7b --loop trainer --rank 128 --grad-checkpointing --gpu 24GiB "
    shell(plan + f"--batch-size 2 --grad-accum {accumulation} --seq-len 2048", code=1)
    shell(plan + f"--batch-size 1 --grad-accum {2 * accumulation} --seq-len 1536")


def test_the_7b_guides_commands_run_in_their_order(shell: Shell, tmp_path: Path) -> None:
    baseline_7b(tmp_path, AFTER)
    shell("memfit train --config baseline_7b.yaml --dry-run", PYTORCH_CUDA_ALLOC_CONF=ALLOCATOR)
    shell("memfit train --config baseline_7b.yaml", PYTORCH_CUDA_ALLOC_CONF=ALLOCATOR, TOKENIZERS_PARALLELISM="false")
    made = tmp_path / "outputs" / "baseline_7b"
    assert json.loads((made / "result.json").read_text())["losses"]
    assert (made / "step_2" / "adapter_model.safetensors").exists()
    shell("memfit watch --count 1 --interval 1")


# -- GSA-512M on four cards --------------------------------------------------------------------------------------------

LADDER = (
    {"micro_batch_size": 2, "gradient_accumulation_steps": 32, "max_seq_len": 1024},
    {"micro_batch_size": 3, "gradient_accumulation_steps": 21, "max_seq_len": 1024},
    {"micro_batch_size": 4, "gradient_accumulation_steps": 16, "max_seq_len": 1024},
    {"micro_batch_size": 2, "gradient_accumulation_steps": 32, "max_seq_len": 1536},
)
TRAIN = "torchrun --nproc_per_node={} -m memfit train --config training/configs/pretrain_512m_low_memory.yaml "


def pretrain_512m(folder: Path, steps: int) -> None:
    """The guide's YAML with its names; what makes it run in a moment is the size of the model and of the batch."""
    configs = folder / "training" / "configs"
    configs.mkdir(parents=True, exist_ok=True)
    (folder / "play.txt").write_text("to be or not to be, that is the question. " * 400)
    document = {
        "model": {"name": "gsa-512m", "tokenizer": "bytes", **TINY_GSA}, "gsa": {"k_base": 8, "k_min": 2, "k_max": 16},
        "data": {"source": "play.txt"}, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_seq_len": 64,
        "gradient_checkpointing": True, "precision": "bf16", "max_steps": steps, "save_steps": 2, "logging_steps": 1,
    }  # fmt: skip
    (configs / "pretrain_512m_low_memory.yaml").write_text(yaml.safe_dump(document))


@pytest.mark.parametrize("processes", quick([2], [2, 4]))
def test_the_gsa_guides_commands_run_in_their_order(shell: Shell, tmp_path: Path, processes: int) -> None:
    train = TRAIN.format(processes)
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    made = tmp_path / "outputs" / "gsa-512m"
    pretrain_512m(tmp_path, steps=2)
    shell(train + "--output_dir outputs/gsa-512m", **expandable)
    assert (made / "step_2").is_dir()

    pretrain_512m(tmp_path, steps=4)
    shell(train + "--output_dir outputs/gsa-512m --resume_from outputs/gsa-512m/step_2", **expandable)
    result = json.loads((made / "result.json").read_text())
    assert sorted(map(int, result["losses"]))[-1] == 4 and (made / "step_4").is_dir()
    shell("memfit watch --count 1 --interval 2")

    elsewhere = tmp_path / "outputs" / "their-own" / "step_5000"  # of the guide's own program: weights, and no more
    elsewhere.mkdir(parents=True)
    (elsewhere / "model.safetensors").write_bytes((made / "step_4" / "model.safetensors").read_bytes())
    begun = shell(train + "--output_dir outputs/begun --resume_from outputs/their-own/step_5000", **expandable)
    assert "step_5000" in begun.stdout + begun.stderr
    assert (tmp_path / "outputs" / "begun" / "step_4").is_dir()


@pytest.mark.slow  # 32 micro-steps in each of three steps are traced
@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: "x".join(map(str, rung.values())))
def test_the_gsa_guides_ladder_is_planned_for_four_cards_without_any(shell: Shell, rung: dict[str, int]) -> None:
    rows, times, length = rung.values()
    plan = "memfit plan train --model gsa-512m --precision amp-bf16 --grad-checkpointing --world-size 4 --gpu 44GiB "
    done = shell(f"{plan} --batch-size {rows} --grad-accum {times} --seq-len {length} --loss chunked")
    assert done.stdout.startswith("safe: ")

"""What each of the five documents asks its reader to do, and the command of memfit that does it."""

from __future__ import annotations

from dataclasses import dataclass

from accuracy.guide_claims import BOTH_ALLOCATOR_SETTINGS
from memfit.guides.claims import DEBUGGING, GSA_512M, LORA_7B, PROFILING, REQUIREMENTS


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """Something that a document has its reader do: a command, a file that must come out, a number to look up."""

    asks: str
    memfit: str
    """A command line, or a sentence where there is nothing to type."""


_PRUNE = "memfit prune --model meta-llama/Llama-3.2-1B --prune_method wanda --sparsity_ratio 0.5"
_UNSTRUCTURED = f"{_PRUNE} --sparsity_type unstructured"
_PROFILE = "memfit profile --model-size 2.7B --context-length 512 --device predict"
_LORA = "--model qwen2.5-7b --loop trainer --precision fp16 --rank 128 --grad-checkpointing --gpu 24GB"
_GSA = "--model gsa-512m-gather --precision amp-bf16 --grad-checkpointing --world-size 4 --gpu 44GB"
_GSA_RUN = (
    "--config training/configs/pretrain_512m_low_memory.yaml --output_dir outputs/gsa-512m "
    "--resume_from outputs/gsa-512m/step_5000"
)

STEPS: dict[str, tuple[Instruction, ...]] = {
    DEBUGGING.name: (
        Instruction(
            asks="`python main.py --model meta-llama/Llama-3.2-1B --prune_method wanda --sparsity_ratio 0.5 "
            "--sparsity_type unstructured --seqlen 2048 --save out/llama_3.2_1b/unstructured/wanda/`",
            memfit=f"{_UNSTRUCTURED} --seqlen 2048 --save out/llama_3.2_1b/unstructured/wanda/",
        ),
        Instruction(
            asks="`--log_memory`: checkpoints `01_start` to `09_end` on the terminal, a summary, and `memory_log.csv` "
            "with its seven columns in the folder of `--save`",
            memfit=f"{_UNSTRUCTURED} --save out/test/ --log_memory",
        ),
        Instruction(
            asks="find the checkpoint at which memory rises, in `memory_log.csv`",
            memfit="memfit report out/test/memory_log.csv",
        ),
        Instruction(
            asks="what is wrong with `CUDA out of memory. Tried to allocate 64.00 GiB.`",
            memfit="memfit explain error.txt --model meta-llama/Llama-3.2-1B",
        ),
        Instruction(
            asks="`--seqlen 1024 --nsamples 64` where memory runs out during pruning; a smaller model, several GPUs or "
            "the CPU where it does while loading",
            memfit="memfit fit prune --model llama-3.2-1b --gpu 16GB",
        ),
        Instruction(
            asks="`nvidia-smi` before, `watch -n 1 nvidia-smi` beside the run", memfit="memfit watch --interval 1"
        ),
        Instruction(
            asks="`from lib.memory_utils import print_gpu_memory_summary` in one's own code",
            memfit="in Python: `memfit.print_gpu_memory_summary()`",
        ),
        Instruction(
            asks="the formula for the memory that is needed",
            memfit="memfit plan prune --model llama-3.2-1b --nsamples 128 --seqlen 2048 --gpu 16GB",
        ),
    ),
    REQUIREMENTS.name: (
        Instruction(asks="the quick-reference table and the decision matrix", memfit="memfit table --workloads prune"),
        Instruction(
            asks="`estimate_memory(model_params_billions, seqlen=2048, nsamples=128)`",
            memfit="in Python: `memfit.estimate_memory(1.2, seqlen=2048)`, with the same keys, predicted",
        ),
        Instruction(
            asks="`python main.py --model meta-llama/Llama-3.2-1B --prune_method wanda --sparsity_ratio 0.5 "
            "--sparsity_type unstructured --dataset wikitext2 --nsamples 128 --seqlen 2048`",
            memfit=f"{_UNSTRUCTURED} --dataset wikitext2 --nsamples 128 --seqlen 2048",
        ),
        Instruction(
            asks="LLaMA 7B on 24 GB, before it is run",
            memfit="memfit plan prune --model llama-7b --nsamples 128 --seqlen 2048 --gpu 24GB",
        ),
        Instruction(
            asks="LLaMA 13B on 16 GB, which will fail there", memfit="memfit fit prune --model llama-13b --gpu 16GB"
        ),
        Instruction(
            asks='`device_map="auto"` with an `offload_folder` for very large models',
            memfit="memfit prune --model meta-llama/Llama-2-70b-hf --sparsity_ratio 0.5",
        ),
        Instruction(
            asks="`nvidia-smi` first: what is using the GPU's memory",
            memfit="memfit check prune --model llama-7b --gpu 24GB",
        ),
    ),
    PROFILING.name: (
        Instruction(
            asks="`python -m cs336_systems.memory_profiling.profile_memory --model-size 2.7B --context-length 512 "
            "--profile-type forward`",
            memfit=f"{_PROFILE} --profile-type forward",
        ),
        Instruction(asks="the same with `--profile-type training`", memfit=f"{_PROFILE} --profile-type training"),
        Instruction(
            asks="the same with `--use-mixed-precision`",
            memfit=f"{_PROFILE} --profile-type training --use-mixed-precision",
        ),
        Instruction(
            asks="`./run_all.sh`: ten `2.7B_ctx*_snapshot.pickle`, `peak_memory_summary.txt`, "
            "`mixed_precision_memory_summary.txt` and `activation_size_analysis.txt` in `results/memory_profiling/`",
            memfit="memfit profile suite --device predict --output-dir results/memory_profiling --force",
        ),
        Instruction(
            asks="`./profile_part_a.sh`, `_b`, `_c`, and `analyze_activation_size` for part (d)",
            memfit="memfit profile suite --part d --output-dir results/memory_profiling",
        ),
        Instruction(
            asks="the timeline, the largest allocations and their stack traces on pytorch.org/memory_viz",
            memfit="memfit report results/memory_profiling/2.7B_ctx512_training_snapshot.pickle --html report.html",
        ),
        Instruction(
            asks="`--model-size small` first, on a small GPU",
            memfit="memfit profile --model-size small --profile-type forward --device predict --gpu 'RTX 4090'",
        ),
    ),
    LORA_7B.name: (
        Instruction(
            asks="the budget before: batch 2, accumulation 8, 2048 tokens",
            memfit=f"memfit plan lora {_LORA} --batch-size 2 --grad-accum 8 --seq-len 2048",
        ),
        Instruction(
            asks="the budget after: batch 1, accumulation 16, 1536 tokens, both allocator settings",
            memfit=f"memfit plan lora {_LORA} --batch-size 1 --grad-accum 16 --seq-len 1536 "
            f"--alloc-conf {BOTH_ALLOCATOR_SETTINGS}",
        ),
        Instruction(
            asks="what to change so that it fits, with the sequence, the rank and the effective batch kept",
            memfit=f"memfit fit lora {_LORA} --batch-size 2 --grad-accum 8 --seq-len 2048 --keep seq-len,rank",
        ),
        Instruction(
            asks="`config/config.py`: `MAX_SEQ_LENGTH`, `per_device_train_batch_size`, `gradient_accumulation_steps`, "
            "`LORA_CONFIG`; then `bash START_BASELINE_7B_TRAINING.sh`",
            memfit="memfit train --config qwen2.5-7b-lora-24gb --set data.source=my.jsonl",
        ),
        Instruction(
            asks="the checklist: config, free GPU memory, environment variables, a trial of loading the model",
            memfit="memfit check --config qwen2.5-7b-lora-24gb --gpu 24GB --load",
        ),
        Instruction(
            asks=f"`PYTORCH_CUDA_ALLOC_CONF={BOTH_ALLOCATOR_SETTINGS}`",
            memfit=f"memfit plan lora {_LORA} --seq-len 1536 --alloc-conf {BOTH_ALLOCATOR_SETTINGS}",
        ),
        Instruction(asks="`watch -n 1 nvidia-smi`, `tail -f logs/training.log`", memfit="memfit watch --interval 1"),
        Instruction(
            asks="memory that grows over time: clear the cache every 100 steps",
            memfit="memfit report outputs/qwen2.5-7b-lora-24gb",
        ),
    ),
    GSA_512M.name: (
        Instruction(
            asks="`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun --nproc_per_node=4 training/train.py "
            f"{_GSA_RUN}`",
            memfit=f"torchrun --nproc_per_node=4 -m memfit train {_GSA_RUN}",
        ),
        Instruction(
            asks="the current settings: micro-batch 2, accumulation 32, 1024 tokens",
            memfit=f"memfit plan train {_GSA} --batch-size 2 --grad-accum 32 --seq-len 1024",
        ),
        Instruction(
            asks="Safe, Medium, Aggressive, Maximum: how far the micro-batch can go",
            memfit=f"memfit fit train {_GSA} --batch-size 2 --grad-accum 32 --seq-len 1024 --ladder",
        ),
        Instruction(
            asks="what else saves memory, if it still runs out",
            memfit=f"memfit fit train {_GSA} --batch-size 8 --grad-accum 8 --seq-len 1024",
        ),
        Instruction(
            asks="`watch -n 2 nvidia-smi`, `nvidia-smi dmon -s mu -d 2`",
            memfit="memfit watch --interval 2",
        ),
    ),
}

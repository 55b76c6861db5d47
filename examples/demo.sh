#!/bin/sh
# Three predictions, none of which needs a GPU: `make demo`.
set -eu

plan() {
    printf '\n$ memfit plan'
    for word in "$@"; do
        case $word in *' '*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n\n'
    memfit plan "$@" || [ $? -eq 1 ] # 1 is an answer: it does not fit
}

plan lora --model qwen2.5-7b --batch-size 1 --seq-len 1536 --rank 128 --grad-checkpointing --gpu 24GiB
plan train --model gpt2 --batch-size 8 --seq-len 1024 --precision fp32 --gpu 'RTX 3060'
plan train --model gpt2 --batch-size 8 --seq-len 1024 --precision fp32 --gpu 'RTX 4090'

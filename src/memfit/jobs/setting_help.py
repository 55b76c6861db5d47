"""What each setting of a job is for, in one sentence, and which of them a kind of job reads."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args, get_origin

from memfit.jobs.settings import setting_types
from memfit.jobs.workload import Workload

HELP = {
    "model": "Preset (`memfit models`), hub id, folder, config.json or module:factory.",
    "batch_size": "Sequences in one forward pass.",
    "seq_len": "Tokens in a sequence.",
    "precision": "Type of the weights; amp is fp32 weights under autocast.",
    "autocast": "Type of the autocast region, whatever the weights are. Default: none, or what an amp precision says.",
    "quant": "Base model's linear layers in 4 or 8 bits, by bitsandbytes or torchao, as from_pretrained loads them; "
    "dequantize makes a quantised checkpoint 16-bit.",
    "double_quant": "Quantise the scales of 4-bit weights too.",
    "quant_compute": "Type in which 4-bit layers compute. Default: that of the other weights.",
    "kbit_prepare": "peft's prepare_model_for_kbit_training: 16-bit weights become fp32. Default: with --quant.",
    "attention": "Fused kernels, or the plain formula.",
    "padding": "Rows of a batch differ in length: the mask forces other attention kernels.",
    "loop": "A bare PyTorch loop, the Hugging Face Trainer, or `memfit train`.",
    "loss": "How logits become a loss; chunked is the same loss, some tokens at a time.",
    "loss_chunk": "Tokens at a time, for --loss chunked.",
    "head": "What the model ends in. Default: what its config.json names.",
    "target_len": "Tokens that an encoder-decoder writes. Default: 128.",
    "images": "Pictures in a row, for a model of pictures and text. Default: 1.",
    "image_size": "WIDTHxHEIGHT of a picture. Default: what the model's processor makes of any.",
    "outputs": "Whether the loop's variable keeps the model's outputs through backward. Default: a plain loop does.",
    "optimizer": "adamw is torch's foreach. Default: what the loop takes by itself.",
    "grad_checkpointing": "Recompute a block's activations in the backward pass.",
    "use_cache": "Leave config.use_cache on: the forward pass also keeps keys and values, as for generation.",
    "selective_checkpointing": "Recompute only what is cheap: matrix products and attention are kept.",
    "compile": "torch.compile the whole model.",
    "compile_blocks": "torch.compile each block by itself (regional compilation).",
    "offload": "What lies in host memory: optimizer, activations, weights (frozen ones).",
    "world_size": "GPUs that train together; the plan is of one of them.",
    "parallel": "How: DDP has all on each, FSDP2 shards.",
    "gradient_as_bucket_view": "Gradients lie in DDP's buckets. Default: what the loop does by itself.",
    "grad_accum": "Forward and backward passes before one optimizer step.",
    "clip_grad": "Clip the norm of the gradients. Default: what the loop does by itself.",
    "adapter": "Which adapter of peft: lora, dora, ia3, loha, lokr, vera, adalora, oft, boft, prefix, prompt, ...",
    "adapter_config": "What else its config says: KEY=VALUE,... or a JSON or YAML file.",
    "rank": "Rank of the adapters. Default: 16 of LoRA, else what peft has.",
    "target_modules": "Modules with adapters: a,b or the flag repeated. Default: all linear layers of a block.",
    "lora_dropout": "Dropout in front of the adapters.",
    "adapter_dtype": "Type of the adapters' weights; fp32 is what peft makes.",
    "new_tokens": "Tokens to generate.",
    "decoding": "How the next token is chosen.",
    "num_beams": "Beams, when decoding by beam.",
    "cache": "How the key-value cache grows.",
    "method": "How weights are chosen that go.",
    "sparsity": "Share of the weights that goes. Default: a half, or what the type says.",
    "sparsity_type": "unstructured, or N:M: N of each M consecutive weights go.",
    "nsamples": "Windows of text to calibrate on.",
    "dataset": "Text to calibrate on; it does not change the memory.",
    "max_gpu_memory": "What may be used of the card, as 16GiB. Default: all of it.",
    "alloc_conf": "What PYTORCH_CUDA_ALLOC_CONF would hold, such as expandable_segments:True.",
}


def settings_of(kind: str) -> tuple[str, ...]:
    """The settings that a kind of job reads, some of them only beside another one: beams when decoding by beam."""
    plain = Workload(kind=kind, model="-", world_size=2)  # type: ignore[arg-type]
    read = set(plain.settings())
    for name in list(read - {"kind"}):
        if get_origin(setting_types()[name]) is Literal:
            for value in get_args(setting_types()[name]):
                read.update(dataclasses.replace(plain, **{name: value}).settings())
    return tuple(f.name for f in dataclasses.fields(Workload) if f.name in read and f.name != "kind")

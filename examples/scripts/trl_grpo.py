"""TRL, GRPO: memfit plan script --gpu 24GB -- examples/scripts/trl_grpo.py"""

import argparse

import torch
from datasets import Dataset
from tiny_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--hidden_size", type=int, default=256)
args = parser.parse_args()

tokenizer = byte_tokenizer()
model = AutoModelForCausalLM.from_config(
    Qwen2Config(
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        pad_token_id=0,
        eos_token_id=1,
    ),
    dtype=torch.bfloat16,
)
rows = Dataset.from_list([{"prompt": f"What is {n} + {n}?"} for n in range(64)])


def short(completions: list[str], **_: object) -> list[float]:
    return [-float(len(text)) for text in completions]


training = GRPOConfig(
    output_dir="out",
    per_device_train_batch_size=args.batch_size,
    num_generations=args.batch_size,
    max_completion_length=64,
    bf16=True,
    report_to="none",
    use_vllm=False,
)
GRPOTrainer(model=model, args=training, train_dataset=rows, processing_class=tokenizer, reward_funcs=short).train()

"""TRL, DPO: memfit plan script --gpu 24GB -- examples/scripts/trl_dpo.py"""

import argparse
import copy

import torch
from datasets import Dataset
from tiny_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config
from trl import DPOConfig, DPOTrainer

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
rows = Dataset.from_list(
    [{"prompt": f"What is {n} + {n}?", "chosen": f" {2 * n}" * 20, "rejected": f" {3 * n}" * 10} for n in range(64)]
)
training = DPOConfig(
    output_dir="out", per_device_train_batch_size=args.batch_size, max_length=256, bf16=True, report_to="none"
)
reference = copy.deepcopy(model)
DPOTrainer(model=model, ref_model=reference, args=training, train_dataset=rows, processing_class=tokenizer).train()

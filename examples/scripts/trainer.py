"""transformers' Trainer: memfit plan script --gpu 24GB -- examples/scripts/trainer.py --bf16 True"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    layers: int = 4
    seq_len: int = 512


model_args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
config = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=model_args.layers, num_attention_heads=8
)
model = AutoModelForCausalLM.from_config(config)
ids = torch.randint(0, config.vocab_size, (64, model_args.seq_len))
rows = [{"input_ids": row, "labels": row} for row in ids]
Trainer(model=model, args=training_args, train_dataset=rows).train()

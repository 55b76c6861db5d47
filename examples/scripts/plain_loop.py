"""A language model in a loop as most people write it: memfit plan script -- examples/scripts/plain_loop.py"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--seq_len", type=int, default=512)
parser.add_argument("--layers", type=int, default=4)
args = parser.parse_args()

config = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=args.layers, num_attention_heads=8, vocab_size=32000
)
model = AutoModelForCausalLM.from_config(config).to("cuda", dtype=torch.bfloat16)
rows = [torch.randint(0, config.vocab_size, (args.seq_len,)) for _ in range(10 * args.batch_size)]
loader = DataLoader(rows, batch_size=args.batch_size, shuffle=True, num_workers=2, pin_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, 1000)

for epoch in range(100):
    for step, ids in enumerate(loader):
        ids = ids.to("cuda", non_blocking=True)
        outputs = model(input_ids=ids, labels=ids)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"epoch {epoch} step {step} loss {loss.item():.3f} peak {peak:.2f} GiB")

"""LoRA on the U-Net of a diffusion model: memfit plan script --gpu 24GB -- examples/scripts/diffusers_lora.py"""

import argparse

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--size", type=int, default=64, help="of the latents: an eighth of the picture's")
parser.add_argument("--rank", type=int, default=8)
args = parser.parse_args()

unet = UNet2DConditionModel(
    sample_size=args.size,
    block_out_channels=(64, 128),
    layers_per_block=1,
    cross_attention_dim=128,
    attention_head_dim=8,
    norm_num_groups=16,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
unet.requires_grad_(False)
unet.to("cuda", dtype=torch.float16)
unet.add_adapter(LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
trained = [weight for weight in unet.parameters() if weight.requires_grad]
for weight in trained:
    weight.data = weight.to(torch.float32)
noising = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(trained, lr=1e-4)
scaler = torch.amp.GradScaler("cuda")

for step in range(1000):
    latents = torch.randn(args.batch_size, 4, args.size, args.size, device="cuda", dtype=torch.float16)
    text = torch.randn(args.batch_size, 77, 128, device="cuda", dtype=torch.float16)
    noise = torch.randn_like(latents)
    when = torch.randint(0, 1000, (args.batch_size,), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        guess = unet(noising.add_noise(latents, noise, when), when, text).sample
        loss = F.mse_loss(guess.float(), noise.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, loss.item())

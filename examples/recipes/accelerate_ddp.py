"""Accelerate, alone or under DDP (torchrun --nproc-per-node 2): accumulation, clipping, save_state and load_state."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from flashopt_compile import FlashAdamW

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(torch.bfloat16)
optimizer = FlashAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8)
batches = DataLoader(torch.randn(256, 64, dtype=torch.bfloat16), batch_size=16)
model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)


def train() -> dict[str, torch.Tensor]:
    for x in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.3f} on {accelerator.num_processes} processes")
    return optimizer.optimizer.get_fp32_model_state_dict(model)  # FlashAdamW lies within Accelerate's wrapper


train()
accelerator.save_state("accelerate-state")  # a folder, which flashopt inspect and convert read
exact = train()
accelerator.load_state("accelerate-state")
assert all(torch.equal(weight, exact[name]) for name, weight in train().items()), "it goes on bit for bit"
accelerator.end_training()

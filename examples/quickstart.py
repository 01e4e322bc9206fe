"""FlashAdamW in place of torch.optim.AdamW: a bf16 model, a few steps, and the bytes per parameter."""

import torch
from torch import nn

from flashopt_compile import FlashAdamW

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(torch.bfloat16)
optimizer = FlashAdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

inputs = torch.randn(512, 256, dtype=torch.bfloat16)
targets = inputs.roll(1, dims=1)
for step in range(20):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1:2}  loss {loss.item():.3f}")

print(f"{optimizer.memory()['per_parameter']:.2f} bytes per parameter, gradient included")

"""EMA and SWA of a bf16 model's exact weights, which lie between its bf16 values: a plain loop, and any evaluation."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from flashopt_compile import FlashAdamW

STEPS, SWA_START = 60, 40
torch.manual_seed(0)
inputs = torch.randn(256, 64, dtype=torch.bfloat16)
targets = inputs.roll(1, dims=1)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(torch.bfloat16)
optimizer = FlashAdamW(model.parameters(), lr=1e-2)
schedule = SWALR(optimizer, swa_lr=3e-3, anneal_epochs=10)
exact = copy.deepcopy(model).float()  # its weights are written anew before each averaging
ema = AveragedModel(exact, multi_avg_fn=get_ema_multi_avg_fn(0.98))
swa = AveragedModel(exact)

for step in range(STEPS):
    batch = torch.randint(len(inputs), (32,))
    loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    exact.load_state_dict(optimizer.get_fp32_model_state_dict(model))  # head and tail together
    ema.update_parameters(exact)
    if step >= SWA_START:
        swa.update_parameters(exact)
        schedule.step()

with torch.no_grad():
    for name, each in {"last": exact, "EMA": ema, "SWA": swa}.items():
        print(f"{name:4} {nn.functional.mse_loss(each(inputs.float()), targets.float()).item():.4f}")

optimizer.set_fp32_model_state_dict(model, ema.module.state_dict())  # train on from the average, if you want to

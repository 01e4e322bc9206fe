"""Every scheduler of torch.optim.lr_scheduler gives FlashAdamW the numbers that it gives torch's AdamW."""

import torch
from torch.optim import lr_scheduler as lrs

from flashopt_compile import FlashAdamW

SCHEDULERS = {
    "LambdaLR": lambda opt: lrs.LambdaLR(opt, lambda step: 0.9**step),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(opt, lambda step: 0.9),
    "StepLR": lambda opt: lrs.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, [2, 4]),
    "ConstantLR": lambda opt: lrs.ConstantLR(opt, total_iters=3),
    "LinearLR": lambda opt: lrs.LinearLR(opt, total_iters=5),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lrs.PolynomialLR(opt, total_iters=5),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, 5),
    "CosineAnnealingWarmRestarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 3),
    "CyclicLR": lambda opt: lrs.CyclicLR(opt, 1e-4, 1e-2, 3),  # cycles betas too
    "OneCycleLR": lambda opt: lrs.OneCycleLR(opt, 1e-2, total_steps=20),
    "ReduceLROnPlateau": lambda opt: lrs.ReduceLROnPlateau(opt, patience=1),
    "SequentialLR": lambda opt: lrs.SequentialLR(opt, [lrs.ConstantLR(opt), lrs.ExponentialLR(opt, 0.9)], [3]),
    "ChainedScheduler": lambda opt: lrs.ChainedScheduler([lrs.ConstantLR(opt), lrs.ExponentialLR(opt, 0.9)]),
}
for name, new in SCHEDULERS.items():
    numbers = []
    for kind in (FlashAdamW, torch.optim.AdamW):
        parameter = torch.nn.Parameter(torch.ones(40, 64, dtype=torch.bfloat16))
        optimizer = kind([parameter])
        schedule = new(optimizer)
        for _ in range(8):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            numbers.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
    assert numbers[:8] == numbers[8:], name
    print(f"{name}: lr {numbers[0][0]:.2e} to {numbers[7][0]:.2e}")

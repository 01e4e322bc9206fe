"""torchtitan's optimizer container: parameter groups by pattern, `fused`, and states keyed by parameters' names."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from flashopt_compile import FlashAdamW


class FlashOptimizers(OptimizersContainer):
    @staticmethod
    def _resolve_optimizer_factory(name: str) -> type[FlashAdamW]:
        return {"FlashAdamW": FlashAdamW}[name]


OPTIONS = {pattern: {"lr": 1e-2, "weight_decay": decay} for pattern, decay in (("bias$", 0.0), (".*", 0.1))}
GROUPS = [ParamGroupConfig(pattern=key, optimizer_name="FlashAdamW", optimizer_kwargs=OPTIONS[key]) for key in OPTIONS]
inputs = torch.randn(64, 64, dtype=torch.bfloat16)
exact = []
for run in ("whole", "resumed"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(torch.bfloat16)
    optimizers = FlashOptimizers(OptimizersContainer.Config(param_groups=GROUPS), model_parts=[model])
    for step in range(0 if run == "whole" else 10, 20):
        if step == 10:
            content = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
            if run == "whole":
                dcp.save(content, checkpoint_id="titan-state", no_dist=True)
            else:  # before the first step, so torchtitan has taken one at lr 0 to make the states
                dcp.load(content, checkpoint_id="titan-state", no_dist=True)
                model.load_state_dict(content["model"])
                optimizers.load_state_dict(content["optimizer"])
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
    exact.append(optimizers.optimizers[0].get_fp32_model_state_dict(model))
    print(f"{run}: loss {loss.item():.3f}")
assert all(torch.equal(exact[1][name], weight) for name, weight in exact[0].items()), "resumed bit for bit"

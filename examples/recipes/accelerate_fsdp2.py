"""Accelerate with FSDP2 (torchrun --nproc-per-node 2): it shards a model after its optimizer was made."""

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.utils.data import DataLoader

from flashopt_compile import FlashAdamW

# Without mixed_precision, which would make Accelerate cast the bf16 model to fp32: 4 bytes for each weight, not 3.
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
if accelerator.device.type == "cpu":  # where Accelerate would not shard; on GPUs leave this out
    PartialState().distributed_type = AcceleratorState().distributed_type = DistributedType.FSDP
    AcceleratorState().fsdp_plugin = plugin
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(torch.bfloat16)
optimizer = FlashAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
batches = DataLoader(torch.randn(256, 64, dtype=torch.bfloat16), batch_size=16)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)


def train() -> dict[str, torch.Tensor]:
    for x in batches:
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.3f}, {optimizer.optimizer.memory()['total']:,} bytes in each process")
    return optimizer.optimizer.get_fp32_model_state_dict(model)  # whole weights, from all shards


train()
accelerator.save_state("fsdp2-state")  # in shards, which load on any number of processes
exact = train()
accelerator.load_state("fsdp2-state")
assert all(torch.equal(weight, exact[name]) for name, weight in train().items()), "it goes on bit for bit"
accelerator.end_training()

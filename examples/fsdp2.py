"""Train a model sharded by FSDP2, stop, and resume with another number of processes.

torchrun --nproc-per-node 2 examples/fsdp2.py run
torchrun --nproc-per-node 3 examples/fsdp2.py run
"""

# pyright: reportPrivateImportUsage=false

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as distributed
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashopt_compile import FlashAdamW

STEPS = 30


def train(folder: Path) -> None:
    world, is_first = distributed.get_world_size(), distributed.get_rank() == 0
    torch.manual_seed(0)
    inputs = torch.randn(240, 128, dtype=torch.bfloat16)
    targets = inputs.roll(1, dims=1).tanh()

    model = nn.Sequential(nn.Linear(128, 250), nn.GELU(), nn.Linear(250, 128)).to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = FlashAdamW(model.parameters(), lr=3e-3)  # after sharding, as with any optimizer

    first = 0
    if folder.exists():
        states, others = get_state_dict(model, optimizer)
        content = {"model": states, "optimizer": others, "step": 0, "processes": 0}
        dcp.load(content, checkpoint_id=str(folder))
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        first = content["step"]
        if is_first:
            print(f"resumed at step {first} of {content['processes']} processes")

    for step in range(first, first + STEPS):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(step))
        own = order[distributed.get_rank() :: world]
        loss = nn.functional.mse_loss(model(inputs[own]).float(), targets[own].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_first and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {optimizer.memory()['total']:,} bytes here")

    states, others = get_state_dict(model, optimizer)
    content = {"model": states, "optimizer": others, "step": first + STEPS, "processes": world}
    dcp.save(content, checkpoint_id=str(folder))


def main() -> None:
    if "RANK" not in os.environ:  # without torchrun: one process
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as empty:
        train(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(empty) / "run")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

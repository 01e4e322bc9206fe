"""Train 200 steps; then train 100, get killed, and resume for 100 more. The losses are the same, bit for bit."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import flashopt_compile
from flashopt_compile import FlashAdamW

STEPS, DIES_AFTER = 200, 100


def train(path: Path, steps: int, save_every: int = 0) -> list[float]:
    """Train, resuming from a checkpoint at `path` if there is one. Return the losses of all steps."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 128, dtype=torch.bfloat16)
    targets = inputs.roll(1, dims=1).tanh()
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).to(torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses: list[float] = []
    if path.exists():
        extra = flashopt_compile.load(path, model, optimizer)
        schedule.load_state_dict(extra["schedule"])
        torch.set_rng_state(extra["rng"])
        losses = extra["losses"]
        print(f"resumed at step {len(losses)}")
    for step in range(len(losses), steps):
        batch = torch.randint(len(inputs), (64,))
        loss = nn.functional.mse_loss(model(inputs[batch]).float(), targets[batch].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if save_every and (step + 1) % save_every == 0:
            rng = torch.get_rng_state()
            flashopt_compile.save(path, model, optimizer, losses=losses, schedule=schedule.state_dict(), rng=rng)
    return losses


def train_and_die(path: Path) -> None:
    train(path, DIES_AFTER, save_every=25)
    train_on = train(path, DIES_AFTER + 10)  # unsaved work, repeated after the resume
    print(f"killed after step {len(train_on)}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        killed = subprocess.run([sys.executable, __file__, str(path)])
        assert killed.returncode == -signal.SIGKILL
        resumed = train(path, STEPS)
        whole = train(Path(folder) / "none.ckpt", STEPS)
    for step in (1, DIES_AFTER, DIES_AFTER + 1, STEPS):
        print(f"step {step:3}  loss {whole[step - 1]!r:22} resumed {resumed[step - 1]!r}")
    assert resumed == whole
    print(f"all {STEPS} losses are identical")


if __name__ == "__main__":
    train_and_die(Path(sys.argv[1])) if len(sys.argv) > 1 else main()

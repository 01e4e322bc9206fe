"""What only a fresh process can tell `bench.speed`: how long its first step takes, and what memory a step adds.

python -m bench.fresh first-step CONVOLUTIONS | memory ROWS COLUMNS
"""

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.peers import OUR_ADAMW, resnet_shapes

ROOT = Path(__file__).parent.parent
CLEAR_REFS = Path("/proc/self/clear_refs")
THREADS = 2
MEASURED_STEPS = 3


def chosen_device() -> torch.device:
    """A CUDA or XPU GPU where there is one, or else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and found.type in ("cuda", "xpu") else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def first_step_seconds(convolutions: int) -> float:
    """The first step of FlashAdamW on a small ResNet, compilation included, imports not."""
    device = chosen_device()
    runner = OUR_ADAMW.build(resnet_shapes(convolutions), device)
    runner.renew()
    synchronize(device)
    begin = time.perf_counter()
    runner.step()
    synchronize(device)
    return time.perf_counter() - begin


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def extra_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """By how much memory rises, at its highest, during some steps; None where the system does not tell."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        for _ in range(MEASURED_STEPS):
            step()
        return torch.accelerator.max_memory_allocated() - before
    if not CLEAR_REFS.exists():
        return None
    with contextlib.suppress(AttributeError, OSError):  # not every C library has it
        # What earlier steps have freed and the C library has kept would be used again unseen: give it back first.
        ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5", encoding="ascii")  # the high-water mark starts here
    before = status_bytes("VmRSS")
    for _ in range(MEASURED_STEPS):
        step()
    return status_bytes("VmHWM") - before


def extra_bytes_of_adamw(rows: int, columns: int) -> int | None:
    """What a step of FlashAdamW on one bf16 parameter adds, after those that compile and make the state."""
    device = chosen_device()
    runner = OUR_ADAMW.build([(rows, columns)], device)
    runner.renew()
    for _ in range(2):
        runner.step()
    return extra_bytes(runner.step, device)


QUESTIONS: dict[str, Callable[..., float | None]] = {
    "first-step": first_step_seconds,
    "memory": extra_bytes_of_adamw,
}


def ask(question: str, *numbers: int, cache: str = "") -> float | None:
    """The answer of a new process, with its Inductor cache in the folder `cache` or the usual one."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"} if cache else {}
    command = [sys.executable, "-m", "bench.fresh", question, *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **folders}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(THREADS)
    print(json.dumps(QUESTIONS[arguments[0]](*map(int, arguments[1:]))))


if __name__ == "__main__":
    main(sys.argv[1:])

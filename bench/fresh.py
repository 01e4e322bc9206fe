"""Measurements for `bench.speed` that need a fresh process: the time of the first step, and a step's extra memory.

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
    """A CUDA or XPU GPU if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and found.type in ("cuda", "xpu") else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def first_step_seconds(convolutions: int) -> float:
    """The time of FlashAdamW's first step on a small ResNet, with compilation, without imports."""
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


def forget_peak() -> None:
    """Have the peak of this process's memory begin anew, from what is in use now. Linux only."""
    with contextlib.suppress(AttributeError, OSError):  # not every C library has malloc_trim
        # The C library would otherwise reuse memory freed by earlier steps, and the rise would not show.
        ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5", encoding="ascii")  # resets the high-water mark


def extra_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """The peak rise of memory during a few steps; None if the system cannot tell."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        for _ in range(MEASURED_STEPS):
            step()
        return torch.accelerator.max_memory_allocated() - before
    if not CLEAR_REFS.exists():
        return None
    forget_peak()
    before = status_bytes("VmRSS")
    for _ in range(MEASURED_STEPS):
        step()
    return status_bytes("VmHWM") - before


def extra_bytes_of_adamw(rows: int, columns: int) -> int | None:
    """The extra memory of a FlashAdamW step on one bf16 parameter, after warm-up steps have compiled."""
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
    """Ask a new process. Its Inductor cache is in the folder `cache`, by default the usual one."""
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

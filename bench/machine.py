"""The machine and versions of a measurement. Every bench prints them first."""

import os
import platform
from pathlib import Path

import torch


def processor() -> str:
    """The processor's name, from /proc/cpuinfo if it exists."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_machine() -> str:
    return (
        f"{processor()}, {os.cpu_count()} cores ({torch.backends.cpu.get_cpu_capability()}), "
        f"{platform.system()}; Python {platform.python_version()}, torch {torch.__version__}"
    )

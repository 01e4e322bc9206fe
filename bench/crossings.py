"""Count how often a step crosses from one of our files to another: `python -m bench.crossings`."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import flashopt_compile
from flashopt_compile import FlashAdamW

ROOT = Path(flashopt_compile.__file__).parent.parent


def crossings(optimizer: FlashAdamW) -> list[str]:
    """The files that one step passes through, in order; a file is listed each time it is entered from another."""
    way: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "flashopt_compile"):
            name = str(path.relative_to(ROOT / "flashopt_compile"))
            if not way or way[-1] != name:
                way.append(name)

    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return way


def main() -> None:
    layouts = {
        "one matrix": [(1024, 1024)],
        "300 small tensors": [(64, 64)] * 300,
        "rows of 1000": [(1024, 1000)],
    }
    for eager in (False, True):
        for name, shapes in layouts.items():
            parameters = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer = FlashAdamW(parameters, eager=eager)
            if not eager:
                optimizer.warmup(verbose=False)  # compile outside the traced step
            first, later = crossings(optimizer), crossings(optimizer)
            kind = "eager" if eager else "compiled"
            print(f"{kind:9s}{name:20s}first step {len(first):4d}   later {len(later):3d}: {' → '.join(later)}")


if __name__ == "__main__":
    main()

"""The steps whose GPU kernels are tested, and parameters that hold every possible number."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashopt_compile.engine.step import Step
from flashopt_compile.kernels import Emitted, emit
from flashopt_compile.kernels.emit import blocks_of, numbers
from flashopt_compile.rule import Rule
from flashopt_compile.rules import adam, adamw, lion, sgd


@cache
def example_rule() -> Rule:
    path = Path(__file__).parent.parent / "examples" / "new_rule.py"
    spec = importlib.util.spec_from_file_location("new_rule", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["new_rule"] = module
    spec.loader.exec_module(module)
    return module.ademamix


RULES: dict[str, Rule] = {
    "adamw": adamw.adamw,
    "adam": adam.adam,
    "sgd momentum": sgd.sgd_momentum,
    "sgd nesterov": sgd.sgd_nesterov,
    "lion": lion.lion,
    "example": example_rule(),
}
# A parameter's dtype and master_weight_bits.
WEIGHTS: dict[str, tuple[torch.dtype, int]] = {
    "bf16+8": (torch.bfloat16, 24),
    "bf16+16": (torch.bfloat16, 32),
    "fp16+8": (torch.float16, 24),
    "fp32": (torch.float32, 24),
}
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}


@dataclass(frozen=True)
class Case:
    rule: str
    weight: str
    quantize: bool

    def __str__(self) -> str:
        return f"{self.rule}, {self.weight}, {'quantized' if self.quantize else 'fp32 states'}"

    def emit(self, target: str, **options: Any) -> Emitted:
        dtype, bits = WEIGHTS[self.weight]
        return emit(RULES[self.rule], target, dtype=dtype, master_weight_bits=bits, quantize=self.quantize, **options)


CASES = [Case(rule, weight, quantize) for rule in RULES for weight in WEIGHTS for quantize in (True, False)]


def hyper_of(step: Step) -> dict[str, Any]:
    return {name: HYPER.get(name, default) for name, default in step.rule.hyper}


def every_number(step: Step, shape: tuple[int, ...], grad_dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """A parameter and its parts. 16-bit heads take all bit patterns, other floats all exponents."""
    random = torch.Generator().manual_seed(seed)

    def spread(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype in (torch.int8, torch.uint8, torch.int16):
            limits = torch.iinfo(dtype)
            least = 0 if limits.min == 0 else -limits.max
            return torch.randint(least, limits.max + 1, shape, generator=random).to(dtype)
        exponents = torch.randint(-149, 120, shape, generator=random).double()
        values = torch.randn(shape, generator=random, dtype=torch.float64) * 2.0**exponents
        values[torch.rand(shape, generator=random) < 0.02] = 0.0
        return values.to(dtype)

    tensors: list[Tensor] = []
    for number, part in enumerate(step.storage.step_parts(shape, grad_dtype)):
        tensor = spread(part.shape, part.dtype)
        if number == 0 and part.dtype != torch.float32:
            patterns = torch.arange(tensor.numel()) % 65536 - 32768
            order = torch.randperm(tensor.numel(), generator=random)
            tensor = patterns[order].to(torch.int16).view(part.dtype).view(part.shape)
        if part.shape != shape:
            tensor = tensor.abs()  # a scale
        tensors.append(tensor)
    return tensors


def of_a_training(step: Step, shape: tuple[int, ...], grad_dtype: torch.dtype, steps: int = 8) -> list[Tensor]:
    """A parameter after some steps on random gradients, with its next gradient."""
    random = torch.Generator().manual_seed(1)
    tensors = step.storage.zeros(shape, grad_dtype)
    tensors[0].copy_(torch.randn(shape, generator=random) * 0.05)
    for t in range(1, steps + 1):
        tensors[1].copy_(torch.randn(shape, generator=random) * 1e-2)
        run_eager(step, tensors, t)
    tensors[1].copy_(torch.randn(shape, generator=random) * 1e-2)
    return tensors


def run_eager(step: Step, tensors: list[Tensor], t: int, like_a_gpu: bool = True) -> None:
    """Step a parameter in place, uncompiled, by a GPU's formulas or by a CPU's."""
    with like_gpu() if like_a_gpu else exact_roots():
        for block, place in zip(*blocks_of(step, [tensors]), strict=True):
            step(block, torch.tensor(float(t)), place, numbers(step, hyper_of(step)))


class _ExactRoots(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for root in ("sqrt", "rsqrt"):
            if function in (getattr(torch, root), getattr(Tensor, root)) and args[0].dtype == torch.float32:
                return getattr(args[0].double(), root)().float()
        return function(*args, **(kwargs or {}))


class _LikeGpu(_ExactRoots):
    """Say of all tensors, but of numbers, that they are on a GPU, and keep them where they are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function == Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return torch.device("cuda") if args[0].dim() else function(*args)
        if kwargs.get("device") == torch.device("cuda"):
            kwargs["device"] = "cpu"
        return super().__torch_function__(function, types, args, kwargs)


@contextmanager
def like_gpu() -> Iterator[None]:
    """Compute by a GPU's formulas on the CPU, with correctly rounded roots."""
    with _LikeGpu():
        yield


@contextmanager
def exact_roots() -> Iterator[None]:
    """Round square roots correctly, as GPUs do and torch on a CPU does not."""
    with _ExactRoots():
        yield

"""Published FlashOptim itself, under Triton's interpreter: it reads what we write, and we read what it writes.

Run it once for each version: pip install flashoptim==0.1.3 (or 0.1.4), or its folder on PYTHONPATH.
"""

import importlib.util
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from training import held, params_of

from flashopt_compile import (
    FlashAdamW,
    FlashOptimizer,
    FlashSGD,
    flashoptim_state_dict,
)
from flashopt_compile.checkpoint.flashoptim import VERSIONS

NEEDED = ("flashoptim", "triton")
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason="flashoptim is not installed: pip install flashoptim triton"
)
KINDS: dict[str, tuple[type[FlashOptimizer], dict[str, Any], tuple[str, ...]]] = {
    "FlashAdamW": (FlashAdamW, {}, ("exp_avg", "exp_avg_sq")),
    "FlashSGD": (FlashSGD, {"momentum": 0.9}, ("momentum_buffer",)),
}
LETTERS = {"exp_avg": "m", "exp_avg_sq": "v", "momentum_buffer": "m"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def in_its_process(function: Any) -> None:
    fresh.run(function, variables={"TRITON_INTERPRET": "1"})


def published() -> Any:
    """The package, made to believe that the CPU is a GPU; only the kernels that store and load states run."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=2)
    torch.Tensor.is_cuda = property(lambda tensor: True)  # pyright: ignore[reportAttributeAccessIssue]
    Autotuner.do_bench = lambda *args, **kwargs: [1.0] * 3  # pyright: ignore[reportAttributeAccessIssue]
    return importlib.import_module("flashoptim")


def weights() -> list[Parameter]:
    random = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=random).to(dtype)) for dtype in DTYPES for shape in ((32, 32), (7,))]


def trained(kind: str) -> FlashOptimizer:
    make, options, _ = KINDS[kind]
    optimizer = make(weights(), **options, eager=True)
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in params_of(optimizer):
            parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
        optimizer.step()
    return optimizer


def theirs_for(ours: FlashOptimizer, package: Any, **options: Any) -> Any:
    kind = type(ours).__name__
    copies = [Parameter(parameter.detach().clone()) for parameter in params_of(ours)]
    return getattr(package, kind)(copies, **KINDS[kind][1], **options)


def assert_they_hold_ours(kind: str, theirs: Any, ours: FlashOptimizer) -> None:
    """Their states to the error of 8 bits, and their weights to the bit."""
    pairs = zip(params_of(theirs), params_of(ours), strict=True)
    for number, (copied, parameter) in enumerate(pairs):
        own, state = held(ours, parameter), theirs.state[copied]
        for name in KINDS[kind][2]:
            expected, found = own[LETTERS[name]], state[name]
            found = found.materialize() if hasattr(found, "materialize") else found
            assert (found.float() - expected).norm() < 0.02 * expected.norm(), (kind, number, parameter.dtype, name)
    found, expected = exact_weights(theirs), exact_weights(ours)
    assert all(torch.equal(found[key], expected[key]) for key in expected), kind


def exact_weights(optimizer: Any) -> dict[str, Tensor]:
    return optimizer.get_fp32_model_state_dict(ParameterList(params_of(optimizer)))


def test_it_reads_what_we_write_for_every_version():
    in_its_process(read_there)


def read_there() -> None:
    package, installed = published(), metadata.version("flashoptim")
    for kind in KINDS:
        ours = trained(kind)
        for version in VERSIONS:
            if tuple(map(int, version.split("."))) <= tuple(map(int, installed.split("."))):
                theirs = theirs_for(ours, package)
                theirs.load_state_dict(flashoptim_state_dict(ours, version=version))
                assert_they_hold_ours(kind, theirs, ours)


def test_we_read_what_it_writes():
    in_its_process(read_here)


def read_here() -> None:
    package = published()
    for kind in KINDS:
        ours = trained(kind)
        for compressed in (True, False):
            theirs = theirs_for(ours, package, compress_state_dict=compressed)
            theirs.load_state_dict(flashoptim_state_dict(ours))
            again = KINDS[kind][0]([Parameter(p.detach().clone()) for p in params_of(ours)], eager=True)
            again.load_state_dict(theirs.state_dict())
            for one, two in zip(params_of(ours), params_of(again), strict=True):
                expected, found = held(ours, one), held(again, two)
                for name in KINDS[kind][2]:
                    letter = LETTERS[name]
                    difference = (found[letter] - expected[letter]).norm()
                    assert difference < 0.03 * expected[letter].norm(), (kind, one.dtype, name, compressed)
            weights, expected = exact_weights(again), exact_weights(ours)
            assert all(torch.equal(weights[key], expected[key]) for key in expected)

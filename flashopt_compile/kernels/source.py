"""Read and run Inductor's module: its kernels, their loads and stores, and the `call` around them."""

import ast
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.kernels import pretend

Launch = Callable[..., None]


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def kernels_of(module: str) -> dict[str, str]:
    """The source of each `name = async_compile.triton(name, source, ...)`."""
    found: dict[str, str] = {}
    for node in _parsed(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            if ast.unparse(call.func) == "async_compile.triton":
                name, text = (ast.literal_eval(argument) for argument in call.args[:2])
                found[name] = text
    return found


@cache
def accesses_of(kernel: str) -> tuple[list[str], Counter[str], Counter[str]]:
    """The names of a kernel's arguments, and the numbers of loads from and stores to each."""
    function = next(node for node in _parsed(kernel).body if isinstance(node, ast.FunctionDef))
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            pointer = next(each.id for each in ast.walk(node.args[0]) if isinstance(each, ast.Name))
            (loads if ast.unparse(node.func) == "tl.load" else stores)[pointer] += 1
    return [argument.arg for argument in function.args.args], loads, stores


def load_kernel(name: str, text: str) -> ModuleType:
    """The module of one kernel. Its attribute `name` is the jitted function, wrapped by Inductor's heuristics."""
    module = ModuleType(name)
    with tempfile.TemporaryDirectory() as folder, pretend.no_driver():  # triton reads source from files
        path = Path(folder) / "kernel.py"
        path.write_text(text, encoding="utf-8")
        module.__file__ = str(path)
        exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def run_call(module: str, inputs: Sequence[Any], launch: Callable[[str], Launch]) -> list[Tensor]:
    """Run the module's `call` on CPU tensors. `launch(name)` returns a stand-in for a kernel's launch.

    Returns the tensors it allocated: the step's temporaries.
    """
    runner = next(node for node in _parsed(module).body if isinstance(node, ast.ClassDef) and node.name == "Runner")
    call = next(node for node in runner.body if isinstance(node, ast.FunctionDef) and node.name == "call")
    temporaries: list[Tensor] = []

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        temporaries.append(torch.empty_strided(size, stride, dtype=dtype))
        return temporaries[-1]

    guards = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
    namespace: dict[str, Any] = {
        **{"torch": torch, "inf": float("inf"), "nan": float("nan")},
        **{"empty_strided_cuda": allocate, "empty_strided_xpu": allocate, "empty_strided_cpu": allocate},
        **{"reinterpret_tensor": guards._reinterpret_tensor, "assert_size_stride": guards.assert_size_stride},
        **{"copy_if_misaligned": lambda tensor: tensor, "get_raw_stream": lambda index: 0},
        **{name: _Kernel(launch(name)) for name in kernels_of(module)},
    }
    exec(compile(ast.Module([call], []), "<call>", "exec"), namespace)
    with pretend.no_device():
        namespace["call"](None, list(inputs))
    return temporaries


class _Kernel:
    """Stands in for a compiled kernel in `call`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def run(self, *arguments: Any, stream: int) -> None:
        self._launch(*arguments)

"""Run emitted Triton source on CPU tensors in triton's interpreter, for the bits that kernels compute.

The interpreter has no FMA, and its divisions and roots are rounded correctly; docs/gpu.md explains the consequences.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashopt_compile.kernels import pretend, source
from flashopt_compile.kernels.emit import Emitted, blocks_of, numbers

HEURISTICS = ("persistent_reduction", "reduction", "pointwise")
GRIDS = {"Grid1D": ("x",), "Grid2D": ("x", "y")}
BLOCK_ELEMENTS = 1 << 16  # per program; few large programs are fastest, as numpy runs each


def interpret(emitted: Emitted, parameters: Sequence[Sequence[Tensor]], t: int, **hyper: Any) -> None:
    """Take step `t` in place on CPU tensors with the emitted kernels.

    Each parameter is its head, gradient and parts, as `emitted.step.storage.zeros(shape, grad_dtype)` makes them.
    There must be as many parameters as were emitted; their numbers of rows may differ.
    """
    pretend.check_versions()
    if len(parameters) != len(emitted.shapes):
        raise ValueError(f"{len(parameters)} parameters are given; the code is for {len(emitted.shapes)}.")
    for tensors, shape in zip(parameters, emitted.shapes, strict=True):
        check_parameter(emitted, tensors, shape)
    blocks, places = blocks_of(emitted.step, parameters)
    given = blocks, torch.tensor(float(t), dtype=torch.float32, device="cpu"), places, numbers(emitted.step, hyper)
    with _interpreter():
        source.run_call(emitted.source, emitted.bind(given), lambda name: _launcher(name, emitted.kernels[name]))


def check_parameter(emitted: Emitted, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless code emitted for `shape`, with any number of rows, fits `tensors`."""
    own = tuple(tensors[0].shape)
    expected = emitted.step.storage.step_parts(own, emitted.grad_dtype)
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    if found != [(part.shape, part.dtype) for part in expected]:
        raise ValueError(f"a parameter of shape {own} has the tensors {found}; expected are {expected}.")
    if _forms(emitted, own) != _forms(emitted, shape):
        raise ValueError(f"a parameter has shape {own}; the code is for rows like those of {shape}.")


def _forms(emitted: Emitted, shape: tuple[int, ...]) -> list[tuple[int, int | None]]:
    """The number of dims of each block, and its row length if that is constant in the code."""
    blocks, _ = blocks_of(emitted.step, [emitted.step.storage.zeros(shape, emitted.grad_dtype, "meta")])
    return [(head.dim(), head.shape[-1] if head.dim() > 1 else None) for head, *_ in blocks]


def _launcher(name: str, text: str) -> source.Launch:
    function, meta, signature = _load(name, text)
    grid_type = meta["grid_type"]
    if grid_type not in GRIDS:
        raise ValueError(f"kernel {name} is launched on a {grid_type}; interpreted are {', '.join(GRIDS)}.")
    tensor_of = _scalars()

    def launch(*given: Any) -> None:
        names = list(signature)
        arguments = [tensor_of(value, signature[key]) for key, value in zip(names, given, strict=False)]
        sizes = dict(zip(names, given, strict=False))
        blocks = {key: 1 for key in names if key.endswith("BLOCK")}
        if "R0_BLOCK" in blocks:
            blocks["R0_BLOCK"] = 1 << (sizes["r0_numel"] - 1).bit_length()
        blocks["XBLOCK"] = max(1, BLOCK_ELEMENTS // (1 << max(0, sizes.get("r0_numel", 1) - 1).bit_length()))
        grid = tuple(-(-sizes[f"{axis}numel"] // blocks[f"{axis.upper()}BLOCK"]) for axis in GRIDS[grid_type])
        function[grid](*arguments, **blocks)

    return launch


def _load(name: str, text: str) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """The kernel as an interpreted function, and Inductor's metadata: its grid and its arguments' types."""
    heuristics = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    told: dict[str, Any] = {}

    def note(*_: Any, **kwargs: Any) -> Callable[[Any], Any]:
        told.update(kwargs)
        return lambda function: function

    with contextlib.ExitStack() as stack:
        for each in HEURISTICS:
            stack.enter_context(mock.patch.object(heuristics, each, note))
        module = source.load_kernel(name, text)
    module.__dict__.update(_stand_ins())
    return getattr(module, name), told["inductor_meta"], told["triton_meta"]["signature"]


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Make `triton.jit` interpret functions, with the hardware's casts between fp32 and bf16.

    The interpreter's own casts truncate to bf16, and get subnormals wrong on the way back.
    """
    triton = importlib.import_module("triton")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    tl = importlib.import_module("triton.language")
    numpy = importlib.import_module("numpy")
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_rightly(builder: Any, value: Any, dtype: Any) -> Any:
        data = numpy.ascontiguousarray(value.data)
        if value.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            bits = torch.from_numpy(data).to(torch.bfloat16).view(torch.int16).numpy().view(numpy.uint16)
            return interpreter.TensorHandle(bits, dtype.scalar)
        if value.dtype.scalar == tl.bfloat16 and dtype.scalar == tl.float32:
            wide = (data.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
            return interpreter.TensorHandle(wide, dtype.scalar)
        return cast(builder, value, dtype)

    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        with (
            mock.patch.object(interpreter.InterpreterBuilder, "cast_impl", cast_rightly),
            numpy.errstate(all="ignore"),
        ):
            yield
    finally:
        triton.knobs.runtime.interpret = before


def _scalars() -> Callable[[Any, str], Any]:
    """Return a function that makes fp32 numbers tensors. The interpreter would compute with Python's doubles."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    tl = importlib.import_module("triton.language")
    numpy = importlib.import_module("numpy")

    def tensor_of(value: Any, kind: str) -> Any:
        if kind != "fp32":
            return value
        return tl.tensor(interpreter.TensorHandle(numpy.array([value], numpy.float32), tl.float32), tl.float32)

    return tensor_of


def _stand_ins() -> dict[str, Any]:
    """Stand-ins for functions that the interpreter lacks: those jitted when torch was loaded, and device libraries."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    tl = importlib.import_module("triton.language")
    numpy = importlib.import_module("numpy")

    def made(data: Any, like: Any) -> Any:
        kind = like.type.scalar
        handle = interpreter.TensorHandle(data.astype(like.handle.data.dtype), kind)
        return tl.tensor(handle, tl.block_type(kind, list(data.shape)) if data.ndim and data.shape != (1,) else kind)

    def elementwise(function: Any) -> Callable[..., Any]:
        def apply(x: Any, *others: Any) -> Any:
            return made(function(x.handle.data, *(other.handle.data for other in others)), x)

        return apply

    def larger(a: Any, b: Any) -> Any:
        return tl.where((a > b) | (a != a), a, b)

    def smaller(a: Any, b: Any) -> Any:
        return tl.where((a < b) | (a != a), a, b)

    def reduced(function: Any) -> Callable[[Any, int], Any]:
        return lambda x, dim: made(function(x.handle.data, axis=dim), x)

    def fused(a: Any, b: Any, c: Any) -> Any:
        wide = numpy.float64 if a.dtype.kind == "f" else numpy.int64  # wide enough for a product of 2 × 24 bits
        return a.astype(wide) * b.astype(wide) + c.astype(wide)

    def stray(x: Any, ulps: int) -> Any:
        quotient = numpy.ascontiguousarray(x.handle.data)
        bits = quotient.view(numpy.int32)
        away = (bits + numpy.where(bits & 1, ulps, -ulps).astype(numpy.int32)).view(numpy.float32)
        normal = numpy.isfinite(quotient) & (numpy.abs(quotient) > 2.0**-100)
        return made(numpy.where(normal, away, quotient), x)

    names = {name: name for name in ("rint", "floor", "ceil", "trunc", "sqrt", "exp", "exp2", "expm1", "log", "log1p")}
    names |= {"log2": "log2", "tanh": "tanh", "ldexp": "ldexp", "nearbyint": "rint", "pow": "power", "fmod": "fmod"}
    library = {name: elementwise(getattr(numpy, function)) for name, function in names.items()}
    library |= {"fma": elementwise(fused), "stray": stray}  # called by code from `stray`
    library |= {"rsqrt": elementwise(lambda x: 1 / numpy.sqrt(x.astype(numpy.float64)))}
    helpers = {
        **{"maximum": larger, "minimum": smaller},
        **{"max2": reduced(numpy.max), "min2": reduced(numpy.min)},
    }
    return {"libdevice": _Only("libdevice", library), "triton_helpers": _Only("triton_helpers", helpers)}


class _Only(SimpleNamespace):
    """A few functions of a library. Others raise a ValueError."""

    def __init__(self, library: str, functions: dict[str, Any]) -> None:
        super().__init__(**functions)
        self._library = library

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"the kernel calls {self._library}.{name}, which interpret() has no stand-in for.")

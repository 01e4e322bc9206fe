"""Which format each state of a parameter gets, by its global shape alone, and the blocks a step works on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashopt_compile.rule import Rule
from quant.format import Format, Part, Raw, WeightFormat
from quant.grouped import Grouped
from quant.rows import Rows
from quant.split import Rounded, Split

# Biases, norms and small tensors keep fp32 states: next to nothing in bytes, and their statistics vary most.
LEAST_COLUMNS = 8
LEAST_ELEMENTS = 1024
# The length of a row where no state is grouped.
FLAT_COLUMNS = 32
TAILS = {24: torch.int8, 32: torch.int16}
PARAMETER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def keys_of(state: str, format: Format) -> tuple[str, ...]:
    """The keys of a state's parts, in the format's order."""
    return (state,) if isinstance(format, Raw) else tuple(f"{state}.{name}" for name in format.names)


@dataclass(frozen=True)
class Storage:
    """How one parameter's weight and states are stored; the same for every parameter of like kind."""

    weight: WeightFormat
    states: tuple[tuple[str, Format], ...]

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """What is stored beside the parameter itself, by key: `tail`, and `m.codes`, `m.scales` or `m`."""
        parts = {name: self.weight.parts(shape)[name] for name in self.weight.names[1:]}
        for state, format in self.states:
            parts |= zip(keys_of(state, format), format.parts(shape).values(), strict=True)
        return parts

    def step_parts(self, shape: tuple[int, ...], grad_dtype: torch.dtype) -> list[Part]:
        """All tensors that a step takes: the head, the gradient, then those of `parts`."""
        head = self.weight.parts(shape)[self.weight.names[0]]
        return [head, Part(shape, grad_dtype), *self.parts(shape).values()]

    def zeros(
        self, shape: tuple[int, ...], grad_dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> list[Tensor]:
        """The tensors of `step_parts`."""
        parts = self.step_parts(shape, grad_dtype)
        return [torch.zeros(part.shape, dtype=part.dtype, device=device) for part in parts]

    @property
    def grouped(self) -> Grouped | None:
        return next((format for _, format in self.states if isinstance(format, Grouped)), None)

    @property
    def group_size(self) -> int:
        """The length of the rows a block consists of."""
        return FLAT_COLUMNS if self.grouped is None else self.grouped.group_size

    @property
    def scales(self) -> tuple[bool, ...]:
        """Which of the head and the tensors of `parts` hold one number a group."""
        beside = (False,) * len(self.weight.names)
        return *beside, *(name == "scales" for _, format in self.states for name in format.names)

    def blocks(self, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """Views of `tensors` (head, gradient, then those of `parts`; all contiguous) of all elements.

        Each comes with the position of its first element. Where states are grouped, the last dim is one group.
        """
        elements = math.prod(shape)
        if not elements:
            return []
        if self.grouped is None:
            # With rows of a fixed length the compiler knows that all loads may be wide.
            rows = (-1,) if elements % FLAT_COLUMNS else (-1, FLAT_COLUMNS)
            return [(0, [tensor.view(rows) for tensor in tensors])]
        rows = self.grouped.rows(shape)
        split = [
            rows.scale_blocks(tensor) if is_scale else rows.blocks(tensor)
            for tensor, is_scale in zip(tensors, (False, *self.scales), strict=True)
        ]
        return list(zip(rows.starts, map(list, zip(*split, strict=True)), strict=True))


def storage_of(
    rule: Rule, dtype: torch.dtype, shape: tuple[int, ...], master_weight_bits: int | None, quantize: bool
) -> Storage:
    """The storage of a parameter of global `shape`; never of its shard, or numerics would change with world size."""
    make = _storage_of if torch.compiler.is_compiling() else _cached_storage_of  # Dynamo warns of caches
    return make(rule, dtype, shape, master_weight_bits, quantize)


def _storage_of(
    rule: Rule, dtype: torch.dtype, shape: tuple[int, ...], master_weight_bits: int | None, quantize: bool
) -> Storage:
    if dtype == torch.float32:
        weight: WeightFormat = Raw()
    elif master_weight_bits is None:
        weight = Rounded(dtype)
    else:
        weight = Split(dtype, TAILS[master_weight_bits])

    def kept(format: Format) -> Format:
        if not isinstance(format, Grouped):
            return format
        columns = Rows(shape, format.group_size).columns
        small = len(shape) < 2 or columns < LEAST_COLUMNS or math.prod(shape) < LEAST_ELEMENTS
        return Raw() if small or not quantize else format

    return Storage(weight, tuple((name, kept(format)) for name, format in rule.states))


_cached_storage_of = cache(_storage_of)

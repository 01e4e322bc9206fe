"""fp32 ↔ companded 8-bit codes with a bf16 scale per group: how optimizer states are stored.

    scale = max |x| of the group, rounded up to bf16      code = round(L · φ(x / scale))      x ≈ scale · ψ(code / L)

Groups run along rows and never cross one, so cutting a tensor between rows never cuts a group.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quant.compand import FOURTH_ROOT, LINEAR, SIGNED_ROOT, SOFTSIGN, SQUARE_ROOT, Compander
from quant.dither import block_phases, mix_phases, noise, phase_of, step_phase
from quant.format import Part, check_dtype, check_out
from quant.rows import Rows
from quant.ulp import at_least, largest, on_gpu, once, round_up, spread, whole

MIN_SCALE = 2.0**-118  # below, 127/scale would overflow
# A group whose largest value exceeds a scale by this little keeps that scale. Rounding alone may cause the excess:
# scales would creep up each time a group is stored, and differ between compilers that contract and ones that do not.
SLACK = 2.0**-18
VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Grouped:
    """Companded codes, int8 if `signed` else uint8, and one bf16 scale per group.

    A non-finite value makes its group's scale NaN, so that this group decodes to NaN and no other does. So does a
    value above 2^127 (less for some companders), which would overflow the compander's arithmetic.
    An unsigned value above zero never gets code 0: a variance must not vanish.

    >>> Grouped(SOFTSIGN).parts((8, 64))["scales"]
    Part(shape=(8, 2), dtype=torch.bfloat16)
    """

    compander: Compander = SOFTSIGN
    signed: bool = True
    group_size: int = 32
    _compress: Callable[[Tensor, Tensor], Tensor] = field(init=False, repr=False, compare=False)
    _expand: Callable[[Tensor, Tensor], Tensor] = field(init=False, repr=False, compare=False)

    names = ("codes", "scales")

    def __post_init__(self) -> None:
        if not isinstance(self.group_size, int) or self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size!r}; it must be a whole number of at least 2.")
        if self.signed and not self.compander.odd:
            raise ValueError(
                f"compander {self.compander.name!r} = {self.compander.expression} is not odd; "
                "signed codes need φ(−x) = −φ(x)."
            )
        object.__setattr__(self, "_compress", self.compander.compressor(self.levels))
        object.__setattr__(self, "_expand", self.compander.expander(self.levels))

    def __reduce__(self) -> tuple[type, tuple[Compander, bool, int]]:
        return Grouped, (self.compander, self.signed, self.group_size)

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.signed else torch.uint8

    @property
    def levels(self) -> int:
        return torch.iinfo(self.dtype).max

    def rows(self, shape: tuple[int, ...]) -> Rows:
        return Rows(tuple(shape), self.group_size)

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        return {
            "codes": Part(tuple(shape), self.dtype),
            "scales": Part(self.rows(shape).scales_shape, torch.bfloat16),
        }

    def encode(
        self, x: Tensor, noise: Tensor | None = None, groups: int = 1, for_gcc: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales of a block whose last dim holds one group, or `groups` of them.

        Rounds to the nearest code or, given `noise`, up or down so that the code is right on average.
        """
        size = largest(x, groups, for_gcc)
        finite = size <= self.compander.largest_scale(self.levels)
        scale = once(round_up(at_least(size, MIN_SCALE) * (1 - SLACK)))
        never_zero = None if self.signed else x
        codes = whole(
            self._compress(x, scale), -self.levels, self.levels, noise, never_zero=never_zero, for_gcc=for_gcc
        )
        codes = codes.to(self.dtype)
        if not on_gpu(x):  # where these codes are of no use: their scale is NaN
            kept = once(-finite.to(torch.int32))  # all bits or none
            codes = codes & spread(kept, x).to(self.dtype)
        scale = torch.where(finite, torch.where(size > 0, scale, 0.0), math.nan)
        return codes, scale.to(torch.bfloat16)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return self._expand(codes.to(torch.float32), scales.to(torch.float32))


# The defaults for momenta and variances, chosen in docs/formats.md.
SIGNED8 = Grouped(SIGNED_ROOT)
ROOT8 = Grouped(FOURTH_ROOT, signed=False)


def _format(signed: bool, group_size: int, sqrt: bool, softsign: bool, compander: Compander | None) -> Grouped:
    if compander is None:
        compander = SQUARE_ROOT if sqrt else SOFTSIGN if softsign else LINEAR
    return Grouped(compander, signed, group_size)


def quantize(
    x_float: Tensor,
    out_int8: Tensor | None = None,
    out_scales: Tensor | None = None,
    signed: bool = True,
    group_size: int = 32,
    sqrt: bool = False,
    softsign: bool = True,
    *,
    compander: Compander | None = None,
    rounding: str = "nearest",
    step: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes (of x_float's shape) and scales of a whole fp32, bf16 or fp16 tensor of any shape.

    They are written to `out_int8` and `out_scales` if given. `sqrt` and `softsign` choose the compander, `compander`
    overrides both. `rounding` is "nearest" or "dither", which draws from the element's index and `step`.

    >>> codes, scales = quantize(torch.tensor([0.5, -1.0, 0.0]))
    >>> codes, scales
    (tensor([  85, -127,    0], dtype=torch.int8), tensor([1.], dtype=torch.bfloat16))
    """
    check_dtype("x_float", x_float.dtype, VALUE_DTYPES)
    if rounding not in ("nearest", "dither"):
        raise ValueError(f"rounding is {rounding!r}; allowed are 'nearest' and 'dither'.")
    format = _format(signed, group_size, sqrt, softsign, compander)
    if not signed and not torch.compiler.is_compiling() and (x_float < 0).any():
        raise ValueError(f"x_float has negative values (least {x_float.min().item():.6g}); unsigned codes need x ≥ 0.")
    parts = format.parts(x_float.shape)
    given = {"codes": out_int8, "scales": out_scales}
    for argument, out, part in zip(("out_int8", "out_scales"), given.values(), parts.values(), strict=True):
        check_out(argument, out, part.shape, (part.dtype,))
    stored = {name: torch.empty(part.shape, dtype=part.dtype, device=x_float.device) for name, part in parts.items()}
    rows = format.rows(x_float.shape)
    if x_float.numel():
        source = x_float.detach().contiguous()
        stored_blocks = rows.blocks(stored["codes"]), rows.scale_blocks(stored["scales"])
        for block, codes, scales, start in zip(rows.blocks(source), *stored_blocks, rows.starts, strict=True):
            drawn = None
            if rounding == "dither":
                since = torch.tensor(step, dtype=torch.int64, device="cpu")
                drawn = noise(mix_phases(sum(block_phases(block), phase_of(start) + step_phase(since))), stream=1)
            for part, new in zip((codes, scales), format.encode(block.to(torch.float32), drawn), strict=True):
                part.copy_(new)
    codes, scales = (
        new if out is None else out.copy_(new) for out, new in zip(given.values(), stored.values(), strict=True)
    )
    return codes, scales


def dequantize(
    in_int8: Tensor,
    in_scales: Tensor,
    out_float: Tensor | None = None,
    signed: bool = True,
    group_size: int = 32,
    sqrt: bool = False,
    softsign: bool = True,
    *,
    compander: Compander | None = None,
) -> Tensor:
    """The tensor stored by `quantize` with the same arguments: in fp32, or in `out_float` if given."""
    format = _format(signed, group_size, sqrt, softsign, compander)
    check_dtype("in_int8", in_int8.dtype, (format.dtype,))
    check_dtype("in_scales", in_scales.dtype, (torch.bfloat16,))
    rows = format.rows(in_int8.shape)
    if tuple(in_scales.shape) != rows.scales_shape:
        raise ValueError(
            f"in_scales has shape {tuple(in_scales.shape)}; codes of shape {tuple(in_int8.shape)} need "
            f"{rows.scales_shape}."
        )
    check_out("out_float", out_float, tuple(in_int8.shape), VALUE_DTYPES)
    x = torch.empty(in_int8.shape, dtype=torch.float32, device=in_int8.device)
    if x.numel():
        codes = in_int8.contiguous()
        for block, *stored in zip(
            rows.blocks(x), rows.blocks(codes), rows.scale_blocks(in_scales.contiguous()), strict=True
        ):
            block.copy_(format.decode(*stored))
    return x if out_float is None else out_float.copy_(x)

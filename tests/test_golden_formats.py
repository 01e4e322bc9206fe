"""Our formats agree with vectors recorded from the published implementation, where the record is correct."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from strategies import differences, joined, ulp
from torch import Tensor

from quant import Grouped, Split, dequantize, quantize
from quant.bounds import SPLITS, grouped_bound, split_bound
from quant.compand import SOFTSIGN, SQUARE_ROOT

GOLDEN = Path(__file__).parent / "golden"


@cache
def record(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def recorded_head(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(dtype)


def keys(format: Split) -> tuple[str, str]:
    narrow = {torch.bfloat16: "bf16", torch.float16: "fp16"}[format.head]
    return narrow, f"{narrow}_{8 * (format.head.itemsize + format.tail.itemsize)}"


each_split = pytest.mark.parametrize("format", SPLITS, ids=lambda format: keys(format)[1])


@each_split
def test_split_agrees_with_the_record(format: Split):
    narrow, key = keys(format)
    ecc = record("ecc")
    w, theirs = torch.from_numpy(ecc[f"{narrow}_x"]), torch.from_numpy(ecc[f"{key}_recon"])
    head, tail = format.encode(w)
    assert differences(head, recorded_head(ecc[f"{narrow}_narrow_bits"], format.head)) == 0

    finite = head.isfinite()  # their other tails are meaningless: docs/differences.md
    w, theirs, head, tail = w[finite], theirs[finite], head[finite], tail[finite]
    limit = split_bound(format).function()(ulp_head=ulp(head, format.head), ulp_fp32=ulp(w, torch.float32))
    assert ((format.decode(head, tail).double() - w.double()).abs() <= limit).all()
    record_is_right = (theirs.double() - w.double()).abs() <= limit
    assert record_is_right.all()
    codes = torch.from_numpy(ecc[f"{key}_err"])[finite].int()
    apart = (tail.int() - codes).abs()
    assert apart.max() <= 1
    assert apart.count_nonzero() < len(w) / 1000  # ties between two codes


@each_split
def test_decoding_equals_the_record(format: Split):
    _, key = keys(format)
    ecc = record("ecc")
    head = recorded_head(ecc[f"{key}_dec_narrow_bits"], format.head)
    tail = torch.from_numpy(ecc[f"{key}_dec_code"])
    theirs = torch.from_numpy(ecc[f"{key}_dec_recon"])
    finite = head.isfinite()
    head, tail, theirs = head[finite], tail[finite], theirs[finite]
    ours = format.decode(head, tail)
    assert torch.equal(ours, theirs)
    assert ((ours.double() - joined(head, tail)).abs() <= ulp(ours, torch.float32)).all()


MOMENTUM, VARIANCE = Grouped(SOFTSIGN), Grouped(SQUARE_ROOT, signed=False)
KINDS = ("n1", "n1e-9", "n1e-6", "n1e4", "n1e6", "logu", "outlier", "zeros", "sparse")
SIZES = (1, 31, 32, 33, 1000, 4097)
each_state = pytest.mark.parametrize("format", [MOMENTUM, VARIANCE], ids=["momentum", "variance"])


class Comparison:
    """Our values and the recorded ones for one tensor, element by element."""

    def __init__(self, format: Grouped, kind: str, size: int) -> None:
        key = f"{'s' if format.signed else 'v'}_{kind}_{size}"
        recorded = {part: torch.from_numpy(record("quant")[f"{key}_{part}"]) for part in ("x", "q", "scale", "deq")}
        self.x, self.their_codes, self.theirs = recorded["x"], recorded["q"], recorded["deq"]
        self.codes, scales = quantize(self.x, signed=format.signed, sqrt=not format.signed)
        self.ours = dequantize(self.codes, scales, signed=format.signed, sqrt=not format.signed)
        group = torch.arange(size) // format.group_size
        self.scale = scales.double()[group]
        # The recorded scale is that of the variance's root, in fp16. It has all its bits only if it is normal.
        self.their_scale = recorded["scale"].double()[group] ** (1 if format.signed else 2)
        fp16 = recorded["scale"][group]
        self.sane = fp16.isfinite() & (fp16 >= torch.finfo(torch.float16).smallest_normal)
        self.limit = grouped_bound(format).function()


@each_state
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_within_the_bound_on_every_recorded_tensor(format: Grouped, kind: str):
    for size in SIZES:
        compared = Comparison(format, kind, size)
        error = (compared.ours.double() - compared.x.double()).abs()
        assert (error <= compared.limit(scale=compared.scale)).all()


@each_state
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_codes_agree_where_the_recorded_scale_is_sane(format: Grouped, kind: str):
    for size in SIZES:
        compared = Comparison(format, kind, size)
        sane = compared.sane
        allowed = compared.limit(scale=compared.scale) + compared.limit(scale=compared.their_scale)
        assert ((compared.ours.double() - compared.theirs.double()).abs() <= allowed)[sane].all()
        assert ((compared.codes.int() - compared.their_codes.int()).abs() <= 1)[sane].all()


@each_state
@pytest.mark.parametrize("kind", ["n1", "n1e4"])
def test_mean_error_is_close_to_the_recorded_one_where_fp16_scales_serve(format: Grouped, kind: str):
    compared = Comparison(format, kind, 4097)
    assert compared.sane.all()
    ours, theirs = ((each - compared.x).abs().mean() for each in (compared.ours, compared.theirs))
    assert ours < 1.1 * theirs


@each_state
@pytest.mark.parametrize("kind", ["n1e-9", "n1e6"])
def test_groups_lost_by_fp16_scales_are_kept(format: Grouped, kind: str):
    compared = Comparison(format, kind, 4097)
    assert not compared.sane.any()
    assert not compared.theirs.any() or not compared.theirs.isfinite().any()
    relative = (compared.ours - compared.x).abs().sum() / compared.x.abs().sum()
    assert relative < 0.02


@each_state
@pytest.mark.parametrize("name, scale", [("1", 1.0), ("h", 0.33325), ("sub", 2.0**-24), ("max", 65504.0)])
def test_every_code_decodes_to_the_recorded_value(format: Grouped, name: str, scale: float):
    theirs = torch.from_numpy(record("quant")[f"table_{'s' if format.signed else 'v'}_{name}"])
    codes = torch.arange(-128, 128) if format.signed else torch.arange(256)
    scale = float(np.float16(scale)) ** (1 if format.signed else 2)
    ours = format.decode(codes.to(format.dtype), torch.tensor(scale))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)

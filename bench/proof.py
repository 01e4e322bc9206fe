"""The exhaustive proof of the split formats: all 2^32 fp32 inputs and all (head, tail) pairs. `make proof`.

Each format is compiled with torch.compile's default options, as users do. Inputs are built from bit patterns,
one sign and exponent (2^23 patterns) at a time. The ulps of an input and of its head then follow from the
exponent field, without the arithmetic under test.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from bench.bounds_page import write_page
from bench.findings import CHECKS, EAGER_CHECK, INPUT_CHECKS, PAIR_CHECKS, Findings, Relative
from quant.bounds import SPLITS, split_bound
from quant.dither import mix, noise
from quant.split import Split

CHUNK = 2**23  # the patterns of one sign and exponent field
CHUNKS = 2**32 // CHUNK
PIECE = 2**21  # patterns checked at once: few enough to reuse their memory, enough to keep two cores busy
RUN = 256  # a sample takes or skips this many consecutive patterns
EAGER_STRIDE = 257  # about 1/256 of the inputs, at every alignment, is also run eagerly
HEADS_AT_ONCE = 128
FP32 = torch.finfo(torch.float32)
# Samples and, in the tests, broken formats recompile the same functions.
torch._dynamo.config.recompile_limit = 64


class Bits(NamedTuple):
    """A float tensor and its bits. The view is taken outside of compiled functions, where it is free."""

    value: Tensor
    bits: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Bits":
        return cls(x, x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize]))


class Trip(NamedTuple):
    """An input, its expected head, and the format's results.

    `decoded` comes from stored parts. `fused` comes from the graph that encoded them, where a compiler may skip
    narrowing the head.
    """

    w: Bits
    expected: Bits
    head: Bits
    tail: Tensor
    decoded: Bits
    fused: Bits
    kept_head: Bits
    kept_tail: Tensor


class Limits(NamedTuple):
    """Head ulps, and bounds in head ulps, for a chunk's binade and for the next one, which begins at `next`."""

    ulps: Tensor
    bounds: Tensor
    next: Tensor


def same(a: Bits, b: Bits) -> Tensor:
    """Equal bit for bit; all NaNs are equal."""
    return (a.bits == b.bits) | (a.value.isnan() & b.value.isnan())


def judge(trip: Trip, limits: Limits) -> tuple[list[Tensor], Tensor]:
    """For each of INPUT_CHECKS, a mask of the inputs that pass; and the errors in ulps of the head."""
    w, tail, decoded = trip.w, trip.tail, trip.decoded
    value = trip.head.value.to(torch.float32)
    finite = value.abs() < torch.inf
    carried = value.abs() >= limits.next
    error = (decoded.value.double() - w.value.double()).abs() / torch.where(carried, limits.ulps[1], limits.ulps[0])
    error = torch.where(finite, error, 0.0)
    unmoved = torch.where(value.isnan(), decoded.value.isnan(), decoded.value == value) & (tail == 0)
    passes = [
        same(trip.head, trip.expected),
        error <= torch.where(carried, limits.bounds[1], limits.bounds[0]),
        (value != w.value) | ~finite | ((decoded.bits == w.bits) & (tail == 0)),
        finite | unmoved,
        same(trip.kept_head, trip.head) & (trip.kept_tail == tail),
        same(trip.fused, decoded),
    ]
    return passes, error


def count_inputs(trip: Trip, limits: Limits) -> tuple[Tensor, Tensor]:
    """The violations of each of INPUT_CHECKS and the number of exact inputs; the worst error in ulps."""
    passes, error = judge(trip, limits)
    exact = (trip.decoded.bits == trip.w.bits) & (trip.w.value.abs() < torch.inf)
    counted = [*(~each for each in passes), exact]
    return torch.stack([each.sum(dtype=torch.int32) for each in counted]), error.amax()


def judge_pairs(decoded: Tensor, strict: bool) -> tuple[Tensor, Tensor]:
    """For each of PAIR_CHECKS, a mask of the pairs that pass. Each row has one head and rising tails."""
    below, above = decoded[:, :-1], decoded[:, 1:]
    return decoded.abs() < torch.inf, (above > below) if strict else (above >= below)


def count_pairs(decoded: Tensor, strict: bool) -> Tensor:
    return torch.stack([(~each).sum(dtype=torch.int32) for each in judge_pairs(decoded, strict)])


def worst_relative(w: Tensor, decoded: Tensor) -> Tensor:
    """The worst relative error; −1 if no non-zero `w` decodes to a finite value."""
    error = (decoded.double() - w.double()).abs() / w.double().abs()
    return torch.where((decoded.abs() < torch.inf) & (w != 0), error, -1.0).amax()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under torch.compile's default options, for one size. Fail rather than fall back to eager."""
    return torch.compile(function, dynamic=False, fullgraph=True)


count_inputs_fast = compiled(count_inputs)
count_pairs_fast = compiled(count_pairs)
worst_relative_fast = compiled(worst_relative)


def bit_patterns(chunk: int, sample: int = 1) -> Tensor:
    """The int32 patterns of one sign and exponent field, or every `sample`-th run of 256 of them."""
    start = chunk * CHUNK - (2**32 if chunk >= CHUNKS // 2 else 0)
    runs = torch.arange(0, CHUNK, RUN * sample, dtype=torch.int32).view(-1, 1) + start
    return (runs + torch.arange(RUN, dtype=torch.int32)).view(-1)


def ulp(exponent: int, finfo: torch.finfo) -> float:
    return max(2.0**exponent, finfo.smallest_normal) * finfo.eps


def note_relative(into: Relative, chunk: int, w: Bits, decoded: Tensor) -> None:
    """Update `into` with the worst relative errors of one chunk, by exponent."""
    field = chunk % 256
    if field == 255:
        return
    if field > 0:
        found = {field - 127: worst_relative_fast(w.value, decoded)}
    else:  # subnormals: the chunk spans 23 binades
        edges = torch.searchsorted(w.bits & (CHUNK - 1), 2 ** torch.arange(24, dtype=torch.int32)).tolist()
        spans = {k - 149: slice(*edges[k : k + 2]) for k in range(23) if edges[k] < edges[k + 1]}
        found = {exponent: worst_relative(w.value[span], decoded[span]) for exponent, span in spans.items()}
    for exponent, worst in found.items():
        if worst >= 0:
            into[exponent] = max(into.get(exponent, 0.0), worst.item())


class Proof:
    """The checks of one format and their findings."""

    def __init__(self, format: Split) -> None:
        self.format = format
        self.findings = Findings(format)
        self.bound = split_bound(format).function()
        self.zero = torch.zeros(())
        self.round_trip_fast = compiled(self.round_trip)
        self.stay_fast = compiled(self.stay)
        self.decode_fast = compiled(self.decode)

    def round_trip(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head, tail = self.format.encode(w)
        return head, tail, self.format.decode(head, tail)

    def stay(self, head: Tensor, tail: Tensor, zero: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move stored parts by zero, with dither; also decode them."""
        drawn = noise(mix(index, zero.to(torch.int32)), stream=0)
        return *self.format.advance(head, tail, zero, drawn), self.format.decode(head, tail)

    def decode(self, head: Tensor, tail: Tensor) -> Tensor:
        return self.format.decode(head, tail)

    def limits(self, chunk: int) -> Limits:
        exponent = max(chunk % 256, 1) - 127
        ulps = torch.tensor(
            [ulp(exponent + carry, torch.finfo(self.format.head)) for carry in (0, 1)], dtype=torch.float64
        )
        bounds = self.bound(ulp_head=ulps, ulp_fp32=torch.full_like(ulps, ulp(exponent, FP32)))
        return Limits(ulps, bounds / ulps, torch.tensor(2.0 ** (exponent + 1), dtype=torch.float64))

    def check_inputs(self, chunk: int, w: Bits) -> None:
        """Run and check inputs from one chunk."""
        head, tail, fused = self.round_trip_fast(w.value)
        kept_head, kept_tail, decoded = self.stay_fast(head, tail, self.zero, w.bits)
        trip = Trip(
            w=w,
            expected=Bits.of(w.value.to(self.format.head)),
            head=Bits.of(head),
            tail=tail,
            decoded=Bits.of(decoded),
            fused=Bits.of(fused),
            kept_head=Bits.of(kept_head),
            kept_tail=kept_tail,
        )
        limits = self.limits(chunk)
        counts, worst = count_inputs_fast(trip, limits)
        *violations, exact = counts.tolist()
        found = self.findings
        found.inputs += len(tail)
        found.finite += 0 if chunk % 256 == 255 else len(tail)
        found.exact += exact
        found.worst_in_ulps = max(found.worst_in_ulps, worst.item())
        found.tightness = max(found.tightness, (worst / limits.bounds.amax()).item())
        note_relative(found.relative, chunk, w, decoded)
        if any(violations):
            for check, count, passes in zip(INPUT_CHECKS, violations, judge(trip, limits)[0], strict=True):
                if count:
                    found.blame(check, count, f"input {int(w.bits[~passes][0]) & 0xFFFFFFFF:#010x}")
        self.check_eager(trip, start=chunk % EAGER_STRIDE)

    def check_eager(self, trip: Trip, start: int) -> None:
        w, head, tail, decoded = (
            each[start::EAGER_STRIDE] for each in (trip.w.value, trip.head.value, trip.tail, trip.decoded.value)
        )
        eager_head, eager_tail, eager_decoded = self.round_trip(w)
        equal = same(Bits.of(eager_head), Bits.of(head)) & (eager_tail == tail)
        equal &= same(Bits.of(eager_decoded), Bits.of(decoded))
        if not equal.all():
            pattern = int(Bits.of(w).bits[~equal][0]) & 0xFFFFFFFF
            self.findings.blame(EAGER_CHECK, int((~equal).sum()), f"input {pattern:#010x}")

    def finite_heads(self) -> Sequence[Tensor]:
        patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
        heads = patterns.view(self.format.head)
        return heads[heads.isfinite()].view(-1, 1).split(HEADS_AT_ONCE)

    def check_pairs(self, heads: Tensor) -> None:
        """Decode `heads` with every tail. The decoded value must rise with the tail, strictly for int8.

        Nothing may overflow: half an ulp above the largest head is still below fp32's largest value.
        """
        levels, strict = self.format.levels, self.format.tail == torch.int8
        tails = torch.arange(-levels, levels + 1, dtype=torch.int32).to(self.format.tail)
        decoded = self.decode_fast(heads, tails)
        self.findings.pairs += decoded.numel()
        counts = count_pairs_fast(decoded, strict).tolist()
        if any(counts):
            for check, count, passes in zip(PAIR_CHECKS, counts, judge_pairs(decoded, strict), strict=True):
                if count:
                    row, column = (~passes).nonzero()[0].tolist()
                    pattern = int(Bits.of(heads).bits[row]) & 0xFFFF
                    self.findings.blame(check, count, f"head {pattern:#06x}, tail {column - levels}")


def note_others(into: dict[str, Relative], chunk: int, w: Bits) -> None:
    """Note the errors of other ways to use 2, 3 or 4 bytes, for comparison."""
    others = {
        "plain bf16": w.value.to(torch.bfloat16).to(torch.float32),
        "bf16 + 8 raw low bits": (w.bits & -(2**8)).view(torch.float32),
        "bf16 + 16 raw low bits": ((w.bits & -(2**16)) | (w.bits & (2**16 - 1))).view(torch.float32),
    }
    for name, decoded in others.items():
        note_relative(into.setdefault(name, {}), chunk, w, decoded)


def prove(formats: Sequence[Split] = SPLITS, sample: int = 1) -> tuple[list[Findings], dict[str, Relative]]:
    """Check every `sample`-th run of 256 inputs in every binade, and every `sample`-th batch of pairs."""
    proofs = [Proof(format) for format in formats]
    others: dict[str, Relative] = {}
    for chunk in tqdm(range(CHUNKS), desc="inputs", unit="chunk", mininterval=1):
        for piece in bit_patterns(chunk, sample).split(PIECE):
            w = Bits.of(piece.view(torch.float32))
            note_others(others, chunk, w)
            for proof in proofs:
                proof.check_inputs(chunk, w)
    batches = [(proof, heads) for proof in proofs for heads in proof.finite_heads()[::sample]]
    for proof, heads in tqdm(batches, desc="pairs ", unit="batch", mininterval=1):
        proof.check_pairs(heads)
    return [proof.findings for proof in proofs], others


def report(findings: Sequence[Findings], seconds: float) -> int:
    """Print the findings. Return the number of violations."""
    for found in findings:
        name = split_bound(found.format).format
        print(f"\n{name}: {found.inputs:,} inputs, {found.pairs:,} (head, tail) pairs")
        for check in CHECKS:
            example = f"   first: {found.examples[check]}" if check in found.examples else ""
            print(f"  {check:<40} {found.violations[check]:>13,} violations{example}")
    total = sum(found.total_violations for found in findings)
    inputs = findings[0].inputs
    print(f"\n{inputs:,} inputs × {len(findings)} formats, {total:,} violations   ({seconds / 60:.1f} minutes)")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.proof", description=__doc__)
    parser.add_argument("--sample", type=int, default=1, metavar="K", help="check every K-th run of 256 inputs")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/bounds.md and its picture as they are")
    arguments = parser.parse_args()
    start = time.perf_counter()
    findings, others = prove(sample=arguments.sample)
    violations = report(findings, time.perf_counter() - start)
    if not arguments.no_docs:
        write_page(findings, others)
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()

"""The exhaustive proof's checks pass on a sample and fail for formats broken on purpose."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import proof
from bench.bounds_page import write_page
from bench.findings import CHECKS, EAGER_CHECK, INPUT_CHECKS, Findings
from bench.formats import GOAL, compare_scales, log_normal_groups
from bench.proof import CHUNKS, Bits, Proof, bit_patterns, prove
from quant.bounds import SPLITS
from quant.grouped import SIGNED8
from quant.split import Split
from quant.ulp import spacing

SAMPLE = 4681  # divides 2^15 − 1, so the sample has the first and last 256 patterns of every binade
BOUND_CHECK = INPUT_CHECKS[1]


def tail_of(format: Split, w: Tensor, head: Tensor, binade_of: Tensor) -> Tensor:
    """The tail of w for `head`, in codes of the ulp in the binade of `binade_of`."""
    half_ulp = spacing(binade_of, format.narrow) / 2
    return torch.where(head.isfinite(), (w - head) / half_ulp * format.levels, 0.0).round().to(format.tail)


class CastAndBack(Split):
    """Correct in eager. Compilers fold the cast and back, and lose the tail."""

    def encode(self, w: Tensor) -> tuple[Tensor, Tensor]:
        head = w.to(self.head)
        value = head.to(torch.float32)
        return head, tail_of(self, w, value, binade_of=value)


class WrongCarry(Split):
    """Forgets that a head rounded up into the next binade has a larger ulp than its input."""

    def encode(self, w: Tensor) -> tuple[Tensor, Tensor]:
        head, _ = super().encode(w)
        return head, tail_of(self, w, head.to(torch.float32), binade_of=w)


def findings_for(format: Split, chunk: int = 127) -> Findings:
    """The proof's findings for the inputs from 1 to 2."""
    one = Proof(format)
    one.check_inputs(chunk, Bits.of(bit_patterns(chunk, SAMPLE).view(torch.float32)))
    return one.findings


def test_bit_patterns_cover_every_input_once():
    ends = [
        (patterns[0].item(), patterns[-1].item())
        for patterns in (bit_patterns(chunk, SAMPLE) for chunk in range(CHUNKS))
    ]
    assert sorted(ends) == [(start, start + 2**23 - 1) for start in range(-(2**31), 2**31, 2**23)]
    whole = bit_patterns(CHUNKS - 1)
    assert torch.equal(whole, torch.arange(-(2**23), 0, dtype=torch.int32))


@pytest.mark.parametrize("format", SPLITS, ids=lambda format: f"{format.head}-{format.tail}")
def test_sample_of_the_proof_finds_no_violation(format: Split):
    (found,), _ = prove([format], SAMPLE)
    assert found.inputs == CHUNKS * 8 * 256
    assert found.pairs > 0
    assert found.violations == dict.fromkeys(CHECKS, 0), found.examples


@pytest.mark.parametrize("broken", [CastAndBack, WrongCarry])
def test_broken_split_is_caught(broken: type[Split]):
    assert findings_for(Split()).total_violations == 0
    found = findings_for(broken())
    assert found.violations[BOUND_CHECK] > 0
    assert found.examples[BOUND_CHECK].startswith("input 0x3f")


def test_folded_cast_is_caught_as_a_difference_from_eager():
    assert findings_for(CastAndBack()).violations[EAGER_CHECK] > 0


def test_violations_make_the_command_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    found = Findings(Split(), inputs=2**32)
    found.blame(BOUND_CHECK, 3, "input 0x3f800001")
    monkeypatch.setattr(proof, "prove", lambda **_: ([found], {}))
    monkeypatch.setattr(sys, "argv", ["proof", "--no-docs"])
    with pytest.raises(SystemExit) as ended:
        proof.main()
    assert ended.value.code == 1
    assert "4,294,967,296 inputs × 1 formats, 3 violations" in capsys.readouterr().out


def test_page_shows_every_format(tmp_path: Path):
    relative = {exponent: 2.0**-16 for exponent in range(-149, 128)}
    findings = [Findings(format, inputs=2**32, finite=2, exact=1, relative=relative) for format in SPLITS]
    others = {name: relative for name in ("plain bf16", "bf16 + 8 raw low bits", "bf16 + 16 raw low bits")}
    write_page(findings, others, tmp_path)
    page = (tmp_path / "bounds.md").read_text(encoding="utf-8")
    for name in ("bf16 + int8", "bf16 + int16", "fp16 + int8", "fp16 + int16", "softsign", "fourth root"):
        assert f"| {name}" in page
    assert (tmp_path / "img" / "bounds.png").stat().st_size > 10_000


def test_scales_beat_fp16_by_the_goal():
    assert compare_scales(SIGNED8, log_normal_groups(torch.Generator().manual_seed(0))) >= GOAL

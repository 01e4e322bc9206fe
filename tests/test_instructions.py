"""Machine instructions: counted from assembly, judged by a model, and held to what was recorded."""

import json
from pathlib import Path

import pytest
from kernel_cases import Case

from flashopt_compile.kernels import compile_offline, offline
from flashopt_compile.kernels.instructions import Count, in_amdgcn, in_sass
from flashopt_compile.kernels.report import report
from flashopt_compile.kernels.roofline import DEVICES, verdict, verdicts

triton = pytest.importorskip("triton", reason="pip install -e '.[kernels]'")
RECORDED = Path(__file__).parent / "golden" / "instructions.json"
VERSION = ".".join(triton.__version__.split(".")[:2])
BUDGETS = [("adamw", "sm_90"), ("adamw", "sm_100"), ("adamw", "gfx942"), ("lion", "sm_90"), ("sgd momentum", "sm_90")]
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.EF.128 R36, desc[UR10][R4.64] ;
                                                      /* 0x0000000a04240981 */
        /*0020*/                   MUFU.RSQ R7, R7 ;
        /*0030*/              @P1  I2F.S8 R2, R32 ;
        /*0040*/                   I2FP.F32.U32 R2, R2 ;
        /*0050*/                   BRA 0x50;
        /*0060*/                   NOP;
"""
AMDGCN = """
; %bb.0:
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\tv_rsq_f32_e32 v1, v2
\tv_pk_mul_f32 v[4:5], v[6:7], v[8:9]
\tglobal_store_dwordx4 v1, v[2:5], s[2:3]
\ts_nop 0
\ts_endpgm
"""


def test_instructions_are_counted_without_padding_and_with_those_of_the_special_unit():
    assert in_sass(SASS) == Count(instructions=5, special=2)
    assert in_amdgcn(AMDGCN) == Count(instructions=5, special=1)


@pytest.mark.parametrize("rule, target", BUDGETS, ids=str)
def test_instructions_and_registers_grow_by_no_more_than_three_percent(rule: str, target: str):
    """`python tests/test_instructions.py` records the figures of the installed triton anew."""
    recorded = json.loads(RECORDED.read_text())
    if VERSION not in recorded:
        pytest.skip(f"no figures are recorded for triton {VERSION}, only for {', '.join(recorded)}")
    budget, found = recorded[VERSION][f"{rule}, {target}"], measured(rule, target)
    assert found["spills"] == 0
    for name in ("instructions", "special", "registers"):
        assert found[name] <= 1.03 * budget[name], f"{name}: {found[name]} instead of {budget[name]}"


def measured(rule: str, target: str) -> dict[str, float]:
    (machine,) = compile_offline(Case(rule, "bf16+8", True).emit(target))
    return {
        **{"instructions": round(machine.instructions, 2), "special": round(machine.special, 2)},
        **{"registers": machine.registers, "spills": machine.spills},
    }


def test_the_slowest_of_memory_issue_and_special_unit_sets_the_time():
    device = next(device for device in DEVICES if device.name == "H100 SXM")
    by_memory, by_issue, by_roots = (verdict(device, *given) for given in ((33.5, 1, 1), (1, 1000, 1), (1, 1, 1000)))
    assert (by_memory.bound_by, by_issue.bound_by, by_roots.bound_by) == ("memory", "issue", "XU")
    assert by_memory.ps_per_element == pytest.approx(10)  # 33.5 bytes at 3350 GB/s
    assert by_issue.ps_per_element == pytest.approx(1000 / (132 * 128 * 1.755e9) * 1e12)
    assert by_roots.ps_per_element == pytest.approx(8 * by_issue.ps_per_element)
    assert by_memory.share_of(67) == pytest.approx(0.5)
    assert [each.device.name for each in verdicts("sm_90", 1, 1, 1)] == ["H100 SXM", "H200"]


def test_without_cuobjdump_columns_are_empty_and_a_sentence_says_why(monkeypatch: pytest.MonkeyPatch):
    emitted = Case("sgd momentum", "bf16+8", True).emit("sm_90")
    monkeypatch.setattr(offline, "_cuobjdump", lambda: "/nowhere/cuobjdump")
    row, machines = report(emitted)
    assert not machines and not row.verdicts
    assert row.cells()[-1] == "emitted only: triton came without cuobjdump, which reads machine code"
    assert row.figures()["instructions"] is None and row.figures()["bound_by"] == {}
    with pytest.raises(FileNotFoundError, match=r"target is 'sm_90'; emitted only: triton came without cuobjdump"):
        compile_offline(emitted)


if __name__ == "__main__":
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    known[VERSION] = {f"{rule}, {target}": measured(rule, target) for rule, target in BUDGETS}
    RECORDED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")

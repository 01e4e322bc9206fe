"""One row per target: traffic, resources and instructions of a step's kernels, and the time a model makes of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashopt_compile.kernels.emit import Emitted
from flashopt_compile.kernels.offline import Machine, compile_offline, missing_tool
from flashopt_compile.kernels.roofline import FUSED_BF16, FUSED_FP32, Verdict, verdicts
from flashopt_compile.kernels.traffic import traffic

# The fields of a row that `--json` prints.
KEYS = (
    *("target", "kernels", "temporaries", "read_bytes", "written_bytes", "registers", "spills", "shared_bytes"),
    *("instructions", "xu", "bound_by", "ps_per_element"),
)

HEAD = [
    *("target", "kernels", "temporaries", "read B", "written B", "sum", "least"),
    *("registers", "spills", "instructions", "XU", "shared B", "widest load", "configuration"),
]
VERDICT_HEAD = ["device", "target", "memory", "issue", "XU", "bound by", "of fp32 fused AdamW", "of bf16 AdamW"]
MODEL = (
    "A model, no measurement: picoseconds per element if memory, issue of instructions, or the special unit (XU: "
    "roots, conversions) alone set the time; and the longest of them over the time that memory takes for AdamW's "
    "28 bytes (fp32) or 14 bytes (bf16)."
)


@dataclass(frozen=True)
class Row:
    """A step's kernel launches, temporaries and bytes per element, and the most resources that any kernel needs."""

    target: str
    kernels: int
    temporaries: int
    read_bytes: float
    written_bytes: float
    least_bytes: float
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    widest_load_bits: int | None = None
    instructions: float | None = None
    xu: float | None = None
    configuration: str = ""

    @property
    def verdicts(self) -> list[Verdict]:
        """The model's verdict for each device of the target."""
        if self.instructions is None or self.xu is None:
            return []
        return verdicts(self.target, self.read_bytes + self.written_bytes, self.instructions, self.xu)

    def figures(self) -> dict[str, Any]:
        judged = {
            "bound_by": {each.device.name: each.bound_by for each in self.verdicts},
            "ps_per_element": {each.device.name: each.ps_per_element for each in self.verdicts},
        }
        known = {**asdict(self), **judged}
        return {key: known[key] for key in KEYS}

    def verdict_cells(self) -> list[list[str]]:
        """The cells under VERDICT_HEAD, a list for each device."""
        return [
            [
                *(each.device.name, self.target),
                *(f"{time:.2f}" for time in (each.memory, each.issue, each.special)),
                *(each.bound_by, f"{each.share_of(FUSED_FP32):.2f}", f"{each.share_of(FUSED_BF16):.2f}"),
            ]
            for each in self.verdicts
        ]

    def cells(self) -> list[str]:
        """The row's cells under HEAD, for people to read."""
        moved = (self.read_bytes, self.written_bytes, self.read_bytes + self.written_bytes, self.least_bytes)
        counted = [self.target, str(self.kernels), str(self.temporaries), *(f"{size:.3f}" for size in moved)]
        if self.registers is None:
            return [*counted, *["–"] * 6, self.configuration]
        issued = f"{self.instructions:.1f}", f"{self.xu:.1f}"
        taken = (self.shared_bytes, f"{self.widest_load_bits} bit", self.configuration)
        return [*counted, str(self.registers), str(self.spills), *issued, *map(str, taken)]


def report(emitted: Emitted) -> tuple[Row, list[Machine]]:
    """One target's row, and the kernels' machine code if triton can compile for it."""
    moved = traffic(emitted)
    lacking = missing_tool(emitted.target)
    machines = [] if lacking else compile_offline(emitted)
    row = Row(
        emitted.target.name,
        moved.launches,
        moved.temporaries,
        moved.read_bytes,
        moved.written_bytes,
        moved.least_read_bytes + moved.least_written_bytes,
        configuration=lacking,
    )
    if not machines:
        return row, machines
    taken = {
        "registers": max(machine.registers for machine in machines),
        "spills": max(machine.spills for machine in machines),
        "shared_bytes": max(machine.shared_bytes for machine in machines),
        "widest_load_bits": max(machine.widest_load_bits for machine in machines),
        "instructions": max(machine.instructions for machine in machines),
        "xu": max(machine.special for machine in machines),
        "configuration": ", ".join(dict.fromkeys(machine.configuration for machine in machines)),
    }
    return Row(**{**asdict(row), **taken}), machines


def keep(folder: Path, emitted: Emitted, machines: Sequence[Machine]) -> None:
    """Write Inductor's module, each kernel, and its PTX or AMDGCN."""
    place = folder / emitted.target.name
    place.mkdir(parents=True, exist_ok=True)
    (place / "module.py").write_text(emitted.source, encoding="utf-8")
    numbers = {name: number for number, name in enumerate(emitted.kernels)}
    for name, text in emitted.kernels.items():
        (place / f"kernel{numbers[name]}.py").write_text(text.lstrip(), encoding="utf-8")
    suffix = "amdgcn" if emitted.target.is_hip else "ptx"
    for machine in machines:
        (place / f"kernel{numbers[machine.kernel]}.{suffix}").write_text(machine.assembly, encoding="utf-8")

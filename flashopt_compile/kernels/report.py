"""One row per target: the memory traffic and resources of a step's kernels."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashopt_compile.kernels.emit import Emitted
from flashopt_compile.kernels.offline import Machine, compile_offline
from flashopt_compile.kernels.traffic import traffic

# The fields of a row that `--json` prints.
KEYS = ("target", "kernels", "temporaries", "read_bytes", "written_bytes", "registers", "spills", "shared_bytes")

HEAD = [
    *("target", "kernels", "temporaries", "read B", "written B", "sum", "least"),
    *("registers", "spills", "shared B", "widest load", "configuration"),
]


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
    configuration: str = ""

    def figures(self) -> dict[str, Any]:
        return {key: asdict(self)[key] for key in KEYS}

    def cells(self) -> list[str]:
        """The row's cells under HEAD, for people to read."""
        moved = (self.read_bytes, self.written_bytes, self.read_bytes + self.written_bytes, self.least_bytes)
        counted = [self.target, str(self.kernels), str(self.temporaries), *(f"{size:.3f}" for size in moved)]
        if self.registers is None:
            return [*counted, "–", "–", "–", "–", "emitted only: triton has no compiler for it"]
        taken = (self.registers, self.spills, self.shared_bytes, f"{self.widest_load_bits} bit", self.configuration)
        return [*counted, *map(str, taken)]


def report(emitted: Emitted) -> tuple[Row, list[Machine]]:
    """One target's row, and the kernels' machine code if triton can compile for it."""
    moved = traffic(emitted)
    machines = compile_offline(emitted) if emitted.target.triton else []
    row = Row(
        emitted.target.name,
        moved.launches,
        moved.temporaries,
        moved.read_bytes,
        moved.written_bytes,
        moved.least_read_bytes + moved.least_written_bytes,
    )
    if not machines:
        return row, machines
    taken = {
        "registers": max(machine.registers for machine in machines),
        "spills": max(machine.spills for machine in machines),
        "shared_bytes": max(machine.shared_bytes for machine in machines),
        "widest_load_bits": max(machine.widest_load_bits for machine in machines),
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

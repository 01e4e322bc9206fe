"""How long a step takes per element on real devices, by a model: memory, issue of instructions, or the special unit.

A device moves bytes, issues instructions and takes roots side by side, so the slowest of the three sets the time. The
model knows nothing of latency, of pipes narrower than the issue (integers on an RTX 4090, floats on an A100), or of
clocks that heat lowers. A real step takes longer.
"""

from dataclasses import dataclass

# Bytes per element of the usual step: gradient, weight and two moments are read, the last three written.
FUSED_FP32, FUSED_BF16 = 28.0, 14.0


@dataclass(frozen=True)
class Device:
    """A device, from its data sheet: GB/s, processors, GHz, and what each processor does in a cycle."""

    name: str
    target: str  # whose machine code it is judged by
    bandwidth: float
    processors: int
    clock: float
    lanes: int = 128  # instructions times threads issued per cycle and processor
    special_lanes: int = 16


# An RTX 4090 is of sm_89 and runs the code for sm_80.
DEVICES = (
    Device("A100", "sm_80", 2039, 108, 1.41),
    Device("RTX 4090", "sm_80", 1008, 128, 2.52),
    Device("H100 SXM", "sm_90", 3350, 132, 1.755),
    Device("H200", "sm_90", 4800, 132, 1.755),
    Device("B200", "sm_100", 8000, 148, 1.85),
    Device("MI300X", "gfx942", 5300, 304, 2.1, lanes=64),
)


@dataclass(frozen=True)
class Verdict:
    """Picoseconds per element on a device by each of the three limits."""

    device: Device
    memory: float
    issue: float
    special: float

    @property
    def ps_per_element(self) -> float:
        return max(self.memory, self.issue, self.special)

    @property
    def bound_by(self) -> str:
        return max(("memory", self.memory), ("issue", self.issue), ("XU", self.special), key=lambda limit: limit[1])[0]

    def share_of(self, bytes_per_element: float) -> float:
        """This time over that of a step which memory alone bounds."""
        return self.ps_per_element / (bytes_per_element / self.device.bandwidth * 1e3)


def verdict(device: Device, moved: float, instructions: float, special: float) -> Verdict:
    """Judge a step that moves so many bytes and issues so many instructions per element."""
    cycles = device.processors * device.clock
    return Verdict(
        device,
        moved / device.bandwidth * 1e3,
        instructions / (cycles * device.lanes) * 1e3,
        special / (cycles * device.special_lanes) * 1e3,
    )


def verdicts(target: str, moved: float, instructions: float, special: float) -> list[Verdict]:
    """Judge a step on each of a target's devices."""
    return [verdict(device, moved, instructions, special) for device in DEVICES if device.target == target]

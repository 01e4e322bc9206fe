"""The GPUs that kernels can be written for, and the properties that Inductor's heuristics and triton ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Target:
    """One kind of GPU: torch's name for its device, the device's properties, and triton's name for it."""

    name: str
    device: str
    properties: Mapping[str, Any]
    triton: (
        tuple[str, int | str, int] | None
    )  # backend, architecture, threads of a warp; None: no compiler in the wheel

    @property
    def is_hip(self) -> bool:
        return self.triton is not None and self.triton[0] == "hip"

    @property
    def device_properties(self) -> SimpleNamespace:
        """The properties as returned by `torch.cuda.get_device_properties`."""
        common = {"name": self.name, "total_memory": 80 << 30, "max_threads_per_block": 1024, "L2_cache_size": 50 << 20}
        return SimpleNamespace(**{**common, **self.properties})


def _nvidia(major: int, processors: int) -> Target:
    properties = {
        **{"major": major, "minor": 0, "multi_processor_count": processors, "warp_size": 32},
        **{"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048},
        **{"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448 if major >= 9 else 166912},
    }
    return Target(f"sm_{major}0", "cuda", properties, ("cuda", 10 * major, 32))


_MI300 = {
    **{"major": 9, "minor": 4, "multi_processor_count": 304, "warp_size": 64, "gcnArchName": "gfx942:sramecc+:xnack-"},
    **{"regs_per_multiprocessor": 131072, "max_threads_per_multi_processor": 2048},
    **{"shared_memory_per_block": 65536, "shared_memory_per_block_optin": 65536},
}
_PONTE_VECCHIO = {
    **{"gpu_subslice_count": 64, "multi_processor_count": 64, "max_work_group_size": 1024, "warp_size": 32},
    **{"sub_group_sizes": [16, 32], "max_threads_per_multi_processor": 1024},
}
# A100, H100, B200, MI300X, Data Center GPU Max.
TARGETS = {
    target.name: target
    for target in (
        _nvidia(8, processors=108),
        _nvidia(9, processors=132),
        _nvidia(10, processors=148),
        Target("gfx942", "cuda", _MI300, ("hip", "gfx942", 64)),
        Target("xpu", "xpu", _PONTE_VECCHIO, None),
    )
}


def target_of(name: str) -> Target:
    if name not in TARGETS:
        raise ValueError(f"target is {name!r}; allowed are {', '.join(TARGETS)}.")
    return TARGETS[name]


def targets_of(names: str | Sequence[str]) -> list[Target]:
    """The targets of a list or a comma-separated string."""
    return [target_of(name.strip()) for name in (names.split(",") if isinstance(names, str) else names)]

"""Compile emitted Triton source for an absent GPU with triton's own compilers, and read the resources it needs."""

import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flashopt_compile.kernels import pretend, source
from flashopt_compile.kernels.emit import Emitted
from flashopt_compile.kernels.instructions import Count, in_amdgcn, in_sass
from flashopt_compile.kernels.targets import Target


@dataclass(frozen=True)
class Machine:
    """One kernel compiled for a target in one configuration. Registers are counted per thread."""

    kernel: str
    configuration: str
    registers: int
    spills: int  # bytes per thread
    shared_bytes: int
    widest_load_bits: int
    assembly: str  # PTX or AMDGCN
    elements: float  # per thread
    count: Count  # of one thread

    @property
    def instructions(self) -> float:
        """Machine instructions per element."""
        return self.count.instructions / self.elements

    @property
    def special(self) -> float:
        """Operations of the special unit (XU) per element."""
        return self.count.special / self.elements


def missing_tool(target: Target) -> str:
    """Why machine code for a target cannot be made or read here; empty if it can."""
    if target.triton is None:
        return "emitted only: triton has no compiler for it"
    if target.is_hip or Path(_cuobjdump()).is_file():
        return ""
    return "emitted only: triton came without cuobjdump, which reads machine code"


def compile_offline(emitted: Emitted, every: bool = False) -> list[Machine]:
    """Compile each kernel in one of the configurations that Inductor would try on the device, or in `every` one.

    On the device Inductor times them. Here we choose the one without spills that is nearest to 16 elements per thread,
    whose 8-bit codes make 128-bit loads. If all spill, we choose the one with the fewest spills.
    """
    pretend.check_versions()
    if emitted.target.triton is None:
        raise ValueError(
            f"target is {emitted.target.name!r}; triton's wheel has compilers only for NVIDIA and AMD, so for Intel "
            "there is only the emitted source."
        )
    if lacking := missing_tool(emitted.target):
        raise FileNotFoundError(f"target is {emitted.target.name!r}; {lacking}.")
    found: list[Machine] = []
    for name, text in emitted.kernels.items():
        tuner = getattr(source.load_kernel(name, text), name)
        threads = emitted.target.triton[2]
        distance = {each: abs(math.log2(_per_thread(tuner, each, threads) / 16)) for each in tuner.configs}
        tried: list[Machine] = []
        for configuration in sorted(tuner.configs, key=distance.__getitem__):
            tried.append(_compile(tuner, configuration, emitted.target, name))
            if not every and not tried[-1].spills:
                break
        found += tried if every else [min(tried, key=lambda machine: machine.spills)]
    return found


def _per_thread(tuner: Any, configuration: Any, threads_of_a_warp: int) -> float:
    """The number of elements per thread."""
    elements = math.prod(configuration.kwargs.values()) * tuner.size_hints.get("r0_", 1)
    return elements / (configuration.num_warps * threads_of_a_warp)


def _compile(tuner: Any, configuration: Any, target: Target, name: str) -> Machine:
    """Compile with the options that Inductor would give triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    meta = tuner._create_compile_meta(configuration)
    options = tuner._create_compile_options(configuration, meta)
    if target.is_hip:
        for nvidia_only in ("launch_cooperative_grid", "launch_pdl", "enable_reflect_ftz"):
            options.pop(nvidia_only, None)
    code = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    assert target.triton is not None
    compiled = triton.compile(code, target=GPUTarget(*target.triton), options=options)
    read = _read_amd if target.is_hip else _read_nvidia
    registers, spills, widest, assembly, count = read(compiled)
    elements = _per_thread(tuner, configuration, target.triton[2])
    sizes = " ".join(f"{key}={value}" for key, value in configuration.kwargs.items())
    configuration = f"{sizes} warps={compiled.metadata.num_warps}"
    shared = compiled.metadata.shared
    return Machine(name, configuration, registers, spills, shared, widest, assembly, elements, count)


def _read_nvidia(compiled: Any) -> tuple[int, int, int, str, Count]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _disassemble("-res-usage", file.name)
        code = _disassemble("-sass", file.name)
    resources = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if resources is None:
        raise RuntimeError(f"cuobjdump does not report the kernel's resources: {usage.strip()!r}")
    registers, stack, local = map(int, resources.groups())
    spilled = stack + local if re.search(r"\b(LDL|STL)\b", code) else 0
    widths = re.findall(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bsuf](\d+)\b", compiled.asm["ptx"])
    widest = max(int(count or 1) * int(bits) for count, bits in widths)
    return registers, spilled, widest, compiled.asm["ptx"], in_sass(code)


@cache
def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _disassemble(what: str, path: str) -> str:
    return subprocess.run([_cuobjdump(), what, path], capture_output=True, text=True, check=True).stdout


def _read_amd(compiled: Any) -> tuple[int, int, int, str, Count]:
    text = compiled.asm["amdgcn"]

    def told(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        if found is None:
            raise RuntimeError(f"the code object has no {key}.")
        return int(found[1])

    spilled = 4 * (told("vgpr_spill_count") + told("sgpr_spill_count"))
    loads = re.findall(r"\b(?:global|buffer)_load_(?:[a-z0-9]+_)*?(dwordx(\d)|dword|[us]?short|[us]?byte)\w*", text)
    return told("vgpr_count"), spilled, max(map(_amd_bits, loads)), text, in_amdgcn(text)


def _amd_bits(load: Sequence[str]) -> int:
    name, dwords = load
    return 32 * int(dwords or 1) if name.startswith("dword") else 16 if "short" in name else 8

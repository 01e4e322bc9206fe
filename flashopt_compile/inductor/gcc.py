"""Choose who vectorizes the loops that Inductor writes for a CPU: gcc where possible, else Inductor.

gcc takes loops over single elements, for whatever processor it compiles for, and works on four vectors at a time, so
that one is worked on while another waits; Inductor's own vectors come one by one (docs/performance.md).
"""

import sys
from functools import cache
from typing import Any

from flashopt_compile.inductor import probes

# torch._inductor is imported where it is needed: it takes a second, and compiling imports it anyway.

GCC_FLAGS = (
    # Inductor's flags turn the first off; roots that set errno, and loads moved to the end of a loop, prevent vectors.
    "-ftree-loop-vectorize -fno-math-errno -fno-tree-pre "
    # The order in which a loop computes decides how much of it waits: this one minds registers too.
    "-fschedule-insns -fsched-pressure --param=sched-pressure-algorithm=2"
)
# For vectors of 512 bits: whatever the processor, the order that suits the first that had them (one that gcc does not
# know gets one for half of that), and no halves, which gcc prefers for that one.
WIDE_FLAGS = "-mtune=skylake-avx512 -mprefer-vector-width=512"


def groups_per_row(group_size: int) -> int:
    """Groups that gcc should process at once: as many elements as a vector has bytes, or it uses shorter vectors."""
    return max(1, _vector_bits() // 8 // group_size)


@cache
def _vector_bits() -> int:
    from torch._inductor import cpu_vec_isa

    return cpu_vec_isa.pick_vec_isa().bit_width()


def loops_for_gcc() -> dict[str, Any]:
    """Inductor's options for loops in tiles that gcc vectorizes; none where the compiler is another.

    Extra flags ride in `cpp.march`, which Inductor appends last.
    """
    if sys.platform != "linux" or not probes.COMPILER.is_open():
        return {}
    from torch._inductor import config, cpp_builder

    if not cpp_builder.is_gcc() or not probes.TILES.is_open():
        return {}
    from flashopt_compile.inductor.tiles import InTiles

    flags = f"{GCC_FLAGS} {WIDE_FLAGS}" if _vector_bits() == 512 else GCC_FLAGS
    return {
        "cpp.simdlen": 1,
        "cpp.march": f"{config.cpp.march or 'native'} {flags}",
        "inplace_buffers": False,  # what a tile keeps to itself is no memory for others to use again
        "_pre_fusion_custom_pass": InTiles(),
    }


def wide_vectors() -> dict[str, str]:
    """Inductor's options for its own vectors: have gcc keep those of 512 bits whole, and not copy them by halves.

    Inductor has no option for more flags, but one whose text is put among them.
    """
    if not probes.COMPILER.is_open():
        return {}
    from torch._inductor import config

    option = "cpp.enable_floating_point_contract_flag"
    contract = getattr(config, option, None)
    if not isinstance(contract, str) or _vector_bits() != 512:
        return {}
    return probes.known({option: f"{contract} -mprefer-vector-width=512"})

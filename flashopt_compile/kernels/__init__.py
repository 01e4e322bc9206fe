"""Write, compile and run the GPU kernels of a step on a machine without a GPU.

`emit(rule, target)` gives the Triton source that training would compile. `traffic` counts the bytes it moves,
`compile_offline` the GPU resources it needs, and `interpret` runs it. Training code imports none of this.
"""

from flashopt_compile.kernels.emit import Emitted, emit
from flashopt_compile.kernels.interpret import interpret
from flashopt_compile.kernels.offline import Machine, compile_offline
from flashopt_compile.kernels.pretend import UncheckedVersion
from flashopt_compile.kernels.stray import contracted, rough
from flashopt_compile.kernels.targets import TARGETS, Target
from flashopt_compile.kernels.traffic import Traffic, traffic

__all__ = [
    "TARGETS",
    "Emitted",
    "Machine",
    "Target",
    "Traffic",
    "UncheckedVersion",
    "compile_offline",
    "contracted",
    "emit",
    "interpret",
    "rough",
    "traffic",
]

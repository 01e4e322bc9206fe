"""The GPU kernels of a step, written, compiled and run on a machine without a GPU.

`emit(rule, target)` gives the Triton source that training would compile, `traffic` what it moves, `compile_offline`
what it takes of the GPU, `interpret` what it computes. Training code imports none of this.
"""

from flashopt_compile.kernels.emit import Emitted, emit
from flashopt_compile.kernels.interpret import interpret
from flashopt_compile.kernels.offline import Machine, compile_offline
from flashopt_compile.kernels.pretend import UncheckedVersion
from flashopt_compile.kernels.stray import contracted, divided
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
    "divided",
    "emit",
    "interpret",
    "traffic",
]

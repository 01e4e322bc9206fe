"""Count a compiled kernel's machine instructions, and those among them that a slow unit carries out.

Instructions are counted as they stand. Our kernels have no loops, so each is issued once per thread, but for slow paths
behind a call, which are counted and seldom taken.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# Padding and jumps, which cost next to nothing here.
_FREE = {"NOP", "BRA", "s_nop", "s_branch"}
# NVIDIA's XU: roots, reciprocals, conversions between integers and floats. AMD's slow ones are called transcendental.
_SPECIAL_NVIDIA = {"MUFU", "I2F", "F2I", "FRND", "F2F"}
_SPECIAL_AMD = re.compile(r"v_(?:rsq|sqrt|rcp|exp|log|sin|cos)_")


@dataclass(frozen=True)
class Count:
    """The instructions of one thread, and how many of them take the special unit."""

    instructions: int
    special: int


def in_sass(text: str) -> Count:
    """Count the instructions that cuobjdump prints."""
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", text, re.MULTILINE)
    return _count(names, lambda name: name in _SPECIAL_NVIDIA)


def in_amdgcn(text: str) -> Count:
    """Count the instructions of AMD's assembly: of the vector unit (v_), the scalar unit (s_) and memory."""
    names = re.findall(r"^\s+((?:v|s|ds|global|buffer|flat)_\w+)", text, re.MULTILINE)
    return _count(names, lambda name: _SPECIAL_AMD.match(name) is not None)


def _count(names: Iterable[str], is_special: Callable[[str], bool]) -> Count:
    counted = [name for name in names if name not in _FREE]
    return Count(len(counted), sum(map(is_special, counted)))

"""The bytes that an optimizer's parameters and states take, counted from the tensors themselves."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from flashopt_compile.distributed.shards import local


def memory(parameters: Iterable[tuple[str, Tensor, Mapping[str, Any]]], plan_bytes: int) -> dict[str, Any]:
    """Count the bytes of parameters, given as name, weight and state.

    Returns `parts` by kind, `parameters` by name, their `total`, `per_parameter`, and `plan`: the other bytes kept
    from step to step. Gradients count while they are held. Sharded parameters count this process's part.
    """
    by_name: dict[str, dict[str, int]] = {}
    elements = 0
    for name, parameter, state in parameters:
        tensors = {"weight": parameter, "gradient": parameter.grad, **state}
        by_name[name] = {key: local(value).nbytes for key, value in tensors.items() if isinstance(value, Tensor)}
        elements += local(parameter).numel()
    parts: dict[str, int] = {}
    for sizes in by_name.values():
        for part, size in sizes.items():
            parts[part] = parts.get(part, 0) + size
    total = sum(parts.values())
    return {
        "parts": parts,
        "parameters": by_name,
        "total": total,
        "per_parameter": total / max(1, elements),
        "plan": plan_bytes,
    }

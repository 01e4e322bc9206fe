"""The bytes that an optimizer's parameters and states take, counted from the tensors themselves."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from flashopt_compile.sharding import local


def memory(parameters: Iterable[tuple[str, Tensor, Mapping[str, Any]]]) -> dict[str, Any]:
    """Of parameters given as name, weight and state: `parts` by kind, `parameters` by name, `total`, `per_parameter`.

    Gradients count while they are held; of sharded parameters what this process has.
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
    return {"parts": parts, "parameters": by_name, "total": total, "per_parameter": total / max(1, elements)}

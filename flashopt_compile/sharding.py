"""Parameters of which each process holds some rows, as FSDP2 makes them: to the part at hand, and back.

The only module that knows of DTensors. Groups never cross a row, so the rows of a process are stepped like a tensor of
their own; only their dither is drawn for the positions that they have in the whole.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def is_sharded(value: Any) -> bool:
    """Whether it is a tensor of which each process has a part or a copy."""
    module = sys.modules.get("torch.distributed.tensor")  # takes most of a second to import; without it there are none
    return module is not None and isinstance(value, module.DTensor)


def placements(parameter: Any) -> tuple[Any, ...]:
    """How a sharded parameter lies on each dim of its mesh."""
    return parameter.placements


def is_supported(parameter: Any) -> bool:
    """Whether what each process has of a sharded parameter are rows of it that follow each other, or all of it."""
    shards = [placement for placement in placements(parameter) if not placement.is_replicate()]
    return all(getattr(placement, "dim", None) == 0 for placement in shards)


def local(tensor: Any) -> Tensor:
    """What this process has of a tensor, in the same memory; all of it unless it is sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def first_row(parameter: Any) -> int:
    """The number, in the whole parameter, of the first row that this process has."""
    if not is_sharded(parameter) or not parameter.dim():
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = parameter.device_mesh
    return compute_local_shape_and_global_offset(parameter.shape, mesh, placements(parameter))[1][0]


def start(parameter: Tensor) -> int:
    """The position, in the whole parameter, of the first element that this process has."""
    return first_row(parameter) * math.prod(parameter.shape[1:])


def part_of(value: Any, parameter: Any) -> Tensor:
    """What belongs with this process's rows of `parameter` of a value with as many rows as the whole.

    The value may be whole or in shards of any kind; where those differ from the parameter's, all processes must call.
    """
    if not is_sharded(parameter):
        return whole(value)
    if is_sharded(value) and value.device_mesh == parameter.device_mesh:
        same = placements(value) == placements(parameter)
        return local(value if same else value.redistribute(placements=placements(parameter)))
    value = whole(value)
    first = first_row(parameter)
    return value[first : first + len(local(parameter))] if value.dim() else value


def whole(tensor: Any) -> Tensor:
    """All of a tensor; of one that is sharded, on every process, all of which must call."""
    if not is_sharded(tensor):
        return tensor
    if tensor.dtype != torch.int16:
        return tensor.full_tensor()
    # Neither gloo nor NCCL takes int16; bytes they do.
    pairs = as_sharded(local(tensor).unsqueeze(-1).view(torch.uint8), tensor)
    return whole(pairs).view(torch.int16).squeeze(-1)


def as_sharded(part: Tensor, parameter: Any) -> Tensor:
    """The tensor with the rows of `parameter`, sharded as it is, of which this process has `part`."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh, shape = parameter.device_mesh, torch.Size((*parameter.shape[:1], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    if part.device.type != mesh.device_type:
        # FSDP2 offloads parameters to the CPU so; `from_local` would move the part to where the mesh is.
        spec = DTensorSpec(mesh, placements(parameter), tensor_meta=TensorMeta(shape, stride, part.dtype))
        return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
    # Without shape and stride it would take all processes to have as many rows.
    return DTensor.from_local(part, mesh, placements(parameter), run_check=False, shape=shape, stride=stride)


def any_process(flag: bool, parameters: Iterable[Any]) -> bool:
    """Whether the flag is set on any of the processes that share a sharded parameter, all of which must call."""
    meshes = {parameter.device_mesh: None for parameter in parameters if is_sharded(parameter)}
    for mesh in meshes:
        found = torch.tensor(float(flag), device=mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))
        flag = bool(found)
    return flag


def is_first_process() -> bool:
    return torch.distributed.get_rank() == 0


@contextmanager
def first_process_succeeds() -> Iterator[None]:
    """What only the first process does, and all wait for: if it fails there, it fails everywhere."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    reasons = [None if error is None else f"{type(error).__name__}: {error}"]
    torch.distributed.broadcast_object_list(reasons, src=0)
    if error is not None:
        raise error
    if reasons[0] is not None:
        raise RuntimeError(f"It failed on the first process: {reasons[0]}")

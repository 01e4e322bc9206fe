"""Convert between a sharded parameter (FSDP2, tensor parallelism) and the part that this process holds.

Only this module knows DTensors. As long as no group is cut, a process steps its part like a tensor of its own. Only
dither needs more: it is drawn for the elements' positions in the global parameter.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.engine.storage import Storage


def is_sharded(value: Any) -> bool:
    """True if this is a DTensor, of which each process has a part or a copy."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; if nobody has, there are no DTensors
    return module is not None and isinstance(value, module.DTensor)


def any_sharded(tensors: Iterable[Any]) -> bool:
    """True if any of them is sharded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def placements(parameter: Any) -> tuple[Any, ...]:
    """A sharded parameter's placement on each dim of its mesh."""
    return parameter.placements


def local(tensor: Any) -> Tensor:
    """This process's part of a tensor, in the same memory. A tensor that is not sharded is returned as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def box(shape: tuple[int, ...], parameter: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offsets of this process's part of a tensor of `shape` that is sharded as `parameter` is."""
    if not is_sharded(parameter):
        return shape, (0,) * len(shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, parameter.device_mesh, placements(parameter))


def start(parameter: Any) -> int:
    """The position in the global parameter of this process's first element."""
    _, offsets = box(tuple(parameter.shape), parameter)
    return sum(offset * stride for offset, stride in zip(offsets, strides(parameter.shape), strict=True))


def positions(parameter: Any, dims: int) -> Tensor | None:
    """The positions in the global parameter of this process's part, at each index of the first `dims` dims.

    None if the part is one contiguous run.
    """
    shape = tuple(parameter.shape)
    own = local(parameter)
    if tuple(own.shape[1:]) == shape[1:]:
        return None
    places = torch.full((), start(parameter), dtype=torch.int64, device=own.device)
    for size, stride in zip(own.shape[:dims], strides(shape), strict=False):
        places = places.unsqueeze(-1) + torch.arange(size, device=own.device) * stride
    return places


def row_starts(parameter: Any, storage: Storage) -> Tensor | None:
    """`positions` of the rows that groups run along or, if there are no groups, of contiguous runs."""
    shape, own = parameter.shape, local(parameter).shape
    if storage.grouped is not None:
        dims = storage.grouped.rows(tuple(shape)).start
    else:
        dims = max((dim for dim in range(len(shape)) if own[dim] != shape[dim]), default=0)
    starts = positions(parameter, dims)
    return None if starts is None else starts.flatten()


def why_not(parameter: Any, storage: Storage) -> str | None:
    """None if no group is cut; else the end of a sentence that says what is wrong with the sharding."""
    if not is_sharded(parameter):
        return None
    if any(placement.is_partial() for placement in placements(parameter)):
        return "allowed are shards and replicas"
    grouped, shape = storage.grouped, tuple(parameter.shape)
    if grouped is None:
        return None
    rows = grouped.rows(shape)
    own, offsets = box(shape, parameter)
    scales, scale_offsets = box(rows.scales_shape, parameter)
    begin = offsets[rows.start] * math.prod(shape[rows.start + 1 :])
    is_last = offsets[rows.start] + own[rows.start] == shape[rows.start]
    local_rows = grouped.rows(own)
    whole_groups = begin % grouped.group_size == 0 and (is_last or local_rows.columns % grouped.group_size == 0)
    fits = (
        whole_groups and begin // grouped.group_size == scale_offsets[-1] and local_rows.scales_shape == tuple(scales)
    )
    if fits and own[rows.start + 1 :] == shape[rows.start + 1 :]:
        return None
    return f"that cuts groups of {grouped.group_size} along its rows; shard it along dim 0 or set quantize=False"


def part_of(value: Any, parameter: Any) -> Tensor:
    """This process's part of a value, cut as `parameter` is.

    The value may be complete or sharded in any way. If its shards differ from the parameter's, all processes must call.
    """
    if not is_sharded(parameter):
        return whole(value)
    if is_sharded(value) and value.device_mesh == parameter.device_mesh:
        same = placements(value) == placements(parameter)
        return local(value if same else value.redistribute(placements=placements(parameter)))
    value = whole(value)
    sizes, offsets = box(tuple(value.shape), parameter)
    return value[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


def whole(tensor: Any) -> Tensor:
    """The complete tensor, on every process. If it is sharded, all processes must call."""
    if not is_sharded(tensor):
        return tensor
    if tensor.dtype != torch.int16:
        return tensor.full_tensor()
    # Neither gloo nor NCCL can send int16, so send bytes.
    pairs = as_sharded(local(tensor).unsqueeze(-1).view(torch.uint8), tensor, (*tensor.shape, 2))
    return whole(pairs).view(torch.int16).squeeze(-1)


def as_sharded(part: Tensor, parameter: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    """Make a DTensor of `shape` (or the parameter's), sharded as `parameter` is, from this process's `part`."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh, shape = parameter.device_mesh, torch.Size(parameter.shape if shape is None else shape)
    stride = strides(shape)
    if part.device.type != mesh.device_type:
        # FSDP2 with CPU offload does this. `from_local` would move the part to the mesh's device.
        spec = DTensorSpec(mesh, placements(parameter), tensor_meta=TensorMeta(shape, stride, part.dtype))
        return DTensor(part, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
    # Without shape and stride, from_local would assume equal shards.
    return DTensor.from_local(part, mesh, placements(parameter), run_check=False, shape=shape, stride=stride)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def any_process(flag: bool, parameters: Iterable[Any]) -> bool:
    """True if the flag is set on any process that shares a sharded parameter. All of them must call."""
    meshes = {parameter.device_mesh: None for parameter in parameters if is_sharded(parameter)}
    for mesh in meshes:
        found = torch.tensor(float(flag), dtype=torch.float32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))
        flag = bool(found)
    return flag


def is_first_process() -> bool:
    return torch.distributed.get_rank() == 0


@contextmanager
def first_process_succeeds() -> Iterator[None]:
    """Run on the first process only while all others wait. If it fails there, it fails everywhere."""
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
        raise RuntimeError(f"the first process failed: {reasons[0]}")

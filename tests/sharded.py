"""Models sharded in every way, their gradients and full states, for the sharding tests."""

# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from flashopt_compile import FlashAdamW

SHAPES = {
    "even": (40, 96),
    "ragged": (37, 70),
    "bias": (40,),
    "tiny": (3,),
    "small": (6, 10),
    "one_row": (1, 2048),
    "convolution": (12, 16, 3, 3),
    "experts": (4, 6, 64),
    "long_rows": (2, 66_000),
    "large": (1100, 64),
    "large_ragged": (310, 257),
}


class Net(nn.Module):
    """A parameter of every shape that is treated differently. All are bf16 but one."""

    def __init__(self, seed: int = 0, shapes: Iterable[str] = SHAPES) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name in shapes:
            dtype = torch.float32 if name == "experts" else torch.bfloat16
            setattr(self, name, nn.Parameter(torch.randn(SHAPES[name], generator=random).to(dtype)))
        self.register_buffer("count", torch.full((3,), float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(parameter.float() * x).sin().sum() for parameter in self.parameters()]).sum()


def sharded(kind: str = "fsdp", seed: int = 0, shapes: Iterable[str] = SHAPES) -> Any:
    """A `Net` on all processes, whole or sharded by FSDP2 or tensor parallelism."""
    model, world = Net(seed, shapes), distributed.get_world_size()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")))
    elif kind in ("fsdp and rows", "fsdp and columns"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        cut_all(model, mesh["tensor"], by_columns=kind == "fsdp and columns")
        fully_shard(model, mesh=mesh["data"])
    elif kind == "columns":
        cut_all(model, init_device_mesh("cpu", (world,)), by_columns=True)
    return model


def cut_all(model: nn.Module, mesh: Any, by_columns: bool) -> None:
    """Shard all parameters as tensor parallelism does: along dim 1 where that cuts no group, else along dim 0."""
    for name, parameter in list(model.named_parameters()):
        columns = by_columns and name in ("small", "one_row", "experts", "large")
        cut = distribute_tensor(parameter.detach(), mesh, [Shard(int(columns))])
        setattr(model, name, nn.Parameter(cut))


def go_on(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    """Take numbered steps. A step's number seeds its gradients."""
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            random = torch.Generator().manual_seed(step * 100 + number)
            grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
            parameter.grad = like(grad, parameter)
        optimizer.step()
    optimizer.zero_grad()


def like(value: Tensor, parameter: Any) -> Tensor:
    """Shard a whole tensor like the parameter, with PyTorch's own functions."""
    if not hasattr(parameter, "placements"):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    if not any("Strided" in type(placement).__name__ for placement in placements):
        return distribute_tensor(value, mesh, placements)
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(value, mesh["tensor"], placements[-1:]))
    fully_shard(model, mesh=mesh["data"])
    return model.weight.detach()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All weights and states by name, unsharded."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
            if hasattr(value, "full_tensor"):  # gloo lacks int16
                value = value.to(torch.float32).full_tensor().to(value.dtype)
            found[f"{name} {key}"] = value.clone()
    return found


def of_one_process(steps: int, kind: Any = FlashAdamW, **options: Any) -> dict[str, Tensor]:
    model = Net()
    optimizer = kind(model.parameters(), lr=1e-2, eager=True, **options)
    go_on(model, optimizer, range(steps))
    return everything(model, optimizer)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    different = [key for key in found if not torch.equal(found[key], expected[key])]
    assert not different, f"not the same: {different}"
    assert all(found[key].dtype == expected[key].dtype for key in found)

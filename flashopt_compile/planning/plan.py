"""The bytes that a model takes while it is trained: ours by part, and those of other optimizers beside them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from flashopt_compile.engine.storage import PARAMETER_DTYPES, storage_of
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.optimizers import FlashAdamW
from flashopt_compile.options import STORAGE_OPTIONS, check_flag, check_options, one_line
from flashopt_compile.planning.peers import peers_of

OWNER = "memory_plan"
STRATEGIES = ("ddp", "fsdp2", "hsdp", "tp")
COUNT = 4  # bytes of a parameter's step count
NODE = 8  # devices that share a model's weights under HSDP unless told otherwise


@dataclass(frozen=True)
class Planned:
    """A parameter that does not exist yet."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    is_trained: bool = True


@dataclass(frozen=True)
class Setup:
    """How a run is spread over devices. `shards` is how many of them share one copy of the weights under HSDP."""

    world: int = 1
    strategy: str = "ddp"
    shards: int | None = None
    release: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"{OWNER}: strategy is {one_line(self.strategy)}; allowed are {', '.join(STRATEGIES)}.")
        for name, value in (("world", self.world), ("shards", self.parts)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{OWNER}: {name} is {one_line(value)}; allowed is a whole number of at least 1.")
        if self.world % self.parts:
            raise ValueError(f"{OWNER}: shards is {self.parts}; allowed is a divisor of world, {self.world}.")
        check_flag(OWNER, "release", self.release)

    @property
    def parts(self) -> int:
        """How many devices share one copy of the weights."""
        if self.strategy == "hsdp":
            return math.gcd(self.world, NODE) if self.shards is None else self.shards
        return 1 if self.strategy == "ddp" else self.world

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The largest part that a device has of a parameter. Tensor parallelism leaves biases and norms whole."""
        if not shape or (self.strategy == "tp" and len(shape) < 2):
            return shape
        return (-(-shape[0] // self.parts), *shape[1:])


@dataclass(frozen=True)
class Total:
    """Bytes of one way to train: on a device, of a checkpoint, and per parameter on a single device."""

    total_bytes: int
    checkpoint_bytes: int
    bytes_per_parameter: float


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes before anything is allocated. Activations, buffers and what the framework needs come on top.

    `parts` and `total_bytes` are of the device that has most; `bytes_per_parameter` is without sharding. `alternatives`
    has other optimizers by name, and ours with released gradients if it keeps them. `device_bytes`, `fits` and
    `changes`, which would make it fit, are for a given device.
    """

    optimizer: str
    parameters: int
    setup: Setup
    parts: dict[str, int]
    total_bytes: int
    checkpoint_bytes: int
    bytes_per_parameter: float
    alternatives: dict[str, Total]
    device_bytes: int | None = None
    fits: bool | None = None
    changes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return asdict(self)


def memory_plan(
    model: nn.Module | Iterable[Planned],
    optimizer: type[FlashOptimizer] = FlashAdamW,
    *,
    world: int = 1,
    strategy: str = "ddp",
    shards: int | None = None,
    release: bool = False,
    device_bytes: int | None = None,
    **options: Any,
) -> MemoryPlan:
    """Plan the memory of training `model`, which may be on the meta device, with one of our optimizers.

    Gradients have the dtype of their parameters; with `release` each is used and freed during backward. `options` are
    those of the optimizer, such as `momentum=0.9`, `quantize=False` or `master_weight_bits=32`.
    """
    setup = Setup(world, strategy, shards, release)
    if not (isinstance(optimizer, type) and issubclass(optimizer, FlashOptimizer)):
        raise TypeError(f"{OWNER}: optimizer is {one_line(optimizer)}; allowed is a class such as FlashAdamW.")
    if device_bytes is not None and not (isinstance(device_bytes, int) and device_bytes > 0):
        raise ValueError(f"{OWNER}: device_bytes is {one_line(device_bytes)}; allowed is a whole number above 0.")
    group = {**optimizer.hyper, **STORAGE_OPTIONS, **options}
    unknown = [name for name in options if name not in {**optimizer.hyper, **STORAGE_OPTIONS}]
    if unknown:
        raise TypeError(f"{OWNER}: {optimizer.__name__} has no option {unknown[0]!r}.")
    check_options(OWNER, group, optimizer.hyper)
    planned = _planned(model)
    ours = _total(optimizer, group, planned, setup)
    alternatives = _alternatives(optimizer, group, planned, setup)
    if not release:
        released = _total(optimizer, group, planned, replace(setup, release=True))
        alternatives = {f"{optimizer.__name__}, gradients released": released, **alternatives}
    plan = MemoryPlan(
        optimizer=optimizer.__name__,
        parameters=_count(planned),
        setup=setup,
        parts=_parts(optimizer, group, planned, setup),
        **asdict(ours),
        alternatives=alternatives,
    )
    if device_bytes is None:
        return plan
    fits = ours.total_bytes <= device_bytes
    changes = () if fits else tuple(_changes(setup, device_bytes, lambda at: _parts(optimizer, group, planned, at)))
    return replace(plan, device_bytes=device_bytes, fits=fits, changes=changes)


def _count(planned: Iterable[Planned]) -> int:
    return sum(math.prod(each.shape) for each in planned)


def _planned(model: nn.Module | Iterable[Planned]) -> list[Planned]:
    if isinstance(model, Iterable) and not isinstance(model, nn.Module):
        return list(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OWNER}: model is {one_line(model)}; allowed is a torch.nn.Module.")
    found = [
        Planned(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in model.named_parameters()
    ]
    for each in found:
        if each.is_trained and each.dtype not in PARAMETER_DTYPES:
            allowed = ", ".join(map(str, PARAMETER_DTYPES))
            raise TypeError(f"{OWNER}: {each.name} of model has dtype {each.dtype}; allowed are {allowed}.")
    return found


def _parts(
    optimizer: type[FlashOptimizer], group: Mapping[str, Any], planned: Iterable[Planned], setup: Setup
) -> dict[str, int]:
    """Bytes on a device by part, named as in `optimizer.memory()`."""
    parts, rule = {"weight": 0, "gradient": 0}, optimizer.rule_of(dict(group))
    for each in planned:
        own = setup.local(each.shape)
        weight = math.prod(own) * each.dtype.itemsize
        parts["weight"] += weight
        if not each.is_trained:
            continue
        parts["gradient"] += 0 if setup.release else weight
        storage = storage_of(rule, each.dtype, each.shape, group["master_weight_bits"], group["quantize"])
        for name, part in storage.parts(own).items():
            parts[name] = parts.get(name, 0) + math.prod(part.shape) * part.dtype.itemsize
        parts["step"] = parts.get("step", 0) + COUNT
    return parts


def _total(optimizer: type[FlashOptimizer], group: Mapping[str, Any], planned: list[Planned], setup: Setup) -> Total:
    single = _parts(optimizer, group, planned, Setup(release=setup.release))
    return Total(
        total_bytes=sum(_parts(optimizer, group, planned, setup).values()),
        checkpoint_bytes=sum(single.values()) - single["gradient"],
        bytes_per_parameter=sum(single.values()) / max(1, _count(planned)),
    )


def _alternatives(
    optimizer: type[FlashOptimizer], group: Mapping[str, Any], planned: list[Planned], setup: Setup
) -> dict[str, Total]:
    """What others take, spread in the same way. None of them releases gradients."""
    states, found, count = len(optimizer.rule_of(dict(group)).states), {}, _count(planned)
    for name, kept in peers_of(optimizer.kind().removeprefix("Flash")).items():

        def bytes_of(at: Setup, kept: Callable[..., Any] = kept) -> tuple[int, int]:
            total = saved = 0
            for each in planned:
                own = kept(at.local(each.shape), states)
                frozen = math.prod(at.local(each.shape)) * each.dtype.itemsize
                total += own.weight + own.gradient + own.states if each.is_trained else frozen
                saved += own.saved + own.states if each.is_trained else frozen
            return total, saved

        single, saved = bytes_of(Setup())
        found[name] = Total(bytes_of(setup)[0], saved, single / max(1, count))
    return found


def _changes(setup: Setup, device_bytes: int, parts: Callable[[Setup], dict[str, int]]) -> Iterable[str]:
    """The least changes that make it fit, as sentences."""

    def needs(at: Setup) -> int:
        return sum(parts(at).values())

    if not setup.release and needs(replace(setup, release=True)) <= device_bytes:
        yield f"release gradients (--release): {needs(replace(setup, release=True))} bytes per device"
    for release in dict.fromkeys((setup.release, True)):
        sizes = (2**power for power in range(1, 15))
        world = next((size for size in sizes if needs(Setup(size, "fsdp2", release=release)) <= device_bytes), None)
        if world is not None and (setup.strategy != "fsdp2" or world != setup.world):
            also = " --release" if release else ""
            bytes_each = needs(Setup(world, "fsdp2", release=release))
            yield f"shard over {world} devices (--strategy fsdp2 --world {world}{also}): {bytes_each} bytes per device"

"""Binds a step on a GPU to the launch of its Triton kernel, past what Dynamo, AOTAutograd and Inductor do around it.

That takes 50 µs of the host's time for each block. What a launch of a block is given is taken from the plain call
itself: it is made once, for this very block, with all of its checks, and notes the launch instead of carrying it out.
In the steps that follow, the same launch is made again with other heads, gradients, numbers and streams. Numbers (the
scalars of a launch) are the same for all blocks that share hyper-parameters and step count: in each step, Inductor's
code is run for one of them, and notes what it would have launched. Where anything else is unknown, there is no binding.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import Bound, Operation, run_at_once
from flashopt_compile.engine.numbers import flat
from flashopt_compile.engine.step import Numbers, Place
from flashopt_compile.inductor import example, probes
from flashopt_compile.inductor.bind import Unbound, leaves_of
from flashopt_compile.inductor.notes import Compiled, noted, noted_call

# Kernels are written for tensors that begin at multiples of so many bytes. Inductor copies others.
ALIGNMENT = 16
# Elements of the example that a kernel is tuned and checked with, at most.
EXAMPLE_ELEMENTS = 1 << 24


@dataclass
class Common:
    """What all launches of a kernel with the same hyper-parameters and step count have in common, in one step."""

    call: Callable[[list[Any]], Any]
    inputs: list[Any]
    places: list[int]  # of the numbers among the arguments
    device: torch.device
    owner: Any  # kernel and hyper-parameters: their identities are the key, and an unused kernel would be unloaded
    numbers: list[Any] = field(default_factory=list)
    stream: Any = None
    around: tuple[list[Operation], list[Operation]] | None = None  # before and after each launch

    def look_up(self) -> None:
        """Run Inductor's code for one of the blocks, and note what it would launch."""
        with noted() as launches:
            self.call(self.inputs.copy())
        (launch,) = launches
        self.stream = launch.stream
        self.numbers = [launch.arguments[place] for place in self.places]
        self.around = _switches(self.device)


def _switches(device: torch.device) -> tuple[list[Operation], list[Operation]] | None:
    """Switch to a device and back; None if it is the current one."""
    current = None if device.type == "cpu" else torch.accelerator.current_device_index()
    if current is None or current == device.index:
        return None
    select = probes.LAUNCHES.needs[1].find()
    return [partial(select, device.index)], [partial(select, current)]


def is_open(device: torch.device) -> bool:
    """Whether launches on a device can be bound."""
    return is_launched(device) and not probes.permission()[0] and probes.LAUNCHES.is_open()


def is_launched(device: torch.device) -> bool:
    """Whether Inductor writes Triton kernels for a device."""
    return device.type in ("cuda", "xpu")


def try_to_bind(
    compiled: Compiled,
    tensors: Sequence[Tensor],
    t: Tensor,
    place: Place,
    numbers: Numbers,
    common: dict[Any, Common],
) -> Bound | None:
    """`bind`, learning first what has to be compiled; None, with a warning, if the launch cannot be bound."""
    if tensors[1].data_ptr() % ALIGNMENT:  # which is copied in each step
        tensors = [tensors[0], example.aligned(tensors[1], int(tensors[0].storage_offset())), *tensors[2:]]
    given = compiled, tensors, t, place, numbers
    with suppress(Exception):  # as that a block of this size is to be compiled for
        if compiled.is_learned:
            return bind(*given, common)
    try:
        learn(*given)
        return bind(*given, common)
    except Exception as error:
        probes.LAUNCHES.close(str(error) if isinstance(error, Unbound) else probes.reason_of(error))
        return None


class Slot:
    """Stands for an argument that each step has anew."""


def bind(
    compiled: Compiled,
    tensors: Sequence[Tensor],
    t: Tensor,
    place: Place,
    numbers: Numbers,
    common: dict[Any, Common],
) -> Bound:
    """Bind the launch of a block (head, gradient, then the rest), whose head and gradient are given anew in each step.

    Nothing is launched. Raises an exception if anything about the launch is unknown, or if the block would have to be
    compiled for. `common` is what blocks share, to be looked up before each step.
    """
    fill = _fill(compiled, tensors, t, place, numbers, common)
    if _runs_no_python(fill.function):
        return Bound(fill.operations)

    def run(head: Tensor, grad: Tensor) -> list[Operation]:
        run_at_once(fill.operations(head, grad))
        return []

    return Bound(run, is_deferred=False, is_at_once=True)


def _fill(
    compiled: Compiled,
    tensors: Sequence[Tensor],
    t: Tensor,
    place: Place,
    numbers: Numbers,
    common: dict[Any, Common],
) -> "_Fill":
    head, grad, *rest = tensors
    (kernel, arguments, _), call, inputs = noted_call(compiled, [head, grad, *rest], t, place, numbers)
    known = set(map(id, leaves_of([head, grad, *rest], t, place, numbers)))
    if any(isinstance(each, Tensor) and id(each) not in known for each in (*inputs, *arguments)):
        raise Unbound("its kernel takes a tensor that is none of its inputs, or that is not aligned")
    if any(type(each) not in (int, float) for each in arguments if not isinstance(each, Tensor)):
        raise Unbound("its kernel takes an argument that is neither a tensor nor a number")
    places = [place for place, each in enumerate(arguments) if type(each) is float]
    key = id(kernel), id(numbers), float(t) if places else None
    if key not in common:
        anew = {id(each): torch.empty(0, dtype=each.dtype, device=each.device) for each in (head, grad)}
        own = [anew.get(id(each), each) for each in inputs]
        found = Common(call, own, places, head.device, (kernel, numbers))
        found.look_up()
        common[key] = found
    if common[key].numbers != [arguments[place] for place in places]:
        raise Unbound("its kernel takes other numbers than that of another block")

    slots = {id(head): Slot(), id(grad): Slot()}
    by_place = {place: Slot() for place in places}
    stream = Slot()
    slotted = [by_place.get(place) or slots.get(id(each), each) for place, each in enumerate(arguments)]
    function, given = _innermost(kernel, slotted, stream)
    return _Fill(function, given, common[key], slots[id(head)], slots[id(grad)], list(by_place.values()), stream)


class _Fill:
    """A call whose arguments are filled in: in each step those that stand as `Slot`s.

    One of the arguments may be a tuple, which has them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        given: Sequence[Any],
        common: Common,
        head: Slot,
        grad: Slot,
        numbers: Sequence[Slot],
        stream: Slot,
    ) -> None:
        self.function, self._common = function, common
        nested = [n for n, each in enumerate(given) if type(each) is tuple and any(type(x) is Slot for x in each)]
        self._nest = nested[0] if len(nested) == 1 else None
        self._outer = list(given)
        self._inner = self._outer if self._nest is None else list(given[self._nest])

        def places(slot: Slot, among: Sequence[Any] = self._inner) -> list[int]:
            return [place for place, each in enumerate(among) if each is slot]

        self._heads, self._grads = places(head), places(grad)
        self._numbers = [place for slot in numbers for place in places(slot)]
        self._stream = places(stream, self._outer)
        filled = len(self._heads) + len(self._grads) + len(self._numbers)
        slots = sum(isinstance(each, Slot) for each in self._inner) - (self._inner is self._outer)
        if not self._heads or not self._grads or len(self._stream) != 1 or len(numbers) != len(self._numbers):
            raise Unbound("its launcher does not take head, gradient, numbers and stream")
        if filled != slots:
            raise Unbound("its launcher takes an argument of each step that is not known")

    def operations(self, head: Tensor, grad: Tensor) -> list[Operation]:
        """The call, for a head and a gradient that begin where the block does."""
        if grad.data_ptr() % ALIGNMENT:
            grad = grad.clone()
        common, inner = self._common, self._inner.copy()
        for place in self._heads:
            inner[place] = head
        for place in self._grads:
            inner[place] = grad
        for place, number in zip(self._numbers, common.numbers, strict=True):
            inner[place] = number
        if self._nest is None:
            outer = inner
        else:
            outer = self._outer.copy()
            outer[self._nest] = tuple(inner)
        outer[self._stream[0]] = common.stream
        operation = partial(self.function, *outer)
        if common.around is None:
            return [operation]
        before, after = common.around
        return [*before, operation, *after]


class _StandIn:
    """A kernel of torch's static launcher, with another launcher."""

    def __init__(self, owner: Any, launcher: Any) -> None:
        self._owner, self.C_impl = owner, launcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name)


def _innermost(kernel: Any, arguments: Sequence[Any], stream: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What a launch comes to, and with which arguments.

    Behind the launcher that Inductor wrote, which works out the grid; and behind the method that this calls, if its C
    function can be found.
    """
    if len(kernel.launchers) != 1:
        raise Unbound(f"its kernel has {len(kernel.launchers)} launchers, as if it were not tuned yet")
    launcher = getattr(kernel, "_cached_launcher", None) or kernel.launchers[0]
    calls: list[tuple[Any, ...]] = []

    def note(*given: Any) -> None:
        calls.append(given)

    own = {**launcher.__globals__, "runner": note}
    FunctionType(launcher.__code__, own, launcher.__name__, launcher.__defaults__, launcher.__closure__)(
        *arguments, stream=stream
    )
    runner: Any = launcher.__globals__["runner"]
    if isinstance(runner, MethodType) and hasattr(runner.__self__, "C_impl"):
        owner: Any = runner.__self__
        given = calls.pop()
        runner.__func__(_StandIn(owner, SimpleNamespace(_launch_kernel=note)), *given)
        runner = owner.C_impl._launch_kernel
    (given,) = calls
    return runner, given


def _runs_no_python(function: Any) -> bool:
    """Whether it is written in C."""
    if isinstance(function, BuiltinFunctionType):
        return True
    written_in_python = isinstance(function, (FunctionType, MethodType, partial))
    return not written_in_python and isinstance(type(function).__call__, WrapperDescriptorType)


def learn(compiled: Compiled, tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Numbers) -> None:
    """Compile and tune the kernel for blocks like this one, on an example, and check that its launch can be bound.

    Raises Unbound unless a launch that was bound with other numbers and another step count is the launch of the plain
    call, and makes the same bits.
    """
    random = torch.Generator("cpu").manual_seed(0)
    rows = len(tensors[0])
    if place.table is None:
        rows = max(2, min(rows, EXAMPLE_ELEMENTS * rows // tensors[0].numel()))
    theirs = [example.like(each[:rows], random) for each in tensors]
    for each in (*theirs, *(place.table or ())[:2]):
        example.mark_rows(each)
    ours = [example.copy_of(each) for each in theirs]
    # A kernel that loads them is not to be written for numbers that lie at multiples of 16 bytes.
    values, then = (example.apart(example.sample_numbers(numbers, most)) for most in (0.9, 0.5))
    t_now, t_then = (example.apart({"t": torch.full_like(t, count)})["t"] for count in (2.0, 1.0))
    compiled.run([theirs], t_now, [place], values)

    common: dict[Any, Common] = {}
    fill = _fill(compiled, ours, t_then, place, then, common)
    t_then.copy_(t_now)
    for number, value in zip(flat(then), flat(values), strict=True):
        number.copy_(value)
    for each in common.values():
        each.look_up()
    (operation,) = [each for each in fill.operations(*ours[:2]) if each.func is fill.function]
    (kernel, arguments, stream), _, _ = noted_call(compiled, ours, t_then, place, then)
    function, given = _innermost(kernel, arguments, stream)
    if function is not operation.func or not _are_same(operation.args, given):
        raise Unbound("its launch, made directly, is not that of the plain call")
    run_at_once(fill.operations(*ours[:2]))
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
            raise Unbound(f"its launch, made directly, gives other bits of tensor {number}")
    compiled.is_learned = True


def _are_same(one: Any, other: Any) -> bool:
    """Whether two launches are given the same arguments."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and one == other)

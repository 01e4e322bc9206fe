"""The face of the library: `torch.optim.Optimizer`s made of a rule, with the arguments everyone knows."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashopt_compile import compiled, numerics, sharding
from flashopt_compile.batch import Batch, Pack, eager
from flashopt_compile.checkpoint import states, weights
from flashopt_compile.count import Count, all_same
from flashopt_compile.hyper import KeptNumbers, as_numbers
from flashopt_compile.memory import memory
from flashopt_compile.options import (
    STORAGE_OPTIONS,
    check_gradient,
    check_options,
    check_parameter,
    check_shards,
    check_state,
    check_torch_options,
    given_options,
    signature,
)
from flashopt_compile.pieces import Piece
from flashopt_compile.routine import FollowedGroup, Group, Routine, is_watched
from flashopt_compile.rule import Rule
from flashopt_compile.step import Numbers, Step, trace
from flashopt_compile.storage import Storage, storage_of

Work = tuple[Group, str, Tensor, dict[str, Any]]


class Entry(NamedTuple):
    """How one parameter is stepped, and what that follows from."""

    values: tuple[Any, ...]
    state: tuple[Tensor, ...]
    step: Step
    piece: Piece


def gradient(parameter: Tensor) -> Tensor:
    """The gradient, of what this process has of a parameter that has one, apart from autograd."""
    grad = sharding.part_of(parameter.grad, parameter) if sharding.is_sharded(parameter) else parameter.grad
    assert grad is not None
    return grad.detach() if grad.requires_grad else grad


class FlashOptimizer(torch.optim.Optimizer):
    """An optimizer made of a rule: `class FlashAdamW(FlashOptimizer, rule=adamw)`.

    The constructor takes the parameters, the rule's hyper-parameters and, for all or per group:
    `master_weight_bits` 24, 32 or None (the weight's head and tail together; None for no tail),
    `quantize` (8-bit states), `rounding` "dither" or "nearest", `maximize`, `compress_state_dict` (False to
    save states as torch.optim does), `decouple_lr` (weight decay scaled by lr/initial_lr instead of lr),
    `check_numerics` and `skip_nonfinite` (no step at all when any gradient is Inf or NaN). `eager=True` runs
    the step uncompiled, for debugging; the results are the same.
    """

    rule: ClassVar[Rule]
    hyper: ClassVar[dict[str, Any]]
    decays_by_penalty: ClassVar[bool] = False  # weight decay is an L2 penalty on the gradient
    torch_names: ClassVar[dict[str, str]] = {}  # what torch.optim calls the rule's states
    namesake: ClassVar[type[Any] | None] = None  # the optimizer of torch.optim that does the same

    def __init_subclass__(cls, rule: Rule | None = None, **flags: Any) -> None:
        super().__init_subclass__()
        if rule is not None:
            cls.rule = rule
            cls.hyper = {**dict(rule.hyper), **flags}
            keywords = {**cls.hyper, **STORAGE_OPTIONS, "eager": False}
            cls.__signature__ = signature("params", keywords)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, params: Any, *args: Any, eager: bool = False, **options: Any) -> None:
        given = given_options(type(self).__name__, self.hyper, args, options)
        self.eager = eager
        self._forget()
        super().__init__(params, {**self.hyper, **STORAGE_OPTIONS, **given})

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with options of its own, as in torch.optim; nothing is added on an error."""
        owner = type(self).__name__
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError(f"{owner}: params is a set, whose order differs from run to run; allowed is a list.")
        params = [params] if isinstance(params, Tensor) else list(params)
        options = check_torch_options(owner, param_group)
        group = {**self.defaults, **options}
        check_options(owner, group, self.hyper)
        if self.decays_by_penalty and group["decouple_lr"]:
            raise ValueError(
                f"{owner}: decouple_lr is True; allowed is False, as its weight decay is a penalty on the gradient."
            )
        seen = {id(p) for group in self.param_groups for p in group["params"]}
        for position, entry in enumerate(params):
            name, parameter = entry if isinstance(entry, tuple) else (f"{len(self.param_groups)}.{position}", entry)
            check_parameter(owner, name, parameter)
            check_shards(owner, name, parameter, self.storage(group, parameter))
            if id(parameter) in seen:
                raise ValueError(f"{owner}: parameter {name} of shape {tuple(parameter.shape)} is given twice.")
            seen.add(id(parameter))
        super().add_param_group({**options, "params": params})
        group = self.param_groups[-1]
        if group["decouple_lr"]:
            group.setdefault("initial_lr", group["lr"])

    @classmethod
    def kind(cls) -> str:
        """The name of the class that was declared with the rule: what a checkpoint says it is of."""
        return next((each.__name__ for each in cls.__mro__ if "rule" in vars(each)), cls.__name__)

    @classmethod
    def rule_of(cls, group: Group) -> Rule:
        """The rule a group follows; the class's own unless its options choose among several."""
        return cls.rule

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; with `closure`, evaluate it first and return its loss."""
        is_plain = closure is None and not is_dynamo_compiling() and not is_watched(self)
        if is_plain and self._routine is not None and self._routine.again(self):
            return None
        # In a class with a step of its own, torch.optim takes care of that one.
        step = self._step if is_plain or type(self).step is not FlashOptimizer.step else self._step_watched
        return step() if closure is None else step(closure)

    step.hooked = True  # for torch.optim to leave it as it is  # pyright: ignore[reportFunctionMemberAccess]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_dynamo_compiling() or self._routine is None or not self._routine.again(self):
            self._step_anew()
        return loss

    # What torch.optim puts around a step takes longer than all else that it does beside the kernel.
    _step_watched = torch.optim.Optimizer.profile_hook_step(_step)

    @torch.no_grad()
    def _step_anew(self) -> None:
        """Step, working out how."""
        work = [item for item in self._work() if item[2].grad is not None]
        owner = type(self).__name__
        for _, name, parameter, _ in work:
            check_gradient(owner, name, parameter)
        asking = [parameter for group, _, parameter, _ in work if group["skip_nonfinite"]]
        if not work or (asking and self._has_nonfinite_gradient(asking)):
            return
        numbers = {id(group): self._numbers(group) for group in self.param_groups}
        if torch.compiler.is_compiling():
            self._trace(work, numbers)
        else:
            self._run(work, numbers)

    def _run(self, work: list[Work], numbers: dict[int, Numbers]) -> None:
        self._routine = None
        entries = [self._entry(*item) for item in work]
        for entry, (group, name, parameter, state) in zip(entries, work, strict=True):
            if group["check_numerics"]:
                head, *rest = entry.piece.stored
                tensors = [head, gradient(parameter), *rest]
                numerics.check_numerics(name, entry.step, tensors, state["step"] + 1, numbers[id(group)])
        batch = Batch(eager, self._packs) if self.eager else compiled.batch(self._packs)
        steps = tuple(state["step"] for *_, state in work)
        if self._count is None or not self._count.is_of(steps) or not self._count.up():
            self._count = Count(steps)
            self._count.up()
        for entry, (group, _, parameter, state), taken in zip(entries, work, self._count.taken(), strict=True):
            batch.add(entry.step, entry.piece, gradient(parameter), state["step"], taken, numbers[id(group)])
        batch.flush()
        if batch.calls is not None and not any(sharding.is_sharded(parameter) for *_, parameter, _ in work):
            groups = [FollowedGroup.of(group, self.hyper, self._numbers) for group in self.param_groups]
            self._routine = Routine.of(groups, self.state, batch.calls, self._count)

    def _trace(self, work: list[Work], numbers: dict[int, Numbers]) -> None:
        """Step inside a graph that the caller is compiling."""
        for group, name, parameter, state in work:
            storage = self.storage(group, parameter)
            check_state(type(self).__name__, name, state, storage.parts(tuple(parameter.shape)))
            state["step"] += 1
            step = Step(self.rule_of(group), storage, group["rounding"], group["maximize"])
            tensors = self._tensors(storage, parameter, gradient(parameter), state)
            places = sharding.start(parameter), sharding.positions(parameter, parameter.dim())
            trace(step, tensors, *places, state["step"], numbers[id(group)])

    def _entry(self, group: Group, name: str, parameter: Tensor, state: dict[str, Any]) -> Entry:
        """How a parameter is stepped, worked out anew when anything it depends on is another than last time."""
        options = (
            self.rule_of(group),
            group["master_weight_bits"],
            group["quantize"],
            group["rounding"],
            group["maximize"],
        )
        own = sharding.local(parameter)
        values = own.data_ptr(), own.stride(), *options
        entry = self._entries.get(parameter)
        if entry is None or entry.values != values or not all_same(entry.state, tuple(state.values())):
            step = self._step_of(group, parameter)
            check_state(type(self).__name__, name, state, step.storage.parts(tuple(parameter.shape)))
            keys = step.storage.parts(tuple(own.shape))
            stored = own.detach(), *(sharding.local(state[key]) for key in keys)
            piece = Piece.of(step, stored, sharding.start(parameter), sharding.row_starts(parameter, step.storage))
            entry = self._entries[parameter] = Entry(values, tuple(state.values()), step, piece)
            self._packs.clear()
        return entry

    @torch.no_grad()
    def warmup(self, verbose: bool = True) -> None:
        """Compile now what the first step would compile, for gradients of the parameters' dtypes.

        `verbose` tells on stderr what is being compiled and how long it took. Nothing that the optimizer holds changes.
        """
        if self.eager:
            return
        kinds: dict[Any, tuple[Step, Group, Tensor]] = {}
        for group, _, parameter, _ in self._work(make=False):
            step, own = self._step_of(group, parameter), sharding.local(parameter)
            if own.numel():
                kinds[compiled.kind_of(step, own)] = step, group, own
        for number, (step, group, parameter) in enumerate(kinds.values(), start=1):
            begin = time.perf_counter()
            if compiled.prepare(step, parameter, self._numbers(group)) and verbose:
                took = f"{time.perf_counter() - begin:.1f} s"
                print(f"{type(self).__name__}: compiled {number} of {len(kinds)}, {step}: {took}", file=sys.stderr)

    def memory(self) -> dict[str, Any]:
        """Bytes that exist now: `parts` by kind, `parameters` by name, their `total`, and `per_parameter`."""
        return memory((name, parameter, state) for _, name, parameter, state in self._work(make=False))

    @torch.no_grad()
    def health(self) -> list[numerics.Health]:
        """For each parameter group, what share of its stored numbers is saturated, zeroed, stalled or not finite.

        Of sharded parameters, of what this process has of them.
        """
        return [numerics.health(self._samples(group)) for group in self.param_groups]

    def _samples(self, group: Group) -> Iterator[tuple[Step, list[Tensor], Tensor, Numbers]]:
        numbers = self._numbers(group)
        for owner, _, parameter, state in self._work(make=False):
            if owner is group and state:
                step = self._step_of(group, parameter)
                own = sharding.local(parameter)
                grad = torch.zeros_like(own) if parameter.grad is None else gradient(parameter)
                yield step, self._tensors(step.storage, parameter, grad, state), state["step"], numbers

    def _work(self, make: bool = True) -> Iterator[Work]:
        """Every parameter to be trained, with its group, name and state, made if need be."""
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{number}.{position}" for position in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.requires_grad:
                    if make and not self.state.get(parameter):
                        self.state[parameter] = self.new_state(group, parameter)
                    yield group, name, parameter, self.state.get(parameter, {})

    def storage(self, group: Group, parameter: Tensor) -> Storage:
        """How a parameter's weight and states are stored under the group's options; the same on every process."""
        shape = tuple(parameter.shape)
        return storage_of(self.rule_of(group), parameter.dtype, shape, group["master_weight_bits"], group["quantize"])

    def _step_of(self, group: Group, parameter: Tensor) -> Step:
        return Step.of(self.rule_of(group), self.storage(group, parameter), group["rounding"], group["maximize"])

    def new_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state before its first step."""
        device, state = sharding.local(parameter).device, {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        for key, part in self.storage(group, parameter).parts(tuple(parameter.shape)).items():
            shape, _ = sharding.box(part.shape, parameter)
            zeros = torch.zeros(shape, dtype=part.dtype, device=device)
            state[key] = sharding.as_sharded(zeros, parameter, part.shape)
        return state

    def _tensors(self, storage: Storage, parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> list[Tensor]:
        """Head, gradient and the rest in the storage's order, apart from autograd, which minds views of a leaf."""
        head = sharding.local(parameter).detach()
        return [head, grad, *(sharding.local(state[key]) for key in storage.parts(tuple(head.shape)))]

    def _numbers(self, group: Group) -> Numbers:
        """The group's hyper-parameters as its rule takes them."""
        hyper = {name: group[name] for name, _ in self.rule_of(group).hyper}
        if group["decouple_lr"] and "weight_decay" in hyper and group["initial_lr"]:
            hyper["weight_decay"] = hyper["weight_decay"] / group["initial_lr"]
        if torch.compiler.is_compiling():
            return as_numbers(hyper)
        return self._kept_numbers.setdefault((id(group), id(self.rule_of(group))), KeptNumbers()).of(hyper)

    def _has_nonfinite_gradient(self, parameters: list[Tensor]) -> bool:
        found = numerics.has_nonfinite([gradient(parameter) for parameter in parameters])
        return sharding.any_process(found, parameters)

    def state_dict(self) -> dict[str, Any]:
        """States as they are stored, or as torch.optim has them in groups with compress_state_dict=False."""
        return states.outgoing(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, bit for bit; or one of torch.optim, FlashOptim, bitsandbytes or torchao.

        If it does not fit, a ValueError says why in a sentence and nothing changes.
        """
        states.check_frame(type(self).__name__, state_dict)
        hook = self.register_load_state_dict_pre_hook(lambda _, state_dict: states.incoming(self, state_dict))
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            hook.remove()

    def get_fp32_model_state_dict(self, model: torch.nn.Module, sharded: bool = False) -> dict[str, Any]:
        """The model's state dict with its weights as exactly as the optimizer has them, in fp32.

        Sharded parameters come whole, to every process; with `sharded` as DTensors, as torch.distributed.checkpoint
        takes them. All processes must call.
        """
        return weights.get_fp32(self, model, sharded)

    def set_fp32_model_state_dict(
        self, model: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Set the model's weights from fp32, keeping what 16-bit heads round away; on an error nothing changes.

        For sharded parameters the values may be whole or DTensors.
        """
        weights.set_fp32(self, model, state_dict, strict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "eager": self.eager}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for parameter, value in state["state"].items():
            if isinstance(value, states.Opaque):
                state["state"][parameter] = value.state
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        """All that the last steps have left for the next one."""
        self._entries: dict[Tensor, Entry] = {}
        self._kept_numbers: dict[tuple[int, int], KeptNumbers] = {}
        self._packs: dict[tuple[int, ...], Pack] = {}
        self._count: Count | None = None
        self._routine: Routine | None = None

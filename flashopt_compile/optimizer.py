"""The face of the library: `torch.optim.Optimizer`s made of a rule, with the arguments everyone knows."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashopt_compile import scaling, stepping, tracing
from flashopt_compile.checkpoint import flashoptim, states, weights
from flashopt_compile.distributed import shards
from flashopt_compile.engine.plan import Plan
from flashopt_compile.engine.planner import Workspace
from flashopt_compile.engine.storage import Storage, storage_of
from flashopt_compile.inductor import operator, probes
from flashopt_compile.inspection import numerics
from flashopt_compile.inspection.memory import memory
from flashopt_compile.options import (
    STORAGE_OPTIONS,
    check_flag,
    check_keys,
    check_options,
    check_parameter,
    check_shards,
    check_torch_options,
    given_options,
    signature,
    torch_defaults,
)
from flashopt_compile.release.selection import Selections
from flashopt_compile.rule import Rule

Group = dict[str, Any]


class Release(Protocol):
    """What an optimizer knows of gradient release, while its gradients are released."""

    @property
    def bytes(self) -> int: ...

    def step(self) -> None: ...

    def zero_grad(self) -> bool: ...

    def check_finished(self, what: str) -> None: ...


class FlashOptimizer(torch.optim.Optimizer):
    """An optimizer made of a rule: `class FlashAdamW(FlashOptimizer, rule=adamw)`.

    The constructor takes the parameters, the rule's hyper-parameters and, for all or per group:
    `master_weight_bits` 24, 32 or None (the weight's head and tail together; None for no tail),
    `quantize` (8-bit states), `rounding` "dither" or "nearest", `maximize`, `compress_state_dict` (False to
    save states as torch.optim does), `decouple_lr` (weight decay scaled by lr/initial_lr instead of lr),
    `check_numerics`, `skip_nonfinite` (no step at all when any gradient is Inf or NaN) and `capturable` (steps that
    CUDA graphs can replay). `eager=True` runs the step uncompiled, for debugging; the results are the same.
    """

    rule: ClassVar[Rule]
    hyper: ClassVar[dict[str, Any]]
    decays_by_penalty: ClassVar[bool] = False  # weight decay is an L2 penalty on the gradient
    torch_names: ClassVar[dict[str, str]] = {}  # what torch.optim calls the rule's states
    namesake: ClassVar[type[Any] | None] = None  # the optimizer of torch.optim that does the same
    implementation: ClassVar[dict[str, Any]]  # its options that say how and not what it computes
    workspace: Workspace | None = None
    release: Release | None = None

    def __init_subclass__(cls, rule: Rule | None = None, **flags: Any) -> None:
        super().__init_subclass__()
        if rule is not None:
            cls.rule = rule
            cls.hyper = {**dict(rule.hyper), **flags}
            cls.implementation = torch_defaults(cls.namesake)
            keywords = {**cls.hyper, **STORAGE_OPTIONS, **cls.implementation, "eager": False}
            del keywords["replayable"]
            cls.__signature__ = signature("params", keywords)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, params: Any, *args: Any, eager: bool = False, **options: Any) -> None:
        given = given_options(type(self).__name__, self.hyper, self.implementation, args, options)
        check_flag(type(self).__name__, "eager", eager)
        self.eager = eager
        self.plan: Plan | None = None
        self.selections = Selections(self)
        self.dtypes: dict[Tensor, torch.dtype] = {}  # of each parameter when its state was made: tails depend on it
        self.handle = operator.new_handle(self)
        self.handle_name = str(int(self.handle))
        self.known: list[tracing.Known] = []  # of each group, for graphs that trace a step
        self.is_traced = eager  # in graphs that a caller compiles, instead of called
        super().__init__(params, {**self.hyper, **STORAGE_OPTIONS, **self.implementation, **given})

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with options of its own, as in torch.optim; nothing is added on an error."""
        owner = type(self).__name__
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError(f"{owner}: params is a set, whose order differs from run to run; allowed is a list.")
        params = [params] if isinstance(params, Tensor) else list(params)
        options = flashoptim.given_options(owner, check_torch_options(owner, param_group, self.implementation))
        check_keys(owner, options, self.hyper)
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
            if stepping.is_trained(parameter):
                check_shards(owner, name, parameter, self.storage(group, parameter))
            if id(parameter) in seen:
                raise ValueError(f"{owner}: parameter {name} of shape {tuple(parameter.shape)} is given twice.")
            seen.add(id(parameter))
        super().add_param_group({**options, "params": params})
        group = self.param_groups[-1]
        self.known.append(tracing.Known.of(type(self), group))
        if group["replayable"]:
            self.is_traced = True
            self._opt_called = True  # no scheduler is to miss steps that a CUDA graph replays
        if group["decouple_lr"]:
            lr = group["lr"]
            group.setdefault("initial_lr", lr.clone() if isinstance(lr, Tensor) else lr)  # the lr itself may change

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
        # torch.optim's step wrapper costs more than all our own overhead. It wraps the step of a subclass itself.
        is_plain = is_dynamo_compiling() or not probes.is_watched(self) or type(self).step is not FlashOptimizer.step
        step = self._step if is_plain else self._step_watched
        return step() if closure is None else step(closure)

    step.hooked = probes.WRAPPER.is_open()  # if so, torch.optim leaves it as it is  # pyright: ignore[reportFunctionMemberAccess]
    # Likewise for schedulers, whose wrapper no torch.compile can trace: a step sets itself what the wrapper would.
    step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
    operator.register_root(step)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_dynamo_compiling():
            tracing.trace(self, alone=closure is None and operator.is_alone())
        else:
            self._opt_called = True
            with torch.no_grad():
                self._take()
        return loss

    def _take(self) -> None:
        if self.release is None:
            stepping.take(self)
        else:
            self.release.step()

    @torch.no_grad()
    def step_param(self, p: Tensor, group: Group | None = None) -> None:
        """Step one parameter, of `group`, by the gradient that it has now; all others stay as they are."""
        owner = type(self).__name__
        own = next((each for each in self.param_groups if any(other is p for other in each["params"])), None)
        if own is None or (group is not None and group is not own):
            where = "no parameter of the optimizer" if own is None else "in another group than the one that is given"
            raise ValueError(f"{owner}.step_param: the parameter of shape {tuple(p.shape)} is {where}.")
        if p.grad is None:
            raise ValueError(f"{owner}.step_param: the parameter of shape {tuple(p.shape)} has no gradient.")
        self._opt_called = True
        self.selections.step([p])

    @torch.no_grad()
    def step_in_graph(self, given: operator.Given | None) -> None:
        """Step from a graph that a caller has compiled, which may give heads and gradients."""
        self._opt_called = True
        if given is None:
            self._take()
        else:
            with tracing.lent(self, given):
                self._take()

    @torch.no_grad()
    def prepare_to_trace(self) -> None:
        """Make all states, for a graph that is to find them."""
        with torch.inference_mode(False):
            for group, _, parameter, state in stepping.trained(self):
                for tensor in (parameter, *state.values()) if group["replayable"] else ():
                    probes.mark_static(tensor)

    def numbers_in_graph(self, group: int, rule: str) -> list[float]:
        """A parameter group's hyper-parameters, for a graph that has traced `rule`."""
        self._opt_called = True
        return tracing.numbers_in_graph(self, group, rule)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler is to leave unscaling and skipping to the step, as it cannot unscale fp16.

        If not, gradients can be clipped between its `unscale_` and its `step`; Lightning forbids that if so.
        """
        return scaling.needs_unscaling(parameter for group in self.param_groups for parameter in group["params"])

    _step_watched = torch.optim.Optimizer.profile_hook_step(_step) if probes.WRAPPER.is_open() else _step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or with `set_to_none=False` set them to zero."""
        if is_dynamo_compiling():  # torch.optim's is marked for Dynamo to leave out of graphs
            tracing.drop_gradients(self, set_to_none)
        elif self.release is None or self.release.zero_grad():
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def warmup(self, verbose: bool = True) -> None:
        """Compile now what the first step would compile, for gradients of the parameters' dtypes.

        `verbose` tells on stderr what is being compiled and how long it took. Nothing that the optimizer holds changes.
        """
        if not self.eager:
            stepping.warmup(self, verbose)

    def memory(self) -> dict[str, Any]:
        """Bytes that exist now: `parts` by kind, `parameters` by name, their `total`, and `per_parameter`.

        `plan` is what is kept from step to step beside these.
        """
        held = ((name, parameter, state) for _, name, parameter, state in stepping.trained(self, make=False))
        plan = 0 if self.plan is None else self.plan.bytes
        return memory(held, plan + self.selections.bytes + (0 if self.release is None else self.release.bytes))

    @torch.no_grad()
    def health(self) -> list[numerics.Health]:
        """For each parameter group, what share of its stored numbers is saturated, zeroed, stalled or not finite.

        Of sharded parameters, of what this process has of them.
        """
        return [numerics.health(stepping.samples(self, group)) for group in self.param_groups]

    def storage(self, group: Group, parameter: Tensor, rule: Rule | None = None) -> Storage:
        """How a parameter's weight and states are stored under the group's options; the same on every process."""
        rule, shape = rule or self.rule_of(group), tuple(parameter.shape)
        return storage_of(rule, parameter.dtype, shape, group["master_weight_bits"], group["quantize"])

    def new_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state before its first step."""
        self.dtypes[parameter] = parameter.dtype
        device = shards.local(parameter).device
        state = {"step": torch.zeros((), dtype=torch.float32, device=stepping.count_device(group, parameter))}
        for key, part in self.storage(group, parameter).parts(tuple(parameter.shape)).items():
            shape, _ = shards.box(part.shape, parameter)
            zeros = torch.zeros(shape, dtype=part.dtype, device=device)
            state[key] = shards.as_sharded(zeros, parameter, part.shape)
        return state

    def state_dict(self) -> dict[str, Any]:
        """States as they are stored, or as torch.optim has them in groups with compress_state_dict=False."""
        if self.release is not None:
            self.release.check_finished("a state dict")
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
        self, model: torch.nn.Module, fp32_state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Set the model's weights from fp32, keeping what 16-bit heads round away; on an error nothing changes.

        For sharded parameters the values may be whole or DTensors.
        """
        weights.set_fp32(self, model, fp32_state_dict, strict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "eager": self.eager, "dtypes": self.dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.setdefault("dtypes", {})
        for parameter, value in state["state"].items():
            if isinstance(value, states.Opaque):
                state["state"][parameter] = value.state
                self.dtypes[parameter] = parameter.dtype
        self.plan = None
        self.selections = Selections(self)
        self.handle = operator.new_handle(self)
        self.handle_name = str(int(self.handle))
        super().__setstate__(state)
        for group in self.param_groups:  # pickled by an earlier version
            group.update({"replayable": False, **self.implementation, **group})
        self.known = [tracing.Known.of(type(self), group) for group in self.param_groups]
        self.is_traced = self.eager or any(group["replayable"] for group in self.param_groups)

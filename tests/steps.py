"""The steps of a course. Both sides must reach the same bits or raise the same sentence."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TextIO

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sides import Model, Reference, Side, copied, deep_copied, difference, fresh, outcome, same_bits
from torch import Tensor
from uses import (
    BF16,
    CONDITIONS,
    FP32,
    GRADIENTS,
    KNOWN,
    OPTIMIZERS,
    RARE_GRADIENTS,
    REFUSED,
    SHAPES,
    SIZES,
    VALUES,
    default_dtype,
    give,
    kinds,
    new_weights,
    under,
)

seeds = st.integers(0, 99)
places = st.integers(0, 7)
shapes = st.lists(kinds(*SHAPES), min_size=1, max_size=4)
gradients = st.lists(
    kinds(*(name for name in GRADIENTS if name not in RARE_GRADIENTS), rare=RARE_GRADIENTS), min_size=1, max_size=3
)
simple_gradients = st.lists(kinds("plain", "none", "fp32", "transposed gradient"), min_size=1, max_size=2)
conditions = kinds(*CONDITIONS)


def use(**strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a rule of the machine, unless it is KNOWN."""

    def make(function: Callable[..., None]) -> Any:
        @wraps(function)
        def noted(self: "Steps", **arguments: Any) -> None:
            self.tally.note(function.__name__, arguments)
            function(self, **arguments)

        return precondition(lambda _: function.__name__ not in KNOWN)(rule(**strategies)(noted))

    return make


def between(**strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a rule that a few steps follow. Otherwise a course would have too few steps."""

    def make(function: Callable[..., None]) -> Any:
        @wraps(function)
        def followed(self: "Steps", then_steps: int = 0, **arguments: Any) -> None:
            function(self, **arguments)
            self.both_hold_the_same()
            for seed in range(then_steps):
                self.give_gradients(seed, ["plain"])
                self.take_step()

        return use(then_steps=st.integers(0, 2), **strategies)(followed)

    return make


@dataclass
class Tally:
    """Counts courses and steps. `log` holds the rules of the current course, for use after a crash."""

    courses: int = 0
    steps: int = 0
    report: Callable[[], None] = field(default=lambda: None)
    log: TextIO | None = None

    def note(self, rule: str, arguments: dict[str, Any]) -> None:
        if self.log is not None:
            if rule == "begin":
                self.log.seek(0)
                self.log.truncate()
            print(
                f"{rule}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})",
                file=self.log,
                flush=True,
            )


class Steps(RuleBasedStateMachine):
    """Steps of all kinds, and the comparison after each rule."""

    tally: ClassVar[Tally] = Tally()

    def __init__(self) -> None:
        super().__init__()
        self.settings_before = torch.get_default_dtype(), torch.get_num_threads()
        torch.set_num_threads(1)
        self.folder = tempfile.TemporaryDirectory(prefix="hunt")
        self.file = Path(self.folder.name) / "checkpoint.pt"
        self.frozen: set[int] = set()
        self.has_begun = False
        self.left: list[tuple[Tensor, Tensor]] = []  # tensors of copied optimizers and their expected values

    @initialize(
        kind=kinds("AdamW", "AdamW", "AdamW", "SGD", rare=("Lion", "fresh AdamW")),
        shapes=shapes,
        dtypes=st.sampled_from([(BF16,), (BF16, FP32), (FP32,)]),
        seed=seeds,
    )
    def begin(self, kind: str, shapes: list[str], dtypes: tuple[torch.dtype, ...], seed: int) -> None:
        self.tally.note("begin", {"kind": kind, "shapes": shapes, "dtypes": dtypes, "seed": seed})
        make, options = OPTIMIZERS[kind.split()[-1]]
        if kind.startswith("fresh"):
            make = fresh(make)
        models = [Model(new_weights(shapes, dtypes, seed)) for _ in range(2)]
        self.compiled = Side(models[0], make(models[0].parameters(), **options))
        self.reference = Reference(models[1], make(models[1].parameters(), eager=True, **options))
        self.has_begun = True

    def teardown(self) -> None:
        dtype, threads = self.settings_before
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        self.folder.cleanup()
        self.tally.courses += 1
        self.tally.report()

    # The comparison after every rule.

    @invariant()
    def both_hold_the_same(self) -> None:
        if not self.has_begun:
            return
        ours, theirs = self.compiled, self.reference
        for place, (w, reference) in enumerate(zip(ours.weights, theirs.weights, strict=True)):
            assert not (found := difference(w.detach(), reference.detach(), f"weight {place}")), found
        assert not (found := difference(ours.states(), theirs.states(), "states")), found
        for one, other in zip(ours.optimizer.param_groups, theirs.optimizer.param_groups, strict=True):
            numbers = [{name: group[name] for name in VALUES if name in group} for group in (one, other)]
            assert not (found := difference(numbers[0], numbers[1], "numbers")), found
        assert all(same_bits(now, then) for now, then in self.left), "a step changed the optimizer that was copied"

    # Parts of rules.

    def stepped(self) -> list[int]:
        """The places of weights of dtypes that can be stepped."""
        return [place for place, w in enumerate(self.compiled.weights) if w.dtype in (BF16, FP32)]

    def at(self, place: int) -> int:
        return self.stepped()[place % len(self.stepped())]

    def give_gradients(self, seed: int, kinds: list[str], size: str = "ordinary", frozen_too: bool = False) -> None:
        random = torch.Generator().manual_seed(1000 + seed)
        for place in self.stepped():
            w, reference = self.compiled.weights[place], self.reference.weights[place]
            values = torch.randn(w.shape, generator=random, dtype=FP32).mul(SIZES[size])
            grad = GRADIENTS[kinds[place % len(kinds)]](values, w)
            if place in self.frozen and not frozen_too:
                grad = None
            give(w, grad)
            give(reference, None if grad is None else grad.detach().clone(memory_format=torch.contiguous_format))

    def plainly(self, act: Callable[[], Any]) -> Any:
        with default_dtype(FP32):
            return act()

    def forget(self) -> None:
        self.plainly(self.reference.forget)

    def take_step(self, condition: str = "nothing") -> None:
        self.forget()
        for w in self.reference.weights:  # torch.optim steps frozen weights that have gradients
            w.requires_grad_(w.requires_grad or w.grad is not None)
        self.plainly(self.reference.optimizer.step)
        for place in self.frozen:
            self.reference.weights[place].requires_grad_(False)
        under(condition, self.compiled.optimizer.step)
        self.tally.steps += 1
        for w, reference in zip(self.compiled.weights, self.reference.weights, strict=True):
            if w.grad is None or w.grad.untyped_storage().data_ptr() == w.untyped_storage().data_ptr():
                w.grad = reference.grad = None
            else:
                assert reference.grad is not None and same_bits(w.grad.detach(), reference.grad), "a gradient changed"

    # Steps.

    @use(
        seed=seeds,
        kinds=gradients,
        size=kinds(*SIZES),
        condition=conditions,
        frozen=kinds("no gradient", "hand-set gradient"),
    )
    def step(self, seed: int, kinds: list[str], size: str, condition: str, frozen: str) -> None:
        self.give_gradients(seed, kinds, size, frozen_too=frozen == "hand-set gradient")
        self.take_step(condition)

    @use(condition=conditions)
    def step_again(self, condition: str) -> None:
        self.take_step(condition)

    @use(seed=seeds, kind=kinds("given gradients", "backward"), condition=kinds("nothing", "no_grad"))
    def step_by_a_closure(self, seed: int, kind: str, condition: str) -> None:
        def step(side: Side) -> None:
            random = torch.Generator().manual_seed(seed)
            returned: list[Any] = []

            def closure() -> Any:
                loss: Any = torch.zeros((), dtype=FP32)
                for place in self.stepped():
                    w = side.weights[place]
                    w.grad, factor = None, torch.randn(w.shape, generator=random, dtype=FP32)
                    if kind == "given gradients" and place not in self.frozen:
                        w.grad = factor.to(w.dtype)
                    elif w.requires_grad:
                        loss = loss + (w.to(FP32) * factor).sum()
                if loss.requires_grad:
                    loss.backward()
                returned.append(loss)
                return loss

            assert side.optimizer.step(closure) is returned[0] and len(returned) == 1

        self.forget()
        self.plainly(lambda: step(self.reference))
        under(condition, lambda: step(self.compiled))
        self.tally.steps += 1

    @use(seed=seeds, kinds=simple_gradients, hook=kinds("before", "after", "raises before", "raises after"))
    def step_with_a_hook(self, seed: int, kinds: list[str], hook: str) -> None:
        self.give_gradients(seed, kinds)
        self.forget()

        def step(side: Side) -> None:
            def change(*_: Any) -> None:
                if "raises" in hook:
                    raise ValueError("of a hook")
                for place in self.stepped():
                    w = side.weights[place]
                    target = w.grad if hook == "before" else w.detach()
                    if target is not None:
                        target.mul_(0.5)

            register = (
                side.optimizer.register_step_pre_hook if "before" in hook else side.optimizer.register_step_post_hook
            )
            handle = register(change)
            try:
                side.optimizer.step()
            finally:
                handle.remove()

        self.same_outcome(step, must_fail="raises" in hook)

    @use(seed=seeds, place=places)
    def step_weights_that_share_memory(self, seed: int, place: int) -> None:
        """Weights that share memory are stepped in turn, as by torch.optim. The reference steps each alone."""
        pairs = [(one, other) for other in self.stepped() for one in range(other) if self.are_alike(one, other)]
        if not pairs or {*pairs[place % len(pairs)]} & self.frozen:
            return
        one, other = pairs[place % len(pairs)]
        for side in (self.compiled, self.reference):
            side.weights[other].data = side.weights[one].data
        self.give_gradients(seed, ["plain"])
        self.compiled.optimizer.step()
        grads = [w.grad for w in self.reference.weights]
        self.reference.optimizer.zero_grad()
        order = [w for group in self.reference.optimizer.param_groups for w in group["params"]]
        for w in order:
            w.grad = next(grad for each, grad in zip(self.reference.weights, grads, strict=True) if each is w)
            self.forget()
            self.plainly(self.reference.optimizer.step)
            w.grad = None
        for w, grad in zip(self.reference.weights, grads, strict=True):
            w.grad = grad
        for side in (self.compiled, self.reference):
            side.weights[other].data = side.weights[other].data.clone()
        self.tally.steps += 1

    def are_alike(self, one: int, other: int) -> bool:
        w, v = self.compiled.weights[one], self.compiled.weights[other]
        return (w.shape, w.dtype) == (v.shape, v.dtype)

    def same_outcome(self, act: Callable[[Side], Any], must_fail: bool = False) -> None:
        ours, theirs = outcome(lambda: act(self.compiled)), self.plainly(lambda: outcome(lambda: act(self.reference)))
        assert ours == theirs, f"{ours} and {theirs}"
        assert ours is not None or not must_fail, "nothing was raised"

    @use(seed=seeds, kinds=simple_gradients, kind=kinds(*REFUSED), place=places)
    def a_step_is_refused(self, seed: int, kinds: list[str], kind: str, place: int) -> None:
        self.give_gradients(seed, kinds)
        self.forget()
        place = self.at(place)
        if place in self.frozen or not self.compiled.states()[place]:
            return
        if kind == "quantize changed" and self.compiled.weights[place].dim() == 1:
            return  # biases are never quantized
        sides = self.compiled, self.reference
        for side in sides:
            w = side.weights[place]
            give(w, torch.ones(w.shape, dtype=w.dtype))
        before = [(copied(side.weights), list(map(deep_copied, side.states()))) for side in sides]
        undo = [REFUSED[kind](side, side.weights[place]) for side in sides]
        try:
            self.same_outcome(lambda side: side.optimizer.step(), must_fail=True)
        finally:
            for each in undo:
                each()
        for side, (weights, states) in zip(sides, before, strict=True):
            side.weights[place].grad = None
            assert not (found := difference(copied(side.weights), weights, "weights")), found
            # The refused step may have made zero states for weights without any.
            now = [state if then else {} for state, then in zip(side.states(), states, strict=True)]
            assert not (found := difference(now, states, "states")), found

    @use(seed=seeds, place=places, value=st.sampled_from([float("inf"), float("nan")]))
    def a_step_is_skipped(self, seed: int, place: int, value: float) -> None:
        self.give_gradients(seed, ["plain"])
        place = self.at(place)
        if place in self.frozen or not self.compiled.group_of(self.compiled.weights[place])["skip_nonfinite"]:
            return
        for side in (self.compiled, self.reference):
            grad = side.weights[place].grad
            assert grad is not None
            grad.view(-1)[-1] = value
        before = copied(self.compiled.weights)
        self.take_step()
        assert all(map(same_bits, self.compiled.weights, before))

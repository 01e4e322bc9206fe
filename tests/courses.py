"""A random course of use as a state machine: steps, options, weights, states, copies and checkpoints, in any order."""

import pickle
import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from sides import Side, copied, deep_copied, difference
from steps import Steps, between, places, seeds, shapes
from torch.optim.lr_scheduler import LinearLR
from uses import (
    BF16,
    FP32,
    GROUP_OPTIONS,
    LAYOUTS,
    NUMBERS,
    RARE_GROUP_OPTIONS,
    STATE_CHANGES,
    VALUES,
    WEIGHT_CHANGES,
    change_in_place,
    frozen_weights,
    kinds,
    new_weights,
    number,
    rounded,
)

from flashopt_compile import load, save

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.filter_too_much]
QUICK = settings(max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=SLOW)
LONG = settings(QUICK, max_examples=10, stateful_step_count=40, database=None)

options = kinds(*GROUP_OPTIONS, rare=list(RARE_GROUP_OPTIONS))


class Course(Steps):
    """A random course of use: steps, and anything a user may do between them."""

    scheduler: LinearLR | None = None
    remembered: dict[str, Any] | None = None

    # Options.

    @between(group=places, name=kinds(*VALUES), value=places, kind=kinds(*NUMBERS))
    def set_number(self, group: int, name: str, value: int, kind: str) -> None:
        ours, theirs = self.groups(group)
        if name in ours and not (name == "weight_decay" and "momentum" in ours):  # SGD's decay chooses a kernel
            ours[name] = number(kind, VALUES[name][value % len(VALUES[name])])
            theirs[name] = rounded(VALUES[name][value % len(VALUES[name])])

    @between(group=places, name=kinds(*VALUES), value=places)
    def change_number_in_place(self, group: int, name: str, value: int) -> None:
        ours, theirs = self.groups(group)
        chosen = VALUES[name][value % len(VALUES[name])]
        if name in ours and change_in_place(ours[name], chosen):
            theirs[name] = rounded(chosen)

    @between()
    def schedule(self) -> None:
        """Let a torch scheduler change the rates. Its first use wraps the optimizer's step."""
        groups, known = self.compiled.optimizer.param_groups, self.scheduler
        if known is None or known.optimizer is not self.compiled.optimizer or len(known.base_lrs) != len(groups):
            self.scheduler = LinearLR(self.compiled.optimizer, 0.5, 1.0, 4)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns if no step came between
                known.step()
        for ours, theirs in zip(groups, self.reference.optimizer.param_groups, strict=True):
            theirs.update({name: float(ours[name]) for name in ("lr", "initial_lr") if name in ours})

    @between(group=places)
    def reverse_group(self, group: int) -> None:
        for each in self.groups(group):
            each["params"].reverse()

    def groups(self, group: int) -> list[dict[str, Any]]:
        """The same parameter group on both sides."""
        all_groups = [side.optimizer.param_groups for side in (self.compiled, self.reference)]
        return [groups[group % len(groups)] for groups in all_groups]

    @precondition(lambda self: len(self.compiled.weights) < 8)
    @between(shapes=shapes, seed=seeds, options=options, lr=kinds(*NUMBERS), frozen=kinds("none", "frozen weights too"))
    def add_group(self, shapes: list[str], seed: int, options: str, lr: str, frozen: str) -> None:
        chosen = {**GROUP_OPTIONS, **RARE_GROUP_OPTIONS}[options]
        if options == "decouple_lr" and self.compiled.optimizer.decays_by_penalty:
            chosen = {}
        for side in (self.compiled, self.reference):
            more = new_weights(shapes, (BF16,), seed) + (frozen_weights() if frozen != "none" else [])
            value = chosen.get("lr", 0.5)
            own = {**chosen, "lr": number(lr, value) if side is self.compiled else rounded(value)}
            side.optimizer.add_param_group({"params": more, **own})
            side.model.weights.extend(more)

    @between(place=places, thaw=st.booleans())
    def freeze(self, place: int, thaw: bool) -> None:
        place = self.at(place)
        (self.frozen.discard if thaw else self.frozen.add)(place)
        for side in (self.compiled, self.reference):
            side.weights[place].requires_grad_(thaw)

    @between(dtype=st.sampled_from([FP32, BF16, torch.float64]))
    def set_default_dtype(self, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)

    @between(threads=st.integers(1, 2))
    def set_num_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @between(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        for w in self.compiled.weights:
            if w.grad is not None and not set_to_none and 0 in w.grad.stride():
                w.grad = w.grad.clone(memory_format=torch.contiguous_format)  # torch cannot write to expanded ones
        for side in (self.compiled, self.reference):
            side.optimizer.zero_grad(set_to_none)

    # Weights and states.

    @between(place=places, how=kinds(*WEIGHT_CHANGES), seed=seeds)
    def write_to_a_weight(self, place: int, how: str, seed: int) -> None:
        place = self.at(place)
        for side in (self.compiled, self.reference):
            WEIGHT_CHANGES[how](side.weights[place], seed)

    @between(place=places, layout=kinds(*LAYOUTS))
    def replace_data(self, place: int, layout: str) -> None:
        w = self.compiled.weights[self.at(place)]
        w.data = LAYOUTS[layout](w.data)

    @between(place=places, change=kinds(*STATE_CHANGES))
    def change_states(self, place: int, change: str) -> None:
        place = self.at(place)
        if self.compiled.states()[place]:
            for side in (self.compiled, self.reference):
                STATE_CHANGES[change](side, side.weights[place])

    # Copies and checkpoints. The reference loads what the compiled side saved.

    @between()
    def look(self) -> None:
        ours, theirs = (side.optimizer.state_dict() for side in (self.compiled, self.reference))
        assert not (found := difference(ours, theirs, "state_dict")), found
        memory, expected = (side.optimizer.memory() for side in (self.compiled, self.reference))
        assert {**memory, "plan": 0} == {**expected, "plan": 0}  # each side has its own plan

    @between()
    def load_own_state_dict(self) -> None:
        self.compiled.optimizer.load_state_dict(self.compiled.optimizer.state_dict())

    @between()
    def remember_state_dict(self) -> None:
        self.remembered = deep_copied(self.compiled.optimizer.state_dict())

    @precondition(lambda self: self.remembered is not None)
    @between()
    def load_remembered_state_dict(self) -> None:
        self.same_outcome(lambda side: side.optimizer.load_state_dict(deep_copied(self.remembered)))

    @between(how=kinds("deepcopy", "pickle"))
    def go_on_with_a_copy(self, how: str) -> None:
        left = self.compiled.tensors()
        self.left = list(zip(left, copied(left), strict=True))
        pair = self.compiled.model, self.compiled.optimizer
        self.compiled = Side(*(deep_copied(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))))
        for side in (self.compiled, self.reference):
            side.optimizer.zero_grad()  # torch copies weights without gradients

    @between()
    def save_file(self) -> None:
        save(self.file, self.compiled.model, self.compiled.optimizer)

    @precondition(lambda self: self.file.exists())
    @between()
    def load_file(self) -> None:
        self.same_outcome(lambda side: load(self.file, side.model, side.optimizer))

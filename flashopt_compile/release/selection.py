"""Some of an optimizer's parameters, stepped by a plan of their own on the road of every step."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashopt_compile import stepping
from flashopt_compile.engine.plan import Plan
from flashopt_compile.engine.planner import Workspace


class _Places(NamedTuple):
    """Where some parameters lie in one of the optimizer's groups, and what they are called."""

    group: int
    places: list[int]
    names: list[str]
    parameters: list[Tensor]


class Selection:
    """Parameters of an optimizer that are stepped together.

    They are stepped as by an optimizer of the same class, which has groups, options and states of the real one as they
    are at each step, and a plan of its own.
    """

    def __init__(self, optimizer: stepping.Stepped, parameters: Sequence[Tensor], workspace: Workspace) -> None:
        self._parameters, self._workspace = parameters, workspace
        self._places = _find(optimizer, parameters)
        self.plan: Plan | None = None

    def step(self, real: stepping.Stepped) -> None:
        """Step those that have a gradient."""
        if not all(self._is_in_place(real, each) for each in self._places):
            self._places = _find(real, self._parameters)
        if not all(map(real.state.get, self._parameters)):
            stepping.trained(real)  # makes the states of all parameters, as an ordinary first step does
        own: Any = object.__new__(type(real))
        vars(own).update(vars(real))
        own.param_groups = [
            {**real.param_groups[each.group], "params": each.parameters, "param_names": each.names}
            for each in self._places
        ]
        own.state = {each: real.state[each] for each in self._parameters if each in real.state}
        own.plan, own.workspace = self.plan, self._workspace
        try:
            stepping.take(own)
        finally:
            self.plan = own.plan

    @staticmethod
    def _is_in_place(optimizer: stepping.Stepped, known: _Places) -> bool:
        """Whether parameters are still where they were in the optimizer's groups."""
        groups = optimizer.param_groups
        params = groups[known.group]["params"] if known.group < len(groups) else []
        return all(
            place < len(params) and params[place] is each
            for place, each in zip(known.places, known.parameters, strict=True)
        )


def _find(optimizer: stepping.Stepped, parameters: Sequence[Tensor]) -> list[_Places]:
    wanted, found = set(map(id, parameters)), []
    for number, group in enumerate(optimizer.param_groups):
        named = stepping.named(number, group)
        places = [place for place, (_, each) in enumerate(named) if id(each) in wanted]
        if places:
            names, own = zip(*(named[place] for place in places), strict=True)
            found.append(_Places(number, places, list(names), list(own)))
    return found


class Selections:
    """The selections that an optimizer has been asked to step. Their plans share a workspace."""

    def __init__(self, optimizer: stepping.Stepped) -> None:
        self._optimizer = weakref.ref(optimizer)  # which has this, and is to be freed as soon as it is dropped
        self._workspace = Workspace()
        self._known: dict[tuple[int, ...], Selection] = {}
        self._latest: dict[int, tuple[int, ...]] = {}  # the selection that a parameter was last stepped in

    def step(self, parameters: Sequence[Tensor]) -> None:
        """Step some parameters by a plan of their own, which is kept until one of them is stepped with others."""
        optimizer = self._optimizer()
        assert optimizer is not None
        key = tuple(map(id, parameters))
        selection = self._known.get(key)
        if selection is None:
            for former in {self._latest[each] for each in key if each in self._latest}:
                self._known.pop(former, None)
            selection = self._known[key] = Selection(optimizer, tuple(parameters), self._workspace)
            self._latest |= dict.fromkeys(key, key)
        selection.step(optimizer)

    @property
    def bytes(self) -> int:
        """What they keep between steps."""
        return self._workspace.bytes + sum(each.plan.bytes for each in self._known.values() if each.plan is not None)

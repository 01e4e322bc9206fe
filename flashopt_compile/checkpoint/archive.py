"""Read a checkpoint without the program that wrote it: rebuild its weights and optimizer from the file alone."""

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashopt_compile.checkpoint import beside, file
from flashopt_compile.checkpoint.marks import found_by_marks
from flashopt_compile.checkpoint.states import STAMP, check_frame
from flashopt_compile.checkpoint.values import described
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.optimizers import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW

OPTIMIZERS = {each.__name__: each for each in (FlashAdamW, FlashAdam, FlashSGD, FlashSGDW, FlashLion)}
# The names of a checkpoint's parts, ours and other libraries'.
MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = (
    *("optimizer", "optimizer_state_dict", "optim", "opt"),
    "optimizer_states",  # Lightning's, a list
)
STATISTICS = ("running_mean", "running_var")  # buffers; a state dict does not tell them from parameters


class Weights(nn.Module):
    """A checkpoint's model: tensors by key. Some of them are parameters; tied ones are one tensor."""

    def __init__(self, tensors: Mapping[str, Any], parameters: list[list[str]], metadata: Mapping[str, Any]) -> None:
        super().__init__()
        self.tensors = dict(tensors)
        self.metadata = metadata
        self.held: list[nn.Parameter] = []
        for number, keys in enumerate(parameters):
            if not keys or not all(isinstance(tensors.get(key), Tensor) for key in keys):
                raise ValueError(f"parameter {number} of the optimizer is not among the model's tensors.")
            parameter = nn.Parameter(tensors[keys[0]].clone())
            self.held.append(parameter)
            self.tensors |= dict.fromkeys(keys, parameter)

    def state_dict(self, *args: Any, **options: Any) -> OrderedDict[str, Any]:
        found = OrderedDict(self.tensors)
        found._metadata = self.metadata  # pyright: ignore[reportAttributeAccessIssue]
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        for key, value in state_dict.items():
            self.tensors[key].data.copy_(value)


@dataclass(frozen=True)
class Archive:
    """The content of a file from any writer."""

    path: str
    files: tuple[str, ...]
    content: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Archive":
        """Read and verify a file; ValueError unless it holds a model and an optimizer.

        A folder is searched for the optimizer's file, and a file of an optimizer alone has its model beside it.
        """
        path = beside.optimizer_file(Path(path))
        content, files = file.read(path), [path]
        if {"state", "param_groups"} <= content.keys():
            files += beside.weight_files(path)
            weights: dict[str, Any] = {}
            for each in files[1:]:
                weights |= beside.read_safetensors(each) if each.suffix == ".safetensors" else file.read(each)
            content = {"model": weights, "optimizer": content}
        found = []
        for what, keys in (("model", MODEL_KEYS), ("optimizer", OPTIMIZER_KEYS)):
            values = (_only(content.get(key)) for key in keys)
            part = next((value for value in values if isinstance(value, dict)), None)
            if part is None:
                raise ValueError(
                    f"{path} has no {what}: its keys are {described(list(content))}, not {' or '.join(keys)}."
                )
            found.append(dict(part))
        check_frame(str(path), found[1])
        return cls(str(path), tuple(map(str, files)), content, *found)

    @property
    def extra(self) -> dict[str, Any]:
        return self.content.get("extra", {})

    @property
    def parameters(self) -> list[list[str]]:
        """The model's keys for each of the optimizer's parameters: from the file, by their weights, or by their order.

        ValueError if they cannot be matched.
        """
        return self._matched[0]

    @property
    def guessed(self) -> int:
        """How many parameters have a double among the weights and were told apart by the order of their names."""
        return self._matched[1]

    @cached_property
    def _matched(self) -> tuple[list[list[str]], int]:
        if isinstance(self.content.get("parameters"), list):
            return self.content["parameters"], 0
        groups = self.optimizer["param_groups"]
        names = [str(name) for group in groups for name in group.get("param_names", group["params"])]
        if all(name in self.model for name in names):
            return [[name] for name in names], 0
        weights = {
            key: value
            for key, value in self.model.items()
            if isinstance(value, Tensor) and value.is_floating_point() and not key.endswith(STATISTICS)
        }
        marks = (self.optimizer.get(STAMP) or {}).get("marks")
        if marks:
            try:
                return found_by_marks(marks, weights)
            except ValueError as error:
                raise ValueError(f"{self.files[-1]} {error}") from None
        return self._by_order(list(weights), len(names)), 0

    def _by_order(self, keys: list[str], count: int) -> list[list[str]]:
        if self.files[-1].endswith(".safetensors"):
            raise ValueError(
                f"{self.path} does not say which parameter is which, and {self.files[-1]} sorts them by name; give the "
                "optimizer model.named_parameters(), or save once more with version 0.7 or later."
            )
        if len(keys) != count:
            raise ValueError(
                f"{self.path} has {len(keys)} floating-point tensors in its model and {count} parameters in its "
                "optimizer, so they cannot be matched by their order; load it in your program instead."
            )
        return [[key] for key in keys]

    def kind(self, given: str | None = None) -> type[FlashOptimizer]:
        """Our class for the file's optimizer: the class that wrote it, or the one to convert it to."""
        name = self.optimizer.get(STAMP, {}).get("optimizer") or given or self._guess()
        if name not in OPTIMIZERS:
            raise ValueError(
                f"{self.path} is of the optimizer {described(name)}; known here are {', '.join(OPTIMIZERS)}; "
                "choose one with --optimizer."
            )
        return OPTIMIZERS[name]

    def _guess(self) -> str | None:
        """Guess the class from torch.optim's options. Other libraries do not say."""
        group = dict(next(iter(self.optimizer["param_groups"]), {}))
        if "decoupled_weight_decay" in group:
            return "FlashAdamW" if group["decoupled_weight_decay"] else "FlashAdam"
        return "FlashSGD" if "momentum" in group and "nesterov" in group else None

    def revive(self, kind: str | None = None, dtype: torch.dtype | None = None) -> tuple[Weights, FlashOptimizer]:
        """Rebuild weights and optimizer. Given a `dtype`, split parameters into heads of that dtype and tails."""
        cls = self.kind(kind)
        if dtype is not None and STAMP in self.optimizer:
            raise ValueError(f"{self.path} is ours already; a dtype is for the fp32 weights of other libraries.")
        weights = Weights(self.model, self.parameters, self.content.get("metadata", {}))
        exact: dict[str, Any] = {}
        if dtype is not None:
            for parameter, keys in zip(weights.held, self.parameters, strict=True):
                exact |= dict.fromkeys(keys, parameter.detach().float())
                parameter.data = parameter.detach().to(dtype)
        groups, first = [], 0
        for group in self.optimizer["param_groups"]:
            count = len(group["params"])
            groups.append({"params": weights.held[first : first + count]})
            first += count
        optimizer = cls(groups, eager=True)
        optimizer.load_state_dict(self.optimizer)
        if exact:
            optimizer.set_fp32_model_state_dict(weights, exact, strict=False)
        return weights, optimizer


def _only(value: Any) -> Any:
    """The only item of a list, or anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value

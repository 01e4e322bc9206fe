"""Read a checkpoint without the program that wrote it: rebuild its weights and optimizer from the file alone."""

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashopt_compile.checkpoint import file
from flashopt_compile.checkpoint.states import STAMP, check_frame
from flashopt_compile.checkpoint.values import described
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.optimizers import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW

OPTIMIZERS = {each.__name__: each for each in (FlashAdamW, FlashAdam, FlashSGD, FlashSGDW, FlashLion)}
# The names of a checkpoint's parts, ours and other libraries'.
MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")
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
    content: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Archive":
        """Read and verify a file; ValueError unless it holds a model and an optimizer."""
        content = file.read(path)
        found = []
        for what, keys in (("model", MODEL_KEYS), ("optimizer", OPTIMIZER_KEYS)):
            part = next((content[key] for key in keys if isinstance(content.get(key), dict)), None)
            if part is None:
                raise ValueError(
                    f"{path} has no {what}: its keys are {described(list(content))}, not {' or '.join(keys)}."
                )
            found.append(dict(part))
        check_frame(str(path), found[1])
        return cls(str(path), content, *found)

    @property
    def extra(self) -> dict[str, Any]:
        return self.content.get("extra", {})

    @property
    def parameters(self) -> list[list[str]]:
        """The model's keys for each of the optimizer's parameters, from the file or else by their order."""
        if isinstance(self.content.get("parameters"), list):
            return self.content["parameters"]
        groups = self.optimizer["param_groups"]
        if all("param_names" in group for group in groups):
            return [[name] for group in groups for name in group["param_names"]]
        count = sum(len(group["params"]) for group in groups)
        keys = [
            key
            for key, value in self.model.items()
            if isinstance(value, Tensor) and value.is_floating_point() and not key.endswith(STATISTICS)
        ]
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

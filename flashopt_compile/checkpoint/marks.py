"""Marks by which the parameters of a saved optimizer are found again among weights that were saved elsewhere.

Trainer and Accelerate write optimizer and model into separate files, and safetensors sorts a model's weights by name,
so that their order no longer says which is which. A mark is a checksum of up to 64 elements of a weight.
"""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

ELEMENTS = 64


def marks_of(parameters: Sequence[Tensor]) -> list[int]:
    """The mark of each parameter; none at all if one is sharded or has no values."""
    if any(type(each) not in (Tensor, Parameter) or each.is_meta for each in parameters):
        return []
    samples = [_sample(each.detach()) for each in parameters]
    together: dict[torch.device, list[Tensor]] = {}
    for sample in samples:
        together.setdefault(sample.device, []).append(sample)
    read = {device: iter(bytes(torch.cat(each).tolist())) for device, each in together.items()}  # one copy per device
    return [
        zlib.crc32(
            bytes(next(read[sample.device]) for _ in range(sample.numel())),
            zlib.crc32(f"{each.dtype} {tuple(each.shape)}".encode()),
        )
        for each, sample in zip(parameters, samples, strict=True)
    ]


def _sample(tensor: Tensor) -> Tensor:
    """The bytes of elements from all over a tensor, however it lies in memory."""
    count = tensor.numel()
    shape = tuple(tensor.shape) or (1,)
    taken = min(ELEMENTS, count)
    places = torch.tensor([number * count // taken for number in range(taken)], dtype=torch.int64, device=tensor.device)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    at = tuple(
        places.div(stride, rounding_mode="floor").remainder(size) if count else places
        for size, stride in zip(shape, strides, strict=True)
    )
    return tensor.reshape(shape)[at].contiguous().view(torch.uint8)


def found_by_marks(marks: Sequence[int], weights: Mapping[str, Tensor]) -> tuple[list[list[str]], int]:
    """The keys of each marked parameter, and how many were told apart by their order alone, as their weights are equal.

    ValueError, with the end of a sentence, if a parameter is not among the weights.
    """
    of_key = dict(zip(weights, marks_of(list(weights.values())), strict=True))
    keys: dict[int, list[str]] = {}
    for key in sorted(weights, key=_in_natural_order):
        keys.setdefault(of_key[key], []).append(key)
    wanted: dict[int, int] = {}
    for mark in marks:
        wanted[mark] = wanted.get(mark, 0) + 1
    found: list[list[str]] = []
    taken: dict[int, int] = {}
    for number, mark in enumerate(marks):
        own, place = keys.get(mark, []), taken.get(mark, 0)
        if place >= len(own):
            raise ValueError(
                f"has no weight for parameter {number} of the optimizer; were both saved at the same step?"
            )
        taken[mark] = place + 1
        memory = weights[own[place]].data_ptr()
        tied = [key for key in own if key != own[place] and weights[key].data_ptr() == memory]
        found.append([own[place], *(tied if wanted[mark] == 1 else [])])
    return found, sum(count for count in wanted.values() if count > 1)


def _in_natural_order(key: str) -> list[Any]:
    """Layer 10 comes after layer 9."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", key)]

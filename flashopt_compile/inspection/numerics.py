"""Numerical health: updates too small to store, and the state of the codes while training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashopt_compile.engine.step import Numbers, Place, Step
from quant.format import Raw
from quant.grouped import Grouped
from quant.split import Split

# Per parameter. Enough to see a fraction of one in a thousand, few enough to be quick.
SAMPLE_ELEMENTS = 1 << 16


class NumericsError(RuntimeError):
    """Updates are too small for the format the weights are stored in."""


@dataclass(frozen=True)
class Health:
    """Fractions of the stored numbers of a parameter group.

    `nonfinite`: weights and states that are Inf or NaN, counted over all of them. The others are measured on a sample
    of each parameter. `saturated`: codes at the end of their range (by construction, each group has one). `zeroed`:
    codes of zero in groups that are not all zero. `stalled`: weights whose next update, with the current gradient, is
    not zero and less than half of what can be stored. "nearest" rounding loses such updates; "dither" keeps them on
    average.
    """

    saturated: float
    zeroed: float
    stalled: float
    nonfinite: float


def health(parameters: Iterator[tuple[Step, list[Tensor], Tensor, Numbers]]) -> Health:
    """The health of a parameter group's parameters, each given as the arguments of its step."""
    counted = dict.fromkeys(("saturated", "zeroed", "stalled", "nonfinite"), 0)
    codes_seen = weights_seen = values_seen = 0
    for step, tensors, t, hyper in parameters:
        counted["nonfinite"] += nonfinite(step, tensors)
        values_seen += tensors[0].numel() * (1 + len(step.storage.states))
        for block in sampled(step, tensors):
            head, _, *stored = block
            beside = len(step.storage.weight.names) - 1
            weight_parts, stored = (head, *stored[:beside]), stored[beside:]
            for _, format in step.storage.states:
                parts, stored = stored[: len(format.names)], stored[len(format.names) :]
                if isinstance(format, Grouped):
                    codes, scales = parts
                    codes_seen += codes.numel()
                    counted["saturated"] += int((codes.to(torch.int16).abs() == format.levels).sum())
                    counted["zeroed"] += int(((codes == 0) & (scales > 0)).sum())
            _, by = step.compute(block, t + 1, Place.at(0), hyper)
            half_code = step.storage.weight.resolution(*weight_parts) / 2
            weights_seen += head.numel()
            counted["stalled"] += int(((by != 0) & (by.abs() < half_code)).sum())
    return Health(
        saturated=counted["saturated"] / max(1, codes_seen),
        zeroed=counted["zeroed"] / max(1, codes_seen),
        stalled=counted["stalled"] / max(1, weights_seen),
        nonfinite=counted["nonfinite"] / max(1, values_seen),
    )


def has_nonfinite(grads: Sequence[Tensor]) -> bool:
    """True if any gradient has an Inf or NaN. A graph that the caller is compiling cannot ask this."""
    if grads and torch.compiler.is_compiling():
        raise RuntimeError(
            "skip_nonfinite=True decides on the gradients' values, which torch.compile(opt.step) cannot."
        )
    # The extremes show any Inf or NaN and need no memory.
    return any(not bool(extreme.isfinite()) for grad in grads if grad.numel() for extreme in grad.aminmax())


def nonfinite(step: Step, tensors: Sequence[Tensor]) -> int:
    """Count a parameter's weights and states that are Inf or NaN."""
    count = 0
    for _, (head, _, *stored) in step.storage.blocks(tuple(tensors[0].shape), [each.contiguous() for each in tensors]):
        count += int((~head.isfinite()).sum())
        stored = stored[len(step.storage.weight.names) - 1 :]
        for _, format in step.storage.states:
            values, *scales = stored[: len(format.names)]
            stored = stored[len(format.names) :]
            # A non-finite group has a non-finite scale.
            count += (
                int((~scales[0].isfinite()).sum()) * values.shape[-1] if scales else int((~values.isfinite()).sum())
            )
    return count


def sampled(step: Step, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Copy evenly spaced groups from all over a parameter. The short groups that end rows are a separate block."""
    every = tensors[0].numel() // SAMPLE_ELEMENTS | 1  # odd, so that samples do not stay in the same columns
    kinds: dict[tuple[int, int], list[list[Tensor]]] = {}
    for _, block in step.storage.blocks(tuple(tensors[0].shape), [tensor.contiguous() for tensor in tensors]):
        groups = [tensor.flatten(0, -2)[::every] if tensor.dim() == 3 else tensor[::every] for tensor in block]
        kinds.setdefault((block[0].dim(), block[0].shape[-1] if block[0].dim() > 1 else 1), []).append(groups)
    return [[torch.cat(pieces) for pieces in zip(*blocks, strict=True)] for blocks in kinds.values()]


def check_numerics(name: str, step: Step, tensors: Sequence[Tensor], t: Tensor, hyper: Numbers) -> None:
    """Raise NumericsError if the update of the group that holds the largest weight rounds to nothing.

    Dither keeps updates on average that are far below a weight's resolution, but not all of them.
    """
    if not tensors[0].numel():
        return
    blocks = step.storage.blocks(tuple(tensors[0].shape), [tensor.contiguous() for tensor in tensors])
    _, block = max(blocks, key=lambda pair: float(pair[1][0].abs().max()))
    row = int(block[0].abs().argmax()) // max(1, block[0].numel() // len(block[0]))
    group = [tensor[row : row + 1] for tensor in block]
    _, by = step.compute(group, t, Place.at(0), hyper)
    head, _, *stored = group
    weight = step.storage.weight
    is_dithered = step.rounding == "dither" and weight.dithered_share < 1
    resolution = float(weight.resolution(head, *stored[: len(weight.names) - 1]).max())
    resolution *= weight.dithered_share if is_dithered else 1
    largest = float(by.abs().max())
    if 0 < largest < resolution / 2:
        is_widest = isinstance(weight, Raw) or (isinstance(weight, Split) and weight.tail == torch.int16)
        remedies = ["raise lr", *([] if is_widest else ["use master_weight_bits=32"])]
        if step.rounding == "nearest" and not isinstance(weight, Raw):
            remedies.append("use rounding='dither'")
        raise NumericsError(
            f"parameter {name}: with lr {float(hyper['lr']):.3g} the largest weight, {float(head.abs().max()):.3g}, "
            f"would move by {largest:.3g}, less than half its resolution of {resolution:.3g}"
            f"{' under dither' if is_dithered else ''}; {' or '.join(remedies)}."
        )

"""Hyper-parameters as rules take them: tensors that stay, with values that follow."""

from typing import Any

import pytest
import torch

from flashopt_compile.hyper import KeptNumbers, as_numbers, flat


def values_of(numbers: dict[str, Any]) -> list[float]:
    return [number.item() for number in flat(numbers)]


def test_numbers_stay_the_same_tensors_while_their_values_change():
    kept = KeptNumbers()
    first = kept.of({"lr": 0.5, "betas": (0.25, 0.75), "eps": 1})
    tensors = flat(first)
    assert values_of(first) == [0.5, 0.25, 0.75, 1.0]
    second = kept.of({"lr": 2, "betas": (0.5, 0.0), "eps": 0.125})
    assert second is first and all(a is b for a, b in zip(flat(second), tensors, strict=True))
    assert values_of(first) == [2.0, 0.5, 0.0, 0.125]
    assert isinstance(first["betas"], tuple) and all(number.dtype == torch.float32 for number in tensors)


def test_other_names_or_more_of_them_are_other_numbers():
    kept = KeptNumbers()
    first = kept.of({"lr": 0.5})
    assert kept.of({"lr": 0.5, "momentum": 0.25}) is not first
    assert values_of(kept.of({"lr": (0.5, 0.25), "momentum": 1.0})) == [0.5, 0.25, 1.0]


@pytest.mark.parametrize("lr", [torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64), [0.5]])
def test_what_may_change_unnoticed_is_looked_at_each_time(lr: Any):
    kept, values = KeptNumbers(), {"lr": lr}
    first = kept.of(values)
    lr[... if isinstance(lr, torch.Tensor) else 0] = 0.25
    assert kept.of(values) is not first
    assert values_of(kept.of(values)) == [0.25]


def test_a_users_tensor_is_not_written_to():
    kept, lr = KeptNumbers(), torch.tensor(0.5)
    kept.of({"lr": lr})
    kept.of({"lr": 0.25})
    kept.of({"lr": 0.125})
    assert lr.item() == 0.5


def test_a_value_that_is_no_number_changes_nothing():
    kept = KeptNumbers()
    numbers = kept.of({"lr": 0.5, "eps": 0.25})
    with pytest.raises((TypeError, ValueError)):
        kept.of({"lr": 0.125, "eps": "small"})
    assert values_of(kept.of({"lr": 0.5, "eps": 0.25})) == values_of(numbers) == [0.5, 0.25]


def test_all_numbers_are_as_exact_as_fp32():
    assert values_of(as_numbers({"lr": 0.1})) == [torch.tensor(0.1).item()]

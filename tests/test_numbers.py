"""Rules' hyper-parameters: the tensors stay the same, and their values follow the schedule."""

from typing import Any

import pytest
import torch

from flashopt_compile.engine.numbers import KeptNumbers, as_numbers, flat


def values_of(numbers: dict[str, Any]) -> list[float]:
    return [number.item() for number in flat(numbers)]


def test_numbers_stay_the_same_tensors_while_their_values_change():
    kept = KeptNumbers({"lr": 0.5, "betas": (0.25, 0.75), "eps": 1})
    first, tensors = kept.numbers, flat(kept.numbers)
    assert values_of(first) == [0.5, 0.25, 0.75, 1.0]
    kept.set({"lr": 2, "betas": (0.5, 0.0), "eps": 0.125})
    assert kept.numbers is first and all(a is b for a, b in zip(flat(first), tensors, strict=True))
    assert values_of(first) == [2.0, 0.5, 0.0, 0.125]
    assert isinstance(first["betas"], tuple)
    assert all(number.dtype == torch.float32 and number.shape == () for number in tensors)


def test_no_two_numbers_share_memory():
    """This holds for equal values too, as betas may be equal for a while."""
    kept = KeptNumbers({"lr": 0.5, "betas": [0.5, 0.5]})
    assert len({number.data_ptr() for number in flat(kept.numbers)}) == 3
    kept.set({"lr": 0.5, "betas": [0.5, 0.25]})
    assert values_of(kept.numbers) == [0.5, 0.5, 0.25]


@pytest.mark.parametrize("lr", [torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64), [0.5]])
def test_a_tensor_or_list_that_was_written_to_is_read_again(lr: Any):
    values = {"lr": lr}
    kept = KeptNumbers(values)
    lr[... if isinstance(lr, torch.Tensor) else 0] = 0.25
    kept.set(values)
    assert values_of(kept.numbers) == [0.25]


def test_a_users_tensor_is_neither_kept_nor_written_to():
    lr = torch.tensor(0.5)
    kept = KeptNumbers({"lr": lr})
    kept.set({"lr": 0.25})
    assert lr.item() == 0.5 and values_of(kept.numbers) == [0.25]
    kept.set({"lr": lr})
    lr.fill_(0.125)
    assert values_of(kept.numbers) == [0.5]


def test_a_value_that_is_not_a_number_changes_nothing():
    kept = KeptNumbers({"lr": 0.5, "eps": 0.25})
    with pytest.raises((TypeError, ValueError)):
        kept.set({"lr": 0.125, "eps": "small"})
    assert values_of(kept.numbers) == [0.5, 0.25]
    kept.set({"lr": 0.125, "eps": 0.25})
    assert values_of(kept.numbers) == [0.125, 0.25]


def test_numbers_are_rounded_to_fp32_once():
    for numbers in (as_numbers({"lr": 0.1}), KeptNumbers({"lr": 0.1}).numbers):
        assert values_of(numbers) == [torch.tensor(0.1).item()]

"""Steps are counted together and belong to each parameter alone."""

import copy

import torch
from training import give_gradients, parameters

from flashopt_compile import FlashAdamW
from flashopt_compile.count import Count


def test_each_is_counted_in_whatever_company():
    steps = [torch.tensor(float(number)) for number in range(4)]
    same, count = list(steps), None
    for company in ((0, 1, 2, 3), (0, 1, 2, 3), (1, 3), (0, 1), (1, 3), (1, 3)):
        counted = tuple(steps[number] for number in company)
        if count is None or not count.is_of(counted) or not count.up():
            count = Count(counted)
            assert count.up()
        assert count.taken() == [step.item() for step in counted]
    assert [step.item() for step in steps] == [3.0, 7.0, 4.0, 8.0]
    assert all(step is before and step.shape == () for step, before in zip(steps, same, strict=True))


def test_a_count_that_was_set_or_replaced_is_counted_on():
    optimizer = FlashAdamW(params := parameters([(8,), (9,), (10,)]), eager=True)
    for number in range(2):
        give_gradients(params, number)
        optimizer.step()
    optimizer.state[params[0]]["step"].fill_(10)
    optimizer.state[params[1]]["step"] = torch.tensor(20.0)
    optimizer.state[params[2]]["step"].data = torch.tensor(30.0)
    give_gradients(params, 2)
    optimizer.step()
    optimizer.state[params[2]]["step"].data = torch.tensor(40.0)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [12.0, 22.0, 41.0]


def test_a_copy_counts_for_itself():
    optimizer = FlashAdamW(params := parameters([(8,), (9,)]), eager=True)
    give_gradients(params, 0)
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    own = copied.param_groups[0]["params"]
    give_gradients(own, 1)
    copied.step()
    assert [copied.state[p]["step"].item() for p in own] == [2.0, 2.0]
    assert [optimizer.state[p]["step"].item() for p in params] == [1.0, 1.0]
    other = FlashAdamW(again := parameters([(8,), (9,)]), eager=True)
    other.load_state_dict(optimizer.state_dict())
    give_gradients(again, 1)
    other.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1.0, 1.0]

"""Copies between memory orders give torch's own bits, bound or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from training import assert_identical, stored, train

from flashopt_compile import FlashSGD
from flashopt_compile.engine import planner
from flashopt_compile.engine.kernel import run_at_once
from flashopt_compile.inductor import bind, copies, gcc, interleave, probes, transpose
from flashopt_compile.inductor import compile as inductor


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A target and a source of one shape, each with an order of its own."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    made = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape))))
        padded = [shape[dim] + draw(st.integers(0, 2)) for dim in order]
        whole = torch.arange(torch.Size(padded).numel(), dtype=torch.float32).view(padded)
        cut = whole[tuple(slice(shape[dim]) for dim in order)]
        made.append(cut.permute([order.index(dim) for dim in range(len(shape))]))
    return made[0], made[1]


@given(pairs())
def test_a_form_names_the_same_elements(pair: tuple[Tensor, Tensor]):
    target, source = pair
    for form in interleave.forms_of(target.shape, target.stride(), source.stride()):
        expected = target.clone(memory_format=torch.preserve_format).copy_(source)
        form.view_target(target).copy_(form.view_source(source))
        assert torch.equal(target, expected)
        target.zero_()


@pytest.mark.parametrize("rows", [64, 70])
def test_the_usual_orders_have_a_form(rows: int):
    matrix, wide = torch.zeros(80, rows).t(), torch.zeros(650, rows).t()
    image = torch.zeros(rows, 12, 3, 3).contiguous(memory_format=torch.channels_last)
    for tensor in (matrix, wide, image, matrix[3:9], wide[3:9], image[2:5]):
        strides = tensor.contiguous().stride()
        there = interleave.forms_of(tensor.shape, strides, tensor.stride())[-1]
        back = interleave.forms_of(tensor.shape, tensor.stride(), strides)[-1]
        assert isinstance(there, transpose.Form) and isinstance(back, transpose.Form)
        assert there[:3] != (1, 1, 1) and back[0] * back[1] * back[2] == tensor.numel()
        numbered = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
        back.view_target(tensor).copy_(back.view_source(numbered))
        assert torch.equal(tensor, numbered)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("channels", [64, 256])
def test_filters_are_interleaved_both_ways(size: int, channels: int):
    """The views of a form name the same elements, of all filters and of some."""
    image = torch.zeros(6, channels, size, size).contiguous(memory_format=torch.channels_last)
    for tensor in (image, image[2:5], image[3:4]):
        numbered = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
        there = interleave.forms_of(tensor.shape, numbered.stride(), tensor.stride())[0]
        back = interleave.forms_of(tensor.shape, tensor.stride(), numbered.stride())[0]
        assert isinstance(there, interleave.Form) and isinstance(back, interleave.Form)
        assert (there.way.apart, back.way.apart) == (False, True)
        back.view_target(tensor).copy_(back.view_source(numbered))
        assert torch.equal(tensor, numbered)
        contiguous = torch.zeros_like(numbered)
        there.view_target(contiguous).copy_(there.view_source(tensor))
        assert torch.equal(contiguous, numbered)


@pytest.mark.parametrize("shape", [(6, 100, 3, 3), (6, 128, 5, 5), (6, 64, 1, 1)])
def test_other_filters_are_not_interleaved(shape: tuple[int, ...]):
    image = torch.zeros(shape).contiguous(memory_format=torch.channels_last)
    strides = torch.zeros(shape).stride()
    for orders in ((strides, image.stride()), (image.stride(), strides)):
        assert not any(isinstance(form, interleave.Form) for form in interleave.forms_of(shape, *orders))


def weights() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    made = [
        torch.randn(300, 320, generator=random).t(),
        torch.randn(640, 200, generator=random).t(),  # wide: in blocks of columns
        torch.randn(64, 130, 3, 3, generator=random).to(memory_format=torch.channels_last),
    ]
    return [torch.nn.Parameter(each.to(torch.bfloat16)) for each in made]


def trained(eager: bool) -> list[Tensor]:
    return stored(train(FlashSGD(weights(), lr=0.05, eager=eager), range(3)))


def copiers(kind: type) -> list[Any]:
    return [each for key, each in inductor._kernels.items() if isinstance(key[0], kind)]


def test_transposed_and_channels_last_weights_have_the_eager_bits():
    assert_identical(trained(eager=False), trained(eager=True))
    found = copiers(transpose.Way)  # and those of other tests, in other dtypes
    assert found and all(isinstance(each, copies.Copier) for each in found)


def test_every_bit_of_interleaved_filters_is_copied():
    """NaN of any kind included, as elements are copied as integers."""
    if not gcc.loops_for_gcc():
        pytest.skip("another compiler than gcc")
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(9)[: 70 * 64 * 9 * 9].view(-1, 64, 9)
    filters = bits.view(torch.bfloat16).view(-1, 64, 3, 3).clone()
    apart = torch.zeros_like(filters).contiguous(memory_format=torch.channels_last)
    again = torch.zeros_like(filters)
    for target, source in ((apart, filters), (again, apart)):
        (form, _) = interleave.forms_of(target.shape, target.stride(), source.stride())
        found = inductor._remembered((form.way, torch.int16), lambda: inductor._copier(form.way, torch.int16))  # noqa: B023
        run_at_once(found.bind(form)(target, source))
        assert torch.equal(target.contiguous().view(torch.int16), filters.view(torch.int16))


def image_weights() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(60, 128, 3, 3, generator=random).to(torch.bfloat16)
    return [torch.nn.Parameter(whole.to(memory_format=torch.channels_last))]


def test_channels_last_filters_of_3x3_have_the_eager_bits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "STAGED_ELEMENTS", 128 * 9 * 25)  # in slices of 25, 25 and 10
    results = [stored(train(FlashSGD(image_weights(), lr=0.05, eager=eager), range(3))) for eager in (False, True)]
    assert_identical(*results)
    assert len(copiers(interleave.Way)) >= 2 or not gcc.loops_for_gcc()


def copy_wrongly(function: Any) -> Any:
    def copy(*arguments: Any) -> None:
        function(*arguments)
        for number, tensor in enumerate(arguments[:2]):
            tensor.as_strided((1,), (1,)).fill_(77 + number)

    return copy


@pytest.mark.parametrize("way", ["wrong elements", "not bound"])
@pytest.mark.parametrize(
    ("make", "warning"),
    [(weights, "copied by torch, up to five times slower"), (image_weights, "filters of 3×3 take about twice as long")],
)
def test_torch_copies_where_a_copy_cannot_be_bound(
    make: Callable[[], list[Tensor]], warning: str, way: str, monkeypatch: pytest.MonkeyPatch
):
    real = bind.only_call

    def only_call(*given: Any) -> Any:
        if way == "not bound":
            raise bind.Unbound("it is not there")
        function, arguments = real(*given)
        return copy_wrongly(function), arguments

    def trained(eager: bool) -> list[Tensor]:
        return stored(train(FlashSGD(make(), lr=0.05, eager=eager), range(3)))

    trained(eager=False)  # the step itself stays bound
    kinds = transpose.Way, interleave.Way
    others = {key: each for key, each in inductor._kernels.items() if not isinstance(key[0], kinds)}
    monkeypatch.setattr(inductor, "_kernels", type(inductor._kernels)(others))
    monkeypatch.setattr(probes, "_told", set())
    monkeypatch.setattr(bind, "only_call", only_call)
    with pytest.warns(RuntimeWarning, match=warning):
        found = trained(eager=False)
    assert_identical(found, trained(eager=True))


def test_copies_are_worked_out_once_for_each_order(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    real = interleave.forms_of

    def forms_of(*given: Any) -> Any:
        asked.append(given)
        return real(*given)

    monkeypatch.setattr(interleave, "forms_of", forms_of)
    weight = torch.nn.Parameter(torch.randn(300, 320).to(torch.bfloat16).t())
    opt = FlashSGD([weight], lr=0.05)
    counts = []
    for order in ("transposed", "transposed", "contiguous", "contiguous", "transposed"):
        grad = torch.ones(320, 300, dtype=torch.bfloat16)
        weight.grad = grad if order == "contiguous" else grad.t().contiguous().t()
        asked.clear()
        opt.step()
        counts.append(bool(asked))
    assert counts == [True, False, True, False, True]

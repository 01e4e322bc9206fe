"""Copies between memory orders give torch's own bits, bound or not."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from training import assert_identical, stored, train

from flashopt_compile import FlashSGD
from flashopt_compile.inductor import bind, probes, transpose
from flashopt_compile.inductor import compile as inductor


@st.composite
def copies(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
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


@given(copies())
def test_a_form_names_the_same_elements(pair: tuple[Tensor, Tensor]):
    target, source = pair
    form = transpose.form_of(target.shape, target.stride(), source.stride())
    if form is not None:
        expected = target.clone(memory_format=torch.preserve_format).copy_(source)
        form.view_target(target).copy_(form.view_source(source))
        assert torch.equal(target, expected)


@pytest.mark.parametrize("rows", [64, 70])
def test_the_usual_orders_have_a_form(rows: int):
    matrix, wide = torch.zeros(80, rows).t(), torch.zeros(650, rows).t()
    image = torch.zeros(rows, 12, 3, 3).contiguous(memory_format=torch.channels_last)
    for tensor in (matrix, wide, image, matrix[3:9], wide[3:9], image[2:5]):
        strides = tensor.contiguous().stride()
        there = transpose.form_of(tensor.shape, strides, tensor.stride())
        back = transpose.form_of(tensor.shape, tensor.stride(), strides)
        assert there is not None and back is not None
        assert there[:3] != (1, 1, 1) and back[0] * back[1] * back[2] == tensor.numel()
        numbered = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
        back.view_target(tensor).copy_(back.view_source(numbered))
        assert torch.equal(tensor, numbered)


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


def test_transposed_and_channels_last_weights_have_the_eager_bits():
    assert_identical(trained(eager=False), trained(eager=True))
    (found,) = {each for key, each in inductor._kernels.items() if key[0] is transpose}
    assert isinstance(found, transpose.Transposition)


def copy_wrongly(function: Any) -> Any:
    def copy(*arguments: Any) -> None:
        function(*arguments)
        for number, tensor in enumerate(arguments[:2]):
            tensor.as_strided((1,), (1,)).fill_(77 + number)

    return copy


@pytest.mark.parametrize("way", ["wrong elements", "not bound"])
def test_torch_copies_where_the_transposition_cannot_be_bound(way: str, monkeypatch: pytest.MonkeyPatch):
    real = bind.only_call

    def only_call(*given: Any) -> Any:
        if way == "not bound":
            raise bind.Unbound("it is not there")
        function, arguments = real(*given)
        return copy_wrongly(function), arguments

    trained(eager=False)  # the step itself stays bound
    others = {key: each for key, each in inductor._kernels.items() if key[0] is not transpose}
    monkeypatch.setattr(inductor, "_kernels", type(inductor._kernels)(others))
    for kernel in others.values():
        getattr(kernel, "transpositions", {}).clear()
    monkeypatch.setattr(probes, "_told", set())
    monkeypatch.setattr(bind, "only_call", only_call)
    with pytest.warns(RuntimeWarning, match="copied by torch, up to five times slower"):
        found = trained(eager=False)
    assert_identical(found, trained(eager=True))
    for kernel in others.values():  # for the tests that follow
        getattr(kernel, "transpositions", {}).clear()


def test_forms_are_worked_out_once_for_each_order():
    before = transpose.form_of.cache_info()
    shapes = list(itertools.product((8, 16), repeat=2))
    for _ in range(2):
        for rows, columns in shapes:
            transpose.form_of((rows, columns), (columns, 1), (1, rows))
    after = transpose.form_of.cache_info()
    assert after.misses - before.misses <= len(shapes) and after.maxsize == 256

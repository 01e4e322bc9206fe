"""The layout of groups in a tensor: every element is in one span, and views agree with plain slices."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.rows import Rows, Span, spans

sizes = st.integers(0, 40)
shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)


@given(rows=sizes, columns=st.integers(0, 300), width=st.integers(1, 100))
def test_every_element_is_in_exactly_one_span(rows: int, columns: int, width: int):
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for span in spans(rows, columns, width):
        assert span.rows == rows and span.columns == columns and 0 <= span.first < span.last <= columns
        assert span.elements == seen[:, span.first : span.last].numel() > 0
        seen[:, span.first : span.last] += 1
    assert (seen == 1).all()


@given(rows=sizes, columns=st.integers(0, 300), width=st.integers(1, 100))
def test_a_row_is_cut_into_whole_pieces_and_a_rest(rows: int, columns: int, width: int):
    cut = spans(rows, columns, width)
    assert len(cut) <= 2
    for span in cut:
        length = span.last - span.first
        assert length % width == 0 if span.first == 0 and columns >= width else length < width


@given(rows=st.integers(1, 20), columns=st.integers(1, 200), width=st.integers(1, 70))
def test_views_of_elements_agree_with_slices(rows: int, columns: int, width: int):
    tensor = torch.arange(rows * columns).view(rows, columns)
    for span in spans(rows, columns, width):
        view = span.of_elements(tensor, width)
        taken = tensor[:, span.first : span.last]
        assert view.shape == (rows, view.shape[1], min(width, taken.shape[1]))
        assert torch.equal(view.flatten(1), taken)
        assert view.data_ptr() == taken.data_ptr()
        # Any shape with as many elements works, if they are contiguous.
        assert torch.equal(span.of_elements(tensor.view(-1), width), view)


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 200),
    group_size=st.integers(1, 40),
    count=st.integers(1, 4),
)
def test_views_of_scales_agree_with_slices(rows: int, columns: int, group_size: int, count: int):
    """Each element gets its group's scale, whether a piece is one group or several."""
    groups = -(-columns // group_size)
    scales = torch.arange(rows * groups).view(rows, groups)
    of_each = scales.repeat_interleave(group_size, 1)[:, :columns]
    for span in spans(rows, columns, group_size * count):
        length = span.last - span.first
        own = scales[:, span.first // group_size : -(-span.last // group_size)]
        if length % (group_size * count) and own.shape[1] > count:
            continue  # the short end has more groups than a piece, so it is not a whole number of pieces
        view = span.of_scales(scales, group_size, count)
        assert torch.equal(view.flatten(1), own)
        assert view.shape[-1] == min(count, own.shape[1])
        assert view.data_ptr() == own.data_ptr()
        spread = view.flatten(1).repeat_interleave(group_size, 1)[:, :length]
        assert torch.equal(spread, of_each[:, span.first : span.last])


@given(rows=st.integers(1, 10), columns=st.integers(1, 100), first=st.integers(0, 99), last=st.integers(1, 100))
def test_a_span_of_any_columns_is_a_slice(rows: int, columns: int, first: int, last: int):
    last = min(last, columns)
    first = min(first, last - 1)
    span = Span(rows, columns, first, last)
    tensor = torch.arange(rows * columns).view(rows, columns)
    assert torch.equal(span.of_elements(tensor, last - first).squeeze(1), tensor[:, first:last])


@given(shape=shapes, group_size=st.integers(2, 40))
def test_blocks_of_a_tensor_are_its_groups(shape: tuple[int, ...], group_size: int):
    """Each element occurs once, each group lies within one row, and each block begins at its start."""
    rows = Rows(shape, group_size)
    assert rows.count * rows.columns == math.prod(shape) == math.prod(rows.grid)
    position = torch.arange(math.prod(shape)).view(shape)
    scales = torch.arange(math.prod(rows.scales_shape)).view(rows.scales_shape)
    if not position.numel():
        return
    blocks, scale_blocks = rows.blocks(position), rows.scale_blocks(scales)
    assert torch.equal(torch.cat([block.flatten() for block in blocks]).sort().values, position.flatten())
    assert torch.equal(torch.cat([block.flatten() for block in scale_blocks]).sort().values, scales.flatten())
    for start, block, scale in zip(rows.starts, blocks, scale_blocks, strict=True):
        assert block.flatten()[0] == start
        assert scale.shape == (*block.shape[:-1], 1)
        assert block.shape[-1] <= group_size
        row, column = block // rows.columns, block % rows.columns
        assert (row == row[..., :1]).all()
        assert torch.equal(column // group_size + row * rows.scales_shape[-1], scale.expand_as(block))

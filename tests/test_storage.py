"""Storage depends on a parameter's global shape and takes the declared bytes. Blocks cover every element once."""

import math
from typing import Any

import pytest
import torch
from oracles import TABLE, Row
from torch import Tensor, nn
from training import parameters

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD
from flashopt_compile.engine.storage import Storage, storage_of
from flashopt_compile.rules.adamw import adamw
from flashopt_compile.rules.sgd import sgd, sgd_momentum
from quant import ROOT8, SIGNED8, Part, Raw, Rounded, Split

BF16 = torch.bfloat16


def stored_as(shape: tuple[int, ...], quantize: bool = True) -> Storage:
    return storage_of(adamw, BF16, shape, 24, quantize)


# Formats


@pytest.mark.parametrize(
    "shape", [(32, 32), (1, 1024), (1024, 8), (64, 33), (16, 8, 3, 3), (50257, 768), (128, 2, 4)], ids=str
)
def test_matrices_have_8_bit_states(shape: tuple[int, ...]):
    assert dict(stored_as(shape).states) == {"m": SIGNED8, "v": ROOT8}


@pytest.mark.parametrize("shape", [(), (4096,), (10**6,), (31, 33), (1024, 7), (2, 2), (0, 4096), (4096, 0)], ids=str)
def test_vectors_and_tiny_tensors_keep_exact_states(shape: tuple[int, ...]):
    assert dict(stored_as(shape).states) == {"m": Raw(), "v": Raw()}


def test_quantize_false_keeps_exact_states():
    assert dict(stored_as((4096, 4096), quantize=False).states) == {"m": Raw(), "v": Raw()}


@pytest.mark.parametrize(
    ("dtype", "bits", "weight"),
    [
        (BF16, 24, Split(BF16, torch.int8)),
        (BF16, 32, Split(BF16, torch.int16)),
        (BF16, None, Rounded(BF16)),
        (torch.float16, 24, Split(torch.float16, torch.int8)),
        (torch.float16, 32, Split(torch.float16, torch.int16)),
        (torch.float16, None, Rounded(torch.float16)),
        (torch.float32, 24, Raw()),
        (torch.float32, 32, Raw()),
        (torch.float32, None, Raw()),
    ],
)
def test_weight_format_follows_dtype_and_bits(dtype: torch.dtype, bits: int | None, weight: object):
    assert storage_of(adamw, dtype, (64, 64), bits, True).weight == weight


def test_a_declared_exact_state_stays_exact():
    from flashopt_compile import rule

    @rule(slow=Raw(), fast=SIGNED8)
    def two_speeds(w, g, slow, fast, t, *, lr=1.0):
        return w, slow, fast

    assert dict(storage_of(two_speeds, BF16, (64, 64), 24, True).states) == {"slow": Raw(), "fast": SIGNED8}


# Parts and bytes


def test_parts_are_named_by_state_and_kind():
    assert stored_as((64, 96)).parts((64, 96)) == {
        "tail": Part((64, 96), torch.int8),
        "m.codes": Part((64, 96), torch.int8),
        "m.scales": Part((64, 3), BF16),
        "v.codes": Part((64, 96), torch.uint8),
        "v.scales": Part((64, 3), BF16),
    }
    # Exact states have other keys, so that codes are never read as values.
    assert stored_as((64,)).parts((64,)) == {
        "tail": Part((64,), torch.int8),
        "m": Part((64,), torch.float32),
        "v": Part((64,), torch.float32),
    }
    assert storage_of(sgd, BF16, (64, 64), None, True).parts((64, 64)) == {}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_states_are_the_parts_declared(row: Row):
    params = [p for dtype in (BF16, torch.float32) for p in parameters([(40, 64), (33, 50), (7,), (), (0, 5)], dtype)]
    optimizer = row.optimizer(params, **row.options, eager=True)
    optimizer.step()  # without gradients, this only makes the states
    for parameter in params:
        parts = optimizer.storage(optimizer.param_groups[0], parameter).parts(tuple(parameter.shape))
        state = optimizer.state[parameter]
        assert {key: Part(tuple(state[key].shape), state[key].dtype) for key in parts} == parts
        assert state.keys() == {"step", *parts}


def matrix_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)).to(BF16)


@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [(FlashAdamW, {}, 5.13), (FlashSGD, {"momentum": 0.9}, 4.07), (FlashLion, {}, 4.07), (FlashSGD, {}, 3.01)],
    ids=["adamw", "sgd momentum", "lion", "sgd"],
)
def test_bytes_per_parameter_beside_the_gradient(kind: type[FlashOptimizer], options: dict[str, Any], limit: float):
    model = matrix_model()
    optimizer = kind(model.named_parameters(), **options)
    optimizer.step()
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    elements = sum(parameter.numel() for parameter in model.parameters())
    memory = optimizer.memory()
    assert memory["total"] == total == sum(memory["parts"].values())
    assert memory["per_parameter"] == total / elements
    assert limit - 0.01 < total / elements <= limit
    assert memory["parameters"]["0.weight"]["weight"] == 2 * 1024 * 4096


def test_memory_counts_gradients_while_they_are_held():
    model = matrix_model()
    optimizer = FlashAdamW(model.parameters())
    optimizer.step()
    without = optimizer.memory()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = optimizer.memory()
    assert "gradient" not in without["parts"]
    assert held["per_parameter"] - without["per_parameter"] == pytest.approx(2)
    assert 7.12 < held["per_parameter"] <= 7.13


def test_memory_before_the_first_step_counts_weights_and_makes_no_state():
    (p,) = parameters([(64, 64)])
    optimizer = FlashAdamW([p])
    assert optimizer.memory()["parts"] == {"weight": 64 * 64 * 2}
    assert not optimizer.state


# Blocks

SHAPES = [
    *[(), (1,), (77,), (4096,), (0, 64), (32, 32), (33, 64), (1, 2048), (1, 2049), (2048, 8), (40, 31), (33, 33)],
    *[(33, 65), (5, 500), (16, 8, 3, 3), (7, 5, 3, 11), (4, 6, 64), (64, 2, 16), (3, 3, 700), (2, 2, 2, 2, 96)],
]


def numbered(storage: Storage, shape: tuple[int, ...]) -> list[Tensor]:
    """Head, gradient and parts whose values are their elements' positions."""
    positions = torch.arange(math.prod(shape)).view(shape)
    parts = [torch.arange(math.prod(part.shape)).view(part.shape) for part in storage.parts(shape).values()]
    return [positions, positions.clone(), *parts]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_cover_each_element_once_at_its_position(shape: tuple[int, ...]):
    how = stored_as(shape)
    seen, groups = [], {}
    for start, (head, grad, tail, *states) in how.blocks(shape, numbered(how, shape)):
        assert head.flatten()[0] == start
        assert torch.equal(head, grad)
        assert torch.equal(head, tail)
        seen.append(head.flatten())
        if how.grouped is None:
            assert all(torch.equal(state, head) for state in states)
        else:
            m_codes, m_scales, v_codes, v_scales = states
            assert torch.equal(m_codes, head)
            assert torch.equal(v_codes, head)
            assert torch.equal(m_scales, v_scales)
            assert m_scales.shape == (*head.shape[:-1], 1)
            for scale, group in zip(m_scales.flatten().tolist(), head.flatten(0, -2).tolist(), strict=True):
                assert scale not in groups
                groups[scale] = group
    covered = torch.cat(seen) if seen else torch.zeros(0, dtype=torch.int64)
    assert torch.equal(covered.sort().values, torch.arange(math.prod(shape)))
    if how.grouped is not None:
        rows = how.grouped.rows(shape)
        assert len(groups) == math.prod(rows.scales_shape)
        for group in groups.values():  # consecutive, and within one row
            assert group == list(range(group[0], group[0] + len(group)))
            assert group[0] // rows.columns == group[-1] // rows.columns


def test_storage_does_not_depend_on_the_rule_alone():
    assert dict(storage_of(sgd_momentum, BF16, (64, 64), 24, True).states) == {"m": SIGNED8}
    assert storage_of(sgd, BF16, (64, 64), 24, True).states == ()

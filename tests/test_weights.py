"""Export exact weights from a model and its optimizer, and set them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import assert_identical, give_gradients

from flashopt_compile import FlashAdamW, FlashOptimizer
from quant.bounds import split_bound
from quant.split import Split
from quant.ulp import NARROW_FLOATS, spacing

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Tied(nn.Module):
    """An embedding tied to the head, a norm with buffers, a frozen layer, and a weight outside of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.embedding, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.norm, self.frozen, self.outside = nn.BatchNorm1d(32), nn.Linear(32, 8), nn.Linear(8, 4)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=random)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("positions", torch.arange(4))


def trained(dtype: torch.dtype, steps: int = 3, **options: Any) -> tuple[Tied, FlashOptimizer]:
    model = Tied().to(dtype)
    held = [parameter for name, parameter in model.named_parameters() if not name.startswith("outside")]
    optimizer = FlashAdamW(held, lr=1e-2, eager=True, **options)
    for step in range(steps):
        give_gradients([parameter for parameter in held if parameter.requires_grad], step)
        optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: FlashOptimizer) -> list[Tensor]:
    states = [value.clone() for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [*(value.clone() for value in model.state_dict().values()), *states]


@pytest.mark.parametrize("bits", [24, 32, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_come_out_as_the_optimizer_has_them(dtype: torch.dtype, bits: int | None):
    model, optimizer = trained(dtype, master_weight_bits=bits)
    exported = optimizer.get_fp32_model_state_dict(model)
    assert list(exported) == list(model.state_dict())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state = optimizer.state.get(parameter, {})
        expected = parameter.detach().float()
        if "tail" in state:
            expected = Split(dtype, state["tail"].dtype).decode(parameter.detach(), state["tail"])
            assert not torch.equal(exported[name], parameter.detach().float())
        assert_identical([exported[name]], [expected])
        assert exported[name].data_ptr() != parameter.data_ptr()
    assert torch.equal(exported["head.weight"], exported["embedding.weight"])
    for name, buffer in model.named_buffers():
        assert_identical([exported[name]], [buffer])


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_go_in_to_the_bound_and_out_again_to_the_bit(dtype: torch.dtype, bits: int, steps: int):
    """This works before the first step too, where the published implementation drops the correction."""
    model, optimizer = trained(dtype, steps, master_weight_bits=bits)
    random = torch.Generator().manual_seed(5)
    given = {
        key: torch.randn(value.shape, generator=random) if value.is_floating_point() else value + 3
        for key, value in model.state_dict().items()
    }
    given["head.weight"] = given["embedding.weight"]
    kept = copy.deepcopy(given)
    optimizer.set_fp32_model_state_dict(model, given)
    assert_identical(list(given.values()), list(kept.values()))
    exported = optimizer.get_fp32_model_state_dict(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith("outside") or dtype == torch.float32:
            assert_identical([exported[name]], [given[name].to(dtype).float()])
            continue
        format = Split(dtype, {24: torch.int8, 32: torch.int16}[bits])
        ulp_head = spacing(parameter.detach().float(), NARROW_FLOATS[dtype]).double()
        ulp_fp32 = torch.nextafter(given[name].abs(), torch.tensor(torch.inf)).double() - given[name].abs().double()
        limit = split_bound(format).function()(ulp_head=ulp_head, ulp_fp32=ulp_fp32)
        assert ((exported[name].double() - given[name].double()).abs() <= limit).all()
    for name, buffer in model.named_buffers():
        assert_identical([buffer], [given[name].to(buffer.dtype)])
    optimizer.set_fp32_model_state_dict(model, exported)
    again = optimizer.get_fp32_model_state_dict(model)
    assert_identical(list(again.values()), list(exported.values()))


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_weights_of_a_long_run_go_into_another_optimizer_to_the_bit(dtype: torch.dtype, bits: int):
    """After dither some heads are not the nearest to the weight, and lie in another binade."""
    model, optimizer = trained(dtype, steps=40, master_weight_bits=bits)
    exported = optimizer.get_fp32_model_state_dict(model)
    other, resumed = trained(dtype, steps=0, master_weight_bits=bits)
    resumed.set_fp32_model_state_dict(other, exported)
    again = resumed.get_fp32_model_state_dict(other)
    held = [key for key in exported if not key.startswith("outside")]
    assert_identical([again[key] for key in held], [exported[key] for key in held])


def test_weights_set_before_the_first_step_are_stepped():
    model, optimizer = trained(torch.bfloat16, steps=0)
    exact = {key: value.float() + 1e-3 for key, value in model.state_dict().items() if value.is_floating_point()}
    optimizer.set_fp32_model_state_dict(model, exact, strict=False)
    optimizer.param_groups[0]["lr"] = 0.0
    give_gradients([p for p in optimizer.param_groups[0]["params"] if p.requires_grad], 0)
    before = optimizer.get_fp32_model_state_dict(model)
    optimizer.step()
    assert_identical(list(optimizer.get_fp32_model_state_dict(model).values()), list(before.values()))


def test_a_partial_dict_sets_what_it_has():
    model, optimizer = trained(torch.bfloat16)
    before = optimizer.get_fp32_model_state_dict(model)
    optimizer.set_fp32_model_state_dict(model, {"head.bias": torch.full((40,), 0.1), "polish": 1}, strict=False)
    after = optimizer.get_fp32_model_state_dict(model)
    assert (after["head.bias"] - 0.1).abs().max() < 1e-6
    assert_identical(
        [value for key, value in after.items() if key != "head.bias"],
        [value for key, value in before.items() if key != "head.bias"],
    )


class Shell(nn.parallel.DistributedDataParallel):
    """DDP as a mere wrapper, without other processes."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DDP": Shell,
    "compiled": torch.compile,
    "compiled DDP": lambda model: torch.compile(Shell(model)),
    "DDP of compiled": lambda model: Shell(torch.compile(model)),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_leave_no_trace_in_the_keys(wrapper: str):
    model, optimizer = trained(torch.bfloat16)
    wrapped = WRAPPERS[wrapper](model)
    exported = optimizer.get_fp32_model_state_dict(wrapped)
    plain = optimizer.get_fp32_model_state_dict(model)
    assert list(exported) == list(plain)
    assert_identical(list(exported.values()), list(plain.values()))
    fresh, other = trained(torch.bfloat16, steps=0)
    other.set_fp32_model_state_dict(WRAPPERS[wrapper](fresh), exported)
    again = other.get_fp32_model_state_dict(fresh)
    assert_identical(list(again.values()), list(plain.values()))


def test_a_compiled_part_leaves_no_trace_either():
    model, optimizer = trained(torch.bfloat16)
    keys = list(optimizer.get_fp32_model_state_dict(model))
    model.norm.compile()
    model.head = torch.compile(model.head)  # pyright: ignore[reportAttributeAccessIssue]
    exported = optimizer.get_fp32_model_state_dict(model)
    assert list(exported) == keys
    optimizer.set_fp32_model_state_dict(model, {**exported, "head.bias": torch.zeros(40)})
    assert not model.head.bias.any()


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda d: d.pop("head.bias"), r"lacks \['head.bias'\] and has \[\] besides"),
    "unexpected": (lambda d: d.update(polish=torch.zeros(1)), r"lacks \[\] and has \['polish'\] besides"),
    "shape": (
        lambda d: d.update({"head.bias": torch.zeros(3)}),
        r"head.bias is torch.float32 of shape \(3,\); expected is a tensor of shape \(40,\)",
    ),
    "no tensor": (lambda d: d.update({"norm.weight": "heavy"}), "norm.weight is 'heavy'; expected is a tensor"),
    "complex": (
        lambda d: d.update({"head.bias": torch.zeros(40, dtype=torch.complex64)}),
        "head.bias is torch.complex64",
    ),
    "torn": (
        lambda d: d.update({"head.weight": d["head.weight"] + 1}),
        "embedding.weight and head.weight are one parameter; in fp32_state_dict their values differ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_changes_nothing(mistake: str):
    model, optimizer = trained(torch.bfloat16)
    wrong = {key: value + 1 for key, value in optimizer.get_fp32_model_state_dict(model).items()}
    wrong["head.weight"] = wrong["embedding.weight"]
    change, sentence = MISTAKES[mistake]
    change(wrong)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=f"FlashAdamW: .*{sentence}") as caught:
        optimizer.set_fp32_model_state_dict(model, wrong)
    assert "\n" not in str(caught.value)
    assert_identical(everything(model, optimizer), before)

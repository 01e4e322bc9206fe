"""Records of FlashOptim, bitsandbytes and torchao load within the formats' bounds; FlashOptim's can be written too.

The records are state dicts after three steps of flashoptim 0.1.4, bitsandbytes 0.50.2 and torchao 0.18.0, with the
values that each package itself decodes. flashoptim ran on a CPU in Triton's interpreter, with its CUDA checks patched.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from training import ALIGNED, BIAS, STATE_LETTERS, assert_state_within_bound, held, parameters, params_of, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW, flashoptim_state_dict
from flashopt_compile.checkpoint.weights import weight_of

GOLDEN = Path(__file__).parent / "golden"


def recorded(name: str) -> dict[str, Any]:
    return torch.load(GOLDEN / name, weights_only=True)


RECORDED: dict[str, tuple[type[FlashOptimizer], dict[str, Any]]] = {
    "adamw": (FlashAdamW, {}),
    "adamw32": (FlashAdamW, {}),
    "lion": (FlashLion, {}),
    "sgd": (FlashSGD, {"momentum": 0.9}),
}


def of_record(name: str) -> tuple[FlashOptimizer, dict[str, Any]]:
    record = recorded("flashoptim-0.1.4.pt")[name]
    kind, options = RECORDED[name]
    return kind([Parameter(weight.clone()) for weight in record["weights"]], **options, eager=True), record


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_flashoptim_states_load(name: str):
    """Parameters are bf16, fp16 and fp32. Weights are exact, states within the bound of FlashOptim's own decoding."""
    optimizer, record = of_record(name)
    optimizer.load_state_dict(record["state_dict"])
    assert optimizer.param_groups[0]["master_weight_bits"] == (32 if name == "adamw32" else 24)
    for number, parameter in enumerate(params_of(optimizer)):
        exact = weight_of(optimizer, optimizer.param_groups[0], parameter)
        assert torch.equal(exact, record["master"][number])
        for key, value in record["expanded"][number].items():
            if f"{STATE_LETTERS[key]}.codes" in optimizer.state[parameter]:
                assert_state_within_bound(optimizer, parameter, key, value)
            else:
                torch.testing.assert_close(optimizer.state[parameter][STATE_LETTERS[key]], value, rtol=1e-6, atol=0)
    train(optimizer, range(1))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_flashoptim_states_load_uncompressed(name: str):
    optimizer, record = of_record(name)
    states = {
        number: {key: value for key, value in state.items() if "::" not in key} | record["expanded"][number]
        for number, state in record["state_dict"]["state"].items()
    }
    optimizer.load_state_dict({"state": states, "param_groups": record["state_dict"]["param_groups"]})
    other, _ = of_record(name)
    other.load_state_dict(record["state_dict"])
    for one, two in zip(params_of(optimizer), params_of(other), strict=True):
        for key, value in optimizer.state[one].items():
            torch.testing.assert_close(value.float(), other.state[two][key].float(), rtol=1e-2, atol=1)


@pytest.mark.parametrize("name", RECORDED)
def test_flashoptim_export_has_its_keys_dtypes_and_values(name: str):
    optimizer, record = of_record(name)
    optimizer.load_state_dict(record["state_dict"])
    written = flashoptim_state_dict(optimizer, version="0.1.4")
    theirs = record["state_dict"]
    group = {key: value for key, value in written["param_groups"][0].items() if key != "nesterov"}
    assert group == theirs["param_groups"][0]
    for number, state in theirs["state"].items():
        ours = written["state"][number]
        assert {key: (value.dtype, value.shape) for key, value in ours.items()} == {
            key: (value.dtype, value.shape) for key, value in state.items()
        }
        if "error_bits" in state:  # compared as bits, which may form NaNs
            width = torch.int16 if state["error_bits"].element_size() == 2 else torch.int32
            assert torch.equal(ours["error_bits"].view(width), state["error_bits"].view(width))
        for key in state:
            if key.endswith("::quantized"):  # re-encoded from our codes, so rounded twice
                assert ((ours[key].int() - state[key].int()).abs() <= 3).all()
    again, _ = of_record(name)
    again.load_state_dict(written)
    for one, two in zip(params_of(optimizer), params_of(again), strict=True):
        for letter in set(STATE_LETTERS.values()) & held(optimizer, one).keys():
            largest = held(optimizer, one)[letter].abs().max()
            assert (held(optimizer, one)[letter] - held(again, two)[letter]).abs().max() <= 0.02 * largest


def test_export_refuses_scales_above_fp16_and_warns_of_those_below():
    optimizer = train(FlashLion(parameters([ALIGNED]), eager=True), range(1))
    state = optimizer.state[params_of(optimizer)[0]]
    state["m.scales"].fill_(1e6)
    with pytest.raises(ValueError, match=r"FlashLion: m of parameter 0 has values of up to 9.99e\+05; the fp16 scales"):
        flashoptim_state_dict(optimizer)
    state["m.scales"].fill_(1e-9)
    with pytest.warns(UserWarning, match=r"80 of 80 groups of m of parameter 0 are below 5.96e-08"):
        flashoptim_state_dict(optimizer)
    state["m.scales"].fill_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = flashoptim_state_dict(optimizer, version="0.1.4")
    assert written["state"][0]["exp_avg::scales"].dtype == torch.bfloat16


def test_what_is_written_for_every_version_has_no_8_bit_states_of_bf16_parameters():
    """To the bit what the optimizer holds; tests/test_published.py has the package read it."""
    optimizer, record = of_record("adamw")
    optimizer.load_state_dict(record["state_dict"])
    written = flashoptim_state_dict(optimizer)
    for number, parameter in enumerate(params_of(optimizer)):
        state = written["state"][number]
        assert ("exp_avg::scales" in state) == (parameter.dtype != torch.bfloat16)
        for key in state.keys() & STATE_LETTERS.keys():
            assert torch.equal(state[key], held(optimizer, parameter)[STATE_LETTERS[key]])
    with pytest.raises(ValueError, match=r"FlashAdamW: version is '0.2'; allowed are '0.1.3' and '0.1.4'."):
        flashoptim_state_dict(optimizer, version="0.2")


def test_states_without_a_flashoptim_name_are_refused():
    optimizer = train(FlashSGDW(parameters(), momentum=0.9, eager=True), range(1))
    assert set(flashoptim_state_dict(optimizer)["state"][0]) >= {"momentum_buffer"}

    class Nameless(FlashSGDW):
        torch_names = {}  # noqa: RUF012

    nameless = train(Nameless(parameters(), momentum=0.9, eager=True), range(1))
    with pytest.raises(ValueError, match="FlashOptim has no state 'm'"):
        flashoptim_state_dict(nameless)


EIGHT_BITS: dict[str, tuple[type[FlashOptimizer], dict[str, Any], list[str]]] = {
    "adamw": (FlashAdamW, {}, ["exp_avg", "exp_avg_sq"]),
    "lion": (FlashLion, {}, ["exp_avg"]),
    "sgd": (FlashSGD, {"momentum": 0.9}, ["momentum_buffer"]),
}


@pytest.mark.parametrize("is_nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_recorded_bitsandbytes_states_load(name: str, is_nested: bool):
    record = recorded("bitsandbytes-0.50.pt")[name]
    state_dict = record["state_dict"]
    if not is_nested:  # as written before version 0.4x
        for state in state_dict["state"].values():
            state |= state.pop("__bnb_optimizer_quant_state__")
    kind, options, names = EIGHT_BITS[name]
    optimizer = kind(parameters([(64, 80), BIAS], torch.float32), **options, eager=True)
    optimizer.load_state_dict(state_dict)
    large, small = params_of(optimizer)
    for key, value in zip(names, record["decoded"], strict=True):
        assert_state_within_bound(optimizer, large, key, value)
    nested = state_dict["state"][1].get("__bnb_optimizer_quant_state__", state_dict["state"][1])
    assert torch.equal(optimizer.state[small]["m"], nested["state1"])
    assert optimizer.state[large]["step"] == 3
    assert optimizer.param_groups[0]["lr"] == state_dict["param_groups"][0]["lr"]
    train(optimizer, range(1))


def test_recorded_torchao_states_load():
    """Plain tensors with the same attributes stand in for torchao's class, which needs the package."""
    record = recorded("torchao-0.18.pt")
    states = {number: dict(state) for number, state in enumerate(record["plain"])}
    for number, tensors in enumerate(record["parts"]):
        for key, parts in tensors.items():
            value: Any = torch.zeros(parts["codes"].shape)
            value.codes, value.scale, value.qmap = parts["codes"], parts["scale"], parts["qmap"]
            states[number][key] = value
    optimizer = FlashAdamW(parameters([(64, 80), BIAS], torch.float32), eager=True)
    optimizer.load_state_dict({"state": states, "param_groups": record["param_groups"]})
    for key, value in zip(("exp_avg", "exp_avg_sq"), record["decoded"], strict=True):
        assert_state_within_bound(optimizer, params_of(optimizer)[0], key, value)
    train(optimizer, range(1))


def test_states_of_the_installed_torchao_load():
    low_bit = pytest.importorskip("torchao.optim", reason="torchao is not installed: pip install torchao")
    from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

    theirs = low_bit.AdamW8bit(parameters([(64, 80)], torch.float32))
    state = {name: OptimState8bit.zeros((64, 80), signed=name == "exp_avg") for name in ("exp_avg", "exp_avg_sq")}
    random = torch.Generator().manual_seed(0)
    for value in state.values():
        value.codes.random_(256, generator=random)
        value.scale.uniform_(0.1, 2, generator=random)
    theirs.state[params_of(theirs)[0]] = {"step": torch.tensor(4.0), **state}
    optimizer = FlashAdamW(parameters([(64, 80)], torch.float32), eager=True)
    optimizer.load_state_dict(theirs.state_dict())
    for key, value in state.items():
        assert_state_within_bound(optimizer, params_of(optimizer)[0], key, value.dequantize())


SPOILED: dict[str, tuple[str, dict[str, Any], str]] = {
    "codes of another shape": (
        "flashoptim-0.1.4.pt",
        {"exp_avg::quantized": torch.zeros(3, dtype=torch.int8)},
        "exp_avg::quantized",
    ),
    "no scales": ("flashoptim-0.1.4.pt", {"exp_avg::scales": None}, "exp_avg::scales None"),
    "error bits of another shape": ("flashoptim-0.1.4.pt", {"error_bits": torch.zeros(2)}, "error_bits"),
    "another key": ("flashoptim-0.1.4.pt", {"polish": 1}, "polish"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_foreign_state_that_does_not_fit_is_refused_in_one_sentence(case: str):
    _, change, sentence = SPOILED[case]
    optimizer, record = of_record("adamw")
    record["state_dict"]["state"][0] |= change
    with pytest.raises(ValueError, match=f"FlashAdamW: the state of parameter 0 has .*{sentence}") as caught:
        optimizer.load_state_dict(record["state_dict"])
    assert "\n" not in str(caught.value)
    assert not optimizer.state

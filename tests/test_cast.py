"""A model cast to 16 bits trains as it is, keeps in fp32 what it is to keep, and loses no bit on the way."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flashopt_compile import FlashAdamW, cast_model
from quant.bounds import split_bound
from quant.split import Split
from quant.ulp import NARROW_FLOATS, spacing

NARROW = [torch.bfloat16, torch.float16]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.InstanceNorm2d(8, affine=True))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((-2, -1)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.table = nn.LayerNorm(32), nn.Linear(32, 32), Table()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        cos, (sin,) = self.table(torch.arange(x.shape[-2]))
        y = self.mix(self.norm(x)) * cos + sin
        return {"hidden": x + (y if scale is None else y * scale)}


class Table(nn.Module):
    """Rotary tables as decoders have them: a buffer that is no weight, whole positions in, a nested pair out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 0.5 ** torch.arange(32.0), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        angles = positions[:, None] * self.get_buffer("frequencies")
        return angles.cos(), [angles.sin()]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(32, 40, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, scale=x.new_ones(()))["hidden"]
        return self.lm_head(x)


MODELS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "conv": (ConvNet, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))),
    "decoder": (Decoder, torch.arange(12).view(2, 6)),
}


def inputs_of(kind: str, dtype: torch.dtype) -> Tensor:
    x = MODELS[kind][1]
    return x.to(dtype) if x.is_floating_point() else x


def made(kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[kind][0]()


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: each.dtype for name, each in [*model.named_parameters(), *model.named_buffers()]}


def hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_cast_model_computes_nearly_what_it_computed_and_trains(kind: str, dtype: torch.dtype):
    model, exact = made(kind), made(kind)
    cast_model(model, dtype)
    out, expected = model(inputs_of(kind, dtype)), exact(inputs_of(kind, torch.float32))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, eager=True)
    for _ in range(2):
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        out = model(inputs_of(kind, dtype))
    assert out.isfinite().all()
    model.eval()(inputs_of(kind, dtype))


def test_norms_with_running_statistics_stay_in_fp32_when_selective():
    model = made("conv")
    report = cast_model(model)
    kept = {name for name, dtype in dtypes(model).items() if dtype == torch.float32}
    norm = [f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    assert kept == set(report.kept) == {*norm, "body.3.weight", "body.3.bias"}
    assert set(report.cast) == {"body.0.weight", "body.0.bias", "head.weight", "head.bias"}
    assert str(report) == "4 tensors in torch.bfloat16, 6 kept in torch.float32 (body.1, body.3)"
    report = cast_model(model, selective=False)
    assert report.kept == () and model.body[1].num_batches_tracked.dtype == torch.int64
    assert str(report) == "10 tensors in torch.bfloat16, 0 kept in torch.float32"


class Frozen(nn.Module):
    """A norm of a user's own, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.full((32,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return x - self.get_buffer("running_mean")


def test_norms_of_other_kinds_take_and_give_16_bits():
    model = nn.Sequential(nn.Linear(32, 32), Frozen(), nn.Linear(32, 32))
    assert cast_model(model).kept == ("1.running_mean",)
    assert model(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("how", ["pattern", "module", "alone"])
def test_full_precision_layers_compute_in_fp32_and_stay_there(dtype: torch.dtype, how: str):
    model = made("conv")
    layers = {"pattern": ["he?d"], "module": [model.head], "alone": "head"}[how]
    report = cast_model(model, dtype, full_precision_layers=layers)
    assert {"head.weight", "head.bias"} <= set(report.kept)
    assert model(inputs_of("conv", dtype)).dtype == torch.float32
    cast_model(model, dtype, full_precision_recast_layers=layers)
    assert model.head.weight.dtype == torch.float32
    assert model(inputs_of("conv", dtype)).dtype == dtype


def test_tables_keep_their_precision_in_a_decoder():
    """Patterns cross dots; a layer inside of another that is kept has no hooks of its own."""
    model = made("decoder")
    cast_model(model, full_precision_recast_layers=["*.table"])
    assert model.layers[1].table.frequencies.dtype == torch.float32
    cos, (sin,) = model.layers[0].table(torch.arange(3))
    assert (cos.dtype, sin.dtype) == (torch.bfloat16, torch.bfloat16)
    assert model(inputs_of("decoder", torch.bfloat16)).dtype == torch.bfloat16

    cast_model(model, full_precision_layers=["layers.0"], full_precision_recast_layers=["layers.0.*", "layers.1.norm"])
    seen: list[torch.dtype] = []
    model.layers[0].norm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model.layers[1].norm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert model.layers[0](torch.ones(1, 32, dtype=torch.bfloat16))["hidden"].dtype == torch.float32
    model.layers[1](torch.ones(1, 32, dtype=torch.bfloat16))
    assert seen == [torch.float32, torch.bfloat16]


def test_tied_weights_stay_tied_in_fp32_too():
    model = made("decoder")
    cast_model(model)
    assert model.embed.weight is model.lm_head.weight and model.embed.weight.dtype == torch.bfloat16
    report = cast_model(model, full_precision_layers=["lm_head"])
    assert model.embed.weight is model.lm_head.weight and model.embed.weight.dtype == torch.float32
    assert report.kept == ("embed.weight",)
    assert model.embed(torch.arange(2)).dtype == torch.bfloat16
    assert model(inputs_of("decoder", torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("kind", MODELS)
def test_casting_again_changes_nothing_and_other_arguments_replace_the_first(kind: str):
    model = made(kind)
    report, reference = cast_model(model), copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert cast_model(model) == report
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    first = next(iter(dict(model.named_children())))
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        cast_model(copied, full_precision_recast_layers=[first])
        cast_model(copied, full_precision_recast_layers=[first])
        assert max(hooks(copied)) == 2
        assert cast_model(copied) == report
        assert hooks(copied) == hooks(reference) and dtypes(copied) == dtypes(reference)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_compiled_model_is_cast_in_one_graph(kind: str, when: str):
    model, plain = made(kind), made(kind)
    last = list(dict(model.named_children()))[-1]
    cast_model(plain, full_precision_layers=[last])
    compiled: Any = model
    if when == "before":
        cast_model(model, full_precision_layers=[last])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if when == "after":
        cast_model(compiled, full_precision_layers=[last])
    x = inputs_of(kind, torch.bfloat16)
    out = compiled(x)
    torch.testing.assert_close(out, plain(x), rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())


def test_gradients_are_cast_along_and_frozen_weights_too():
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    model(torch.ones(4)).sum().backward()
    weight, grad = model.weight, model.weight.grad
    cast_model(model)
    assert model.weight is weight and weight.grad is not None and grad is not None
    assert torch.equal(weight.grad, grad.to(torch.bfloat16))
    assert (model.bias.dtype, model.bias.requires_grad) == (torch.bfloat16, False)


# Exact weights


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_the_state_dict_taken_before_keeps_every_bit_that_the_optimizer_can_hold(kind: str, dtype: torch.dtype):
    """Without a copy, and before the first step; published FlashOptim has no state then to keep a tail in."""
    model, reference = made(kind), made(kind).state_dict()
    exact = model.state_dict()
    cast_model(model, dtype, full_precision_layers=["head"] if kind == "conv" else None)
    optimizer = FlashAdamW(model.parameters(), lr=0.0, eager=True)
    optimizer.set_fp32_model_state_dict(model, exact)
    for step in range(2):
        held = optimizer.get_fp32_model_state_dict(model)
        assert list(held) == list(reference)
        for name, value in reference.items():
            head = model.state_dict()[name]
            if head.dtype == dtype:
                assert_within_the_bound(held[name], value, head)
            else:
                assert torch.equal(held[name], value), name
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # moves nothing
        assert step == 0 or optimizer.state[next(model.parameters())]["step"] == 2


def assert_within_the_bound(found: Tensor, value: Tensor, head: Tensor) -> None:
    limit = split_bound(Split(head.dtype)).function()(
        ulp_head=spacing(head.float(), NARROW_FLOATS[head.dtype]).double(),
        ulp_fp32=torch.nextafter(value.abs(), torch.tensor(torch.inf)).double() - value.abs().double(),
    )
    assert ((found.double() - value.double()).abs() <= limit).all()
    assert (found - value).abs().max() <= (head.float() - value).abs().max() / 64  # what casting alone loses


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), st.sampled_from(NARROW))
def test_a_cast_is_the_nearest_narrow_number_or_refused(values: list[float], dtype: torch.dtype):
    model = nn.Module()
    model.register_buffer("x", exact := torch.tensor(values))
    nearest = exact.to(dtype)
    if bool(nearest.isfinite().all()):
        cast_model(model, dtype)
        assert torch.equal(model.get_buffer("x"), nearest)
    else:
        with pytest.raises(ValueError, match=r"cast_model: x of model has values of up to"):
            cast_model(model, dtype)
        assert model.get_buffer("x").dtype == torch.float32


# Mistakes


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.late = nn.Linear(2, 2), nn.LazyLinear(4)


def huge() -> nn.Module:
    model = made("conv")
    model.head.weight.data[0, 0] = 1e6
    return model


class Shell(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "model": (lambda: "model", {}, "model is a str; allowed is a torch.nn.Module"),
    "dtype": (
        lambda: made("conv"),
        {"dtype": torch.int8},
        "dtype is torch.int8; allowed are torch.bfloat16, torch.float16, torch.float32",
    ),
    "dtype by name": (lambda: made("conv"), {"dtype": "bf16"}, "dtype is 'bf16'; allowed are torch.bfloat16"),
    "selective": (lambda: made("conv"), {"selective": "yes"}, "selective is 'yes'; allowed is True or False"),
    "pattern": (
        lambda: made("conv"),
        {"full_precision_layers": ["head", "heda"]},
        r"full_precision_layers has 'heda', which matches no module of model; it has \['body', 'body.0', ",
    ),
    "module": (
        lambda: made("conv"),
        {"full_precision_recast_layers": [nn.Linear(2, 2)]},
        r"full_precision_recast_layers has Linear\(.*\), which is no module of model",
    ),
    "number": (lambda: made("conv"), {"full_precision_layers": [3]}, "full_precision_layers has 3; allowed are"),
    "no list": (lambda: made("conv"), {"full_precision_layers": 3}, "full_precision_layers is 3; allowed is a list"),
    "both": (
        lambda: made("conv"),
        {"full_precision_layers": ["head"], "full_precision_recast_layers": ["h*"]},
        "module 'head' is in full_precision_layers and in full_precision_recast_layers",
    ),
    "values": (
        huge,
        {"dtype": torch.float16},
        r"head.weight of model has values of up to 1e\+06; torch.float16 holds finite values of up to 6.55e\+04",
    ),
    "lazy": (Lazy, {}, "late.weight of model has no shape yet"),
    "DDP": (lambda: Shell(made("conv")), {}, "model is a DistributedDataParallel"),
    "DDP inside": (lambda: nn.Sequential(Shell(made("conv"))), {}, "module '0' of model is a DistributedDataParallel"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_changes_nothing(mistake: str):
    make, arguments, sentence = MISTAKES[mistake]
    model = make()
    with pytest.raises((TypeError, ValueError), match=f"^cast_model: {sentence}") as caught:
        cast_model(model, **arguments)
    assert "\n" not in str(caught.value)
    if isinstance(model, nn.Module):
        assert torch.bfloat16 not in dtypes(model).values() and torch.float16 not in dtypes(model).values()
        assert not any(hooks(model)) or mistake == "lazy"

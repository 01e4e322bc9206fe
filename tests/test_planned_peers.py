"""What a plan says of other optimizers, and of models by their config, beside what really exists."""

import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, memory_plan
from flashopt_compile.planning.configs import shapes_of

SHAPES = [(512, 96), (64, 64), (63, 65), (257,), (8, 1000)]
LLAMA_LIKE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-2-7B": (
        6_738_415_616,
        {"model_type": "llama", **LLAMA_LIKE, "intermediate_size": 11008, "vocab_size": 32000},
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {"model_type": "mistral", **LLAMA_LIKE, "num_key_value_heads": 8, "vocab_size": 32000},
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "GPT-2": (
        124_439_808,
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
    ),
    "ViT-B/16": (
        85_798_656,
        {
            "model_type": "vit",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "image_size": 224,
            "patch_size": 16,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_gives_the_published_number_of_parameters(name: str):
    count, config = PUBLISHED[name]
    assert sum(math.prod(shape) for _, shape in shapes_of(config)) == count


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("GPT2", {}),
        ("ViT", {}),
    ],
)
def test_shapes_are_those_that_transformers_makes(kind: str, changes: dict[str, Any]):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**changes)
    make = (
        (lambda: transformers.AutoModel.from_config(config, add_pooling_layer=False))
        if kind == "ViT"
        else (lambda: transformers.AutoModelForCausalLM.from_config(config))
    )
    with torch.device("meta"):
        model = make()
    ours, theirs = shapes_of(config.to_dict()), [tuple(each.shape) for each in model.parameters()]
    assert sorted(shape for _, shape in ours) == sorted(theirs)


def bytes_of(values: Iterable[Any]) -> int:
    """Memory of tensors, also of torchao's, which hold several."""
    total = 0
    for value in values:
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is not None:
            total += bytes_of(getattr(value, name) for name in flatten()[0])
        elif isinstance(value, Tensor):
            total += value.nbytes
    return total


def stepped(make: Callable[[list[nn.Parameter]], Any], dtype: torch.dtype) -> int:
    """Bytes of weights, gradients and states after a step, without step counts and the tables that states share."""
    weights = [nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in SHAPES]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.25)
    optimizer = make(weights)
    optimizer.step()
    states = (
        value
        for each in optimizer.state.values()
        for name, value in each.items()
        if name not in ("qmap1", "qmap2", "step")
    )
    return 2 * bytes_of(weight.detach() for weight in weights) + bytes_of(states)


def planned(name: str, kind: type[FlashOptimizer] = FlashAdamW, **options: Any) -> int:
    model = nn.ParameterList(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in SHAPES)
    return memory_plan(model, kind, **options).alternatives[name].total_bytes


def test_torch_takes_what_is_planned():
    assert stepped(torch.optim.AdamW, torch.float32) == planned("torch AdamW fp32")
    assert stepped(torch.optim.AdamW, torch.bfloat16) == planned("torch AdamW bf16")
    with_momentum = planned("torch SGD fp32", FlashSGD, momentum=0.9)
    assert stepped(lambda weights: torch.optim.SGD(weights, momentum=0.9), torch.float32) == with_momentum


def test_torchao_takes_what_is_planned():
    pytest.importorskip("torchao")
    module = importlib.import_module("torchao.optim")
    assert stepped(module.AdamW8bit, torch.bfloat16) == pytest.approx(planned("torchao AdamW8bit"), rel=0.01)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [("AdamW", FlashAdamW, {}), ("Lion", FlashLion, {}), ("SGD", FlashSGD, {"momentum": 0.9})],
)
def test_bitsandbytes_takes_what_is_planned(name: str, kind: type[FlashOptimizer], options: dict[str, Any]):
    module = pytest.importorskip("bitsandbytes").optim
    make = getattr(module, f"{name}8bit")
    found = stepped(lambda weights: make(weights, lr=0.01, **options), torch.bfloat16)
    assert found == pytest.approx(planned(f"bitsandbytes {name}8bit", kind, **options), rel=0.01)

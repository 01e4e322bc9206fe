"""The parameters of a model from its Hugging Face config.json alone, without the weights and without transformers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def shapes_of(config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters of the model for language modelling, or of the encoder for ViT.

    ValueError for a kind of model that is not known here, or a config that lacks a number.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type of the config is {kind!r}; known are {', '.join(FAMILIES)}. For others give the model itself: "
            "--model package:factory, such as a function that returns AutoModelForCausalLM.from_config(...)."
        )
    try:
        return list(FAMILIES[kind](config))
    except KeyError as error:
        raise ValueError(f"the config of a {kind} has no {error.args[0]!r}.") from None


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, size: int) -> Shapes:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _decoder(config: Mapping[str, Any]) -> Shapes:
    """Llama and its relatives: RMS norms, grouped queries, a gated MLP."""
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from _linear(f"{at}.self_attn.q_proj", queries, hidden, bias or kind == "qwen2")
        yield from _linear(f"{at}.self_attn.k_proj", keys, hidden, bias or kind == "qwen2")
        yield from _linear(f"{at}.self_attn.v_proj", keys, hidden, bias or kind == "qwen2")
        yield from _linear(f"{at}.self_attn.o_proj", hidden, queries, bias)
        if kind == "qwen3":
            yield f"{at}.self_attn.q_norm.weight", (head,)
            yield f"{at}.self_attn.k_norm.weight", (head,)
        yield from _linear(f"{at}.mlp.gate_proj", inner, hidden, mlp_bias)
        yield from _linear(f"{at}.mlp.up_proj", inner, hidden, mlp_bias)
        yield from _linear(f"{at}.mlp.down_proj", hidden, inner, mlp_bias)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _gpt2(config: Mapping[str, Any]) -> Shapes:
    """GPT-2, whose linear layers have their weights transposed and whose head is the embedding."""
    hidden = config["n_embd"]
    inner = config.get("n_inner") or 4 * hidden
    yield "transformer.wte.weight", (config["vocab_size"], hidden)
    yield "transformer.wpe.weight", (config["n_positions"], hidden)
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        yield from _norm(f"{at}.ln_1", hidden)
        for name, rows, columns in (("attn.c_attn", hidden, 3 * hidden), ("attn.c_proj", hidden, hidden)):
            yield f"{at}.{name}.weight", (rows, columns)
            yield f"{at}.{name}.bias", (columns,)
        yield from _norm(f"{at}.ln_2", hidden)
        for name, rows, columns in (("mlp.c_fc", hidden, inner), ("mlp.c_proj", inner, hidden)):
            yield f"{at}.{name}.weight", (rows, columns)
            yield f"{at}.{name}.bias", (columns,)
    yield from _norm("transformer.ln_f", hidden)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _vit(config: Mapping[str, Any]) -> Shapes:
    """The encoder of a vision transformer, without pooler and classifier."""
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    bias, patches = bool(config.get("qkv_bias", True)), (config["image_size"] // patch) ** 2
    yield "embeddings.cls_token", (1, 1, hidden)
    yield "embeddings.position_embeddings", (1, patches + 1, hidden)
    yield "embeddings.patch_embeddings.projection.weight", (hidden, config.get("num_channels", 3), patch, patch)
    yield "embeddings.patch_embeddings.projection.bias", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            yield from _linear(f"{at}.attention.attention.{name}", hidden, hidden, bias)
        yield from _linear(f"{at}.attention.output.dense", hidden, hidden, True)
        yield from _linear(f"{at}.intermediate.dense", inner, hidden, True)
        yield from _linear(f"{at}.output.dense", hidden, inner, True)
        yield from _norm(f"{at}.layernorm_before", hidden)
        yield from _norm(f"{at}.layernorm_after", hidden)
    yield from _norm("layernorm", hidden)


FAMILIES: dict[str, Callable[[Mapping[str, Any]], Shapes]] = {
    "llama": _decoder,
    "mistral": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "gpt2": _gpt2,
    "vit": _vit,
}

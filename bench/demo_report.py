"""The demo's report: one HTML file with everything in it, for a phone as for a desktop."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from bench.demo_picture import Bytes, Losses, bars, curves, svg
from flashopt_compile import memory_plan
from flashopt_compile.planning.configs import shapes_of
from flashopt_compile.planning.plan import Planned

LLAMA = Path(__file__).parent.parent / "examples" / "configs" / "llama-3.1-8b.json"
REPOSITORY = Path(__file__).parent.parent
PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>flashopt-compile: the demo</title>
<style>
body { margin: 0 auto; padding: 1rem; max-width: 68rem; color: #222; background: #fff;
       font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.6rem; line-height: 1.25 }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem }
p, figcaption { max-width: 44rem }
figcaption, small { color: #555; font-size: .9rem }
figure { margin: 0 }
img { display: block; width: 100%; max-width: 32rem; height: auto }
.pictures { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; vertical-align: bottom; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0; background: #fff }
th { font-weight: 600 }
@media (max-width: 34rem) { table { font-size: .78rem } th, td { padding: .25rem .2rem } }
.ours { background: #fdf0e6 }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; font-size: .9rem }
</style>
<h1>$heading</h1>
<p>$verdict</p>
<div class="pictures">
<figure>$curves<figcaption>Training loss of the same model on the same batches, and how far two of them lie from
fp32 AdamW. Lines are means over $smoothed.</figcaption></figure>
<figure>$bars<figcaption>What each keeps per parameter while training. The last row is planned by
<code>flashopt plan</code>; the others were measured in this run.</figcaption></figure>
</div>
<h2>Figures of this run</h2>
<div class="wide">$table</div>
<p><small>$setting</small></p>
<h2>Llama-3.1-8B by the same count</h2>
<div class="wide">$llama</div>
<p><small>Weights, gradients, optimizer states, without activations. A checkpoint has the weights, as exactly as
the optimizer knows them, and the states. <code>flashopt plan --config $config</code> prints more.</small></p>
<h2>Next</h2>
<pre>.venv/bin/flashopt inspect $checkpoint
.venv/bin/flashopt plan --params 8B --device 80GB</pre>
<p>In a training script of your own, cast the model to bf16 and change one line:</p>
<pre>from flashopt_compile import FlashAdamW, cast_model

cast_model(model)
optimizer = FlashAdamW(model.parameters(), lr=1e-3)</pre>
<p>The README and docs/ describe the rest.</p>
</html>
""")


@dataclass(frozen=True)
class Report:
    """The results of a demo. `rows` is a table with a heading; the last two columns are ours."""

    losses: Losses
    sizes: Bytes
    rows: Sequence[Sequence[str]]
    verdict: str
    setting: Sequence[str]
    checkpoint: Path

    def page(self) -> str:
        """Write the page, which refers to nothing outside of itself."""
        exact, ours = (sum(list(self.sizes.values())[place].values()) for place in (0, 2))
        seeds = len(next(iter(self.losses.values())))
        return PAGE.substitute(
            heading=f"The same training in {ours:.2f} bytes per parameter instead of {exact:.0f}",
            verdict=escape(self.verdict),
            curves=image(svg(curves(self.losses)), "loss curves"),
            bars=image(svg(bars(self.sizes)), "bytes per parameter, by part"),
            smoothed="15 steps" if seeds == 1 else f"15 steps and {seeds} seeds",
            table=html(self.rows),
            setting=" ".join(map(escape, self.setting)),
            llama=html(llama()),
            config=LLAMA.relative_to(REPOSITORY),
            checkpoint=escape(str(self.checkpoint)),
        )


def image(picture: bytes, description: str) -> str:
    """An SVG picture within the page."""
    return f'<img alt="{description}" src="data:image/svg+xml;base64,{base64.b64encode(picture).decode()}">'


def html(rows: Sequence[Sequence[str]]) -> str:
    """A table with a heading; columns that begin with Flash are marked as ours."""
    heading, *others = rows
    marks = [' class="ours"' if name.startswith("Flash") else "" for name in heading]

    def inner(cell: str) -> str:
        return escape(cell).replace("    ", "&emsp;").replace("FlashAdamW", "Flash<wbr>AdamW")

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (f"<{tag}{mark}>{inner(cell)}</{tag}>" for cell, mark in zip(row, marks, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    return f"<table>{line('th', heading)}{''.join(line('td', row) for row in others)}</table>"


def llama() -> list[tuple[str, ...]]:
    """GiB that Llama-3.1-8B takes, with a heading."""
    planned = [Planned(name, shape) for name, shape in shapes_of(json.loads(LLAMA.read_text(encoding="utf-8")))]
    ours, released = memory_plan(planned), memory_plan(planned, release=True)
    names = {"torch AdamW fp32": "torch AdamW, fp32", "torch AdamW bf16": "torch AdamW, pure bf16"}
    columns = {
        **{shown: ours.alternatives[name] for name, shown in names.items()},
        "FlashAdamW": ours,
        "FlashAdamW, gradients released": released,
    }
    return [
        ("GiB", *columns),
        ("training", *(f"{each.total_bytes / 1024**3:.1f}" for each in columns.values())),
        ("checkpoint", *(f"{each.checkpoint_bytes / 1024**3:.1f}" for each in columns.values())),
    ]

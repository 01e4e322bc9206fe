"""docs/quality.md, written from the results alone."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from bench.quality.judges import FALL, FALL_SHARE, LEAST_SEEDS, LOSS, OPTIMUM, RATE_STEPS, SPREAD_SHARE, Judgement
from bench.quality.picture import draw
from bench.quality.rows import ROWS
from bench.quality.runs import RESULTS, read
from bench.quality.tally import Tally, mean_and_spread, pictured

DOCS = Path(__file__).parent.parent.parent / "docs"
NAME = "quality.md"
NOT_YET = "not run yet"

TEMPLATE = Path(__file__).with_name("page.md")
CAPTIONS = {
    "quality.png": "Mean differences from exact fp32 with their 95 % intervals, in margins: the grey band is ± 1.\n"
    "Right of 0 is worse. Arrows and numbers stand for what lies outside.",
    "quality-rates.png": "Held-out loss by learning rate: the mean over seeds and, faint, each seed.",
    "quality-curves.png": "Training losses of the GPTs, the mean over seeds.",
}


def interval_of(found: Judgement, digits: int = 4) -> str:
    if found.mean is None or found.low is None or found.high is None:
        return "–"
    return f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"


def verdict_of(tally: Tally, name: str) -> str:
    """A verdict, or how to get one."""
    found = tally.judgements[name]
    command = f"`make quality ROW={tally.row.name}`"
    if not found.pairs:
        return f"{NOT_YET}: {command}"
    if not found.verdict:
        return f"{found.pairs} of {tally.row.seeds} seeds so far: {command}"
    lacking = "without an optimum inside" if tally.row.judge is OPTIMUM else "diverged"
    diverged = f", {found.diverged} of {found.pairs} seeds {lacking}" if found.diverged else ""
    return f"**{found.verdict}**{diverged}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    align = [" --- ", *(" ---: " if title in RIGHT else " --- " for title in head[1:])]
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'|'.join(align)}|", *rows]) + "\n"


SETTINGS = ("row", "what", "numbers", "hours planned", "hours taken", "runs")
RIGHT = {
    "hours planned",
    "hours taken",
    "runs",
    "seeds",
    "exact fp32",
    "ours",
    "margin",
    "difference, 95 % interval",
    "held-out loss",
    "loss of the stored weights",
    "weights move",
    "errors, exact and ours",
}


def losses(tallies: Sequence[Tally]) -> str:
    """Ours beside the exact optimizer, one row each."""

    def line(tally: Tally) -> list[str]:
        row, found = tally.row, tally.ours
        errors = [tally.values(each, "errors") for each in row.contenders[:2] if "errors" in keys(tally)]
        paired = [mean_and_spread(tally.values(each, "loss")) for each in row.contenders[:2]]
        return [
            *(row.name, row.family.name, str(found.pairs) if found.pairs else "–", *paired),
            interval_of(found),
            "–" if found.margin is None else f"{found.margin:.4f}",
            " / ".join(f"{fmean(each):.2%}" for each in errors if each) or "–",
            verdict_of(tally, row.family.ours.name),
        ]

    head = ("row", "optimizer", "seeds", "exact fp32", "ours", "difference, 95 % interval", "margin")
    return table((*head, "errors, exact and ours", "verdict"), map(line, tallies))


def keys(tally: Tally) -> set[str]:
    return {key for run in tally.runs for key in run}


def sweep(tallies: Sequence[Tally]) -> str:
    """Where the best learning rate lies."""

    def line(tally: Tally) -> list[str]:
        found = tally.ours
        return [
            *(tally.row.name, tally.row.family.name, str(found.pairs) if found.pairs else "–"),
            *(f"{tally.row.rates[0]:.1g} … {tally.row.rates[-1]:.1g}", interval_of(found, 3)),
            *(f"{RATE_STEPS:g}", verdict_of(tally, tally.row.family.ours.name)),
        ]

    head = ("row", "optimizer", "seeds", "learning rates", "difference, 95 % interval", "margin", "verdict")
    return table(head, map(line, tallies))


def others(tally: Tally, digits: int = 4) -> str:
    """All contenders of one row beside the exact one."""
    row = tally.row
    if not tally.runs:
        return f"{NOT_YET[0].upper()}{NOT_YET[1:]}: `make quality ROW={row.name}`\n"
    exact = row.family.exact
    figure, shown = ("stored", "loss of the stored weights") if row.judge is FALL else ("loss", "held-out loss")
    stays = fmean(tally.values(exact, "moved")) if tally.values(exact, "moved") else 1.0
    lines = [[exact.name, exact.role, mean_and_spread(tally.values(exact, figure)), "1.00×", "–", ""]]
    for each in row.contenders[1:]:
        moved = tally.values(each, "moved")
        lines.append(
            [
                *(each.name, each.role, mean_and_spread(tally.values(each, figure))),
                f"{fmean(moved) / stays:.2f}×" if moved else "–",
                *(interval_of(tally.judgements[each.name], digits), verdict_of(tally, each.name)),
            ]
        )
    return table(("optimizer", "role", shown, "weights move", "difference, 95 % interval", "verdict"), lines)


def setting(tally: Tally) -> list[str]:
    row = tally.row
    numbers = ", ".join(f"{name} {value}" for name, value in row.family.numbers.items())
    rate = f"{row.rates[0]:.2g} … {row.rates[-1]:.2g}" if row.rates else f"{row.schedule.lr:g}"
    took = f"{tally.core_hours:.2f}" if tally.runs else NOT_YET
    done = f"{len(tally.runs)} of {len(row.jobs)}"
    about = f"{row.task.about}; {row.schedule.steps} steps"
    return [row.name, about, f"lr {rate}, {numbers}", f"{row.minutes / 60:.2g}", took, done]


def summary(tallies: Sequence[Tally]) -> str:
    """Count verdicts, in two sentences."""
    ours = Counter(each.ours.verdict or "without a verdict yet" for each in tallies)
    controls = [
        each.judgements[contender.name].verdict
        for each in tallies
        for contender in each.row.others
        if contender.role == "control"
    ]
    told = ", ".join(f"{count} {verdict}" for verdict, count in ours.most_common())
    return (
        f"**So far**, of {len(tallies)} comparisons of ours with exact fp32: {told}. "
        f"Of {sum(map(bool, controls))} controls with a verdict, {controls.count('worse')} are seen to be worse; "
        f"{controls.count('')} have none yet."
    )


def page(tallies: Sequence[Tally]) -> str:
    """The whole page in Markdown."""
    plain = [each for each in tallies if each.row.judge is LOSS]
    machines = dict.fromkeys(run["machine"] for each in tallies for run in each.runs)
    filled = {
        "summary": summary(tallies),
        "seeds": str(LEAST_SEEDS),
        "spread": f"{SPREAD_SHARE:g}",
        "rate": f"{RATE_STEPS:g}",
        "fall": f"{100 * FALL_SHARE:g} %",
        "losses": losses(plain),
        "sweep": sweep([each for each in tallies if each.row.judge is OPTIMUM]),
        "low": "\n".join(others(each) for each in tallies if each.row.judge is FALL),
        "others": "\n".join(f"### {each.row.name}\n\n{others(each)}" for each in plain if each.row.others),
        "settings": table(SETTINGS, map(setting, tallies)),
        "machines": "\n".join(f"Machine: {each}." for each in machines),
    }
    for name, shown in pictured(tallies).items():
        filled[name] = f"![{CAPTIONS[name].split(',')[0]}](img/{name})\n\n{CAPTIONS[name]}" if shown else ""
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in filled.items():
        text = text.replace(f"<!-- {name} -->", value.rstrip())
    return re.sub(r"\n{3,}", "\n\n", text)  # a picture that there is not leaves no gap


def write_page(folder: Path = RESULTS, docs: Path = DOCS) -> None:
    """Write the page and its pictures from the results in `folder`."""
    tallies = [Tally(row, read(row, folder)) for row in ROWS]
    (docs / NAME).write_text(page(tallies), encoding="utf-8")
    draw(tallies, docs / "img")

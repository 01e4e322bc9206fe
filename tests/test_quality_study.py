"""The quality study: its statistics, its verdicts, what it keeps, and the page that it writes."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from torch import nn

from bench.loop import Schedule
from bench.quality import __main__ as command
from bench.quality import contenders, controls, judges, page, rows, runs
from bench.quality.contenders import ADAMW, Contender, Lion, stored_weights
from bench.quality.judges import FALL, LOSS, OPTIMUM, best_rate, interval, judged, t_quantile
from bench.quality.rows import ROWS, Row
from bench.quality.tally import Tally
from bench.quality.tasks import Classify, Labelled, divided
from flashopt_compile import FlashAdamW
from quant.ulp import STATE_NOISE_BITS


def points() -> Labelled:
    """Points of two classes that a line divides."""
    inputs = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    return divided(inputs, (inputs.sum(1) > 0).long())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))


TASK = Classify("points", network, points, batch=8)
OURS = Contender("FlashAdamW", "ours", partial(FlashAdamW, eager=True))
PURE = Contender("pure", "control", torch.optim.AdamW)
FAMILY = replace(ADAMW, ours=OURS)
ROW = Row("points", TASK, FAMILY, Schedule(4, 1e-2, 1), minutes=1, seeds=2, others=(PURE,))


def invented(contender: str, seed: int, loss: float, lr: float = 1e-2, **others: Any) -> dict[str, Any]:
    run = {"contender": contender, "lr": lr, "seed": seed, "loss": loss, "errors": 0.1, "start": 3.0, "stored": loss}
    return run | {"moved": 1.0, "curve": [3.0, loss], "core_seconds": 36.0, "machine": "a machine"} | others


def compared(role: str, exact: list[float], theirs: list[float]) -> judges.Judgement:
    def by_seed(losses: list[float]) -> dict[int, list[dict[str, Any]]]:
        return {seed: [invented("", seed, loss)] for seed, loss in enumerate(losses)}

    return judged(LOSS, role, by_seed(theirs), by_seed(exact))


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (4, 2.776), (9, 2.262), (29, 2.045)])
def test_quantiles_are_those_of_the_printed_tables(freedom: int, expected: float):
    assert t_quantile(freedom) == pytest.approx(expected, abs=5e-4)


def test_95_of_100_intervals_hold_the_true_mean():
    random = torch.Generator().manual_seed(0)
    samples = torch.randn(4000, 5, generator=random, dtype=torch.float64).tolist()
    held = sum(low <= 0 <= high for _, low, high in map(interval, samples))
    assert held / 4000 == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


EXACT = [1.0, 1.1, 1.2, 1.3, 1.4]  # from seed to seed they spread by 0.158


@pytest.mark.parametrize(
    ("role", "added", "verdict"),
    [
        ("ours", [0.01, -0.01, 0.02, -0.02, 0.01], "same"),
        ("ours", [0.05, 0.06, 0.05, 0.06, 0.05], "same"),  # not 0, but less than another seed makes
        ("ours", [0.2, 0.21, 0.19, 0.2, 0.22], "worse"),
        ("ours", [-0.2, -0.21, -0.19, -0.2, -0.22], "better"),
        ("ours", [0.4, -0.4, 0.3, -0.3, 0.1], "open"),
        ("ours", [0.0, 0.0, 0.0, 0.0, math.nan], "diverged"),
        ("peer", [0.2, 0.21, 0.19, 0.2, 0.22], "worse"),
        ("control", [0.05, 0.06, 0.05, 0.06, 0.05], "worse"),
        ("control", [0.4, -0.4, 0.3, -0.3, 0.1], "not seen to be worse"),
        ("control", [math.nan] * 5, "worse"),
    ],
)
def test_verdicts_follow_from_the_interval_and_the_margin(role: str, added: list[float], verdict: str):
    found = compared(role, EXACT, [loss + more for loss, more in zip(EXACT, added, strict=True)])
    assert (found.pairs, found.verdict) == (5, verdict)
    assert found.margin == pytest.approx(0.1581, abs=1e-4)


def test_four_pairs_give_no_verdict():
    found = compared("ours", EXACT[:4], EXACT)
    assert (found.pairs, found.verdict, found.mean) == (4, "", None)


def test_seeds_in_which_the_exact_optimizer_diverged_count_for_nobody():
    found = compared("ours", [*EXACT, math.nan], [*EXACT, 1.0])
    assert (found.pairs, found.diverged, found.verdict) == (5, 0, "same")


def test_the_best_rate_is_the_vertex_of_a_parabola():
    rates = [2.0**power for power in range(-9, -3)]
    swept = [invented("", 0, (math.log2(rate) + 6.3) ** 2, rate) for rate in rates]
    assert best_rate(swept) == pytest.approx(-6.3)
    assert best_rate([*swept[:-1], {**swept[-1], "loss": math.nan}]) == pytest.approx(-6.3)
    assert math.isnan(best_rate(swept[:3]))  # the least loss is the last: the best rate lies outside
    moved = [{**run, "lr": 2 * run["lr"]} for run in swept]
    assert OPTIMUM.difference(moved, swept) == pytest.approx(1.0)


def test_a_stalled_run_misses_the_whole_gain():
    exact, half, stalled = ([invented("", 0, loss)] for loss in (1.0, 2.0, 3.0))
    assert [FALL.difference(each, exact) for each in (exact, half, stalled)] == [0.0, 0.5, 1.0]


def test_lion_in_fp32_is_the_papers():
    random = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8, generator=random))
    optimizer = Lion([weight], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    exact, state = weight.detach().double(), {"m": torch.zeros(8, 8, dtype=torch.float64)}
    for t in range(1, 6):
        weight.grad = torch.randn(8, 8, generator=random)
        optimizer.step()
        exact = oracles.lion(exact, weight.grad.double(), state, t, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    torch.testing.assert_close(weight.detach().double(), exact, rtol=0, atol=1e-6)


def test_ours_begins_with_the_exact_weights_and_others_with_rounded_ones():
    exact = TASK.model(3).state_dict()

    def begun(contender: Contender) -> float:
        model = TASK.model(3)
        weights = stored_weights(model, contender.begin(model, {"lr": 0.0}))
        return max((weights[name] - exact[name]).abs().max().item() for name in exact)

    assert begun(FAMILY.exact) == 0
    assert 0 < begun(OURS) < 2**-18
    assert begun(PURE) > 2**-12


def test_batches_depend_on_the_seed_alone():
    one, again, other = (next(TASK.batches(1, seed)).inputs for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_controls_lose_what_their_names_say():
    random = torch.Generator().manual_seed(0)
    tiny = 1e-9 * torch.rand(4, 32, generator=random)
    m, v = (dict(controls.HALF_SCALES.rule.states)[name] for name in ("m", "v"))
    assert not v.decode(*v.encode(tiny)).any() and not m.decode(*m.encode(tiny)).any()
    noise = torch.randint(2**STATE_NOISE_BITS, (4, 32), generator=random, dtype=torch.int32)
    for name, format in controls.NEAREST_CODES.rule.states:
        ours = dict(FlashAdamW.rule.states)[name]
        codes, dithered = format.encode(tiny, noise)[0], ours.encode(tiny, noise)[0]
        assert torch.equal(codes, ours.encode(tiny)[0])
        assert not torch.equal(codes, dithered)
    linear = dict(controls.LINEAR_CODES.rule.states)["m"]
    spread = torch.logspace(-4, 0, 32)[None]  # linear codes know nothing below a 254th of the largest value
    assert (linear.decode(*linear.encode(spread)) == 0).sum() > 10


@pytest.mark.parametrize("kind", [controls.HALF_SCALES, controls.NEAREST_CODES, controls.LINEAR_CODES])
def test_controls_train(kind: Callable[..., Any]):
    contender = Contender("control", "control", partial(kind, eager=True))
    found = runs.run(ROW, contender, 1e-2, 0, lambda _: None)
    assert math.isfinite(found["loss"]) and found["moved"] > 0


def strip(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in each.items() if "seconds" not in key} for each in found]


def test_an_interrupted_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command.study(ROW, tmp_path / "whole")
    trained = []

    def run(row: Row, contender: Contender, lr: float, seed: int, tell: Callable[[float], None]) -> runs.Run:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((contender.name, seed))
        return runs.run(row, contender, lr, seed, tell)

    monkeypatch.setattr(command, "run", run)
    with pytest.raises(KeyboardInterrupt):
        command.study(ROW, tmp_path)
    assert trained == [("torch AdamW, fp32", 0), ("FlashAdamW", 0), ("torch AdamW, fp32", 1)]
    trained.clear()
    with pytest.raises(KeyboardInterrupt):
        command.study(replace(ROW, seeds=3), tmp_path)
    assert trained == [("FlashAdamW", 1), ("torch AdamW, fp32", 2), ("FlashAdamW", 2)]
    monkeypatch.setattr(command, "run", runs.run)
    command.study(ROW, tmp_path)
    key = lambda each: (each["contender"], each["seed"])  # noqa: E731
    kept = [each for each in runs.read(ROW, tmp_path) if each["seed"] < 2]
    assert sorted(strip(kept), key=key) == sorted(strip(runs.read(ROW, tmp_path / "whole")), key=key)


def test_runs_with_other_settings_are_not_taken_for_results(tmp_path: Path):
    runs.write(ROW, [invented("FlashAdamW", 0, 1.0)], tmp_path)
    assert len(runs.read(ROW, tmp_path)) == 1
    for other in (replace(ROW, schedule=Schedule(5, 1e-2, 1)), replace(ROW, family=contenders.LION)):
        assert runs.read(other, tmp_path) == []


def test_a_diverged_run_is_kept_as_one(tmp_path: Path):
    runs.write(ROW, [invented("FlashAdamW", 0, math.nan)], tmp_path)
    json.loads((tmp_path / "points.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)  # plain JSON
    assert math.isnan(runs.read(ROW, tmp_path)[0]["loss"])


def told(row: Row, losses: dict[str, list[float]]) -> Tally:
    return Tally(row, [invented(name, seed, loss) for name, each in losses.items() for seed, loss in enumerate(each)])


def test_the_page_keeps_unlucky_results_and_says_what_has_not_run():
    exact = FAMILY.exact.name
    unlucky = told(ROW, {exact: EXACT, "FlashAdamW": [loss + 0.3 for loss in EXACT], "pure": EXACT[:3]})
    text = page.page([unlucky, Tally(replace(ROW, name="later"), [])])
    (line,) = [each for each in text.splitlines() if each.startswith("| points | AdamW")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:7] == ["5", "1.2000 ± 0.1581", "1.5000 ± 0.1581", "+0.3000 [+0.3000, +0.3000]", "0.1581"]
    assert cells[-1] == "**worse**"
    assert "| pure | control |" in text and "3 of 2 seeds so far: `make quality ROW=points`" in text
    assert "not run yet: `make quality ROW=later`" in text
    assert "1 worse, 1 without a verdict yet" in text
    assert "<!--" not in text


def test_the_committed_page_is_that_of_the_committed_results():
    tallies = [Tally(row, runs.read(row)) for row in ROWS]
    text = page.page(tallies)
    assert (page.DOCS / page.NAME).read_text(encoding="utf-8") == text
    assert {path.name for path in (page.DOCS / "img").glob("quality*")} == set(re.findall(r"img/(quality\S*?)\)", text))


def test_a_picture_is_there_when_it_has_something_to_show(tmp_path: Path):
    exact, swept = FAMILY.exact.name, next(row for row in ROWS if row.judge is OPTIMUM)
    swept_runs = [invented(contender.name, seed, (math.log2(lr) + 8) ** 2, lr) for contender, lr, seed in swept.jobs]
    tallies = [told(replace(ROW, name="gpt"), {exact: EXACT, "FlashAdamW": EXACT}), Tally(swept, swept_runs)]
    page.draw(tallies, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"quality.png", "quality-rates.png", "quality-curves.png"}
    assert all(f"](img/{name})" in page.page(tallies) for name in names)
    nothing = [Tally(each.row, []) for each in tallies]
    page.draw(nothing, tmp_path)
    assert not list(tmp_path.iterdir())
    assert "](img/" not in page.page(nothing)


def test_rows_are_chosen_by_the_beginnings_of_their_names(capsys: pytest.CaptureFixture[str]):
    assert {row.family.name for row in command.chosen("digits-vit", 0)} == {"SGD", "AdamW", "Lion"}
    assert command.chosen("", 0) == list(ROWS)
    assert [row.seeds for row in command.chosen("low-lr", 20)] == [20]
    with pytest.raises(SystemExit):
        command.main(["--row", "digit-vit"])
    assert "--row is 'digit-vit'; rows are digits-convnet-sgd, " in capsys.readouterr().err


def test_every_row_has_its_own_name_and_at_least_five_seeds():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.seeds >= judges.LEAST_SEEDS and len(row.jobs) == len(set(row.jobs)) for row in ROWS)
    assert {row.family.name for row in ROWS} == {"SGD", "AdamW", "Lion"}
    assert rows.SWEPT == tuple(sorted(rows.SWEPT))

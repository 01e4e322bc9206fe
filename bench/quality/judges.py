"""How runs become a difference per seed, its 95 % confidence interval, and a verdict.

Verdicts were fixed before any result was looked at. The interval is Student's, of the mean of paired differences.

  ours, peers   "same": the whole interval lies within ± the margin. "worse" or "better": it does not, and excludes 0.
                "open": neither; more seeds would tell.
  controls      "worse": the interval lies above 0, or some seed diverged. Else "not seen to be worse".

A seed in which the exact optimizer itself diverged counts for nobody.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

import mpmath

CONFIDENCE = 0.95
LEAST_SEEDS = 5
SPREAD_SHARE = 1.0  # of the exact optimizer's standard deviation from seed to seed
FALL_SHARE = 0.05  # of the exact optimizer's gain
RATE_STEPS = 0.5  # of a factor of two in the learning rate

Run = Mapping[str, Any]
Runs = Sequence[Run]  # of one contender and one seed; several in a sweep


@cache
def t_quantile(freedom: int) -> float:
    """The t that Student's distribution exceeds in absolute value with probability 1 − CONFIDENCE."""

    def missed(t: Any) -> Any:
        return mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) - (1 - CONFIDENCE)

    return float(mpmath.findroot(missed, (1.5, 15.0), solver="anderson"))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the ends of its confidence interval."""
    mean = fmean(values)
    reach = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean, mean - reach, mean + reach


@dataclass(frozen=True)
class Judge:
    """A figure in which a contender is compared with the exact optimizer, seed by seed. Lower is better."""

    name: str
    unit: str
    difference: Callable[[Runs, Runs], float]  # theirs, exact → of one seed
    margin: Callable[[Sequence[Runs]], float]  # the exact optimizer's runs of all seeds
    no_figure: str = "diverged"  # the verdict on ours if a seed has none


def only(runs: Runs) -> Run:
    (run,) = runs
    return run


def _loss(theirs: Runs, exact: Runs) -> float:
    return only(theirs)["loss"] - only(exact)["loss"]


def _spread(exact: Sequence[Runs]) -> float:
    return SPREAD_SHARE * stdev(only(runs)["loss"] for runs in exact)


def _missing_share(theirs: Runs, exact: Runs) -> float:
    gained = only(exact)["start"] - only(exact)["stored"]
    return (only(theirs)["stored"] - only(exact)["stored"]) / gained


def best_rate(runs: Runs) -> float:
    """log₂ of the best learning rate: the vertex of a parabola through the least loss and its two neighbours.

    NaN if the least loss is the first or the last, or a neighbour diverged.
    """
    points = sorted((math.log2(run["lr"]), run["loss"]) for run in runs)
    losses = [loss if math.isfinite(loss) else math.inf for _, loss in points]
    place = losses.index(min(losses))
    if not 0 < place < len(points) - 1:
        return math.nan
    low, here, high = losses[place - 1 : place + 2]
    step = points[place + 1][0] - points[place][0]
    return points[place][0] + step * 0.5 * (low - high) / (low - 2 * here + high)


def _moved_optimum(theirs: Runs, exact: Runs) -> float:
    return best_rate(theirs) - best_rate(exact)


LOSS = Judge("held-out loss", "nats", _loss, _spread)
FALL = Judge("missing share of the exact optimizer's gain", "of the gain", _missing_share, lambda _: FALL_SHARE)
OPTIMUM = Judge("best learning rate", "factors of two", _moved_optimum, lambda _: RATE_STEPS, no_figure="open")


@dataclass(frozen=True)
class Judgement:
    """A contender beside the exact optimizer. Numbers are None unless LEAST_SEEDS pairs are finite."""

    pairs: int
    diverged: int
    margin: float | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = ""


def judged(judge: Judge, role: str, theirs: Mapping[int, Runs], exact: Mapping[int, Runs]) -> Judgement:
    """Compare the seeds that both have."""
    seeds = [
        seed for seed in sorted(theirs.keys() & exact.keys()) if any(math.isfinite(run["loss"]) for run in exact[seed])
    ]
    differences = [judge.difference(theirs[seed], exact[seed]) for seed in seeds]
    finite = [each for each in differences if math.isfinite(each)]
    diverged = len(differences) - len(finite)
    if len(seeds) < LEAST_SEEDS:
        return Judgement(len(seeds), diverged)
    margin = judge.margin([exact[seed] for seed in seeds])
    if len(finite) < LEAST_SEEDS:
        return Judgement(len(seeds), diverged, margin, verdict="worse" if role == "control" else judge.no_figure)
    mean, low, high = interval(finite)
    if role == "control":
        verdict = "worse" if low > 0 or diverged else "not seen to be worse"
    else:
        verdict = judge.no_figure if diverged else verdict_of(low, high, margin)
    return Judgement(len(seeds), diverged, margin, mean, low, high, verdict)


def verdict_of(low: float, high: float, margin: float) -> str:
    """Judge an interval that ought to hold 0."""
    if -margin < low and high < margin:
        return "same"
    return "worse" if low > 0 else "better" if high < 0 else "open"

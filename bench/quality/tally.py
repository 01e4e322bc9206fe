"""The results of a row by contender and seed, and what is concluded from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

from bench.quality.contenders import Contender
from bench.quality.judges import OPTIMUM, Judgement, Run, judged
from bench.quality.rows import Row


@dataclass(frozen=True)
class Tally:
    """A row and the runs that it has."""

    row: Row
    runs: Sequence[Run]

    @cached_property
    def by_seed(self) -> dict[str, dict[int, list[Run]]]:
        """The runs of each contender and seed, if none is missing: in a sweep there are several."""
        found: dict[str, dict[int, list[Run]]] = {each.name: {} for each in self.row.contenders}
        for run in self.runs:
            found.get(run["contender"], {}).setdefault(run["seed"], []).append(run)
        count = len(self.row.rates) or 1
        return {
            name: {seed: each for seed, each in seeds.items() if len(each) == count} for name, seeds in found.items()
        }

    @cached_property
    def judgements(self) -> dict[str, Judgement]:
        """What is concluded of each contender but the exact one."""
        exact = self.by_seed[self.row.family.exact.name]
        return {
            each.name: judged(self.row.judge, each.role, self.by_seed[each.name], exact)
            for each in self.row.contenders
            if each.role != "exact"
        }

    @property
    def ours(self) -> Judgement:
        return self.judgements[self.row.family.ours.name]

    @property
    def is_complete(self) -> bool:
        """Whether each contender has all seeds."""
        return all(len(seeds) >= self.row.seeds for seeds in self.by_seed.values())

    @property
    def core_hours(self) -> float:
        return sum(run["core_seconds"] for run in self.runs) / 3600

    def values(self, contender: Contender, figure: str) -> list[float]:
        """One figure of every seed, in a row without a sweep."""
        return [run[figure] for seeds in self.by_seed[contender.name].values() for run in seeds]


def mean_and_spread(values: Sequence[float], digits: int = 4) -> str:
    """The mean and, of several values, their standard deviation."""
    if not values:
        return "–"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def pictured(tallies: Sequence[Tally]) -> dict[str, list[Tally]]:
    """The rows that each picture of the page has something to show of."""
    paired = [each for each in tallies if each.ours.pairs]
    return {
        "quality.png": [each for each in tallies if any(found.verdict for found in each.judgements.values())],
        "quality-rates.png": [each for each in paired if each.row.judge is OPTIMUM],
        "quality-curves.png": [each for each in paired if each.row.name.startswith("gpt")],
    }

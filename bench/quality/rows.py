"""The rows of the study: what is trained by whom, for how long, from how many seeds, and how it is judged.

Seeds, schedules, margins and learning rates were written down before any result was looked at.
"""

from dataclasses import dataclass
from typing import Any

from bench.loop import Schedule
from bench.quality.contenders import ADAMW, CONTROLS, LION, PEERS, SGD, Contender, Family
from bench.quality.digits import CONV_NET, NEGATIVES, VIT
from bench.quality.encoder import MINILM
from bench.quality.judges import FALL, LOSS, OPTIMUM, Judge
from bench.quality.tasks import Continue, NextByte, Task
from bench.transformer import Plan, Shape


@dataclass(frozen=True)
class Row:
    """One comparison. `rates` are the learning rates of a sweep; `minutes` is what it may take on one core."""

    name: str
    task: Task
    family: Family
    schedule: Schedule
    minutes: int
    seeds: int = 5
    others: tuple[Contender, ...] = ()
    judge: Judge = LOSS
    rates: tuple[float, ...] = ()

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return self.family.exact, self.family.ours, *self.others

    @property
    def settings(self) -> dict[str, Any]:
        """All that a result depends on, beside contender, learning rate and seed."""
        schedule = {"steps": self.schedule.steps, "warmup": self.schedule.warmup}
        return {"task": self.task.about, "judge": self.judge.name, **schedule, "numbers": self.family.numbers}

    @property
    def jobs(self) -> list[tuple[Contender, float, int]]:
        """Contender, learning rate and seed of each run. Exact and ours take turns; then one after the other."""
        rates = self.rates or (self.schedule.lr,)
        turns = (self.contenders[:2], *((each,) for each in self.others))
        return [
            (contender, rate, seed)
            for turn in turns
            for seed in range(self.seeds)
            for rate in rates
            for contender in turn
        ]


def gpt(width: int, layers: int, heads: int, batch: int = 16, context: int = 64) -> NextByte:
    return NextByte(Plan(batch=batch, shape=Shape(width, layers, heads, context)))


SMALL, MEDIUM, LARGE = gpt(64, 2, 2), gpt(128, 4, 4), gpt(256, 6, 8, batch=24, context=128)
DIGITS, BYTES, WORDS = Schedule(400, 3e-3, 40), Schedule(1000, 4e-3, 100), Schedule(120, 5e-5, 12)
ALL = (*CONTROLS, *PEERS)
SWEPT = tuple(4e-3 * 2.0**power for power in range(-3, 3))


def at(schedule: Schedule, lr: float, steps: int | None = None) -> Schedule:
    steps = steps or schedule.steps
    return Schedule(steps, lr, steps // 10)


DIGITS_ROWS = (
    Row("digits-convnet-sgd", CONV_NET, SGD, at(DIGITS, 0.05), 2, seeds=10),
    Row("digits-convnet-adamw", CONV_NET, ADAMW, DIGITS, 12, seeds=10, others=ALL),
    Row("digits-convnet-lion", CONV_NET, LION, at(DIGITS, 5e-4), 2, seeds=10),
    Row("digits-vit-sgd", VIT, SGD, at(DIGITS, 0.05), 4, seeds=10),
    Row("digits-vit-adamw", VIT, ADAMW, DIGITS, 4, seeds=10),
    Row("digits-vit-lion", VIT, LION, at(DIGITS, 1e-3), 4, seeds=10),
)
GPT_ROWS = (
    Row("gpt-small-adamw", SMALL, ADAMW, BYTES, 30, others=ALL),
    Row("gpt-small-lion", SMALL, LION, at(BYTES, 1.5e-3), 10),
    Row("gpt-small-sgd", SMALL, SGD, at(BYTES, 0.3), 10),
    Row("gpt-medium-adamw", MEDIUM, ADAMW, at(BYTES, 3e-3, 2000), 60),
    Row("gpt-medium-lion", MEDIUM, LION, at(BYTES, 1e-3, 2000), 60),
    Row("gpt-large-adamw", LARGE, ADAMW, at(BYTES, 1.5e-3, 4000), 900),
)
MINILM_ROWS = (
    Row("minilm-adamw", MINILM, ADAMW, WORDS, 15),
    Row("minilm-lion", MINILM, LION, at(WORDS, 1e-5), 15),
    Row("minilm-sgd", MINILM, SGD, at(WORDS, 2e-2), 15),
)
SWEEP_ROWS = (
    Row("sweep-adamw", SMALL, ADAMW, at(BYTES, 4e-3, 200), 12, judge=OPTIMUM, rates=SWEPT),
    Row(
        "sweep-lion",
        SMALL,
        LION,
        at(BYTES, 1.5e-3, 200),
        12,
        judge=OPTIMUM,
        rates=tuple(rate * 3 / 8 for rate in SWEPT),
    ),
)
LOW_LR_ROWS = (
    Row(
        "low-lr",
        Continue(CONV_NET, NEGATIVES, at(DIGITS, 3e-3, 200)),
        ADAMW,
        at(DIGITS, 1e-6, 1000),
        12,
        others=CONTROLS,
        judge=FALL,
    ),
)
# The order in which they run: what tells most in the least time first.
ROWS = (*DIGITS_ROWS, *LOW_LR_ROWS, *GPT_ROWS[:2], *SWEEP_ROWS[:1], *MINILM_ROWS[:1])
ROWS = (*ROWS, *SWEEP_ROWS[1:], *MINILM_ROWS[1:], *GPT_ROWS[2:])
